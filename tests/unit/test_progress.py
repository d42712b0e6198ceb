"""What is shown of a long run: a bar on a terminal, lines elsewhere, nothing when it is not wanted."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import closing

import pytest

from slea_llm.progress import Progress


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def told(successes: Sequence[float], *, done: int = 0, total: int = 12, shown: bool = True) -> list[str]:
    """The lines of a run of iterations of 64 dialogues each."""
    lines: list[str] = []
    with closing(Progress(total=total, done=done, episodes=64, shown=shown, report=lines.append)) as progress:
        for success in successes:
            metrics = {"episodes/played": 64.0, "episodes/success": success, "episodes/turns": 5.25, "update/kl": 0.002}
            progress.advance(metrics, {"collect": 1.5, "update": 2.25})
    return lines


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: between fixtures and test the runner puts its own stream back."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_line_every_ten_iterations_and_one_for_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told([0.0] * 10 + [0.5, 1.0])
    assert lines == [
        "iteration 10 of 12, 640 dialogues: success 0.00 over the last 10, 5.2 turns, KL 2.0e-03; "
        "seconds: collect 15.0, update 22.5",
        "iteration 12 of 12, 768 dialogues: success 0.75 over the last 2, 5.2 turns, KL 2.0e-03; "
        "seconds: collect 3.0, update 4.5",
    ]
    assert capsys.readouterr().err == ""


def test_a_resumed_run_counts_the_dialogues_before_it() -> None:
    lines = told([1.0, 0.0], done=19, total=30)
    assert [line.partition(":")[0] for line in lines] == [
        "iteration 20 of 30, 1280 dialogues",
        "iteration 21 of 30, 1344 dialogues",
    ]


def test_a_terminal_gets_one_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    assert told([0.0, 0.0, 0.5, 1.0], total=4) == []
    shown = stream.getvalue()
    assert "4/4" in shown
    assert "iteration" in shown
    # The average is over 128 dialogues: the last two iterations.
    assert "success=0.75, turns=5.2, kl=2.0e-03" in shown.rpartition("\r")[2]


def test_nothing_is_shown_when_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    assert told([0.0] * 10, shown=False) == []
    assert stream.getvalue() == ""
