"""A chat endpoint on this machine: a real HTTP server that answers as a test scripts it, well or badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One HTTP response. `delay_s` passes before its head, `drip_s` before each of its bytes."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    hang_up: bool = False


Asked = Mapping[str, Any]
"""The JSON body of a request."""


def completion(content: Any, *, finish_reason: str = "stop", tokens: tuple[int, int] | None = (10, 5)) -> bytes:
    """The body of a chat completion; `content` that is no text is written as JSON."""
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    document: dict[str, Any] = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]
    }
    if tokens is not None:
        document["usage"] = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return json.dumps(document).encode()


class ChatServer:
    """Answers from a list of replies, the last of them for ever, or by a function of what is asked."""

    def __init__(self, replies: Sequence[Reply] | Callable[[Asked], Reply]) -> None:
        self.requests: list[Asked] = []
        self.headers: list[Mapping[str, str]] = []
        self.most_at_once = 0
        self._replies = replies
        self._at_once = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server._serve(self)

            def log_message(self, *_: Any) -> None:
                """A test's output is its own."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 64  # connections that wait to be taken; the default of 5 makes the sixth try again

        self._http = Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = False  # joined at close, so that no socket outlives its test
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self._closing.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        asked = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append({"path": handler.path, **asked})
            self.headers.append(dict(handler.headers.items()))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            reply = (
                self._replies(asked) if callable(self._replies) else self._replies[min(number, len(self._replies) - 1)]
            )
            self._closing.wait(reply.delay_s)
        finally:
            with self._lock:  # before the answer leaves: a client that has it may ask again before this thread goes on
                self._at_once -= 1
        try:
            if not reply.hang_up:
                self._send(handler, reply)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up waiting: what many a test is about

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        handler.send_response(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if not reply.drip_s:
            handler.wfile.write(reply.body)
            return
        for byte in reply.body:
            if self._closing.is_set():
                return
            time.sleep(reply.drip_s)
            handler.wfile.write(bytes([byte]))


@contextmanager
def serving(*replies: Reply | Callable[[Asked], Reply]) -> Iterator[ChatServer]:
    """A server that gives these replies in turn, or what the one function given makes of each request."""
    first = replies[0]
    server = ChatServer(first if callable(first) else [reply for reply in replies if isinstance(reply, Reply)])
    try:
        yield server
    finally:
        server.close()


def closed_port() -> int:
    """A port of this machine on which nothing listens."""
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
