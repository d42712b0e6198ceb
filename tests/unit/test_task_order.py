"""The order of tasks: a permutation an epoch, resumed from a position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.errors import ConfigError
from slea_llm.task_order import TaskOrder


def test_br_053_resume_goes_on_where_it_stopped() -> None:
    whole = TaskOrder(tasks=10, seed=7)
    order = whole.take(0, 10)
    assert sorted(order) == list(range(10))
    assert TaskOrder(tasks=10, seed=7).take(4, 6) == order[4:]
    second = whole.take(10, 10)
    assert sorted(second) == list(range(10))
    assert second != order
    assert TaskOrder(tasks=10, seed=7).take(10, 10) == second


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(0, 12), max_size=6))
def test_any_cut_of_the_order_gives_the_same_tasks(tasks: int, seed: int, cuts: list[int]) -> None:
    order = TaskOrder(tasks=tasks, seed=seed)
    pieces: tuple[int, ...] = ()
    for count in cuts:
        pieces += order.take(len(pieces), count)
    assert pieces == order.take(0, len(pieces))


def test_other_seeds_give_other_orders() -> None:
    assert TaskOrder(tasks=50, seed=1).take(0, 50) != TaskOrder(tasks=50, seed=2).take(0, 50)


def test_an_empty_order_and_a_negative_position_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 tasks"):
        TaskOrder(tasks=0, seed=0)
    with pytest.raises(ConfigError, match="-1"):
        TaskOrder(tasks=3, seed=0).take(-1, 1)
