"""Hostile programs in the sandbox: none succeeds, each is reported as what it was, none leaves a process."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slea_llm.errors import ConfigError
from slea_llm.sandbox import filters
from slea_llm.sandbox.runner import Limits, Status, Verdict, run, unavailable

REASON = unavailable()

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

LIMITS = Limits(wall_s=30.0, cpu_s=2, memory_mib=128, processes=8, output_bytes=20_000, disk_mib=4)

MARK = f"slea-hostile-{os.getpid()}"
"""Stands in the command line of everything that a hostile program starts."""

SECRET = "correct-horse-battery"  # noqa: S105 (of nothing)

SYSCALL = (
    "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.syscall({number}, {arguments}); print('passed')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A program and what it must be reported as. `never` must not stand in its output."""

    name: str
    program: str
    status: tuple[Status, ...]
    never: str = "passed"
    tried: str = ""
    wall_s: float = LIMITS.wall_s


def number(call: str) -> int:
    return filters.DENIED[call][platform.machine() != "x86_64"]


def by_call(name: str, arguments: str) -> Hostile:
    program = SYSCALL.format(number=number(name), arguments=arguments)
    return Hostile(name=f"call_{name}", program=program, status=("forbidden",), tried="system call")


HOSTILE = (
    # ---- network -------------------------------------------------------------------------------------------------
    Hostile(
        name="connect",
        program="import socket; socket.create_connection(('127.0.0.1', PORT), 2); print('passed')",
        status=("forbidden",),
        tried="socket.getaddrinfo",
    ),
    Hostile(
        name="urllib",
        program="import urllib.request as r; r.urlopen('http://127.0.0.1:PORT/'); print('passed')",
        status=("forbidden",),
    ),
    Hostile(
        name="udp",
        program="import socket; socket.socket(2, 2).sendto(b'x', ('10.0.0.1', 53)); print('passed')",
        status=("forbidden",),
        tried="socket.__new__ ",
    ),
    Hostile(
        name="raw_socket",
        program="import socket; socket.socket(17, 3); print('passed')",
        status=("forbidden",),
        tried="system call",
    ),
    Hostile(
        name="socket_by_ctypes",
        program="import ctypes; ctypes.CDLL(None).socket(2, 1, 0); print('passed')",
        status=("forbidden",),
        tried="system call",
    ),
    # ---- processes, time -----------------------------------------------------------------------------------------
    Hostile(name="fork_bomb", program="import os\nwhile True: os.fork()", status=("too_many_processes",)),
    Hostile(
        name="patient_fork_bomb",
        program="""
import os, time
while True:
    try: os.fork()
    except OSError: time.sleep(0.001)
""",
        status=("too_many_processes",),
    ),
    Hostile(
        name="thread_bomb",
        program="import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        status=("too_many_processes",),
    ),
    Hostile(name="spins", program="while True: pass", status=("timed_out",)),
    Hostile(name="sleeps", program="import time; time.sleep(600)", status=("timed_out",), wall_s=1.0),
    Hostile(
        name="sleeps_deaf",
        program="""
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
        status=("timed_out",),
        wall_s=1.0,
    ),
    Hostile(
        name="daemon",
        program="""
import os, sys, time
if os.fork(): sys.exit()
os.setsid()
if os.fork(): os._exit(0)
os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', 'MARK'])
""",
        status=("ok",),
    ),
    Hostile(
        name="daemon_children",
        program="""
import subprocess, sys
for _ in range(4):
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'MARK'], start_new_session=True)
import time; time.sleep(1); raise SystemExit(3)
""",
        status=("failed",),
    ),
    Hostile(name="waits_for_input", program="input(); print('passed')", status=("failed",)),
    Hostile(
        name="waits_for_a_pipe",
        program="import os; os.mkfifo('pipe'); open('pipe').read(); print('passed')",
        status=("timed_out",),
        wall_s=1.0,
    ),
    # ---- memory, disk, output ------------------------------------------------------------------------------------
    Hostile(name="memory", program="x = bytearray(1 << 34); print('passed')", status=("out_of_memory",)),
    Hostile(
        name="memory_by_degrees",
        program="x = []\nwhile True: x.append(bytearray(b'x' * (1 << 20)))",
        status=("out_of_memory",),
    ),
    Hostile(
        name="memory_of_many",
        program="""
import os, time
for _ in range(5):
    if not os.fork():
        break
