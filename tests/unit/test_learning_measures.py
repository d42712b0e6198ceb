"""Costs to a threshold, interquartile means, paired comparisons and censoring of the learning study."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "learning"))

from measures import Bootstrap, Point, area, dialogues_to, iqm, iqms, reached, spent

BOOTSTRAP = Bootstrap(resamples=500, confidence=0.95)


def curve(*successes: int, played: int = 32) -> list[Point]:
    return [Point(played=played, successes=one, turns=5.0, cpu=2.0, wall=3.0) for one in successes]


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


def test_what_a_run_spent_counts_up_to_the_threshold_and_all_of_a_censored_run() -> None:
    climbing = curve(0, 16, 32, 32)
    last = reached(climbing, 0.7, window=64)
    assert last == 2
    until = spent(climbing, last)
    assert (until.dialogues, until.turns, until.cpu, until.wall) == (96, 480.0, 6.0, 9.0)
    assert spent(climbing, None).dialogues == 128


def test_the_interquartile_mean_is_scipys_trimmed_mean_where_quarters_are_whole() -> None:
    assert iqm([1.0, 2.0, 3.0, 100.0]) == 2.5
    assert iqm([5.0]) == 5.0
    assert iqm([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    # Five values: a quarter is 1.25 of them, so the second and fourth count three quarters each.
    assert iqm([1.0, 2.0, 4.0, 8.0, 16.0]) == pytest.approx((0.75 * 2 + 4 + 0.75 * 8) / 2.5)
    assert iqms(np.array([[1.0, 2.0, 3.0, 100.0], [8.0, 6.0, 4.0, 2.0]])).tolist() == [2.5, 5.0]
    with pytest.raises(ValueError, match="no values"):
        iqm([])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_the_interquartile_mean_lies_within_and_is_symmetric(values: list[float]) -> None:
    assert min(values) - 1e-6 <= iqm(values) <= max(values) + 1e-6
    assert iqm([-one for one in values]) == pytest.approx(-iqm(values), abs=1e-6)


def test_a_comparison_pairs_the_seeds() -> None:
    base = {seed: float(1000 * (seed + 1)) for seed in range(8)}
    half = BOOTSTRAP.ratio(({seed: value / 2 for seed, value in base.items()}, base))
    assert (half.value, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5)), "the spread between seeds cancels"
    less = BOOTSTRAP.difference(({seed: value - 300 for seed, value in base.items()}, base))
    assert (less.value, less.low, less.high) == pytest.approx((-300.0, -300.0, -300.0))
    noise = np.random.default_rng(0).uniform(0.8, 1.2, 8)
    other = BOOTSTRAP.ratio(({s: v * n for (s, v), n in zip(base.items(), noise, strict=True)}, base))
    assert other.low < other.value < other.high
    only = BOOTSTRAP.ratio(({1: 100.0, 2: 7.0}, {2: 14.0, 3: 1.0}))
    assert only.value == 0.5, "seeds that one arm alone has count for neither"
    with pytest.raises(ValueError, match="share no seed"):
        BOOTSTRAP.ratio(({1: 1.0}, {2: 1.0}))


def test_an_interval_of_two_runs_is_the_one_that_can_be_counted() -> None:
    # Of two runs four samples are as likely: (0, 0), (0, 1), (1, 0), (1, 1), with the means 0, 0.5, 0.5 and 1.
    estimate = Bootstrap(resamples=20_000, confidence=0.4).mean([0.0, 1.0])
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.5, 0.5)
    wide = Bootstrap(resamples=20_000, confidence=0.6).mean([0.0, 1.0])
    assert (wide.low, wide.high) == (0.0, 1.0)
    assert BOOTSTRAP.mean([3.0, 4.0, 9.0]) == BOOTSTRAP.mean([3.0, 4.0, 9.0]), "equal seeds draw equal samples"


def test_intervals_are_those_of_scipy() -> None:
    """scipy 1.17.1: `bootstrap` by percentiles, paired, of `trim_mean(0.25)`, 20,000 resamples with seed 0."""
    base = dict(enumerate([900.0, 1100.0, 1300.0, 1000.0, 2000.0, 800.0, 1500.0, 1200.0]))
    ours = dict(enumerate([400.0, 350.0, 600.0, 500.0, 700.0, 300.0, 650.0, 380.0]))
    bootstrap = Bootstrap(resamples=20_000, confidence=0.95)
    found = [bootstrap.mean(list(base.values())), bootstrap.ratio((ours, base)), bootstrap.difference((ours, base))]
    expected = [(1150.0, 950.0, 1500.0), (0.408696, 0.328261, 0.473684), (-680.0, -905.0, -525.0)]
    for one, numbers in zip(found, expected, strict=True):
        # The ends are quantiles of draws: another generator would move them a little.
        assert (one.value, one.low, one.high) == pytest.approx(numbers, rel=0.01)


def test_domains_are_resampled_one_by_one_and_weigh_alike() -> None:
    orders = ({1: 500.0, 2: 500.0}, {1: 1000.0, 2: 1000.0})
    support = ({1: 20.0, 2: 20.0}, {1: 40.0, 2: 40.0})
    both = BOOTSTRAP.ratio(orders, support)
    assert (both.value, both.low, both.high) == pytest.approx((0.5, 0.5, 0.5))
    # Were the runs of all domains thrown together, samples without a run of the second would be drawn.
    apart = BOOTSTRAP.difference(({1: 0.0}, {1: 0.0}), ({1: 1.0}, {1: 0.0}))
    assert (apart.value, apart.low, apart.high) == (0.5, 0.5, 0.5)


def test_the_area_is_the_share_of_all_dialogues() -> None:
    assert area([*curve(32), *curve(16, played=64)]) == 48 / 96
