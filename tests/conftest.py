"""What every test may count on: no hub, no network beyond this machine, no telemetry, skips counted at the end."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# No deadline: how long an example takes says how busy the machine is. `quick` is that of `make check`.
settings.register_profile("thorough", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile("thorough")

LOOPBACK = ("127.", "localhost", "::1", "0.0.0.0")  # noqa: S104  (compared with, never bound)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that talks to another machine fails at once."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if host and not str(host).startswith(LOOPBACK) and host != socket.gethostname():
            raise AssertionError(f"a test tried to reach {host!r}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Skips are counted and named, so that a test which never runs is seen."""
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(f"{len(skipped)} skipped")
    for report in skipped:
        terminalreporter.write_line(f"  {report.nodeid}: {report.longrepr[-1] if report.longrepr else ''}")
