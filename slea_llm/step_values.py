"""Which steps a training valued most and least: the mean advantage of every text that was said often enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slea_llm.credit.placement import lay_out
from slea_llm.interfaces import Reducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, Step, TokenStats

ROWS = 5
"""Rows at either end of a printed table."""
LEAST = 5
"""Times that a text must have been said to get a row."""
WIDTH = 72

_TAG = re.compile(r"</?(?:think|tool_call)>")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValue:
    """A text (numbers as #), how often it was said, and the mean and standard error of its advantages."""

    text: str
    count: int
    mean: float
    error: float


class Crediter(Protocol):
    """Scores and values to credit; `slea_llm.crediting.Crediting` is one."""

    streams: dict[str, StreamSettings]
    heads: tuple[str, ...]

    def credit(
        self, scored: Sequence[ScoredTrajectory], stats: Sequence[TokenStats], *, progress: float, reducer: Reducer
    ) -> tuple[AugmentedExperience, ...]: ...

    def summary(
        self, scored: Sequence[ScoredTrajectory], experiences: Sequence[AugmentedExperience], *, reducer: Reducer
    ) -> dict[str, float]: ...


class StepValues:
    """Sums of advantages by text: (count, sum, sum of squares). What is added is never forgotten."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, float, float]] = {}

    def add(self, experience: AugmentedExperience) -> None:
        """Count every leaf step with the mean advantage of its tokens."""
        placed = {place.key: place for place in lay_out(experience.scored).steps}
        for step in experience.scored.leaves():
            place = placed[step.turn, step.index]
            tokens = experience.advantages[place.start : place.end]
            value = float(np.mean(tokens)) if len(tokens) else float(experience.advantages[place.earner])
            self._add(said(step), (1, value, value * value))

    def merge(self, sums: Mapping[str, tuple[int, float, float]]) -> None:
        """Take in the sums of another process."""
        for text, added in sums.items():
            self._add(text, added)

    def _add(self, text: str, added: tuple[int, float, float]) -> None:
        count, total, squares = self.sums.get(text, (0, 0.0, 0.0))
        self.sums[text] = (count + added[0], total + added[1], squares + added[2])

    def values(self, least: int = LEAST) -> list[StepValue]:
        """Every text said at least `least` times, the most valued first."""
        found = []
        for text, (count, total, squares) in self.sums.items():
            if text and count >= least:
                mean = total / count
                spread = max(0.0, squares / count - mean * mean)
                found.append(StepValue(text=text, count=count, mean=mean, error=(spread / count) ** 0.5))
        return sorted(found, key=lambda one: (-one.mean, one.text))

    def lines(self, rows: int = ROWS, least: int = LEAST) -> list[str]:
        """The table as text; one line that says so when no text was said often enough."""
        values = self.values(least)
        if not values:
            return [f"step values: no text of a step was said {least} times"]
        half = min(rows, (len(values) + 1) // 2)
        return [
            f"step values: mean advantage of {len(values)} texts said {least} times or more",
            *_rows("most valued", values[:half]),
            *_rows("least valued", values[len(values) - min(half, len(values) - half) :][::-1]),
        ]


class ValuedCrediting:
    """A crediter that also notes down how each step was valued."""

    def __init__(self, crediting: Crediter, values: StepValues) -> None:
        self._crediting, self._values = crediting, values
        self.streams = crediting.streams
        self.heads = crediting.heads

    def credit(
        self, scored: Sequence[ScoredTrajectory], stats: Sequence[TokenStats], *, progress: float, reducer: Reducer
    ) -> tuple[AugmentedExperience, ...]:
        experiences = self._crediting.credit(scored, stats, progress=progress, reducer=reducer)
        for experience in experiences:
            self._values.add(experience)
        return experiences

    def summary(
        self, scored: Sequence[ScoredTrajectory], experiences: Sequence[AugmentedExperience], *, reducer: Reducer
    ) -> dict[str, float]:
        return self._crediting.summary(scored, experiences, reducer=reducer)


def said(step: Step) -> str:
    """The text of a step without its tags and line ends, numbers as #, cut to one line of a table."""
    text = " ".join(_NUMBER.sub("#", _TAG.sub("", step.text)).split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _rows(title: str, values: Iterable[StepValue]) -> list[str]:
    rows = [f"  {one.mean:+6.2f} +- {one.error:.2f}  {one.count:>5} x  {one.text}" for one in values]
    return [f"  {title}:", *rows] if rows else []
