"""Augmenter `repeat_penalty`: which turns its rules charge, and how much at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.augmenters.repeat_penalty import RepeatPenalty
from slea_llm.errors import ConfigError, CreditError
from slea_llm.types import ScoredTrajectory
from tests.support.components import orders
from tests.support.shaping import talk

ACTS = ["dish", "quantity", "dish", "address", "address", "address", ""]
BOTH = ("dish", "quantity")
FILLED = [(), ("dish",), BOTH, BOTH, BOTH, *[(*BOTH, "address")] * 3]


def asking(acts: Sequence[str], filled: Sequence[Sequence[str]], **options: Any) -> ScoredTrajectory:
    """The agent asks for one slot a turn ('' confirms); `filled` before every turn and after the last one."""
    asked: dict[str, int] = {}
    states = [{"filled": list(filled[0]), "confirmed": list(filled[0]), "asked": {}, "turn": 0}]
    for number, act in enumerate(acts):
        if act:
            asked[act] = asked.get(act, 0) + 1
        after = list(filled[number + 1])
        states.append({"filled": after, "confirmed": after, "asked": dict(asked), "turn": number + 1})
    turns: Any = [[("thought", "hm"), ("reply", f"your {act}?" if act else "is that right?")] for act in acts]
    return talk(turns, states=states, **{"termination": "failure", **options})


def charged(scored: ScoredTrajectory, **options: Any) -> list[float]:
    got = RepeatPenalty(RepeatPenalty.Config(**options)).augment(scored, 0.0)
    assert all(step == 1 for _, step in got)  # the reply, not the thought
    return [got.get((turn.index, 1), 0.0) for turn in scored.trajectory.turns]


@pytest.mark.parametrize("settled", ["filled", "confirmed"])
def test_oracle_repeat_question_penalty(settled: str) -> None:
    """The address is filled after the second time of asking, so that the third one is charged and the second is not."""
    got = charged(asking(ACTS, FILLED), settled=settled)
    assert got == pytest.approx([0, 0, -0.5, 0, 0, -0.5, 0], abs=1e-12)
    assert sum(got) == pytest.approx(-1.0)


def test_a_dialogue_never_loses_more_than_the_bound() -> None:
    loop = asking(["dish"] * 6, [("dish",)] * 7)
    assert charged(loop) == pytest.approx([-0.5, -0.5, 0, 0, 0, 0])
    assert sum(charged(loop, bound=1.2)) == pytest.approx(-1.2)
    assert sum(charged(loop, penalty=0.0)) == 0.0


def test_successes_are_charged_only_when_asked_for() -> None:
    one = asking(ACTS, FILLED, termination="success")
    assert not any(charged(one))
    assert sum(charged(one, dialogues="all")) == pytest.approx(-1.0)
    assert not RepeatPenalty(RepeatPenalty.Config(dialogues="all")).augment(asking([], [()], termination="error"), 0.0)


def test_asking_a_vague_user_again_is_no_repetition_but_a_third_time_is() -> None:
    """The same question is charged when the answer had told something, or the third time in a row."""
    told = asking(["dish", "dish"], [(), ("dish",), ("dish",)])
    assert charged(told, asked="", stall_turns=0) == [0.0, -0.5]
    vague = asking(["dish"] * 3, [()] * 4)
    assert charged(vague, stall_turns=0) == [0.0, 0.0, -0.5]
    assert not any(charged(vague, stall_turns=0, again=False))


def test_turns_that_change_nothing_are_charged_from_the_fourth_on() -> None:
    acts = ["dish", "quantity", "address", "time", "phone"]
    assert charged(asking(acts, [()] * 6), asked="") == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert not any(charged(asking(acts, [()] * 6), asked="", stall_turns=0))
    moving = asking(acts, [(), ("dish",), ("dish",), ("dish",), ("dish",), ("dish",)])
    assert charged(moving, asked="") == [0.0, 0.0, 0.0, 0.0, -0.5]


def test_a_state_without_the_named_keys_is_an_error() -> None:
    bare = talk([[("reply", "x")]], termination="failure")
    with pytest.raises(CreditError, match="no table 'asked' of questions by slot; set asked to ''"):
        RepeatPenalty(RepeatPenalty.Config()).augment(bare, 0.0)
    asks = talk([[("reply", "x")]], states=[{"asked": {}}, {"asked": {"dish": 1}}], termination="failure")
    with pytest.raises(CreditError, match="turn 0 in trajectory 't' has no list 'confirmed'"):
        RepeatPenalty(RepeatPenalty.Config()).augment(asks, 0.0)
    assert RepeatPenalty(RepeatPenalty.Config(asked="")).augment(bare, 0.0) == {}


def test_an_expert_that_errs_is_charged_in_failures_alone() -> None:
    part = RepeatPenalty(RepeatPenalty.Config())
    losses = {one.trajectory.id: sum(part.augment(one, 0.0).values()) for one in orders(40)}
    for one in orders(40):
        loss = losses[one.trajectory.id]
        assert -1.0 <= loss <= 0.0
        assert not (one.trajectory.success and loss)
    assert any(loss < 0 for loss in losses.values())


@given(acts=st.lists(st.sampled_from(["dish", "quantity", ""]), min_size=1, max_size=8), bound=st.floats(0, 3))
@settings(deadline=None, max_examples=40)
def test_what_it_charges_is_negative_and_bounded(acts: list[str], bound: float) -> None:
    filled: list[tuple[str, ...]] = [()]
    for act in acts:
        filled.append(tuple(dict.fromkeys([*filled[-1], *([act] if act else [])])))
    got = RepeatPenalty(RepeatPenalty.Config(bound=bound)).augment(asking(acts, filled), 0.0)
    assert all(pay < 0.0 for pay in got.values())
    assert sum(got.values()) >= -bound - 1e-9


@pytest.mark.parametrize(
    "options", [{"penalty": -1.0}, {"bound": float("nan")}, {"stall_turns": -1}, {"dialogues": "some"}, {"settled": ""}]
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} "):
        RepeatPenalty.Config(**options)
