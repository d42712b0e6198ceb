"""Starts the program inside the sandbox and notes what it tries. It reports; walls are the kernel's (jail.py).

Copied into the sandbox and imported there alone, so it imports nothing of this library. A program can silence its
notes, which loses a line of the report and opens nothing.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

PATHS = frozenset(
    (
        *("open", "os.listdir", "os.scandir", "os.chdir", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link"),
        *("os.symlink", "os.chmod", "os.chown", "os.truncate", "os.utime", "shutil.rmtree", "shutil.copyfile"),
    )
)
NAMES = frozenset(("socket.getaddrinfo", "socket.gethostbyname"))
ADDRESSES = frozenset(("socket.connect", "socket.bind", "socket.sendto"))


class Notes:
    """Writes to a pipe of the sandbox, one JSON pair a line."""

    def __init__(self, fd: int, readable: tuple[str, ...], loopback: bool) -> None:
        self._fd, self._readable, self._loopback = fd, readable, loopback
        # A program may replace what stands in the modules.
        self._write, self._dumps, self._path, self._exists = os.write, json.dumps, os.path.abspath, os.path.exists

    def note(self, kind: str, what: object) -> None:
        try:
            self._write(self._fd, (self._dumps([kind, repr(what)[:200]]) + "\n").encode("ascii"))
        except OSError:
            self._fd = -1  # closed by the program, or full

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in PATHS:
            self._look(event, arguments)
        elif event in ("os.kill", "os.killpg"):
            if arguments[0] <= 1 or not self._exists(f"/proc/{arguments[0]}"):
                self.note(event, arguments[0])
        elif event.startswith("socket."):
            self._network(event, arguments)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        for path in arguments[:2] if event in ("os.symlink", "os.link", "os.rename") else arguments[:1]:
            if isinstance(path, bytes):
                path = os.fsdecode(path)
            if isinstance(path, str) and not self._allowed(path, event, arguments):
                self.note(event, path)

    def _allowed(self, path: str, event: str, arguments: tuple[Any, ...]) -> bool:
        whole = self._path(path)
        if whole == "/work" or whole.startswith(("/work/", "/dev/", "/boot/")):
            return True
        flags = arguments[2] if event == "open" and len(arguments) > 2 and isinstance(arguments[2], int) else 0
        reads = event in ("os.listdir", "os.scandir") or (event == "open" and not flags & (os.O_WRONLY | os.O_RDWR))
        return reads and any(whole == root or whole.startswith(root + "/") for root in self._readable)

    def _network(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.__new__" and not self._loopback and arguments[1] not in (-1, 1):
            self.note(event, arguments[1])
        host = arguments[0] if event in NAMES else None
        if event in ADDRESSES and isinstance(arguments[1], tuple):
            host = arguments[1][0]
        if isinstance(host, bytes):
            host = host.decode("ascii", "replace")
        if host is not None and not (self._loopback and str(host).startswith("127.")):
            self.note(event, host)


def ending(error: BaseException) -> str | None:
    """Which limit an uncaught error speaks of."""
    if isinstance(error, MemoryError):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG):
        return "too_much_disk"
    if isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        return "too_many_processes"
    return None


def start(fd: int, loopback: bool, readable: tuple[str, ...]) -> None:
    """Run /work/main.py as `__main__`."""
    notes = Notes(fd, readable, loopback)
    with open("/work/main.py", encoding="utf-8") as source:
        text = source.read()
    sys.argv[:] = ["main.py"]
    sys.path[:] = ["/work", *(path for path in sys.path if path != "/boot")]
    sys.addaudithook(notes.hook)
    try:
        exec(compile(text, "main.py", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 (raised again below)
        if limit := ending(error):
            notes.note("limit", limit)
        # A traceback begins with the program's own line.
        raise error.with_traceback(error.__traceback__ and error.__traceback__.tb_next) from None
