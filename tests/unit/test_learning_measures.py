"""Dialogues to a threshold, interquartile means and paired ratios of the learning study."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "learning"))

from measures import Point, area, dialogues_to, iqm, paired_ratio


def curve(*successes: int, played: int = 32) -> list[Point]:
    return [Point(played=played, successes=one, turns=5.0) for one in successes]


def test_a_threshold_is_reached_when_the_window_before_it_succeeded_often_enough() -> None:
    climbing = curve(0, 8, 16, 24, 32, 32)
    assert dialogues_to(climbing, 0.5, window=64) == 4 * 32  # (16 + 24) / 64
    assert dialogues_to(climbing, 1.0, window=64) == 6 * 32
    assert dialogues_to(climbing, 0.5, window=32) == 3 * 32
    assert dialogues_to(climbing[:4], 0.8, window=64) is None
    assert dialogues_to(climbing, 0.0, window=1000) is None, "fewer dialogues than the window were played"


@given(st.lists(st.integers(0, 8), min_size=1, max_size=30), st.integers(1, 12))
def test_dialogues_to_is_what_counting_dialogue_by_dialogue_says(successes: list[int], iterations: int) -> None:
    points, window, threshold = curve(*successes, played=8), iterations * 8, 0.6
    expected = None
    for last in range(iterations - 1, len(points)):
        if sum(point.successes for point in points[last - iterations + 1 : last + 1]) >= threshold * window:
            expected = 8 * (last + 1)
            break
    assert dialogues_to(points, threshold, window=window) == expected


def test_the_interquartile_mean_is_scipys_trimmed_mean_where_quarters_are_whole() -> None:
    assert iqm([1.0, 2.0, 3.0, 100.0]) == 2.5
    assert iqm([5.0]) == 5.0
    assert iqm([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    # Five values: a quarter is 1.25 of them, so the second and fourth count three quarters each.
    assert iqm([1.0, 2.0, 4.0, 8.0, 16.0]) == pytest.approx((0.75 * 2 + 4 + 0.75 * 8) / 2.5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_the_interquartile_mean_lies_within_and_is_symmetric(values: list[float]) -> None:
    assert min(values) - 1e-6 <= iqm(values) <= max(values) + 1e-6
    assert iqm([-one for one in values]) == pytest.approx(-iqm(values), abs=1e-6)


def test_a_ratio_pairs_the_seeds() -> None:
    base = {seed: float(1000 * (seed + 1)) for seed in range(8)}
    half = paired_ratio({seed: value / 2 for seed, value in base.items()}, base, resamples=500, confidence=0.95)
    assert (half.value, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5)), "the spread between seeds cancels"
    noise = np.random.default_rng(0).uniform(0.8, 1.2, 8)
    other = paired_ratio(
        {s: v * n for (s, v), n in zip(base.items(), noise, strict=True)}, base, resamples=500, confidence=0.95
    )
    assert other.low < other.value < other.high
    with pytest.raises(ValueError, match="share no seed"):
        paired_ratio({1: 1.0}, {2: 1.0}, resamples=10, confidence=0.95)


def test_the_area_is_the_share_of_all_dialogues() -> None:
    assert area([*curve(32), *curve(16, played=64)]) == 48 / 96
