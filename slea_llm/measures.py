"""How well it went, with how much doubt: rates and their intervals, and curves of one run or of several.

Nothing here knows of dialogues; every function takes plain numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval: TypeAlias = tuple[float, float]
Floats: TypeAlias = NDArray[np.float64]

Z95 = NormalDist().inv_cdf(0.975)
"""Standard normal quantile of a two-sided 95 % interval."""


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def wilson(successes: int, n: int, *, z: float = Z95) -> Interval:
    """Score interval of a proportion (Wilson 1927). Raises ValueError unless 0 <= successes <= n and n > 0."""
    _require(n > 0 and 0 <= successes <= n, f"{successes} successes of {n} is not a proportion")
    rate = successes / n
    denominator = 1.0 + z * z / n
    centre = (rate + z * z / (2 * n)) / denominator
    half = z * math.sqrt(rate * (1.0 - rate) / n + z * z / (4 * n * n)) / denominator
    # At 0 and n successes the exact bounds are 0 and 1; rounding must not push them outside.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def two_proportions(first: int, first_n: int, second: int, second_n: int) -> tuple[float, float]:
    """z and two-sided p of second minus first, with the pooled variance; (0, 1) when every trial ended the same."""
    for successes, n in ((first, first_n), (second, second_n)):
        _require(n > 0 and 0 <= successes <= n, f"{successes} successes of {n} is not a proportion")
    pooled = (first + second) / (first_n + second_n)
    variance = pooled * (1.0 - pooled) * (1.0 / first_n + 1.0 / second_n)
    if variance == 0.0:
        return 0.0, 1.0
    z = (second / second_n - first / first_n) / math.sqrt(variance)
    return z, math.erfc(abs(z) / math.sqrt(2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLengths:
    """Mean length over successes (None without any) and over all; the first alone flatters whoever gives up early."""

    successes: float | None
    all: float


def mean_lengths(lengths: Sequence[float], successes: Sequence[bool]) -> MeanLengths:
    """Both means. Raises ValueError when the two differ in length or are empty."""
    _require(len(lengths) == len(successes) > 0, f"{len(lengths)} lengths and {len(successes)} successes do not pair")
    good = [length for length, success in zip(lengths, successes, strict=True) if success]
    return MeanLengths(successes=sum(good) / len(good) if good else None, all=sum(lengths) / len(lengths))


def pass_hat_k(n: int, successes: int, k: int) -> float:
    """pass^k: the chance that k trials drawn from n without replacement all succeed (tau-bench, Yao et al. 2024)."""
    _check_draw(n, successes, k)
    return math.comb(successes, k) / math.comb(n, k)


def pass_at_k(n: int, successes: int, k: int) -> float:
    """pass@k: the chance that at least one of k trials drawn from n succeeds (Chen et al. 2021, equation 1)."""
    _check_draw(n, successes, k)
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def mean_over_tasks(measure: Callable[[int, int, int], float], tasks: Iterable[tuple[int, int]], k: int) -> float:
    """`measure` (pass_hat_k or pass_at_k) averaged over tasks given as (trials, successes)."""
    values = [measure(n, successes, k) for n, successes in tasks]
    _require(bool(values), "no task to average over")
    return sum(values) / len(values)


def _check_draw(n: int, successes: int, k: int) -> None:
    _require(0 <= successes <= n, f"{successes} successes of {n} is not a proportion")
    _require(1 <= k <= n, f"k = {k} is not in 1 to the number of trials {n}")


def interquartile_mean(values: ArrayLike) -> float:
    """Mean of the middle half: floor(n / 4) values are left out on each side (Agarwal et al. 2021)."""
    ordered = np.sort(np.asarray(values, np.float64), axis=None)
    _require(ordered.size > 0, "no value to average over")
    cut = ordered.size // 4
    return float(ordered[cut : ordered.size - cut].mean())


def stratified_bootstrap(
    scores: ArrayLike,
    *,
    statistic: Callable[[Floats], float] = interquartile_mean,
    draws: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile interval of a statistic of `scores` (runs, tasks); runs are drawn anew for each task."""
    table = np.asarray(scores, np.float64)
    _require(table.ndim == 2 and table.size > 0, f"scores of shape {table.shape} are not (runs, tasks)")
    rng = np.random.default_rng(seed)
    results = [
        statistic(np.take_along_axis(table, rng.integers(0, table.shape[0], table.shape), axis=0)) for _ in range(draws)
    ]
    return _percentiles(results, level)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Mean of second minus first over pairs (the same seeds), with its bootstrap interval."""

    mean: float
    interval: Interval


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], *, draws: int = 5000, seed: int = 0, level: float = 0.95
) -> PairedDifference:
    """Difference of two arms that ran the same seeds; pairs are drawn with replacement."""
    _require(len(first) == len(second) > 0, f"{len(first)} and {len(second)} values do not pair")
    difference = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    rng = np.random.default_rng(seed)
    means = difference[rng.integers(0, difference.size, (draws, difference.size))].mean(axis=1)
    return PairedDifference(mean=float(difference.mean()), interval=_percentiles(means, level))


def _percentiles(results: ArrayLike, level: float) -> Interval:
    _require(0.0 < level < 1.0, f"level {level} is not between 0 and 1")
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(np.asarray(results, np.float64), [tail, 100.0 - tail])
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Where a curve reaches a threshold, in the unit of its x; None: it does not.

    `first`: the first point at or above. `interpolated`: on the line from the point before it. `sustained`: the first
    of `in_a_row` consecutive points at or above.
    """

    first: float | None
    interpolated: float | None
    sustained: float | None


