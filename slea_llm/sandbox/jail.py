"""Builds the sandbox and watches it. Runs as a process of its own, started by `slea_llm.sandbox.runner`.

Four processes: a guard outside, which maps user ids; its child, which makes the namespaces and the file tree; the child
of that, process 1 of the sandbox, which gives up every privilege, watches the limits and takes everything with it when
it ends; and the program. Each dies with its parent. Only the standard library: it starts without site-packages.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import secrets
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from slea_llm.sandbox import filters

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_PIVOT_ROOT: Mapping[str, int] = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _SECUREBITS, _NO_NEW_PRIVS = 1, 4, 22, 24, 28, 38
_NO_ROOT = 0b11  # user id 0 has no privilege by itself; locked
_POLL_S = 0.02
_STACK_BYTES = 8 << 20
"""Of a thread; the address space has room for one each."""
_NOTES_BYTES = 65536


class SetUpError(Exception):
    """The sandbox cannot be made here; the text is the reason."""


class _Libc:
    """The calls that Python has no names for."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises SetUpError with the call's name and the system's reason."""
        if getattr(self._libc, name)(*arguments) < 0:
            code = ctypes.get_errno()
            raise SetUpError(f"{name}: {os.strerror(code)}")

    def mount(self, source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
        given = [text.encode() if text is not None else None for text in (source, target, kind)]
        try:
            self.call("mount", *given, ctypes.c_ulong(flags), options.encode())
        except SetUpError as error:
            raise SetUpError(f"mount of {source or kind} at {target}: {error}") from error

    def control(self, option: int, *values: int) -> None:
        self.call("prctl", option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))

    def bind(self, source: str, target: str) -> None:
        """Show a file or folder read-only, with all that is mounted below it."""
        self.mount(source, target, None, _BIND | _REC)
        attributes = struct.pack("QQQQ", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
        recursive, here = 0x8000, ctypes.c_int(-100)
        given = (ctypes.c_uint(recursive), attributes, ctypes.c_size_t(len(attributes)))
        self.call("syscall", ctypes.c_long(_MOUNT_SETATTR), here, target.encode(), *given)

    def filter(self, program: bytes) -> None:
        code = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
        self.call("prctl", _SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0))


