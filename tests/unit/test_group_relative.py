"""Advantages against the group: hand-worked numbers of outcome groups, state groups and their sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.credit.group_relative import GroupRelative
from slea_llm.crediting import Crediting
from slea_llm.errors import ConfigError, CreditError
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory
from tests.support.experience import Scores, dialogue, experiences, stats_of

OUTCOME = {"outcome": StreamSettings(sources=("outcome",), gamma_turn=0.95)}
REPLY = [("reply", 2)]
KITCHEN = "You are in the kitchen. You see a fridge 1, a countertop 1, and a microwave 1."
SAME_KITCHEN = "You are in the kitchen. You see a fridge 1, a countertop 2, and a microwave 1."
BEDROOM = "You are in the bedroom. You see a bed 1, a desk 1, and a lamp 1."


def played(
    rewards: Sequence[float], states: Sequence[str] | None = None, *, name: str = "t", scores: Scores | None = None
) -> ScoredTrajectory:
    return dialogue([REPLY] * len(rewards), rewards=rewards, states=states, name=name, scores=scores)  # type: ignore[list-item]


def credit(
    scored: Sequence[ScoredTrajectory], streams: Mapping[str, StreamSettings] = OUTCOME, **options: Any
) -> list[AugmentedExperience]:
    method = GroupRelative(GroupRelative.Config(**options), streams=streams)
    stats = [stats_of(one, {name: [0.0] * one.trajectory.sampled_tokens for name in streams}) for one in scored]
    crediting = Crediting(streams, (), method)
    return list(crediting.credit(list(scored), stats, progress=0.0, reducer=LocalReducer()))


def by_turn(experience: AugmentedExperience) -> list[float]:
    """The advantage of every turn, which its tokens share."""
    turns = experience.advantages.reshape(-1, 2)
    np.testing.assert_array_equal(turns[:, 0], turns[:, 1])
    found: list[float] = turns[:, 0].tolist()
    return found


def close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 0.5),
        ({"scale": "unbiased"}, 0.8660239),
        ({"scale": "population"}, 0.999998),
        ({"baseline": "leave_one_out"}, 0.66666667),
    ],
)
def test_outcome_groups(options: Mapping[str, Any], size: float) -> None:
    got = credit([played([reward], name=str(n)) for n, reward in enumerate([1, 0, 0, 1])], **options)
    close([by_turn(one) for one in got], [[size], [-size], [-size], [size]])


@pytest.mark.parametrize("scale", ["none", "unbiased", "population"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1 + 0.2])
def test_a_group_that_earned_alike_and_a_group_of_one_get_zero(scale: str, reward: float) -> None:
    alike = [played([reward], name=str(number)) for number in range(3)]
    alone = dialogue([[("reply", 2)]], rewards=[5.0], task="b", name="alone")
    for one in credit([*alike, alone], scale=scale, step_weight=1.0, baseline="leave_one_out"):
        np.testing.assert_array_equal(one.advantages, 0.0)


def test_step_returns_are_the_same_recursion_without_a_critic() -> None:
    """Against a twin that earned nothing in the same states, half of the return is left: 10 at the end, gamma 0.95."""
    judged = {"outcome": OUTCOME["outcome"]}
    got = credit([played([0, 0, 0, 10], name="a"), played([0] * 4, name="b")], judged, step_weight=1.0, unit="turn")
    close(2 * (np.array(by_turn(got[0])) - 5.0), [8.57375, 9.025, 9.5, 10.0])


SHARED = ["start", "middle"]


@pytest.mark.parametrize("unit", ["turn", "step"])
def test_episode_plus_step(unit: str) -> None:
    """GiGPO and SLEA-RL: A earns 10, B nothing; two states are shared, the last of each is its own."""
    first = played([0, 0, 10], [*SHARED, "a"], name="a")
    second = played([0, 0, 0], [*SHARED, "b"], name="b")
    got = credit([first, second], step_weight=1.0, unit=unit)
    close(by_turn(got[0]), [9.5125, 9.75, 5.0])
    close(by_turn(got[1]), [-9.5125, -9.75, -5.0])
    without = credit([first, second], unit=unit)
    close([by_turn(one) for one in without], [[5.0] * 3, [-5.0] * 3])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [("none", [3.15875, -5.86625, 2.7075]), ("unbiased", [0.62114943, -1.15356324, 0.5324138])],
)
def test_step_groups_of_three(scale: str, expected: list[float]) -> None:
    """Returns 9.025, 0 and 8.57375 from one state."""
    dialogues = [
        played([0, 0, 10], ["s", "x1", "x2"], name="a"),
        played([0], ["s"], name="b"),
        played([0, 0, 0, 10], ["s", "y1", "y2", "y3"], name="c"),
    ]
    both = credit(dialogues, step_weight=1.0, scale=scale)
    episode = credit(dialogues, scale=scale)
    close([by_turn(one)[0] - by_turn(alone)[0] for one, alone in zip(both, episode, strict=True)], expected, 2e-6)


def test_a_mean_over_turns_lets_long_dialogues_weigh_more() -> None:
    """Three turns that earned 10 and five that earned nothing: 3.75 is no baseline of two dialogues."""
    dialogues = [played([0, 0, 10], name="a"), played([0] * 5, name="b")]
    close([by_turn(one)[0] for one in credit(dialogues, episode_mean="turns")], [6.25, -3.75])
    close([by_turn(one)[0] for one in credit(dialogues)], [5.0, -5.0])


def test_a_stream_for_the_turns_by_their_number() -> None:
    """MT-GRPO: the turn's own advantage is added before the result, the outcome's stands everywhere."""
    streams = {
        "outcome": StreamSettings(sources=("outcome",)),
        "call": StreamSettings(sources=("judge",), gamma_turn=0.0),
    }
    scores = [{"judge": {(0, 0): call, (1, 0): 0.0}} for call in (1.0, 0.0)]
    dialogues = [
        dialogue([REPLY, REPLY], rewards=[0, paid], states=list(states), scores=score, name=states)  # type: ignore[list-item]
        for paid, states, score in zip((1.6, 0.0), ("ab", "cd"), scores, strict=True)
    ]
    got = credit(dialogues, streams, state="turn")
    close(by_turn(got[0]), [1.3, 0.8])
    close(by_turn(got[1]), [-1.3, -0.8])
    close(by_turn(credit(dialogues, streams, state="state")[0]), [0.8, 0.8])  # no state in common


def test_similar_states_belong_together() -> None:
    """difflib's ratio: 0.987 of the two kitchens, 0.704 of kitchen and bedroom."""
    dialogues = [played([10], [KITCHEN], name="a"), played([0], [SAME_KITCHEN], name="b")]
    dialogues.append(played([0], [BEDROOM], name="c"))
    streams = {"outcome": StreamSettings(sources=("outcome",), gamma_turn=0.0)}
    for similarity, first, third in ((1.0, 0.0, 0.0), (0.85, 5.0, 0.0), (0.7, 10 - 10 / 3, -10 / 3)):
        for order in (dialogues, dialogues[::-1]):
            options = {"state": "observation", "similarity": similarity}
            got = {one.scored.trajectory.id: by_turn(one)[0] for one in credit(order, streams, **options)}
            close([got["a"], got["c"]], [first, third])