def steps_to_threshold(curve: Sequence[tuple[float, float]], threshold: float, *, in_a_row: int = 2) -> Crossing:
    """Where the points (x, y), x growing, reach `threshold`."""
    _require(in_a_row >= 1, f"in_a_row {in_a_row} must be 1 or more")
    xs, reached = [x for x, _ in curve], [y >= threshold for _, y in curve]
    _require(all(left < right for left, right in itertools.pairwise(xs)), "the x of the curve must grow")
    if True not in reached:
        return Crossing(first=None, interpolated=None, sustained=None)
    at = reached.index(True)
    interpolated = xs[at]
    if at > 0:
        (x0, y0), (x1, y1) = curve[at - 1], curve[at]
        interpolated = x0 + (threshold - y0) / (y1 - y0) * (x1 - x0)
    windows = range(len(reached) - in_a_row + 1)
    sustained = next((xs[start] for start in windows if all(reached[start : start + in_a_row])), None)
    return Crossing(first=xs[at], interpolated=interpolated, sustained=sustained)


def area_under_curve(scores: ArrayLike, positive: ArrayLike) -> float | None:
    """Area under the ROC curve: the chance that a positive stands above a negative, ties half (Mann and Whitney 1947).

    None without a positive or without a negative. Raises ValueError when the two differ in length.
    """
    values, truth = np.asarray(scores, np.float64), np.asarray(positive, np.bool_)
    _require(values.shape == truth.shape and values.ndim == 1, f"{values.shape} and {truth.shape} do not pair")
    good, bad = int(truth.sum()), int((~truth).sum())
    if not good or not bad:
        return None
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    return float((ranks[truth].sum() - good * (good + 1) / 2.0) / (good * bad))


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None when either does not vary.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    ranks = [_mean_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    _require(len(ranks[0]) == len(ranks[1]), f"{len(ranks[0])} and {len(ranks[1])} values do not pair")
    centred = [one - one.mean() if len(one) else one for one in ranks]
    size = float(np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1])))
    return float(centred[0] @ centred[1]) / size if size > 0.0 else None


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)


def calibration_error(probabilities: ArrayLike, outcomes: ArrayLike, *, bins: int = 10) -> float:
    """Expected calibration error: mean gap of stated and seen rate over bins of equal width, by size (Naeini 2015).

    `outcomes` in [0, 1]. Raises ValueError for a probability outside [0, 1] and for no prediction.
    """
    stated, seen = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    _require(stated.shape == seen.shape and stated.size > 0, f"{stated.shape} and {seen.shape} do not pair")
    _require(bool((stated >= 0).all() and (stated <= 1).all()), "a probability is not in [0, 1]")
    place = np.minimum((stated * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(place, stated - seen, minlength=bins)
    return float(np.abs(gaps).sum() / stated.size)


def brier(probabilities: ArrayLike, outcomes: ArrayLike) -> float:
    """Mean squared difference of stated probability and outcome (Brier 1950)."""
    stated, seen = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    _require(stated.shape == seen.shape and stated.size > 0, f"{stated.shape} and {seen.shape} do not pair")
    return float(np.square(stated - seen).mean())


def pair_accuracies(scores: Sequence[float], positive: Sequence[bool], contexts: Sequence[str]) -> dict[str, float]:
    """Context -> share of its (positive, negative) pairs that the scores order rightly, ties half.

    Contexts without both kinds are left out.
    """
    _require(len(scores) == len(positive) == len(contexts), "scores, labels and contexts differ in length")
    members: dict[str, tuple[list[float], list[float]]] = {}
    for score, good, context in zip(scores, positive, contexts, strict=True):
        members.setdefault(context, ([], []))[0 if good else 1].append(score)
    found: dict[str, float] = {}
    for context, (goods, bads) in members.items():
        if goods and bads:
            wins = np.subtract.outer(np.asarray(goods), np.asarray(bads))
            found[context] = float(((wins > 0) + 0.5 * (wins == 0)).mean())
    return found