def spare_id() -> int | None:
    """A user id that nothing else has; None where this process may only be itself (it is not root)."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="ascii") as table:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, table)]
    first, count = max(ranges, key=lambda one: one[1])
    low, high = max(first, 100_000), min(first + count, 2**31)
    return low + secrets.randbelow(high - low) if high - low > 1000 else None


def guard(request: dict[str, Any], libc: _Libc) -> None:
    """Start the sandbox and wait for it."""
    libc.control(_PDEATHSIG, signal.SIGKILL)
    # Python's own handler would let the program interrupt process 1, which no other signal of it reaches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    identity = spare_id()
    if os.geteuid() == 0:
        os.setgroups([])
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        _child(request, lambda: make(request, libc, theirs, identity))
    theirs.close()
    if ours.recv(1):
        for name, own in (("uid_map", os.geteuid()), ("setgroups", -1), ("gid_map", os.getegid())):
            lines = "deny" if own < 0 else f"0 {own} 1\n" + (f"{identity} {identity} 1\n" if identity else "")
            _write(f"/proc/{child}/{name}", lines)
        ours.send(b"m")
    os.waitpid(child, 0)


def make(request: dict[str, Any], libc: _Libc, guard_socket: socket.socket, identity: int | None) -> None:
    """Namespaces and file tree; then process 1."""
    libc.control(_PDEATHSIG, signal.SIGKILL)
    libc.call("unshare", _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP)
    guard_socket.send(b"u")
    if not guard_socket.recv(1):
        raise SetUpError("the user ids could not be mapped")
    guard_socket.close()
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    build_tree(request, libc, identity or 0)
    first = os.fork()
    if first == 0:
        _child(request, lambda: rule(request, libc, identity))
    os.waitpid(first, 0)


def build_tree(request: dict[str, Any], libc: _Libc, identity: int) -> None:
    """The file tree: what Python needs, read-only, and /work, which has a size and belongs to the program."""
    root = request["mount_point"]
    libc.mount(None, "/", None, _REC | _PRIVATE)
    libc.mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m,nr_inodes=1000")
    for name in ("work", "proc", "dev", "boot"):
        os.mkdir(f"{root}/{name}", 0o755)
    _write(f"{root}/boot/boot.py", request["boot"])
    for source in request["readable"]:
        if os.path.islink(source):
            os.makedirs(os.path.dirname(root + source), exist_ok=True)
            os.symlink(os.readlink(source), root + source)
        else:
            _place(source, root + source)
            libc.bind(source, root + source)
    for name in ("null", "zero", "urandom", "random"):
        _place(f"/dev/{name}", f"{root}/dev/{name}")
        libc.mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    size = f"mode=700,uid={identity},gid={identity},size={request['disk_bytes']},nr_inodes={request['files_at_most']}"
    libc.mount("tmpfs", f"{root}/work", "tmpfs", _NOSUID | _NODEV | _NOEXEC, size)


def rule(request: dict[str, Any], libc: _Libc, identity: int | None) -> None:
    """Process 1: enter the tree, give up every privilege, start the program, watch it and report."""
    libc.control(_PDEATHSIG, signal.SIGKILL)
    enter(request, libc)
    os.chdir("/work")
    for name, text in request["files"].items():
        _write(f"/work/{name}", text)
    drop(libc, identity)
    notes, noted = os.pipe()
    os.set_blocking(notes, False)
    os.set_blocking(noted, False)
    program = os.fork()
    if program == 0:
        _child(request, lambda: become(request, libc, noted))
    os.close(noted)
    report = watch(request, program, notes)
    _report(request, report)


def enter(request: dict[str, Any], libc: _Libc) -> None:
    root = request["mount_point"]
    libc.mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    _write(f"{root}/proc/sys/user/max_user_namespaces", "0")
    libc.mount(None, f"{root}/proc", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    os.chdir(root)
    libc.call("syscall", ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), b".", b".")
    libc.call("umount2", b".", 2)
    os.chdir("/")
    libc.mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    socket.sethostname("sandbox")
    if request["loopback"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            up = struct.pack("16sh14x", b"lo", 0x1)
            fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def drop(libc: _Libc, identity: int | None) -> None:
    """No privilege is left, none can be gained, and no process of the sandbox can look into this one."""
    libc.control(_SECUREBITS, _NO_ROOT)
    for capability in range(64):
        try:
            libc.control(_CAPBSET_DROP, capability)
        except SetUpError:
            break  # past the last one that this kernel has
    if identity is not None:
        os.setresgid(identity, identity, identity)
        os.setresuid(identity, identity, identity)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    libc.call("capset", header, none)
    libc.control(_NO_NEW_PRIVS, 1)
    libc.control(_DUMPABLE, 0)
    libc.control(_PDEATHSIG, signal.SIGKILL)  # a change of user clears it


def become(request: dict[str, Any], libc: _Libc, noted: int) -> None:
    """Turn into the program."""
    libc.control(_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.set_inheritable(noted, True)
    limits = {
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_AS: request["memory_bytes"] + request["processes"] * _STACK_BYTES,
        resource.RLIMIT_NPROC: 2 * request["processes"] + 2,
        resource.RLIMIT_FSIZE: request["disk_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    # A signal at the limit, which a program may ignore for a second.
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"] + 1))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    start = f"import sys; sys.path.append('/boot'); import boot; boot.start({noted}, {request['loopback']}, "
    start += f"{tuple(request['readable'])!r})"
    python = request["python"]
    environment = {"HOME": "/work", "TMPDIR": "/work", "LANG": "C.UTF-8", "PATH": os.path.dirname(python)}
    environment["MALLOC_ARENA_MAX"] = "1"  # else each thread sets 64 MiB of address space aside
    libc.filter(filters.program(loopback=request["loopback"]))
    # -X utf8: what it prints is UTF-8 whatever the locale.
    os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", "-c", start], environment)  # noqa: S606 (no shell is wanted)


def watch(request: dict[str, Any], program: int, notes: int) -> dict[str, Any]:
    """Wait for the program's end or for the first limit that is passed; other processes are reaped along the way."""
    ends = time.monotonic() + request["wall_s"]
    handle, noted = os.pidfd_open(program), b""
    cause: str | None = None
    status: int | None = None
    full = False
    while status is None and cause is None:
        ready, _, _ = select.select([handle, 0], [], [], _POLL_S)
        status, used_s = _reap(program)
        noted += _drained(notes, _NOTES_BYTES - len(noted))
        disk = os.statvfs("/work")
        full = full or disk.f_bavail == 0 or disk.f_ffree == 0
        if status is not None and os.WIFSIGNALED(status) and used_s >= request["cpu_s"] - 0.1:
            cause = "timed_out"
        elif status is None:
            tasks, memory = _usage()
            if 0 in ready:
                cause = "stopped"
            elif tasks > request["processes"]:
                cause = "too_many_processes"
            elif memory > request["memory_bytes"]:
                cause = "out_of_memory"
            elif time.monotonic() >= ends:
                cause = "timed_out"
    return {"cause": cause, "status": status, "notes": _read_notes(noted), "full": full}