def test_leaf_steps_are_compared_at_the_same_place_of_a_reply() -> None:
    judged = {"scores": StreamSettings(sources=("judge",), gamma_step=0.0, gamma_turn=0.0)}
    shape: Any = [[("thought", 1), ("reply", 1)]]
    scores = [{"judge": {(0, 0): 1.0, (0, 1): 0.0}}, {"judge": {(0, 0): 0.0, (0, 1): 3.0}}]
    dialogues = [dialogue(shape, scores=score, name=str(number)) for number, score in enumerate(scores)]
    close([one.advantages for one in credit(dialogues, judged)], [[0.5, -1.5], [-0.5, 1.5]])


@pytest.mark.parametrize("gamma", [0.0, 0.99])
def test_a_step_without_a_score_is_in_no_group(gamma: float) -> None:
    """By steps, and by whole dialogues, of which one has no score at all."""
    judged = {"scores": StreamSettings(sources=("judge",), gamma_turn=gamma)}
    scores = [1.0, 0.0, None]
    dialogues = [played([0], scores={"judge": {(0, 0): score}}, name=str(n)) for n, score in enumerate(scores)]
    got = credit(dialogues, judged)
    close([by_turn(one)[0] for one in got], [0.5, -0.5, 0.0])
    assert [bool(one.policy_mask.any()) for one in got] == [True, True, False]


