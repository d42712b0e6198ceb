"""Runs an untrusted Python program in namespaces of its own, within limits, and says what became of it.

Linux alone. docs/sandbox.md says what is promised and what is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, cast, get_args

from slea_llm.errors import ConfigError, EpisodeError, UnsupportedError
from slea_llm.sandbox import filters

Status: TypeAlias = Literal[
    "ok",
    "failed",
    "forbidden",
    "timed_out",
    "out_of_memory",
    "too_much_output",
    "too_much_disk",
    "too_many_processes",
    "killed",
]

STATUSES: tuple[str, ...] = get_args(Status)

_GRACE_S = 10.0
"""Added to the wall limit before the outside ends a sandbox whose own watch did not."""

MEND = (
    "Allow this user to make namespaces (user.max_user_namespaces > 0; kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0 where the system has them; a container needs a seccomp profile "
    "that permits them), or run as root of the machine"
)

_FILE_NAME = re.compile(r"[A-Za-z0-9_]+\.[a-z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use. Memory is that of all its processes together; disk is memory too, and comes on top."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Of one process."""
    memory_mib: int = 256
    processes: int = 16
    """Processes and threads at once."""
    output_bytes: int = 65536
    """Standard output and standard error together."""
    disk_mib: int = 16

    def __post_init__(self) -> None:
        lowest = {"wall_s": 0.1, "cpu_s": 1, "memory_mib": 32, "processes": 1, "output_bytes": 1, "disk_mib": 1}
        for name, least in lowest.items():
            if not least <= getattr(self, name) <= 2**31:
                raise ConfigError(
                    f"sandbox limit {name} is {getattr(self, name)}; it must be at least {least}, and at most 2**31"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a program. `forbidden`: it tried what is not allowed, whatever came of it.

    `attempts` names what it tried (an event of Python and its argument, at most 50); `exit_code` is None when a signal
    or a limit ended it. `output` and `errors` are cut at the limit on output.
    """

    status: Status
    exit_code: int | None
    signal: int | None
    output: str
    errors: str
    attempts: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class _Streams:
    """What a run wrote so far."""

    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    report: bytearray = field(default_factory=bytearray)
    too_much: bool = False
    too_long: bool = False


def unavailable() -> str | None:
    """Why no sandbox can be made here; None where it can. Starts one (about 0.1 s)."""
    try:
        verdict = run({"main.py": "print('ready')"}, Limits())
    except UnsupportedError as error:
        return str(error)
    if verdict.status != "ok" or verdict.output != "ready\n":
        return f"a program that prints a word ended as {verdict.status}: {verdict.errors[-500:]}"
    return None


def run(files: Mapping[str, str], limits: Limits, *, loopback: bool = False) -> Verdict:
    """Run `main.py` of `files` (name -> text, all in its working folder) with nothing on standard input.

    `loopback`: the program may use the network 127.0.0.1 of its own sandbox. Raises UnsupportedError where no sandbox
    can be made, with the reason and the mend, and ConfigError for files that it cannot take.
    """
    _check(files, limits)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slea-sandbox-") as mount_point:
        request = {
            "mount_point": os.path.realpath(mount_point),
            "files": dict(files),
            "boot": Path(__file__).with_name("boot.py").read_text(encoding="utf-8"),
            "python": os.path.realpath(sys.executable),
            "readable": readable(),
            "loopback": loopback,
            "wall_s": limits.wall_s,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mib << 20,
            "processes": limits.processes,
            "disk_bytes": limits.disk_mib << 20,
            "files_at_most": 1000,
        }
        streams = _supervised(json.dumps(request).encode("ascii"), limits)
    return _verdict(streams, limits, time.monotonic() - started)


def readable() -> list[str]:
    """Files and folders of this machine that a program in the sandbox can read: Python and the system's libraries."""
    prefix, version = os.path.realpath(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = [prefix] if prefix not in ("/", "/usr", "/usr/local") else [f"{prefix}/lib/{version}"]
    libraries = sysconfig.get_config_var("MULTIARCH") or ""
    system = [f"/usr/lib/{libraries}"] if libraries and Path(f"/usr/lib/{libraries}").is_dir() else ["/usr/lib"]
    found = [*own, os.path.realpath(sys.executable), *system, "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]
    kept: list[str] = []
    for path in found:
        inside = any(path == other or path.startswith(f"{other}/") for other in kept)
        if Path(path).exists() and not inside:
            kept.append(path)
    return kept


def _check(files: Mapping[str, str], limits: Limits) -> None:
    if sys.platform != "linux" or not filters.supported():
        raise UnsupportedError("the sandbox needs Linux on x86_64 or aarch64; run it there or in a container of it")
    if "main.py" not in files:
        raise ConfigError(f"the sandbox runs main.py; the files are {sorted(files)}")
    if wrong := [name for name in files if not _FILE_NAME.fullmatch(name)]:
        raise ConfigError(f"file name {wrong[0]!r}: letters, digits and _, a dot and an ending, no folder")
    for name, text in files.items():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"file {name!r} holds half a character, which no file can: {error}") from error
    size = sum(len(text.encode("utf-8")) for text in files.values())
    if size > limits.disk_mib << 19:
        raise ConfigError(f"the files have {size} bytes; they may take half of disk_mib {limits.disk_mib}")


def _supervised(request: bytes, limits: Limits) -> _Streams:
    """Start the jail, read what it writes until all of it ended, and end it when it goes on for too long."""
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.append({root!r}); from slea_llm.sandbox.jail import main; main(sys.argv[1:])"
    reading, writing = os.pipe()
    streams = _Streams()
    try:
        process = subprocess.Popen(  # noqa: S603 (what it runs is ours; what is not goes through a pipe)
            [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", start, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writing,),
            env={},
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with process, os.fdopen(reading, "rb", buffering=0) as report:
        try:
            with contextlib.suppress(BrokenPipeError):  # the jail ended at once; its errors say why
                _pipe(process.stdin).write(request + b"\n")
                _pipe(process.stdin).flush()
            sources = ((_pipe(process.stdout), "output"), (_pipe(process.stderr), "errors"), (report, "report"))
            _read(streams, sources, limits)
        finally:
            _end(process)
    return streams


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("the process was started without pipes")
    return stream


def _read(streams: _Streams, sources: Sequence[tuple[Any, str]], limits: Limits) -> None:
    ends = time.monotonic() + limits.wall_s + _GRACE_S
    with selectors.DefaultSelector() as selector:
        for source, name in sources:
            selector.register(source, selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, ends - time.monotonic()))
            if not ready:
                streams.too_long = True
                return
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                getattr(streams, key.data).extend(chunk)
            if len(streams.output) + len(streams.errors) > limits.output_bytes:
                streams.too_much = True
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the jail to end, which takes everything inside with it; after a grace, end its group."""
    with contextlib.suppress(BrokenPipeError):
        _pipe(process.stdin).close()
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _verdict(streams: _Streams, limits: Limits, seconds: float) -> Verdict:
    report = _report(streams)
    code: int | None = None
    number: int | None = None
    if report["status"] is not None:
        ended = os.waitstatus_to_exitcode(report["status"])
        code, number = (ended, None) if ended >= 0 else (None, -ended)
    attempts = tuple(f"{event} {what}" for event, what in report["notes"] if event != "limit")
    if number == signal.SIGSYS:
        attempts += ("a system call that is not allowed",)
    output, errors = streams.output[: limits.output_bytes], streams.errors[: limits.output_bytes]
    return Verdict(
        status=_status(streams, report, code, number, attempts),
        exit_code=code,
        signal=number,
        output=output.decode("utf-8", "replace"),
        errors=errors[: limits.output_bytes - len(output)].decode("utf-8", "replace"),
        attempts=attempts,
        seconds=seconds,
    )


def _report(streams: _Streams) -> dict[str, Any]:
    """What process 1 said of the run; raises for a sandbox that was not made or was ended by somebody else."""
    if streams.too_long and not streams.report:
        return {"cause": "timed_out", "status": None, "notes": [], "full": False}
    if not streams.report and streams.too_much:
        return {"cause": "stopped", "status": None, "notes": [], "full": False}
    if not streams.report:
        raise EpisodeError(f"the sandbox ended without a report; it wrote {bytes(streams.errors[-500:])!r}")
    report: dict[str, Any] = json.loads(streams.report.splitlines()[0])
    if "set_up" in report:
        raise UnsupportedError(f"no sandbox can be made here: {report['set_up']}. {MEND}")
    return report


def _status(
    streams: _Streams,
    report: Mapping[str, Any],
    code: int | None,
    number: int | None,
    attempts: tuple[str, ...],
) -> Status:
    """The first that holds: a limit that ended it, what it tried, a limit that it ran into itself, how it ended."""
    if streams.too_much:
        return "too_much_output"
    if report["cause"] in STATUSES:
        return cast(Status, report["cause"])
    if attempts:
        return "forbidden"
    if code == 0:
        return "ok"
    met = [what.strip("'") for event, what in report["notes"] if event == "limit"]
    if report["full"] or number == signal.SIGXFSZ:
        return "too_much_disk"
    if met and met[0] in ("out_of_memory", "too_much_disk", "too_many_processes"):
        return cast(Status, met[0])
    return "failed" if number is None else "killed"
