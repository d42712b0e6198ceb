"""Augmenter `success_backprop`: what a bonus for every step rewards, and one that is shared out does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.augmenters.success_backprop import SuccessBackprop
from slea_llm.errors import ConfigError, CreditError
from slea_llm.overrides import Override, overridden
from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredStep, ScoredTrajectory
from tests.support.shaping import REPLY, Steps, talk


def success(turns: int, reward: float = 10.0, **options: Any) -> ScoredTrajectory:
    return talk([REPLY] * turns, rewards=[0.0] * (turns - 1) + [reward], **options)


def bonus(scored: ScoredTrajectory, gamma: float = 1.0, **options: Any) -> float:
    """What the dialogue earns by the part, discounted between turns."""
    paid = SuccessBackprop(SuccessBackprop.Config(**options)).augment(scored, 0.0)
    return sum(gamma**turn * pay for (turn, _), pay in paid.items())


@pytest.mark.parametrize(
    ("turns", "gamma", "outcome", "expected"),
    [(3, 0.99, 9.801, 0.29701), (3, 1.0, 10.0, 0.3), (8, 0.99, 9.32065348, 0.77255306), (8, 1.0, 10.0, 0.8)],
)
def test_oracle_success_backprop(turns: int, gamma: float, outcome: float, expected: float) -> None:
    """0.1 a step: the part alone pays eight turns more than three, and undiscounted the longer dialogue wins."""
    assert bonus(success(turns), gamma, form="each", bonus=0.1) == pytest.approx(expected, abs=1e-8)
    assert gamma ** (turns - 1) * 10 == pytest.approx(outcome, abs=1e-8)


def test_oracle_success_backprop_breakeven() -> None:
    def worth(turns: int, c: float, gamma: float, reward: float) -> float:
        return gamma ** (turns - 1) * reward + bonus(success(turns), gamma, form="each", bonus=c)

    for gamma, reward, threshold in ((0.99, 10.0, 0.1010101), (0.99, 1.0, 0.01010101), (0.95, 10.0, 0.52631579)):
        assert worth(8, threshold, gamma, reward) == pytest.approx(worth(3, threshold, gamma, reward), abs=1e-6)
        assert worth(8, 1.01 * threshold, gamma, reward) > worth(3, 1.01 * threshold, gamma, reward)
        assert worth(8, 0.99 * threshold, gamma, reward) < worth(3, 0.99 * threshold, gamma, reward)
    assert worth(3, 0.1, 0.99, 10.0) == pytest.approx(10.09801, abs=1e-8)
    assert worth(8, 0.1, 0.99, 10.0) == pytest.approx(10.09320653, abs=1e-8)


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=8), at=st.integers(0, 7))
@settings(deadline=None, max_examples=40)
def test_a_shared_bonus_is_the_same_for_every_length_and_cut(lengths: list[int], at: int) -> None:
    one = talk([(("reply", "x"),) * count for count in lengths])
    assert bonus(one, form="spread", bonus=1.0) == pytest.approx(1.0)
    cut = [count + (number == at % len(lengths)) for number, count in enumerate(lengths)]
    part = SuccessBackprop(SuccessBackprop.Config())
    sums = []
    for scored in (one, talk([(("reply", "x"),) * count for count in cut])):
        paid = part.augment(scored, 0.0)
        sums.append([sum(pay for (t, _), pay in paid.items() if t == turn) for turn in range(len(lengths))])
    assert sums[0] == pytest.approx(sums[1])


def test_bonus_and_priority_are_each_switchable() -> None:
    one = success(2)
    part = SuccessBackprop(SuccessBackprop.Config(bonus=0.0, priority=3.0))
    assert part.augment(one, 0.0) == {}
    assert part.weights(one, 0.0) == {(0, 0): 3.0, (1, 0): 3.0}
    assert set(SuccessBackprop(SuccessBackprop.Config(priority=1.0)).weights(one, 0.0).values()) == {1.0}


@pytest.mark.parametrize("termination", ["failure", "max_turns", "user_left", "budget", "error"])
def test_no_other_end_earns_or_weighs(termination: Any) -> None:
    one = talk([REPLY, REPLY], termination=termination)
    part = SuccessBackprop(SuccessBackprop.Config())
    assert part.augment(one, 0.0) == {}
    assert part.weights(one, 0.0) == {}


def chances(*after: float | None, part: str = "success_after") -> list[ScoredStep]:
    return [
        ScoredStep(turn=turn, step=0, evaluator="judge", version="1", score=0.0, parts={part: chance})
        if chance is not None
        else ScoredStep(turn=turn, step=0, evaluator="judge", version="1", score=None, reason="?")
        for turn, chance in enumerate(after)
    ]


@pytest.mark.parametrize(
    ("after", "counting"),
    [
        ([0.3, 0.6, 0.4, 0.7, 0.9], [3, 4]),
        ([0.6, 0.7, 0.8, 0.9, 0.9], [0, 1, 2, 3, 4]),
        ([0.6, 0.7, 0.8, 0.9, 0.1], []),
        ([0.3, None, 0.5, 0.7, 0.9], [1, 2, 3, 4]),
    ],
)
def test_only_what_comes_after_the_turning_point_counts(after: list[float | None], counting: list[int]) -> None:
    one = success(5, scores=chances(*after))
    part = SuccessBackprop(SuccessBackprop.Config(chance="judge"))
    assert [turn for turn, _ in part.augment(one, 0.0)] == counting
    assert [turn for turn, _ in part.weights(one, 0.0)] == counting
    assert sum(part.augment(one, 0.0).values()) == pytest.approx(1.0 if counting else 0.0)


def test_an_evaluator_without_a_chance_of_success_is_an_error() -> None:
    part = SuccessBackprop(SuccessBackprop.Config(chance="judge"))
    with pytest.raises(CreditError, match="scored by no evaluator, not by 'judge'"):
        part.augment(success(2), 0.0)
    with pytest.raises(CreditError, match="says no chance of success"):
        part.augment(success(1, scores=chances(0.6, part="lift")), 0.0)
    assert part.augment(success(1, scores=chances(0.6, part="after")), 0.0)


@pytest.mark.parametrize("options", [{"form": "all"}, {"bonus": -0.1}, {"priority": 0.5}, {"bonus": float("inf")}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} "):
        SuccessBackprop.Config(**options)


def test_the_literal_form_is_said_to_be_odd() -> None:
    stream = StreamSettings(sources=("success_backprop",))
    assert SuccessBackprop.fits(SuccessBackprop.Config(), "s", stream) == []
    (note,) = SuccessBackprop.fits(SuccessBackprop.Config(form="each"), "s", stream)
    assert "a longer success earns more" in note


def test_a_thought_and_a_reply_share_their_turn() -> None:
    steps: Steps = (("thought", "a"), ("reply", "b"))
    paid = SuccessBackprop(SuccessBackprop.Config(bonus=1.0)).augment(talk([steps, REPLY]), 0.0)
    assert paid == {(0, 0): 0.25, (0, 1): 0.25, (1, 0): 0.5}


def test_a_chance_whose_gate_is_shut_picks_no_step() -> None:
    def judged(*, shut: tuple[str, ...]) -> ScoredTrajectory:
        words = [
            ScoredStep(turn=turn, step=0, evaluator="model", version="1", score=0.0, parts={"success_after": chance})
            for turn, chance in enumerate((0.1, 0.2, 0.3, 0.9))
        ]
        return dataclasses.replace(success(4, scores=words), shut=shut)

    part = SuccessBackprop(SuccessBackprop.Config(chance="model", bonus=1.0, priority=2.0))
    assert part.augment(judged(shut=()), 0.0) == {(3, 0): 1.0}
    assert part.augment(judged(shut=("model",)), 0.0) == {(turn, 0): 0.25 for turn in range(4)}
    assert part.weights(judged(shut=("model",)), 0.0) == {(turn, 0): 2.0 for turn in range(4)}


def test_a_success_that_a_reviewer_took_back_earns_nothing() -> None:
    verdict = Override(trajectory="t", reward=-10.0, reviewer="ada", reason="transfers at once")
    taken_back = overridden(success(3), verdict, policy_version=3)
    assert taken_back.trajectory.success
    part = SuccessBackprop(SuccessBackprop.Config(bonus=1.0, priority=2.0))
    assert (part.augment(taken_back, 0.0), part.weights(taken_back, 0.0)) == ({}, {})