def _read_notes(noted: bytes) -> list[list[str]]:
    """At most 50 different (event, argument); the program can write to the pipe too, so that it may hold anything."""
    found: dict[bytes, list[str]] = {}
    for line in noted.splitlines():
        try:
            pair = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(part, str) for part in pair)
            and len(found) < 50
        ):
            found[line] = [part[:300] for part in pair]
    return list(found.values())


def _reap(program: int) -> tuple[int | None, float]:
    """The program's wait status and CPU seconds once it ended; collects every other process that ended."""
    found: tuple[int | None, float] = (None, 0.0)
    while True:
        try:
            pid, ended, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == program:
            found = (ended, used.ru_utime + used.ru_stime)


def _drained(fd: int, room: int) -> bytes:
    found = b""
    while True:
        try:
            chunk = os.read(fd, 4096)
        except BlockingIOError:
            return found[: max(0, room)]
        if not chunk:
            return found[: max(0, room)]
        found += chunk if len(found) < room else b""


def _usage() -> tuple[int, int]:
    """Tasks (threads of all processes but this one) and resident bytes of the sandbox."""
    tasks = pages = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                # The second field is the program's own choice and may hold anything but the last parenthesis.
                values = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if values[0] not in (b"Z", b"X"):
            tasks += int(values[17])
            pages += int(values[21])
    return tasks, pages * resource.getpagesize()


def _place(source: str, target: str) -> None:
    """An empty file or folder to mount over."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SetUpError(f"{path}: {error.strerror}") from error


def _report(request: dict[str, Any], report: dict[str, Any]) -> None:
    os.write(request["report_fd"], (json.dumps(report) + "\n").encode("ascii"))


def _child(request: dict[str, Any], work: Callable[[], None]) -> NoReturn:
    """Do a child's part and end, without what a Python program does at its end."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 (a child has nobody to raise to)
        _report(request, {"set_up": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Read a request (a line of JSON) from standard input; write one line of report to the descriptor that is given.

    Standard input stays open: its end asks for an end of the sandbox.
    """
    report = int(arguments[0])
    os.set_inheritable(report, False)
    request: dict[str, Any] = {**json.loads(sys.stdin.buffer.readline()), "report_fd": report}
    try:
        guard(request, _Libc())
    except (SetUpError, OSError) as error:
        _report(request, {"set_up": f"{type(error).__name__}: {error}"})
