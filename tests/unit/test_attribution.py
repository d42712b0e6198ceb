"""The formulas of step credit, against numbers that were worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slea_llm.evaluators.attribution import (
    hindsight,
    leave_one_out,
    monte_carlo_advantages,
    monte_carlo_label,
    paired_difference,
    policy_mean_advantages,
    progress,
    redistribute,
    rudder_loss,
)

PREDICTIONS = [0.1, 0.4, 0.35, 0.9]
probabilities = st.floats(0.0, 1.0)


def near(values: object) -> object:
    return pytest.approx(values, abs=1e-6)


def test_rudder_shares_out_the_return() -> None:
    assert redistribute(PREDICTIONS, PREDICTIONS[-1]) == near([0.1, 0.3, -0.05, 0.55])
    assert redistribute(PREDICTIONS, 1.0) == near([0.125, 0.325, -0.025, 0.575])
    assert redistribute(PREDICTIONS, 1.0, residual="last") == near([0.1, 0.3, -0.05, 0.65])
    with pytest.raises(ValueError, match="no step"):
        redistribute([], 1.0)


def test_rudder_loss_squares_before_it_averages() -> None:
    rows = [PREDICTIONS, [0.2, 0.1, 0.0, 0.1]]
    assert rudder_loss(rows, [1.0, 0.0], auxiliary=0.0) == near(0.01)
    assert rudder_loss(rows, [1.0, 0.0], auxiliary=1.0) - 0.01 == near(0.2078125)
    assert rudder_loss(rows, [1.0, 0.0]) == near(0.11390625)
    with pytest.raises(ValueError, match="2 dialogues and 1 returns"):
        rudder_loss(rows, [1.0])


def test_progress() -> None:
    assert progress([0.3, 0.45, 0.4, 0.7, 0.9]) == near([0.15, -0.05, 0.3, 0.2])


def test_hindsight_by_bayes() -> None:
    found = hindsight(0.25, 0.4, 0.5)
    assert (found.lift, found.q, found.advantage) == near((1.6, 0.8, 0.3))
    assert found.q * (1 - 0.25 / 0.4) == near(found.advantage)
    other = hindsight(0.2, 0.5, 0.4)
    assert (other.lift, other.q, other.advantage) == near((2.5, 1.0, 0.6))
    assert hindsight(0.01, 0.9, 0.1, lift_range=(0.2, 5.0)).lift == 5.0
    assert hindsight(0.9, 0.01, 0.5, lift_range=(0.2, 5.0)).q == near(0.1)
    for wrong in [(0.0, 0.1, 0.5), (0.5, 1.5, 0.5), (0.5, 0.5, -0.1)]:
        with pytest.raises(ValueError, match="not"):
            hindsight(*wrong)


def test_policy_mean_baseline() -> None:
    policy = [0.5, 0.3, 0.2]
    found = policy_mean_advantages([0.2, 0.5, 0.9], policy)
    assert found == near([-0.23, 0.07, 0.47])
    assert sum(p * a for p, a in zip(policy, found, strict=True)) == near(0.0)
    with pytest.raises(ValueError, match=r"sum to 0\.8"):
        policy_mean_advantages([0.2, 0.5, 0.9], [0.5, 0.3, 0.0])


def test_paired_and_unpaired_standard_errors() -> None:
    found = paired_difference([1, 1, 0, 1], [0, 1, 0, 0])
    assert (found.mean, found.paired_se, found.unpaired_se) == near((0.5, 0.28867513, 0.35355339))
    with pytest.raises(ValueError, match="1 and 1 ends"):
        paired_difference([1], [0])


def test_leave_one_out_is_the_centred_value_times_k_over_k_minus_one() -> None:
    values = [1.0, 0.0, 0.5, 0.25]
    assert leave_one_out(values) == near([0.75, -0.58333333, 0.08333333, -0.25])
    assert leave_one_out(values) == near([4 / 3 * (value - 0.4375) for value in values])
    with pytest.raises(ValueError, match="1 alternative"):
        leave_one_out([1.0])


@pytest.mark.parametrize(("successes", "soft", "hard"), [(0, 0.0, 0), (1, 0.125, 1), (3, 0.375, 1), (8, 1.0, 1)])
def test_monte_carlo_labels(successes: int, soft: float, hard: int) -> None:
    label = monte_carlo_label(successes, 8)
    assert (label.soft, label.hard) == (soft, hard)


def test_monte_carlo_standard_errors() -> None:
    assert monte_carlo_label(3, 8).se == near(0.1711633)
    assert monte_carlo_label(12, 32).se == near(0.08558165)
    for wrong in [(9, 8), (-1, 8), (0, 0)]:
        with pytest.raises(ValueError, match="not a proportion"):
            monte_carlo_label(*wrong)


def test_monte_carlo_advantages() -> None:
    found = monte_carlo_advantages([0.375, 0.75, 0.625, 1.0], 1.0)
    assert found == near([0.375, -0.125, 0.375, 0.0])
    assert sum(found) == near(0.625)


def test_where_the_methods_mislead_as_the_documentation_says() -> None:
    # A residual knows how this very dialogue ended: the same steps, worse by 1/4 each.
    assert redistribute(PREDICTIONS, 0.0) == near([-0.125, 0.075, -0.275, 0.325])
    # Two situations in one cluster: the step changes nothing in either (chances 0.8 and 0.2), and is credited.
    taken, chances = (0.4, 0.1), (0.8, 0.2)
    success = sum(chances) / 2
    backward = sum(share * chance for share, chance in zip(taken, chances, strict=True)) / 2 / success
    assert (sum(taken) / 2, backward, success) == near((0.25, 0.34, 0.5))
    assert hindsight(0.25, backward, success).advantage == near(0.18)
    # The value of a step that nobody took, guessed wrong, trebles the credit of another.
    assert policy_mean_advantages([0.2, 0.5, 0.2], [0.5, 0.3, 0.2])[1] == near(0.21)


@given(predictions=st.lists(probabilities, min_size=1, max_size=8), outcome=probabilities, start=probabilities)
def test_what_is_shared_out_sums_to_the_outcome_minus_the_start(
    predictions: list[float], outcome: float, start: float
) -> None:
    assert sum(redistribute(predictions, outcome, start=start)) == pytest.approx(outcome - start, abs=1e-9)
    assert sum(redistribute(predictions, outcome, start=start, residual="last")) == pytest.approx(
        outcome - start, abs=1e-9
    )


@given(values=st.lists(probabilities, min_size=2, max_size=8), cut=st.integers(0, 6))
def test_cutting_a_step_in_two_earns_nothing(values: list[float], cut: int) -> None:
    """A border more, whatever is predicted there, leaves the sum of progress as it was."""
    at = min(cut, len(values) - 2) + 1
    finer = [*values[:at], 0.5, *values[at:]]
    assert math.fsum(progress(finer)) == pytest.approx(math.fsum(progress(values)), abs=1e-9)


@given(
    joint=st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)), min_size=1, max_size=6),
)
def test_hindsight_is_what_the_joint_distribution_says(joint: list[tuple[float, float]]) -> None:
    """For each step of a joint distribution over (step, outcome): q is P(success | step); its mean under pi is V."""
    total = sum(bad + good for bad, good in joint)
    successes = sum(good for _, good in joint)
    value, mean = successes / total, 0.0
    for bad, good in joint:
        found = hindsight((bad + good) / total, good / successes, value)
        assert found.q == pytest.approx(good / (bad + good))
        mean += (bad + good) / total * found.advantage
    assert mean == pytest.approx(0.0, abs=1e-9)
