"""What every registered credit method promises, built-in or third-party."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slea_llm import registry
from slea_llm.crediting import Crediting
from slea_llm.errors import CreditError
from slea_llm.interfaces import CreditAssigner, LocalReducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats
from tests.support.experience import dialogue, experiences, on_ranks, spaced, stats_of

STREAMS = {
    "outcome": StreamSettings(sources=("outcome",)),
    "scores": StreamSettings(sources=("judge",), gamma_step=0.0, gamma_turn=0.0, weight=0.5),
}
HEADS = (*STREAMS, "outcome_q", "scores_q")
OUTCOME = {"outcome": STREAMS["outcome"]}
METHODS = sorted(registry.names("credit"))
OPTIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "nested_gae": (
        {"unit": "substep", "lam_critic": 1.0, "conditional": "q_head"},
        {"unit": "step", "conditional": "after_state", "whiten_by": "dialogue", "clip": 1.0},
    ),
    "group_relative": (
        {"step_weight": 1.0, "baseline": "leave_one_out", "similarity": 0.8},
        {"step_weight": 1.0, "scale": "unbiased", "state": "observation", "episode_mean": "turns", "clip": 0.5},
    ),
}
"""More settings of the built-in methods beside their defaults; a third party's method is tested with its defaults."""
CASES = [(name, options) for name in METHODS for options in ({}, *OPTIONS.get(name, ()))]
Pairs = list[tuple[ScoredTrajectory, TokenStats]]
every_method = pytest.mark.parametrize(("name", "options"), CASES, ids=str)
some_dialogues = st.lists(experiences(streams=HEADS), min_size=1, max_size=4)


def crediting(
    name: str, options: Mapping[str, Any], streams: Mapping[str, StreamSettings] = STREAMS, **rest: Any
) -> Crediting:
    method = registry.load("credit", name)
    assigner: CreditAssigner = method(method.Config(**options), streams=streams)
    return Crediting(streams, (), assigner, **rest)


def credit(method: Crediting, pairs: Pairs, reducer: Any = None) -> Sequence[AugmentedExperience]:
    reducer = reducer or LocalReducer()
    return method.credit([one for one, _ in pairs], [stat for _, stat in pairs], progress=0.5, reducer=reducer)


def of_one_token(reward: float, *, name: str, task: str = "a", **rest: Any) -> tuple[ScoredTrajectory, TokenStats]:
    one = dialogue([[("reply", 1)]], rewards=[reward], name=name, task=task, **rest)
    return one, stats_of(one, {head: [0.0] for head in HEADS})


