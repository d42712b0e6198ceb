"""Two evaluators, or two runs, on one log: how far they agree, which of them tells good endings, where they differ."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from slea_llm.errors import ConfigError
from slea_llm.log_measures import known_end
from slea_llm.measures import area_under_curve
from slea_llm.types import ScoredTrajectory, Step

LARGEST = 5
"""Differences that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Difference:
    """A step on which two evaluators differ, with both scores."""

    size: float
    trajectory: str
    turn: int
    step: int
    first: float
    second: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two evaluators say of the same steps. `steps` have a score of both; `alone` of one only.

    `spearman` is the rank correlation (None when one of them never varies), `same_sign` the share of steps with a score
    of equal sign among those with one other than 0, `success_auc` how well each one's mean score of a dialogue tells a
    success from a failure (None without both).
    """

    steps: int
    alone: tuple[int, int]
    spearman: float | None
    same_sign: float | None
    means: tuple[float, float] | None
    success_auc: tuple[float | None, float | None]
    largest: tuple[Difference, ...]

    def lines(self, first: str, second: str) -> list[str]:
        """The comparison to be printed, under these two names."""
        if self.means is None:
            return [f"{first} and {second} scored no step in common (alone: {self.alone[0]} and {self.alone[1]})"]
        found = [
            f"{self.steps} steps scored by both, {self.alone[0]} by {first} alone, {self.alone[1]} by {second} alone",
            f"mean score: {first} {self.means[0]:+.3f}, {second} {self.means[1]:+.3f}; rank correlation "
            f"{_shown(self.spearman)}, same sign in {_shown(self.same_sign)}",
            f"AUC of a dialogue's mean score for its success (0.5: tells nothing): {first} "
            f"{_shown(self.success_auc[0])}, {second} {_shown(self.success_auc[1])}",
        ]
        found += [
            f"  {one.first:+.2f} against {one.second:+.2f}  {one.trajectory} step {one.turn}.{one.step}: {one.text}"
            for one in self.largest
        ]
        return found


def compare(
    first: Iterable[ScoredTrajectory], first_evaluator: str, second: Iterable[ScoredTrajectory], second_evaluator: str
) -> Comparison:
    """Compare word by word; steps pair by the text that they cover. Streams both, holds two numbers a step.

    Raises ConfigError when the two are not scores of one log.
    """
    pairs: list[tuple[float, float]] = []
    alone = [0, 0]
    ends: list[tuple[float, float, bool]] = []
    largest: list[Difference] = []
    for one, other in _paired(first, second):
        sides = (_by_span(one, first_evaluator), _by_span(other, second_evaluator))
        both = sides[0].keys() & sides[1].keys()
        alone = [count + len(side.keys() - both) for count, side in zip(alone, sides, strict=True)]
        found = []
        for key in sorted(both):
            (step, mine), (_, theirs) = sides[0][key], sides[1][key]
            found.append((mine, theirs))
            if mine != theirs:
                _keep(largest, step, mine, theirs)
        pairs += found
        if found and known_end(one.trajectory):
            means = np.mean(found, axis=0)
            ends.append((float(means[0]), float(means[1]), one.trajectory.success))
    return _compared(pairs, (alone[0], alone[1]), ends, largest)


def _compared(
    pairs: list[tuple[float, float]],
    alone: tuple[int, int],
    ends: list[tuple[float, float, bool]],
    largest: list[Difference],
) -> Comparison:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    spoken = (table != 0).any(axis=1)
    truth = [good for _, _, good in ends]
    return Comparison(
        steps=len(table),
        alone=alone,
        spearman=_spearman(table),
        same_sign=float((np.sign(table[spoken, 0]) == np.sign(table[spoken, 1])).mean()) if spoken.any() else None,
        means=(float(table[:, 0].mean()), float(table[:, 1].mean())) if len(table) else None,
        success_auc=(
            area_under_curve([mine for mine, _, _ in ends], truth),
            area_under_curve([theirs for _, theirs, _ in ends], truth),
        ),
        largest=tuple(sorted(largest, reverse=True)),
    )


def _paired(
    first: Iterable[ScoredTrajectory], second: Iterable[ScoredTrajectory]
) -> Iterator[tuple[ScoredTrajectory, ScoredTrajectory]]:
    for number, (one, other) in enumerate(itertools.zip_longest(first, second), start=1):
        names = [None if side is None else side.trajectory.id for side in (one, other)]
        if one is None or other is None or names[0] != names[1]:
            raise ConfigError(
                f"dialogue {number} is {names[0]!r} in the first and {names[1]!r} in the second: they are not scores "
                "of one log"
            )
        yield one, other


def _by_span(scored: ScoredTrajectory, evaluator: str) -> dict[tuple[int, int, int], tuple[Step, float]]:
    words = scored.scores_of(evaluator)
    return {
        (step.turn, step.span.start, step.span.end): (step, word.score)
        for step in scored.leaves()
        if (word := words.get((step.turn, step.index))) and word.score is not None
    }


def _keep(largest: list[Difference], step: Step, mine: float, theirs: float) -> None:
    text = " ".join(step.text.split())
    one = Difference(
        size=abs(mine - theirs),
        trajectory=step.trajectory_id,
        turn=step.turn,
        step=step.index,
        first=mine,
        second=theirs,
        text=text if len(text) <= 80 else f"{text[:79]}\u2026",
    )
    if len(largest) < LARGEST:
        heapq.heappush(largest, one)
    else:
        heapq.heappushpop(largest, one)


def _spearman(table: np.ndarray) -> float | None:
    if len(table) < 2:
        return None
    columns = []
    for values in table.T:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        columns.append((np.cumsum(counts) - (counts - 1) / 2.0)[place])
    if not all(column.std() for column in columns):
        return None
    return float(np.corrcoef(columns[0], columns[1])[0, 1])


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
