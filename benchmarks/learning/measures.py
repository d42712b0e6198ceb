"""What a set of learning curves says: costs to a threshold, interquartile means, paired comparisons with intervals.

The interquartile mean and the percentile bootstrap over runs are those of Agarwal et al. 2021 ("Deep reinforcement
learning at the edge of the statistical precipice"); runs of two arms under one seed are drawn as a pair, domains one
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One iteration of a run: dialogues played, how many reached the goal, mean turns, seconds that it took."""

    played: int
    successes: int
    turns: float
    cpu: float = 0.0
    wall: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run has cost up to and with an iteration. `turns` are replies of the agent: steps of the environment."""

    dialogues: int
    turns: float
    cpu: float
    wall: float


def reached(curve: Sequence[Point], threshold: float, *, window: int) -> int | None:
    """Place of the first iteration at which the last `window` or more dialogues succeeded so often; None: never.

    The window is the fewest last iterations that hold `window` dialogues; before there are that many nothing counts.
    """
    played = np.cumsum([point.played for point in curve])
    succeeded = np.cumsum([point.successes for point in curve])
    for last, total in enumerate(played):
        first = int(np.searchsorted(played, total - window, side="right")) - 1
        before = (int(played[first]), int(succeeded[first])) if first >= 0 else (0, 0)
        if total - before[0] >= window and succeeded[last] - before[1] >= threshold * (total - before[0]):
            return last
    return None


def spent(curve: Sequence[Point], last: int | None) -> Spent:
    """What the iterations up to and with `last` have cost; None: the whole run, where a run that fails is censored."""
    points = curve if last is None else curve[: last + 1]
    return Spent(
        dialogues=sum(point.played for point in points),
        turns=sum(point.played * point.turns for point in points),
        cpu=sum(point.cpu for point in points),
        wall=sum(point.wall for point in points),
    )


def dialogues_to(curve: Sequence[Point], threshold: float, *, window: int) -> int | None:
    """Dialogues until the success of the last `window` or more dialogues is at least `threshold`; None: never."""
    last = reached(curve, threshold, window=window)
    return None if last is None else spent(curve, last).dialogues


def area(curve: Sequence[Point]) -> float:
    """Mean success over all dialogues of a run: the area under its curve."""
    return sum(point.successes for point in curve) / max(sum(point.played for point in curve), 1)


def iqms(values: Floats) -> Floats:
    """Interquartile means along the last axis: the mean of the middle half, the outermost of it by its share."""
    ordered = np.sort(values, axis=-1)
    if not ordered.shape[-1]:
        raise ValueError("no values")
    cut = ordered.shape[-1] / 4
    weights = np.clip(np.arange(1, ordered.shape[-1] + 1) - cut, 0.0, 1.0)
    weights = np.minimum(weights, weights[::-1])
    return np.asarray(ordered @ (weights / weights.sum()), np.float64)


def iqm(values: Sequence[float] | Floats) -> float:
    """The interquartile mean of a list."""
    return float(iqms(np.asarray(values, np.float64)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A statistic with its bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2, *, unit: str = "") -> str:
        return f"{self.value:,.{digits}f}{unit} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """Percentile intervals; equal seeds draw equal samples."""

    resamples: int
    confidence: float
    seed: int = 0

    def mean(self, values: Sequence[float]) -> Estimate:
        """The interquartile mean of runs, the runs resampled."""
        (own,) = self._drawn([[np.asarray(values, np.float64)]])
        return self._estimate(iqm(values), iqms(own))

    def ratio(self, *pairs: tuple[Mapping[int, float], Mapping[int, float]]) -> Estimate:
        """Interquartile mean of an arm over that of its baseline.

        Each pair of arms is a stratum (a domain) of its own, measured in units of its baseline's interquartile mean.
        """
        units = [iqm(list(theirs.values())) for _, theirs in pairs]
        scaled = [
            (
                {seed: value / unit for seed, value in ours.items()},
                {seed: value / unit for seed, value in theirs.items()},
            )
            for (ours, theirs), unit in zip(pairs, units, strict=True)
        ]
        return self._paired(scaled, lambda ours, theirs: ours / theirs)

    def difference(self, *pairs: tuple[Mapping[int, float], Mapping[int, float]]) -> Estimate:
        """Interquartile mean of an arm less that of its baseline."""
        return self._paired(pairs, lambda ours, theirs: ours - theirs)

    def _paired(
        self, pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]], of: Callable[[Floats, Floats], Floats]
    ) -> Estimate:
        strata = [_paired_values(ours, theirs) for ours, theirs in pairs]
        ours, theirs = self._drawn(strata)
        whole = [np.concatenate(side) for side in zip(*strata, strict=True)]
        return self._estimate(float(of(iqms(whole[0]), iqms(whole[1]))), of(iqms(ours), iqms(theirs)))

    def _drawn(self, strata: Sequence[Sequence[Floats]]) -> list[Floats]:
        """(resamples, runs) of every side: within a stratum, with the same runs on all sides."""
        rng = np.random.default_rng(self.seed)
        sides: list[list[Floats]] = [[] for _ in strata[0]]
        for stratum in strata:
            count = len(stratum[0])
            chosen = rng.integers(count, size=(self.resamples, count))
            for side, values in zip(sides, stratum, strict=True):
                side.append(values[chosen])
        return [np.concatenate(side, axis=1) for side in sides]

    def _estimate(self, value: float, draws: Floats) -> Estimate:
        low, high = np.quantile(draws, [(1 - self.confidence) / 2, (1 + self.confidence) / 2])
        return Estimate(value=value, low=float(low), high=float(high))


def _paired_values(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[Floats]:
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise ValueError("the arms share no seed")
    return [np.asarray([side[one] for one in seeds], np.float64) for side in (ours, theirs)]
