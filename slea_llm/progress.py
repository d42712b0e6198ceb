"""How a long training goes, for whoever watches: a bar on a terminal, else a line every ten iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

WINDOW = 128
"""Dialogues over which the success on the bar is averaged."""
LINE_EVERY = 10
"""Iterations between two lines where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What is shown of one iteration."""

    played: float
    successes: float
    seconds: Mapping[str, float]


class Progress:
    """One bar over the iterations of a run, or lines through `report` where output is not a terminal.

    `total`: iterations of the whole run, `episodes`: dialogues of one. `shown` false: neither bar nor lines. Closing it
    says what no line has said yet.
    """

    def __init__(self, *, total: int, done: int, episodes: int, shown: bool, report: Callable[[str], None]) -> None:
        # None lets tqdm look for a terminal itself.
        self._bar: tqdm[Any] = tqdm(
            total=total, initial=done, desc="train", unit="iteration", disable=None if shown else True
        )
        self._lines = shown and bool(self._bar.disable)
        self._total, self._done, self._episodes, self._report = total, done, episodes, report
        self._turns = self._kl = ""
        self._window: list[_Round] = []
        self._since: list[_Round] = []

    def advance(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Take in what one more iteration said of itself."""
        played = metrics["episodes/played"]
        this = _Round(played=played, successes=played * metrics["episodes/success"], seconds=seconds)
        self._done += 1
        self._window.append(this)
        while sum(one.played for one in self._window[1:]) >= WINDOW:
            del self._window[0]
        self._turns, self._kl = f"{metrics['episodes/turns']:.1f}", f"{metrics['update/kl']:.1e}"
        success = f"{_success(self._window):.2f}"
        self._bar.set_postfix({"success": success, "turns": self._turns, "kl": self._kl}, refresh=False)
        self._bar.update()
        self._since.append(this)
        if self._done % LINE_EVERY == 0:
            self._line()

    def close(self) -> None:
        self._bar.close()
        self._line()

    def _line(self) -> None:
        if self._lines and self._since:
            self._report(
                f"iteration {self._done} of {self._total}, {self._done * self._episodes} dialogues: success "
                f"{_success(self._since):.2f} over the last {len(self._since)}, {self._turns} turns, KL {self._kl}; "
                f"seconds: {_seconds(self._since)}"
            )
        self._since = []


def _success(rounds: Iterable[_Round]) -> float:
    """Share of the dialogues played that succeeded."""
    counts = [(one.successes, one.played) for one in rounds]
    return sum(successes for successes, _ in counts) / max(sum(played for _, played in counts), 1.0)


def _seconds(rounds: Iterable[_Round]) -> str:
    """Seconds of every phase, summed, in the order in which phases came up."""
    sums: dict[str, float] = {}
    for one in rounds:
        for phase, seconds in one.seconds.items():
            sums[phase] = sums.get(phase, 0.0) + seconds
    return ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in sums.items())
