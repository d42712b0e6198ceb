"""What a set of learning curves says: dialogues to a threshold, interquartile means, paired ratios with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One iteration of a run: dialogues played, how many of them reached the goal, mean turns."""

    played: int
    successes: int
    turns: float


def dialogues_to(curve: Sequence[Point], threshold: float, *, window: int) -> int | None:
    """Dialogues until the success of the last `window` or more dialogues is at least `threshold`; None: never.

    The window is the fewest last iterations that hold `window` dialogues; before there are that many nothing counts.
    """
    played = np.cumsum([point.played for point in curve])
    succeeded = np.cumsum([point.successes for point in curve])
    for last, total in enumerate(played):
        first = int(np.searchsorted(played, total - window, side="right")) - 1
        before = (int(played[first]), int(succeeded[first])) if first >= 0 else (0, 0)
        if total - before[0] >= window and succeeded[last] - before[1] >= threshold * (total - before[0]):
            return int(total)
    return None


def area(curve: Sequence[Point]) -> float:
    """Mean success over all dialogues of a run: the area under its curve."""
    return sum(point.successes for point in curve) / max(sum(point.played for point in curve), 1)


def iqm(values: Sequence[float] | Floats) -> float:
    """Interquartile mean (Agarwal et al. 2021): the mean of the middle half, the outermost of it by its share."""
    ordered = np.sort(np.asarray(values, np.float64))
    if not ordered.size:
        raise ValueError("no values")
    cut = ordered.size / 4
    weights = np.clip(np.arange(1, ordered.size + 1) - cut, 0.0, 1.0)
    weights = np.minimum(weights, weights[::-1])
    return float(np.average(ordered, weights=weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A statistic with its bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        return f"{self.value:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def paired_ratio(
    values: Mapping[int, float], base: Mapping[int, float], *, resamples: int, confidence: float, seed: int = 0
) -> Estimate:
    """Ratio of the interquartile means of two arms over the seeds that both have, resampled seed by seed."""
    seeds = sorted(values.keys() & base.keys())
    if not seeds:
        raise ValueError("the arms share no seed")
    ours, theirs = (np.asarray([side[one] for one in seeds], np.float64) for side in (values, base))
    draws = [iqm(ours[chosen]) / iqm(theirs[chosen]) for chosen in _chosen(len(seeds), resamples, seed)]
    return _estimate(iqm(ours) / iqm(theirs), draws, confidence)


def _chosen(count: int, resamples: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(count, size=(resamples, count))


def _estimate(value: float, draws: Sequence[float], confidence: float) -> Estimate:
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value=value, low=float(low), high=float(high))
