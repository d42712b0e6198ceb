"""Which dialogues a person should read first, and why: where scores and outcomes do not go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slea_llm.log_measures import Facts

QUEUE = 50
"""Dialogues in the queue at most."""
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


def queue(facts: Sequence[Facts], *, limit: int = QUEUE) -> list[Review]:
    """The most suspicious dialogues, heaviest first.

    Suspicious are: a failure that scored as high as the upper quarter of successes; a success that scored as low as the
    lower quarter of failures; many repeats; a score sum that comes of the number of steps, in a failure; steps that no
    evaluator could score.
    """
    good = [mean for one in facts if one.success and (mean := one.mean_score) is not None]
    bad = [mean for one in facts if one.success is False and (mean := one.mean_score) is not None]
    high = float(np.quantile(good, 0.75)) if len(good) >= 4 else None
    low = float(np.quantile(bad, 0.25)) if len(bad) >= 4 else None
    typical = float(np.median([one.steps for one in facts if not one.failed and one.steps] or [1]))
    found = []
    for place, one in enumerate(facts):
        reasons = tuple(_reasons(one, high, low, typical))
        if reasons:
            found.append(Review(place=place, reasons=reasons))
    return sorted(found, key=lambda review: (-review.weight, review.place))[:limit]


def _reasons(one: Facts, high: float | None, low: float | None, typical: float) -> list[Suspicion]:
    found = []
    mean = one.mean_score
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
    if one.success is False and one.steps >= 1.5 * typical and (rising := _rising(one)) is not None:
        found.append(
            Suspicion(
                "score rises with length",
                1.5,
                f"failed after {one.steps} steps (median {typical:g}) while the sum of scores rose to {rising:+.2f}",
            )
        )
    missing = sum(score is None for score in one.scores)
    if one.steps and missing >= 0.5 * one.steps:
        found.append(Suspicion("unscored", 0.5, f"{missing} of {one.steps} steps have no score"))
    return found


def _rising(one: Facts) -> float | None:
    """The sum of scores when its second half added more than nothing and the whole is above 0."""
    known = [score for score in one.scores if score is not None]
    total, later = sum(known), sum(known[len(known) // 2 :])
    return total if total > 0 and later > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTrend:
    """Whether longer dialogues have higher score sums: Spearman's rank correlation over `n` dialogues."""

    correlation: float
    n: int

    @property
    def suspicious(self) -> bool:
        """A strong tie: an agent could earn by talking on."""
        return self.correlation >= 0.5


def length_trend(facts: Sequence[Facts]) -> LengthTrend | None:
    """The trend over the scored dialogues; None for fewer than 8 or when nothing varies."""
    pairs = [
        (one.steps, sum(score for score in one.scores if score is not None))
        for one in facts
        if not one.failed and any(score is not None for score in one.scores)
    ]
    if len(pairs) < 8:
        return None
    lengths, sums = (_ranks(np.array(column, dtype=np.float64)) for column in zip(*pairs, strict=True))
    if not lengths.std() or not sums.std():
        return None
    return LengthTrend(correlation=float(np.corrcoef(lengths, sums)[0, 1]), n=len(pairs))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks, ties alike."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    return ranks