x = bytearray(b'x' * (60 << 20)); time.sleep(20); print('passed')
""",
        status=("out_of_memory",),
    ),
    by_call("memfd_create", "b'm', 0"),
    Hostile(
        name="disk",
        program="f = open('fill', 'wb')\nwhile True: f.write(b'x' * 65536)",
        status=("too_much_disk",),
    ),
    Hostile(
        name="many_files",
        program="for i in range(10 ** 6): open(f'f{i}', 'w').close()",
        status=("too_much_disk",),
    ),
    Hostile(
        name="sparse_file", program="open('f', 'wb').truncate(1 << 40); print('passed')", status=("too_much_disk",)
    ),
    Hostile(name="endless_output", program="while True: print('x' * 1000)", status=("too_much_output",)),
    Hostile(
        name="endless_errors",
        program="import os\nwhile True: os.write(2, b'x' * 4096)",
        status=("too_much_output",),
    ),
    Hostile(
        name="unicode_output",
        program="import sys\nwhile True: sys.stdout.buffer.write('\\U0001f4a3\\u202e'.encode()[:-1] * 999)",
        status=("too_much_output",),
    ),
    Hostile(name="huge_exception", program="raise ValueError('x' * 10 ** 7)", status=("too_much_output",)),
    Hostile(name="deep_recursion", program="def f(): f()\nf()", status=("failed",)),
    Hostile(
        name="stack_of_c",
        program="import sys; sys.setrecursionlimit(10 ** 9)\nf = lambda: [*map(lambda _: f(), (1,))]\nf()",
        status=("killed", "out_of_memory"),
    ),
    # ---- what is outside -----------------------------------------------------------------------------------------
    Hostile(
        name="environment",
        program="""
import glob, os
found = [repr(dict(os.environ)), os.popen('env').read() if os.path.exists('/bin/sh') else '']
for path in glob.glob('/proc/*/environ'):
    try: found.append(open(path).read())
    except OSError: pass
print(found)
""",
        status=("forbidden",),
        never=SECRET,
        tried="open '/proc/1/environ'",
    ),
    Hostile(
        name="files_outside",
        program="""
for path in ('/etc/passwd', '/etc/shadow', '/root/.bashrc', 'OUTSIDE', '/proc/1/root/etc/passwd', '/work/../etc/hosts'):
    try: print('passed', open(path).read())
    except OSError: pass
""",
        status=("forbidden",),
        tried="open '/etc/shadow'",
    ),
    Hostile(
        name="symlink",
        program="import os; os.symlink('OUTSIDE', 'l'); print('passed', open('l').read())",
        status=("forbidden",),
        tried="os.symlink 'OUTSIDE'",
    ),
    Hostile(
        name="writes_outside",
        program="""
import os, sys
for path in ('/x', '/tmp/x', '/dev/x', '/boot/boot.py', os.__file__, '/proc/sys/kernel/core_pattern', 'OUTSIDE'):
    try: open(path, 'w').write('x'); print('passed')
    except OSError: pass
""",
        status=("forbidden",),
        tried="core_pattern",
    ),
    Hostile(
        name="device",
        program="import os; os.mknod('d', 0o60666, os.makedev(8, 0)); print('passed')",
        status=("failed",),
    ),
    Hostile(
        name="proc_memory_of_the_watch",
        program="open('/proc/1/mem', 'r+b'); print('passed')",
        status=("forbidden",),
        tried="/proc/1/mem",
    ),
    Hostile(
        name="descriptors_of_the_watch",
        program="""
import os
for i in range(3, 64):
    for path in (f'/proc/1/fd/{i}', f'/proc/self/fd/{i}'):
        try: os.write(os.open(path, os.O_WRONLY), b'{"cause": null, "status": 0, "notes": [], "full": false}\\n')
        except OSError: pass
raise SystemExit(1)
""",
        status=("forbidden",),
    ),
    Hostile(
        name="forged_report",
        program="""
import os
for i in range(3, 64):
    try: os.write(i, b'{"cause": null, "status": 0, "notes": [], "full": false}\\n')
    except OSError: pass
raise SystemExit(1)
""",
        status=("failed",),
    ),
    # ---- other processes, privileges -----------------------------------------------------------------------------
    Hostile(
        name="signals",
        program="""
import os, signal
for pid in (1, os.getppid(), HOST):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
print('still here')
""",
        status=("forbidden",),
        tried="os.kill 1",
    ),
    Hostile(
        name="signals_all",
        program="import os; os.kill(-1, 9)",
        status=("forbidden",),
        tried="os.kill -1",
    ),
    Hostile(
        name="every_signal_to_the_watch",
        program="""
import os, time
for number in range(1, 65):
    for pid in (1, os.getppid()):
        try: os.kill(pid, number)
        except OSError: pass
