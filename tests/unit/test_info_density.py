"""Augmenter `info_density`: the steps around a user's turn weigh by what it tells."""

from __future__ import annotations

from typing import Any

import pytest

from slea_llm.augmenters.info_density import InfoDensity
from slea_llm.errors import ConfigError, CreditError
from slea_llm.types import ScoredTrajectory
from tests.support.components import orders
from tests.support.shaping import talk

USERS = ["hello", "I want two large pizzas", "thanks", "two large pizzas to 5 Oak Street", "yes"]


def order(users: list[str] = USERS, **options: Any) -> ScoredTrajectory:
    turns: Any = [[("thought", "hm"), ("reply", "and?")]] * len(users)
    return talk(turns, users=users, **options)


def densities(scored: ScoredTrajectory, **options: Any) -> list[float]:
    return InfoDensity(InfoDensity.Config(**{"slots": "", **options})).densities(scored)


def test_what_is_told_counts_and_politeness_does_not() -> None:
    greets, orders_pizza, thanks, repeats, agrees = densities(order())
    assert thanks == agrees == 0.0
    assert orders_pizza > repeats > greets >= 0.0
    assert orders_pizza == pytest.approx(4 / 7)  # want, two, large, pizzas
    assert repeats == pytest.approx(3 / 6)  # 5, oak, street: the rest was said before


def test_what_the_agent_said_first_tells_nothing() -> None:
    turns: Any = [[("reply", "a margherita?")], [("reply", "fine")]]
    assert densities(talk(turns, users=["hi", "a margherita"]))[1] == 0.0


def test_chinese_is_read_by_characters() -> None:
    polite, told = densities(order(["好的，谢谢", "我要两份宫保鸡丁"]))
    assert told > polite


def test_a_filled_slot_tells_as_much_as_three_words() -> None:
    states = [{"filled": []}, {"filled": ["dish"]}, {"filled": ["dish"]}]
    one = order(["hello", "yes"], states=states)
    assert densities(one, slots="filled") == [pytest.approx(1 / 4), pytest.approx(3 / 6)]


def test_the_answer_weighs_the_turn_that_earned_it() -> None:
    one = order()
    told = densities(one)
    answered = InfoDensity(InfoDensity.Config(slots="")).weights(one, 0.0)
    assert [answered[turn, 1] for turn in range(5)] == [*told[1:], 1.0]
    assert all(answered[turn, 0] == answered[turn, 1] for turn in range(5))
    heard = InfoDensity(InfoDensity.Config(slots="", reads="heard")).weights(one, 0.0)
    assert [heard[turn, 0] for turn in range(5)] == told


def test_a_broken_dialogue_weighs_nothing_and_a_state_without_slots_is_an_error() -> None:
    assert InfoDensity(InfoDensity.Config()).weights(order(termination="error"), 0.0) == {}
    with pytest.raises(CreditError, match="info_density: a state of turn 0 in trajectory 't' has no list 'filled'"):
        InfoDensity(InfoDensity.Config()).weights(order(), 0.0)


def test_questions_that_are_answered_weigh_more_than_confirmations_in_order_dialogues() -> None:
    part = InfoDensity(InfoDensity.Config())
    asked: list[float] = []
    rest: list[float] = []
    for one in orders(40):
        weights = part.weights(one, 0.0)
        assert all(0.0 <= weight <= 1.0 for weight in weights.values())
        for turn, following in zip(one.trajectory.turns, one.trajectory.turns[1:], strict=False):
            fills = following.state_before["filled"] != turn.state_before["filled"]
            (asked if fills else rest).append(weights[turn.index, 0])
    assert sum(asked) / len(asked) > 2 * sum(rest) / len(rest)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="reads 'all' is not one of answer, heard"):
        InfoDensity.Config(reads="all")  # type: ignore[arg-type]