@settings(deadline=None, max_examples=40)
@given(st.lists(experiences(streams=("outcome",)), min_size=1, max_size=6), st.sampled_from(["mean", "leave_one_out"]))
def test_equals_the_slow_form(pairs: list[Any], baseline: str) -> None:
    scored = [one for one, _ in pairs]
    got = credit(scored, step_weight=0.5, baseline=baseline, unit="turn")
    for one, mine in zip(scored, got, strict=True):
        group = [other for other in scored if other.trajectory.task == one.trajectory.task]
        episode = slow(one.trajectory.outcome, [other.trajectory.outcome for other in group], baseline)
        steps = [(turn.state_before, returned(other, turn.index)) for other in group for turn in other.trajectory.turns]
        for turn in one.trajectory.turns:
            same = [value for state, value in steps if state == turn.state_before]
            expected = episode + 0.5 * slow(returned(one, turn.index), same, baseline)
            start = sum(len(other.span or ()) for other in one.trajectory.turns[: turn.index])
            close(mine.advantages[start : start + len(turn.span or ())], expected, 1e-9)


def slow(value: Any, group: Sequence[Any], baseline: str) -> float:
    others = list(group)
    if baseline == "leave_one_out":
        others.remove(value)
    return float(value - sum(others) / len(others)) if len(group) > 1 else 0.0


def returned(one: ScoredTrajectory, turn: int) -> float:
    return sum(0.95 ** (later.index - turn) * later.reward for later in one.trajectory.turns[turn:])


def test_no_head_is_supervised_and_the_summary_speaks_of_no_critic() -> None:
    dialogues = [played([1], name="a"), played([0], name="b")]
    method = GroupRelative(GroupRelative.Config(), streams=OUTCOME)
    crediting = Crediting(OUTCOME, (), method)
    stats = [stats_of(one, {"outcome": [7.0, 7.0]}) for one in dialogues]
    got = crediting.credit(dialogues, stats, progress=0.0, reducer=LocalReducer())
    assert not any(one.value_mask.any() for one in got)
    close(by_turn(got[0]), [0.5])  # the critic's 7 is read nowhere
    metrics = crediting.summary(dialogues, got, reducer=LocalReducer())
    assert not [name for name in metrics if "advantage" in name or "variance" in name]
    assert metrics["credit/idle"] == 0.0


@pytest.mark.parametrize(
    ("options", "stream", "text"),
    [
        ({"baseline": "median"}, {}, "baseline 'median' is not one of mean, leave_one_out"),
        ({"scale": "unbiassed"}, {}, "did you mean 'unbiased'"),
        ({"similarity": 0.0}, {}, "similarity 0.0"),
        ({"similarity": 0.9, "state": "turn"}, {}, "set it to 1"),
        ({"step_weight": -1.0}, {}, "step_weight -1.0"),
        ({}, {"lam_turn": 1.0}, r"lam_turn is 1\.0, but group_relative has no critic"),
        ({}, {"whiten": False}, "whiten is False"),
        ({"unit": "turn"}, {"gamma_step": 0.0}, "gamma_step is 0.0"),
    ],
)
def test_what_would_be_ignored_is_refused(options: Mapping[str, Any], stream: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GroupRelative(GroupRelative.Config(**options), streams={"s": StreamSettings(sources=("outcome",), **stream)})


def test_states_that_are_not_told_are_an_error() -> None:
    one = played([1])
    turns = tuple(dataclasses.replace(turn, state_before={}) for turn in one.trajectory.turns)
    bare = dataclasses.replace(one, trajectory=dataclasses.replace(one.trajectory, turns=turns))
    with pytest.raises(CreditError, match=r"no public state before turn 0; set credit\.state to observation"):
        credit([bare], step_weight=1.0)
    assert len(credit([bare])) == 1  # without a step part nobody asks for it