time.sleep(0.1); raise SystemExit(7)
""",
        status=("forbidden",),
        tried="os.kill 1",
    ),
    Hostile(
        name="limits_of_the_watch",
        program="import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)); print('passed')",
        status=("forbidden",),
        tried="system call",
    ),
    Hostile(
        name="own_limits",
        program="""
import resource
for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
    soft, hard = resource.getrlimit(limit)
    try: resource.setrlimit(limit, (hard + 1, hard + 1)); print('passed')
    except (OSError, ValueError): pass
raise ValueError
""",
        status=("failed",),
    ),
    Hostile(
        name="garbled_notes",
        program="""
import os
for text in (b'[1]', b'{}', b'["limit"]', b'["a", 3]', b'[' * 9000, b'9' * 9000, b'\\xff]', b'["limit", "ok"]'):
    for fd in range(3, 64):
        try: os.write(fd, text + bytes([10]))
        except OSError: pass
raise SystemExit(1)
""",
        status=("failed",),
    ),
    Hostile(name="kills_itself", program="import os; os.kill(os.getpid(), 9)", status=("killed",)),
    Hostile(
        name="becomes_root",
        program="import os; os.setuid(12345); print('passed')",
        status=("failed",),
    ),
    by_call("ptrace", "16, 1, 0, 0"),
    by_call("mount", "b'none', b'/work', b'tmpfs', 0, 0"),
    by_call("unshare", "0x10000000"),
    by_call("setns", "3, 0"),
    by_call("bpf", "0, 0, 0"),
    by_call("io_uring_setup", "1, 0"),
    by_call("process_vm_writev", "1, 0, 0, 0, 0, 0"),
    Hostile(
        name="clone_with_namespaces",
        program=SYSCALL.format(
            number=56 if platform.machine() == "x86_64" else 220, arguments="0x10000011, 0, 0, 0, 0"
        ),
        status=("forbidden",),
        tried="system call",
    ),
    Hostile(
        name="import_tricks",
        program="""
import sys, importlib, builtins
sys.path.append('/usr/lib/python3/dist-packages')
for name in ('slea_llm', 'numpy', 'torch', 'yaml'):
    try: importlib.import_module(name); print('passed', name)
    except ImportError: pass
sys.modules.pop('os'); import os
open('json.py', 'w').write("print('passed')") and importlib.reload(sys.modules['encodings'])
builtins.__import__ = None
open('/etc/passwd')
""",
        status=("forbidden",),
        tried="/etc/passwd",
    ),
    Hostile(
        name="native_code",
        program="""
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7); code.write(b'\\xcc' * 64)
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
""",
        status=("killed",),
    ),
    Hostile(
        name="silenced_notes",
        program="import os; os.closerange(3, 64)\nopen('/etc/passwd')",
        status=("failed",),
    ),
    Hostile(
        name="floods_notes",
        program="for i in range(10 ** 5):\n    try: open('/etc/' + 'x' * 150)\n    except OSError: pass",
        status=("forbidden", "timed_out"),
    ),
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of this machine that a program with a network would reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def left_behind() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if MARK in line:
            found.append(line)
    return found


def children() -> list[str]:
    """Processes below this one."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text(encoding="ascii").split()


def attack(hostile: Hostile, folder: Path, port: int) -> Verdict:
    outside = folder / "outside.txt"
    outside.write_text(f"passed {SECRET}", encoding="utf-8")
    values = {"OUTSIDE": str(outside), "PORT": str(port), "HOST": str(os.getpid()), "MARK": MARK}
    program = hostile.program
    for name, value in values.items():
        program = program.replace(name, value)
    verdict = run({"main.py": program}, replace(LIMITS, wall_s=hostile.wall_s))
    assert outside.read_text(encoding="utf-8") == f"passed {SECRET}"
    return verdict


