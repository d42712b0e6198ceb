"""Published and hand-worked numbers of every measure, and what they do at their edges."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm import measures


def close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("successes", "interval"), [(92, (0.85001892, 0.95890654)), (98, (0.92998821, 0.99449803))])
def test_wilson(successes: int, interval: tuple[float, float]) -> None:
    close(measures.wilson(successes, 100), interval)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_mirrors(trial: tuple[int, int]) -> None:
    successes, n = trial
    low, high = measures.wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    close(measures.wilson(n - successes, n), (1 - high, 1 - low), 1e-12)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_proportion(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="is not a proportion"):
        measures.wilson(successes, n)


@pytest.mark.parametrize(
    ("n", "z", "p", "tolerance"),
    [(50, 1.3764944, 0.16866862, 1e-7), (100, 1.94665705, 0.05157586, 1e-8), (500, 4.3528575, 1.344e-05, 1e-7)],
)
def test_two_proportions(n: int, z: float, p: float, tolerance: float) -> None:
    got_z, got_p = measures.two_proportions(round(0.92 * n), n, round(0.98 * n), n)
    close(got_z, z, tolerance)
    close(got_p, p, 1e-8)
    close(measures.two_proportions(round(0.98 * n), n, round(0.92 * n), n)[0], -z, tolerance)


def test_two_proportions_without_variance() -> None:
    assert measures.two_proportions(0, 10, 0, 20) == (0.0, 1.0)
    assert measures.two_proportions(10, 10, 20, 20) == (0.0, 1.0)


def test_mean_lengths() -> None:
    got = measures.mean_lengths([5, 20, 7, 6], [True, False, True, True])
    assert (got.successes, got.all) == (6.0, 9.5)
    assert measures.mean_lengths([5], [False]).successes is None
    with pytest.raises(ValueError, match="do not pair"):
        measures.mean_lengths([5, 6], [True])


def test_pass_hat_k_and_pass_at_k() -> None:
    expected = {1: 0.75, 2: 0.53571429, 3: 0.35714286, 4: 0.21428571, 6: 0.03571429, 7: 0.0, 8: 0.0}
    for k, value in expected.items():
        close(measures.pass_hat_k(8, 6, k), value)
    for k, value in {1: 0.75, 2: 0.96428571, 3: 1.0, 4: 1.0}.items():
        close(measures.pass_at_k(8, 6, k), value)
    with pytest.raises(ValueError, match="k = 9"):
        measures.pass_hat_k(8, 6, 9)


def test_pass_hat_k_over_tasks() -> None:
    tasks = [(4, 4), (4, 3), (4, 1), (4, 0)]
    close([measures.mean_over_tasks(measures.pass_hat_k, tasks, k) for k in (1, 2, 3, 4)], [0.5, 0.375, 0.3125, 0.25])


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_passes_count_draws(draw: tuple[int, int, int]) -> None:
    n, successes, k = draw
    trials = [True] * successes + [False] * (n - successes)
    draws = list(itertools.combinations(trials, k))
    close(measures.pass_hat_k(n, successes, k), sum(map(all, draws)) / len(draws))
    close(measures.pass_at_k(n, successes, k), sum(map(any, draws)) / len(draws))


TABLE = [[0.1, 0.5, 0.7, 0.95], [0.2, 0.55, 0.65, 0.9], [0, 0.6, 0.8, 1]]


def test_interquartile_mean() -> None:
    close(measures.interquartile_mean(TABLE), 0.63333333)
    close(measures.interquartile_mean(np.arange(1, 11) / 10), 0.55)
    close(measures.interquartile_mean([0, 0, 1, 1, 1]), 0.66666667)


def test_stratified_bootstrap() -> None:
    close(measures.stratified_bootstrap(TABLE), [0.59166667, 0.675])
    with pytest.raises(ValueError, match="are not"):
        measures.stratified_bootstrap([0.1, 0.2])


def test_paired_bootstrap() -> None:
    got = measures.paired_bootstrap([0.92, 0.93, 0.90, 0.94, 0.91], [0.98, 0.97, 0.99, 0.96, 0.98])
    close(got.mean, 0.056)
    close(got.interval, [0.036, 0.076])


CURVE = [(0, 0.1), (100, 0.55), (200, 0.78), (300, 0.83), (400, 0.79), (500, 0.9)]


def test_steps_to_threshold() -> None:
    got = measures.steps_to_threshold(CURVE, 0.8)
    assert got.first == 300
    close(got.interpolated, 240)
    assert got.sustained is None
    assert measures.steps_to_threshold(CURVE, 0.8, in_a_row=1).sustained == 300
    assert measures.steps_to_threshold(CURVE, 0.75).sustained == 200
    at_once = measures.steps_to_threshold(CURVE, 0.05)
    assert (at_once.first, at_once.interpolated, at_once.sustained) == (0, 0, 0)
    assert measures.steps_to_threshold([], 0.5).first is None
    assert measures.steps_to_threshold(CURVE, 0.95).interpolated is None
    with pytest.raises(ValueError, match="must grow"):
        measures.steps_to_threshold([(1, 0.1), (1, 0.2)], 0.5)


def slow_area(scores: list[float], positive: list[bool]) -> float:
    pairs = [
        (a, b)
        for a, good in zip(scores, positive, strict=True)
        if good
        for b, other in zip(scores, positive, strict=True)
        if not other
    ]
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


def test_area_and_brier_of_the_oracle() -> None:
    chances, outcomes = [0.9, 0.8, 0.3, 0.6, 0.1], [1, 1, 0, 0, 0]
    close(measures.area_under_curve(chances, outcomes), 1.0)
    close(measures.brier(chances, outcomes), 0.102)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_area_is_the_share_of_pairs(rows: list[tuple[int, bool]]) -> None:
    scores, positive = [float(score) for score, _ in rows], [good for _, good in rows]
    area = measures.area_under_curve(scores, positive)
    if len(set(positive)) == 1:
        assert area is None
    else:
        close(area, slow_area(scores, positive), 1e-12)
        mirrored = measures.area_under_curve([-score for score in scores], positive)
        assert mirrored is not None
        close(mirrored, 1 - slow_area(scores, positive), 1e-12)


def test_calibration_error_by_hand() -> None:
    # Two bins: four at 0.25 of which one is positive, two at 0.85 of which one is.
    close(measures.calibration_error([0.25] * 4 + [0.85] * 2, [1, 0, 0, 0, 1, 0]), 2 / 6 * 0.35)
    close(measures.calibration_error([1.0, 0.0], [1, 0]), 0.0)
    close(measures.calibration_error([0.3, 0.3], [0.2, 0.4]), 0.0)
    with pytest.raises(ValueError, match=r"not in \[0, 1\]"):
        measures.calibration_error([1.2], [1])
    with pytest.raises(ValueError, match="do not pair"):
        measures.calibration_error([], [])


def test_pair_accuracy_by_context() -> None:
    found = measures.pair_accuracies([3, 1, 1, 5, 2, 0], [True, False, True, False, True, True], list("aaabbc"))
    assert found == {"a": 0.75, "b": 0.0}
