"""Runs a submitted `solve` on test cases. Copied into the sandbox as main.py, where it runs; only the standard library.

It knows the inputs, never the answers, which are compared outside. Each case is a process of its own that cannot look
into this one, has no way to its output, and is ended after `seconds`. The tables are read here, after that process.
"""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import select
import signal
import sqlite3
import sys
import traceback
import urllib.request  # noqa: F401 (loaded once, so that each test's process need not)
from typing import Any, NoReturn

MOST = 65536
"""Bytes of an answer."""


def main() -> None:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the code under test is of the same user
    with open("cases.json", encoding="utf-8") as file:
        work = json.load(file)
    address = served(work["pages"]) if work["pages"] else ""
    answers = [answer(case, address, work["seconds"]) for case in work["cases"]]
    print(json.dumps(answers))


def answer(case: dict[str, Any], address: str, seconds: float) -> dict[str, Any]:
    """What `solve` gave (`value`), raised (`raised`: class names, `message`) or `hung`; and the rows of its table."""
    reading, writing = os.pipe()
    source = case["source"].replace("{address}", address)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        solve_and_tell(source, case["target"], writing)
    os.close(writing)
    text = told(reading, seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        found = {"hung": True} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        found = {"raised": ["SystemExit"], "message": "the process ended before solve returned"}
    return {**found, "rows": rows(case["target"], case["table"]) if case["table"] else None}


def told(reading: int, seconds: float) -> bytes | None:
    """All that comes through a pipe until it is closed or a line is whole; None when that takes too long."""
    found = b""
    while not found.endswith(b"\n") and len(found) <= MOST:
        ready, _, _ = select.select([reading], [], [], seconds)
        if not ready:
            os.close(reading)
            return None
        chunk = os.read(reading, MOST)
        if not chunk:
            break
        found += chunk
    os.close(reading)
    return found


def solve_and_tell(source: str, target: str, writing: int) -> NoReturn:
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    found: dict[str, Any]
    try:
        from solution import solve  # type: ignore[import-not-found]

        found = {"value": solve(source, target)}
        text = json.dumps(found)
    except BaseException as error:  # noqa: BLE001 (whatever the code raises is its answer)
        text = json.dumps({"raised": [kind.__name__ for kind in type(error).__mro__], "message": said(error)})
    os.write(writing, text.encode("utf-8", "replace")[:MOST] + b"\n")
    os._exit(0)


def said(error: BaseException) -> str:
    """The last line of an error and the line of the solution at which it arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if "solution" in frame.filename]
    place = f" (line {lines[-1]})" if lines else ""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1][:200] + place


def rows(path: str, table: str) -> list[list[Any]] | str | None:
    """The rows of (id, amount) in the order of ids; None without such a table, a text when it cannot be read."""
    if not os.path.exists(path):
        return None
    try:
        connection = sqlite3.connect(path, timeout=1)
        try:
            found = connection.execute(f"SELECT id, amount FROM {table} ORDER BY id LIMIT 1000").fetchall()  # noqa: S608 (a name of the task)
        finally:
            connection.close()
    except sqlite3.Error as error:
        return None if "no such table" in str(error) else f"{type(error).__name__}: {error}"
    return [list(row) for row in found]


def served(pages: list[list[Any]]) -> str:
    """The address of a server, a process of its own, of pages (status, text)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = self.path.strip("/")
            status, text = pages[int(number)] if number.isdigit() and int(number) < len(pages) else (404, "")
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    # Its own binding looks up the name of this machine, which has none.
    server.socket.bind(("127.0.0.1", 0))
    server.server_activate()
    port = server.socket.getsockname()[1]
    if os.fork() == 0:
        server.serve_forever()
    server.socket.close()
    return f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