def test_there_are_thirty() -> None:
    assert len({hostile.name for hostile in HOSTILE}) == len(HOSTILE) >= 30


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda one: one.name)
def test_hostile_program(hostile: Hostile, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEA_SECRET", SECRET)
    before = children()
    verdict = attack(hostile, tmp_path, port)
    tried = hostile.tried.replace("OUTSIDE", str(tmp_path / "outside.txt"))
    assert verdict.status in hostile.status, verdict
    assert hostile.never not in verdict.output
    assert tried in "\n".join(verdict.attempts)
    assert len(verdict.output) + len(verdict.errors) <= LIMITS.output_bytes
    assert (left_behind(), children()) == ([], before)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print('héllo')", "ok"),
        ("import sqlite3, json, re, ssl, decimal, asyncio, subprocess, zoneinfo; asyncio.run(asyncio.sleep(0))", "ok"),
        ("import tempfile; tempfile.NamedTemporaryFile().write(b'x'); open('a', 'w').write('b')", "ok"),
        ("import threading as t; x = t.Thread(target=print); x.start(); x.join()", "ok"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)", "ok"),
        ("import helper; assert helper.x == 1", "ok"),
        ("raise SystemExit(3)", "failed"),
        ("def f(:", "failed"),
        ("1 / 0", "failed"),
    ],
)
def test_honest_program(program: str, status: str) -> None:
    verdict = run({"main.py": program, "helper.py": "x = 1"}, LIMITS)
    assert (verdict.status, verdict.attempts) == (status, ()), verdict
    codes = {"ok": 0, "raise SystemExit(3)": 3}
    assert verdict.exit_code == codes.get(status, codes.get(program, 1))


def test_a_program_that_no_file_can_hold_is_refused_for_that() -> None:
    with pytest.raises(ConfigError, match=r"'main.py' holds half a character"):
        run({"main.py": "print('\ud800')"}, LIMITS)
    with pytest.raises(ConfigError, match=r"wall_s is inf; it must be at least 0.1, and at most 2\*\*31"):
        Limits(wall_s=float("inf"))


def test_the_network_of_the_sandbox_is_its_own(port: int) -> None:
    serve = "import socket; s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())"
    verdict = run({"main.py": f"{serve}; s.accept()[0].send(b'own'); print(c.recv(9))"}, LIMITS, loopback=True)
    assert (verdict.status, verdict.output) == ("ok", "b'own'\n"), verdict
    reach = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {port})))"
    assert run({"main.py": reach}, LIMITS, loopback=True).output.strip() not in {"0", ""}
    away = run({"main.py": "import socket; socket.socket().connect(('192.0.2.1', 80))"}, LIMITS, loopback=True)
    assert (away.status, away.attempts[0]) == ("forbidden", "socket.connect '192.0.2.1'")


def test_many_at_once() -> None:
    """Limits count for each run by itself."""
    verdicts: list[Verdict] = []
    program = "import os, time\nfor _ in range(5):\n    if not os.fork(): break\ntime.sleep(0.3)"
    threads = [threading.Thread(target=lambda: verdicts.append(run({"main.py": program}, LIMITS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdict.status for verdict in verdicts] == ["ok"] * 4


def test_nothing_outlives_its_owner(tmp_path: Path) -> None:
    """The owner is killed while its program runs: the program goes with it."""
    ready = (
        f"import sys, os; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', '{MARK}'])"
    )
    owner = f"from slea_llm.sandbox.runner import *; run({{'main.py': {ready!r}}}, Limits(wall_s=600))"
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", owner], env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}, cwd=tmp_path
    )

    def running() -> bool:
        return any("time.sleep(600)" in line and line.rstrip().endswith(MARK) for line in left_behind())

    wait_for(running)
    process.kill()
    process.wait()
    wait_for(lambda: not running())


def wait_for(condition: object) -> None:
    assert callable(condition)
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_works_without_root() -> None:
    """As nobody, by the system's Python; where the whole run is not root's, every other test here shows it."""
    if os.geteuid() != 0:
        pytest.skip("this run is not root's: the other tests show it")
    root, python = str(Path(__file__).resolve().parents[2]), "/usr/bin/python3"
    code = (
        "import os, json; from slea_llm.sandbox.runner import *\n"
        "program = 'import ctypes, os; print(open(\"/proc/self/status\").read()); os.setgid(5)'\n"
        "verdicts = [run({'main.py': text}, Limits()) for text in ('print(1)', program, 'open(\"/etc/passwd\")')]\n"
        "print(json.dumps([os.geteuid(), *[[v.status, v.output] for v in verdicts]]))"
    )
    done = (
        subprocess.run(
            [python, "-c", f"import sys; sys.path.append({root!r})\n{code}"],
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if Path(python).exists()
        else None
    )
    if done is None or "ModuleNotFoundError" in done.stderr or "SyntaxError" in done.stderr:
        pytest.skip(f"nobody has no Python here that reads this library: {python}, {root}")
    assert done.returncode == 0, done.stderr
    user, plain, privileges, outside = json.loads(done.stdout)
    assert (user, plain, outside[0]) == (65534, ["ok", "1\n"], "forbidden")
    assert "CapEff:\t0000000000000000" in privileges[1]
    assert "CapBnd:\t0000000000000000" in privileges[1]
    assert privileges[0] == "forbidden"  # it read /proc