def plain(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers up to a shift and a positive scale, which is all that whitening over a batch may change."""
    spread = np.ptp(numbers)
    return (numbers - numbers.min()) / spread if spread > 1e-9 else np.zeros_like(numbers)


@pytest.mark.parametrize("name", METHODS)
def test_it_is_a_component(name: str) -> None:
    method = registry.load("credit", name)
    assert method.name == name
    config, knob = method.Config(), dataclasses.fields(method.Config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, knob, None)


@every_method
@settings(deadline=None, max_examples=5)
@given(pairs=some_dialogues)
def test_one_finite_number_a_sampled_token(name: str, options: Mapping[str, Any], pairs: Pairs) -> None:
    method = crediting(name, options)
    got = credit(method, pairs)
    assert [one.scored for one in got] == [one for one, _ in pairs]
    for one in got:
        n = one.scored.trajectory.sampled_tokens
        for array in (one.advantages, one.weights, *one.returns.values(), *one.after_returns.values()):
            assert array.shape == (n,)
            assert np.isfinite(array).all()
        for mask in (one.value_mask, one.policy_mask, one.after_mask):
            assert mask is None or (mask.shape, mask.dtype) == ((n,), np.dtype(bool))
        assert set(one.returns) == set(STREAMS)
        assert {*one.returns, *one.after_returns} == set(method.heads)
        assert not one.advantages[~one.policy_mask].any()
        assert one.versions["credit"].startswith(name)


@every_method
@settings(deadline=None, max_examples=5)
@given(pairs=some_dialogues, cut=st.integers(0, 3))
def test_splitting_over_ranks_changes_nothing(name: str, options: Mapping[str, Any], pairs: Pairs, cut: int) -> None:
    """Groups of one task stay on one rank."""
    method = crediting(name, options)
    first = [pair for pair in pairs if pair[0].trajectory.task["id"] < "abcd"[cut]]
    second = [pair for pair in pairs if pair[0].trajectory.task["id"] >= "abcd"[cut]]
    together = credit(method, [*first, *second])
    shards = on_ranks(lambda reducer: credit(method, [first, second][reducer.rank], reducer))
    for apart, one in zip([*shards[0], *shards[1]], together, strict=True):
        np.testing.assert_allclose(apart.advantages, one.advantages, rtol=0, atol=1e-12)
        for stream in STREAMS:
            np.testing.assert_allclose(apart.returns[stream], one.returns[stream], rtol=0, atol=1e-12)


@every_method
@settings(deadline=None, max_examples=5)
@given(pairs=some_dialogues, order=st.randoms(use_true_random=False))
def test_order_changes_nothing(name: str, options: Mapping[str, Any], pairs: Pairs, order: Any) -> None:
    method = crediting(name, options)
    places = list(range(len(pairs)))
    order.shuffle(places)
    straight = credit(method, pairs)
    shuffled = credit(method, [pairs[place] for place in places])
    for place, one in zip(places, shuffled, strict=True):
        np.testing.assert_allclose(one.advantages, straight[place].advantages, rtol=0, atol=1e-12)


@every_method
def test_a_failed_dialogue_is_refused(name: str, options: Mapping[str, Any]) -> None:
    broken = dialogue([[("reply", 2)]], termination="error", scores={"judge": {}})
    stats = stats_of(broken, {head: [0.0, 0.0] for head in HEADS})
    method = registry.load("credit", name)
    rewards = {stream: {settings.sources[0]: np.zeros(2)} for stream, settings in STREAMS.items()}
    with pytest.raises(CreditError, match="failed"):
        method(method.Config(**options), streams=STREAMS).assign([broken], [rewards], [stats], LocalReducer())


@every_method
def test_no_dialogue_is_no_credit(name: str, options: Mapping[str, Any]) -> None:
    assert credit(crediting(name, options), []) == ()


@every_method
def test_br_107_the_end_reward_is_credited_to_the_last_sampled_token(name: str, options: Mapping[str, Any]) -> None:
    """On the token itself and not one place later, where padding is: the one who succeeded is raised there."""
    shapes = {"won": 1.0, "lost": 0.0}
    pairs = []
    for who, reward in shapes.items():
        one = dialogue([[("thought", 2), ("reply", 1)]], rewards=[reward], name=who)
        pairs.append((one, stats_of(one, {head: [0.5] * 3 for head in HEADS}, said_after=judged_by(reward, 3))))
    won, lost = credit(crediting(name, options, OUTCOME), pairs)
    assert won.rewards["outcome"]["outcome"].tolist() == [0.0, 0.0, 1.0]
    assert won.advantages[-1] > 0 > lost.advantages[-1]


def judged_by(reward: float, tokens: int) -> dict[str, list[float]]:
    """What a perfect Q head says after every token."""
    return {"outcome_q": [reward] * tokens}


@every_method
@settings(deadline=None, max_examples=5)
@given(pairs=some_dialogues, prompt=st.integers(1, 9), row_a_turn=st.booleans())
def test_br_017_what_was_not_sampled_is_in_no_number(
    name: str, options: Mapping[str, Any], pairs: Pairs, prompt: int, row_a_turn: bool
) -> None:
    """Prompts of any length, one row or many: whatever stands or is padded between sampled tokens counts nowhere."""
    method = crediting(name, options)
    moved = [(spaced(one, prompt, row_a_turn=row_a_turn), stats) for one, stats in pairs]
    for got, other in zip(credit(method, pairs), credit(method, moved), strict=True):
        np.testing.assert_array_equal(got.advantages, other.advantages)
        np.testing.assert_array_equal(got.policy_mask, other.policy_mask)


@every_method
def test_br_019_unscored_and_equal_groups_give_zero_and_never_nan(name: str, options: Mapping[str, Any]) -> None:
    streams = {"scores": StreamSettings(sources=("judge",), gamma_step=0.0, gamma_turn=0.0)}
    method = crediting(name, options, streams)
    for group in ([None, None, None, 0.7], [1.0, 1.0, 1.0, 1.0], [None] * 4):
        pairs = []
        for number, score in enumerate(group):
            one = dialogue([[("reply", 2)]], scores={"judge": {(0, 0): score}}, name=str(number))
            after = {"scores_q": [score or 0.0] * 2}
            pairs.append((one, stats_of(one, {"scores": [0.0] * 2, "scores_q": [0.0] * 2}, said_after=after)))
        for score, got in zip(group, credit(method, pairs), strict=True):
            np.testing.assert_array_equal(got.advantages, 0.0)
            assert got.policy_mask.all() == (score is not None)
            assert got.policy_mask.any() == (score is not None)


@every_method
def test_br_021_a_dialogue_without_a_trained_token_is_counted_and_in_no_mean(
    name: str, options: Mapping[str, Any]
) -> None:
    empty = dialogue([], termination="user_left", name="empty")
    pairs = [of_one_token(1.0, name="won"), of_one_token(0.0, name="lost")]
    method = crediting(name, options, OUTCOME)
    with_it = [*pairs, (empty, stats_of(empty, {head: [] for head in HEADS}))]
    got = credit(method, with_it)
    for one, alone in zip(got, credit(method, pairs), strict=True):
        np.testing.assert_array_equal(one.advantages, alone.advantages)
    assert method.summary([one for one, _ in with_it], got, reducer=LocalReducer())["credit/empty"] == 1


@every_method
@settings(deadline=None, max_examples=5)
@given(pair=experiences(streams=HEADS), other=experiences(streams=HEADS), another=experiences(streams=HEADS))
def test_br_023_nothing_leaks_from_one_dialogue_into_another(
    name: str, options: Mapping[str, Any], pair: Any, other: Any, another: Any
) -> None:
    """Up to the statistics of the batch, what a dialogue's tokens get among themselves is its own."""
    if options.get("clip"):
        options = {key: value for key, value in options.items() if key != "clip"}
    method = crediting(name, options, OUTCOME)

    def task(one: Any, name: str) -> Any:
        trajectory = dataclasses.replace(one[0].trajectory, task={"id": name})
        return dataclasses.replace(one[0], trajectory=trajectory), one[1]

    first = credit(method, [task(pair, "x"), task(other, "y")])[0].advantages
    second = credit(method, [task(pair, "x"), task(another, "y")])[0].advantages
    if np.ptp(first) > 1e-6 and np.ptp(second) > 1e-6:
        np.testing.assert_allclose(plain(first), plain(second), atol=1e-6)


@every_method
def test_br_025_a_token_that_left_the_reference_is_charged_for_it(name: str, options: Mapping[str, Any]) -> None:
    """k1 in the reward: minus log pi - log ref. Equal to the reference: nothing is paid and nothing moves."""
    stream = {"kl": StreamSettings(sources=("reference_kl",))}
    method = crediting(name, options, stream, kl_coef=0.1)
    for ratios, signs in (((0.5, -0.2), (-1.0, 1.0)), ((0.0, 0.0), (0.0, 0.0))):
        pairs = []
        for number, ratio in enumerate(ratios):
            one = dialogue([[("reply", 1)]], name=str(number))
            stats = stats_of(one, {"kl": [0.0], "kl_q": [0.0]}, log_ratio=[ratio], said_after={"kl_q": [-0.1 * ratio]})
            pairs.append((one, stats))
        got = credit(method, pairs)
        np.testing.assert_allclose([e.rewards["kl"]["reference_kl"][0] for e in got], [-0.1 * r for r in ratios])
        np.testing.assert_array_equal(np.sign([e.advantages[0] for e in got]), signs)
