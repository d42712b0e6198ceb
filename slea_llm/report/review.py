"""Which dialogues a person should read first, and why: where scores and outcomes do not go together."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from slea_llm.log_measures import Facts

QUEUE = 50
"""Dialogues in the queue at most."""
COUNT_BITS = 21
MOST_COUNTED = (1 << COUNT_BITS) - 1
"""Steps of a dialogue, two million, above which they are no longer told apart here."""
SHARE_OF_REPEATS = 0.25
"""Share of repeated steps from which a dialogue is suspicious, if there are two or more."""


class Suspicion(NamedTuple):
    """One reason to look: its name, how much it weighs, and the sentence for a reader."""

    kind: str
    weight: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """A dialogue to be read, by its place in the log; the heavier the sooner."""

    place: int
    reasons: tuple[Suspicion, ...]

    @property
    def weight(self) -> float:
        return sum(reason.weight for reason in self.reasons)


class Standing(NamedTuple):
    """What of a dialogue decides whether somebody should read it.

    `mean` and `total` are of its known scores, None without any; `later` is the sum of their second half.
    """

    success: bool | None
    failed: bool
    steps: int
    repeats: int
    missing: int
    mean: float | None
    total: float | None
    later: float


def standing(one: Facts) -> Standing:
    known = one.known_scores
    return Standing(
        success=one.success,
        failed=one.failed,
        steps=one.steps,
        repeats=one.repeats,
        missing=len(one.scores) - len(known),
        mean=one.mean_score,
        total=sum(known) if known else None,
        later=sum(known[len(known) // 2 :]),
    )


class Standings:
    """The standings of many dialogues in 34 bytes each, so that the summary of a large log fits into memory."""

    def __init__(self) -> None:
        self._ends = array("b")  # success (-1: not known), failed
        self._counts = array("q")  # steps, repeats and missing, 21 bits each
        self._sums = array("d")  # mean, total (NaN: none), later

    def append(self, one: Standing) -> None:
        self._ends.extend((-1 if one.success is None else one.success, one.failed))
        packed = 0
        for count in (one.steps, one.repeats, one.missing):
            packed = packed << COUNT_BITS | min(count, MOST_COUNTED)
        self._counts.append(packed)
        self._sums.extend(math.nan if value is None else value for value in (one.mean, one.total, one.later))

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[Standing]:
        for place, packed in enumerate(self._counts):
            success, failed = self._ends[2 * place : 2 * place + 2]
            mean, total, later = self._sums[3 * place : 3 * place + 3]
            yield Standing(
                success=None if success < 0 else bool(success),
                failed=bool(failed),
                steps=packed >> 2 * COUNT_BITS,
                repeats=packed >> COUNT_BITS & MOST_COUNTED,
                missing=packed & MOST_COUNTED,
                mean=None if math.isnan(mean) else mean,
                total=None if math.isnan(total) else total,
                later=later,
            )


class Many(Protocol):
    """Standings that can be gone through more than once."""

    def __iter__(self) -> Iterator[Standing]: ...


def queue(standings: Many, *, limit: int = QUEUE) -> list[Review]:
    """The most suspicious dialogues, heaviest first.

    Suspicious are: a failure that scored as high as the upper quarter of successes; a success that scored as low as the
    lower quarter of failures; many repeats; a score sum that comes of the number of steps, in a failure; steps that no
    evaluator could score.
    """
    good = [one.mean for one in standings if one.success and one.mean is not None]
    bad = [one.mean for one in standings if one.success is False and one.mean is not None]
    high = float(np.quantile(good, 0.75)) if len(good) >= 4 else None
    low = float(np.quantile(bad, 0.25)) if len(bad) >= 4 else None
    typical = float(np.median([one.steps for one in standings if not one.failed and one.steps] or [1]))
    found = (
        Review(place=place, reasons=reasons)
        for place, one in enumerate(standings)
        if (reasons := tuple(_reasons(one, high, low, typical)))
    )
    return heapq.nsmallest(limit, found, key=lambda review: (-review.weight, review.place))


def _reasons(one: Standing, high: float | None, low: float | None, typical: float) -> list[Suspicion]:
    found = []
    mean = one.mean
    if one.success is False and mean is not None and high is not None and mean >= high:
        found.append(
            Suspicion("high score, failure", 2.0 + mean - high, f"failed with a mean score of {mean:+.2f}, as the best")
        )
    if one.success and mean is not None and low is not None and mean <= low:
        found.append(
            Suspicion(
                "low score, success", 1.0 + low - mean, f"succeeded with a mean score of {mean:+.2f}, as the worst"
            )
        )
    if one.repeats >= 2 and one.repeats >= SHARE_OF_REPEATS * one.steps:
        found.append(
            Suspicion(
                "repeats", 1.0 + one.repeats / one.steps, f"{one.repeats} of {one.steps} steps repeat an earlier one"
            )
        )
    rose = one.total is not None and one.total > 0 and one.later > 0
    if one.success is False and one.steps >= 1.5 * typical and rose:
        found.append(
            Suspicion(
                "score rises with length",
                1.5,
                f"failed after {one.steps} steps (median {typical:g}) while the sum of scores rose to {one.total:+.2f}",
            )
        )
    if one.steps and one.missing >= 0.5 * one.steps:
        found.append(Suspicion("unscored", 0.5, f"{one.missing} of {one.steps} steps have no score"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTrend:
    """Whether longer dialogues have higher score sums: Spearman's rank correlation over `n` dialogues."""

    correlation: float
    n: int

    @property
    def suspicious(self) -> bool:
        """A strong tie: an agent could earn by talking on."""
        return self.correlation >= 0.5


def length_trend(standings: Many) -> LengthTrend | None:
    """The trend over the scored dialogues; None for fewer than 8 or when nothing varies."""
    numbers = array("d")
    for one in standings:
        if not one.failed and one.total is not None:
            numbers.extend((one.steps, one.total))
    if len(numbers) < 2 * 8:
        return None
    lengths, sums = (_ranks(column) for column in np.array(numbers).reshape(-1, 2).T)
    if not lengths.std() or not sums.std():
        return None
    return LengthTrend(correlation=float(np.corrcoef(lengths, sums)[0, 1]), n=len(lengths))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks, ties alike."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    return ranks
