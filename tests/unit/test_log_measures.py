"""Measures of a log: oracles to 1e-6, tasks with unequal trials, what is unknown counts for no rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slea_llm.log_measures import Facts, first_harm, group_advantages, measure, repeated
from slea_llm.log_measures import facts as facts_of
from tests.support.logged import booking, call, logged, scored


def fact(number: int, *, group: str | None, success: bool | None, turns: int = 5) -> Facts:
    return Facts(
        id=f"d{number}",
        group=group,
        success=success,
        failed=False,
        termination="success" if success else "failure",
        outcome=None if success is None else float(success),
        turns=turns,
        steps=turns,
        repeats=0,
        calls=0,
        tool_errors=0,
        scores=(None,) * turns,
        first_harm=None,
    )


def trials(*wins: int, n: int = 4) -> list[Facts]:
    """`n` trials of each task, the first so many of which succeed."""
    return [
        fact(number, group=f"t{task}", success=number < won) for task, won in enumerate(wins) for number in range(n)
    ]


def test_pass_hat_k_and_pass_at_k_over_tasks_as_the_oracle_says() -> None:
    found = measure(trials(4, 3, 1, 0))
    assert [row.pass_hat for row in found.passes()] == pytest.approx([0.5, 0.375, 0.3125, 0.25], abs=1e-6)
    eight = measure(trials(6, n=8)).passes()
    assert [eight[k - 1].pass_hat for k in (1, 2, 3, 4, 6, 7, 8)] == pytest.approx(
        [0.75, 0.53571429, 0.35714286, 0.21428571, 0.03571429, 0, 0], abs=1e-6
    )
    assert [row.pass_at for row in eight[:3]] == pytest.approx([0.75, 0.96428571, 1.0], abs=1e-6)


def test_success_interval_and_lengths_as_the_oracle_says() -> None:
    found = measure(fact(number, group=None, success=number < 92) for number in range(100))
    assert found.interval == pytest.approx((0.85001892, 0.95890654), abs=1e-6)
    lengths = [(5, True), (20, False), (7, True), (6, True)]
    found = measure(fact(number, group=None, success=won, turns=n) for number, (n, won) in enumerate(lengths))
    assert found.lengths is not None
    assert (found.lengths.successes, found.lengths.all) == (6.0, 9.5)
    assert found.passes() == []


def test_tasks_with_fewer_trials_leave_the_larger_k() -> None:
    found = measure([*trials(2, n=4), fact(9, group="short", success=True)])
    assert [(row.k, row.tasks) for row in found.passes()] == [(1, 2), (2, 1), (3, 1), (4, 1)]
    assert "tasks with so many trials: 2, 1, 1, 1" in "\n".join(found.lines())


def test_what_the_log_does_not_say_is_in_no_rate() -> None:
    found = measure([fact(0, group="a", success=None), fact(1, group="a", success=True)])
    assert (found.finished, found.successes, found.unknown) == (1, 1, 1)
    assert found.lines()[0].startswith("success: 1/1 = 100.0 %")
    assert measure([fact(0, group=None, success=None)]).lines()[0].startswith("success: unknown, the log does not say")


@pytest.mark.parametrize("outcomes", [[1.0, 1.0, 1.0], [0.0] * 4, [5.0], [], [0.1 + 0.2, 0.3]])
def test_equal_outcomes_give_an_advantage_of_zero_never_nan(outcomes: list[float]) -> None:
    assert group_advantages(outcomes) == [0.0] * len(outcomes)


@given(st.lists(st.floats(-1e6, 1e6), max_size=12))
def test_group_advantages_are_finite_and_centred(outcomes: list[float]) -> None:
    found = group_advantages(outcomes)
    assert all(math.isfinite(one) for one in found)
    assert math.fsum(found) == pytest.approx(0.0, abs=1e-6)


def test_group_advantages_as_the_oracle_says() -> None:
    assert group_advantages([1, 0, 0, 1]) == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_the_first_harmful_step_is_the_first_far_below_zero() -> None:
    again = call("hold", flight="AZ1")
    (one,) = scored(
        logged(
            "a",
            ([("user", "Hold flight AZ1.")], again),
            ([("tool", "Error: closed")], again),
            ([("tool", "Error: closed")], "The weather is fine."),
        )
    )
    words = one.scores_of("rules")
    assert [word.score for word in one.scores] == [-0.4, -0.5, -0.3]
    assert first_harm(one.leaves(), words) == (0, 0)
    assert first_harm(one.leaves(), {}) is None
    assert repeated(one.leaves()) == {(1, 0)}
    found = facts_of(one, "rules")
    assert (found.calls, found.tool_errors, found.repeats, found.first_harm) == (2, 2, 1, (0, 0))


def test_a_success_has_no_harmful_step() -> None:
    (one,) = scored(booking("a", success=True, errors=1))
    assert facts_of(one, "rules").first_harm is None
    (one,) = scored(booking("a", success=False, errors=1))
    assert facts_of(one, "rules").first_harm == (1, 0)
