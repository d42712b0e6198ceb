"""From scored dialogues to advantages: placement, streams, missing scores, and the slow form on random dialogues."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slea_llm.credit import nested_gae
from slea_llm.credit.maths import gae
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.credit.units import UNITS
from slea_llm.crediting import Crediting, check_streams
from slea_llm.errors import ConfigError, CreditError, UnsupportedError
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats
from tests.support.experience import Shape, dialogue, experiences, kinds_of, on_ranks, refined, stats_of
from tests.support.slow_credit import slow_credit

OUTCOME = StreamSettings(sources=("outcome",))
SCORES = StreamSettings(sources=("judge",), gamma_step=0.0, gamma_turn=0.0)
SCORES_OF_TURNS = StreamSettings(sources=("judge",), gamma_turn=0.0)
Pair = tuple[ScoredTrajectory, TokenStats]
Knobs = Mapping[str, Any]


class Fixed:
    """An augmenter that pays what it is told."""

    name: ClassVar[str] = "fixed"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, pays: Mapping[tuple[int, int], float]) -> None:
        self.pays = pays

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:  # noqa: ARG002
        return {key: pay * progress for key, pay in self.pays.items()}


def crediting(
    streams: Mapping[str, StreamSettings], *, augmenters: Sequence[Fixed] = (), kl_coef: float = 0.0, **knobs: Any
) -> Crediting:
    assigner = NestedGae(NestedGae.Config(**knobs), streams=streams)
    return Crediting(streams, augmenters, assigner, kl_coef=kl_coef)


def credit(pairs: Sequence[Pair], streams: Mapping[str, StreamSettings], **knobs: Any) -> list[AugmentedExperience]:
    scored, stats = [one for one, _ in pairs], [stat for _, stat in pairs]
    return list(crediting(streams, **knobs).credit(scored, stats, progress=1.0, reducer=LocalReducer()))


def raw(pairs: Sequence[Pair], stream: StreamSettings, **knobs: Any) -> list[NDArray[np.float64]]:
    """Advantages of one stream before any whitening."""
    plain = StreamSettings(
        **{name: getattr(stream, name) for name in StreamSettings.__slots__ if name != "whiten"}, whiten=False
    )
    return [one.advantages for one in credit(pairs, {"s": plain}, whiten_final=False, **knobs)]


def close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


TWO_TURNS: Shape = [[("thought", 2), ("reply", 2)], [("thought", 2), ("reply", 2)]]
VALUES = [0.20, 0.25, 0.30, 0.28, 0.50, 0.55, 0.60, 0.70]


@pytest.mark.parametrize("row_a_turn", [False, True])
def test_multi_level_numbers_from_spans(row_a_turn: bool) -> None:
    one = dialogue(TWO_TURNS, rewards=[0, 1], row_a_turn=row_a_turn)
    pairs = [(one, stats_of(one, {"s": VALUES}, after=9.0))]
    close(raw(pairs, OUTCOME)[0], [0.76525, 0.71525, 0.66525, 0.68525, 0.5, 0.45, 0.4, 0.3])
    step = StreamSettings(sources=("outcome",), lam_step=0.95)
    close(raw(pairs, step)[0], [0.714118, 0.664118, 0.64644, 0.66644, 0.48, 0.43, 0.4, 0.3])
    flat: dict[str, Any] = {
        f"{kind}_{level}": n for level in ("token", "step", "turn") for kind, n in (("gamma", 0.99), ("lam", 0.95))
    }
    expected = [0.57722344, 0.56323598, 0.54889524, 0.6078631, 0.41771727, 0.39682857, 0.37515, 0.3]
    close(raw(pairs, StreamSettings(sources=("outcome",), **flat))[0], expected, 1e-8)


def test_turn_unit_broadcasts_and_reads_the_critic_once_a_turn() -> None:
    one = dialogue(TWO_TURNS, rewards=[0, 1])
    stats = stats_of(one, {"s": VALUES})
    close(raw([(one, stats)], OUTCOME, unit="turn")[0], np.repeat([0.76525, 0.5], 4))
    (got,) = credit([(one, stats)], {"s": OUTCOME}, unit="turn")
    close(got.returns["s"], np.repeat([0.96525, 1], 4))
    assert np.flatnonzero(got.value_mask).tolist() == [0, 4]
    assert np.flatnonzero(credit([(one, stats)], {"s": OUTCOME}, unit="step")[0].value_mask).tolist() == [0, 2, 4, 6]
    assert got.unit == "turn"


def test_step_rewards_sit_at_step_ends_and_the_outcome_at_turn_ends() -> None:
    pays = {(0, 0): 0.1, (0, 1): -0.2, (1, 0): 0.3}
    one = dialogue(TWO_TURNS, rewards=[0, 1], scores={"judge": {**pays, (1, 1): 0.0}})
    mixed = StreamSettings(sources=("outcome", "judge"))
    close(raw([(one, stats_of(one, {"s": VALUES}))], mixed)[0], [0.9474, 0.8974, 0.7474, 0.7674, 0.8, 0.75, 0.4, 0.3])
    (got,) = credit([(one, stats_of(one, {"s": VALUES}))], {"s": mixed})
    close(got.rewards["s"]["outcome"], [0] * 7 + [1])
    close(got.rewards["s"]["judge"], [0, 0.1, 0, -0.2, 0, 0.3, 0, 0])


def test_br_107_the_end_reward_is_on_the_last_sampled_token() -> None:
    one = dialogue([[("reply", 3)]], rewards=[1.0])
    close(credit([(one, stats_of(one, {"s": [0, 0, 0]}))], {"s": OUTCOME})[0].rewards["s"]["outcome"], [0, 0, 1])


def test_br_103_rewards_follow_their_trajectory_in_any_order() -> None:
    shapes = {"a": (5, 1.0), "b": (1, 2.0), "c": (3, 3.0)}
    pairs = []
    for name, (length, reward) in shapes.items():
        one = dialogue([[("reply", length)]], rewards=[reward], name=name)
        pairs.append((one, stats_of(one, {"s": [0.0] * length})))
    by_length = sorted(pairs, key=lambda pair: pair[0].trajectory.sampled_tokens)
    got = credit(by_length, {"s": OUTCOME})
    assert [one.scored.trajectory.id for one in got] == ["b", "c", "a"]
    assert [float(one.rewards["s"]["outcome"][-1]) for one in got] == [2, 3, 1]
    swapped = [(one, pairs[(index + 1) % 3][1]) for index, (one, _) in enumerate(pairs)]
    with pytest.raises(CreditError, match="shape"):
        credit(swapped, {"s": OUTCOME})


def test_br_015_br_023_a_cut_bootstraps_and_an_end_does_not() -> None:
    plain = StreamSettings(sources=("outcome",), gamma_turn=1.0, lam_turn=1.0)
    for termination, expected in (("budget", [0.3, 0.2, 0.1]), ("max_turns", [0.3, 0.2, 0.1])):
        one = dialogue([[("reply", 3)]], termination=termination)  # type: ignore[arg-type]
        close(raw([(one, stats_of(one, {"s": [0.5, 0.6, 0.7]}, after=0.8))], plain)[0], expected)
    for termination in ("failure", "user_left", "success"):
        one = dialogue([[("reply", 3)]], termination=termination)  # type: ignore[arg-type]
        close(raw([(one, stats_of(one, {"s": [0.5, 0.6, 0.7]}, after=0.8))], plain)[0], [-0.5, -0.6, -0.7])


def test_a_turn_without_reward_keeps_its_border() -> None:
    one = dialogue(TWO_TURNS, rewards=[0, 1])
    stream = StreamSettings(sources=("outcome",), gamma_turn=0.5, lam_turn=1.0)
    close(raw([(one, stats_of(one, {"s": [0.0] * 8}))], stream)[0], [0.5] * 4 + [1] * 4)


def test_a_score_stream_is_score_minus_value_of_the_state() -> None:
    scores = {(0, 0): 1.0, (0, 1): -1.0, (1, 0): 0.5, (1, 1): 0.25}
    one = dialogue(TWO_TURNS, scores={"judge": scores})
    stats = stats_of(one, {"s": VALUES}, after=5.0)
    for unit, values in (("token", VALUES), ("step", np.repeat(VALUES[::2], 2))):
        expected = np.repeat(list(scores.values()), 2) - values
        close(raw([(one, stats)], SCORES, unit=unit)[0], expected)


def test_a_step_inside_another_steps_token_earns_on_that_token() -> None:
    scores = {(0, 0): 1.0, (0, 1): 2.0, (0, 2): 4.0}
    one = dialogue([[("thought", 2), ("reply", 0), ("reply", 1)]], scores={"judge": scores})
    (got,) = credit([(one, stats_of(one, {"s": [0, 0, 0]}))], {"s": SCORES})
    close(got.rewards["s"]["judge"], [0, 3, 4])


def test_kinds_get_only_their_streams() -> None:
    streams = {
        "outcome": StreamSettings(sources=("outcome",), kinds=("reply",), whiten=False),
        "scores": StreamSettings(sources=("judge",), kinds=("thought",), gamma_step=0, gamma_turn=0, whiten=False),
    }
    one = dialogue(TWO_TURNS, rewards=[0, 1], scores={"judge": {(t, s): 10.0 for t in (0, 1) for s in (0, 1)}})
    (got,) = credit([(one, stats_of(one, dict.fromkeys(streams, [0.0] * 8)))], streams, whiten_final=False)
    thought = np.array([kind == "thought" for kind in kinds_of(one)])
    close(got.advantages[thought], 10)
    assert (got.advantages[~thought] <= 1).all()
    assert got.policy_mask.all()
    (only,) = credit([(one, stats_of(one, {"scores": [0.0] * 8}))], {"scores": streams["scores"]})
    assert (only.policy_mask == thought).all()


def test_br_019_unscored_steps_stay_out_of_statistics_and_loss() -> None:
    def group(scores: Sequence[float | None]) -> list[Pair]:
        ones = [dialogue([[("reply", 1)]], scores={"judge": {(0, 0): score}}) for score in scores]
        return [(one, stats_of(one, {"s": [0.5]})) for one in ones]

    mostly = credit(group([None, None, None, 0.7]), {"s": SCORES})
    close([one.advantages for one in mostly], 0)
    assert [bool(one.policy_mask[0]) for one in mostly] == [False, False, False, True]
    close([one.returns["s"][0] for one in mostly], [0.5, 0.5, 0.5, 0.7])  # nothing learnt where nothing was said
    equal = credit(group([1, 1, 1, 1]), {"s": SCORES})
    close([one.advantages for one in equal], 0)
    assert all(one.policy_mask.all() for one in equal)
    spoilt = credit(group([None, 1.0, 3.0]), {"s": SCORES})
    close([float(one.advantages[0]) for one in spoilt], [0, -1, 1])


def test_a_step_that_the_evaluator_forgot_is_unscored() -> None:
    one = dialogue([[("thought", 1), ("reply", 1)]], scores={"judge": {(0, 0): 1.0}})
    (got,) = credit([(one, stats_of(one, {"s": [0.0, 0.0]}))], {"s": SCORES})
    assert got.policy_mask.tolist() == [True, False]


@settings(deadline=None, max_examples=40)
@given(st.lists(experiences(), min_size=1, max_size=4), st.data())
def test_equals_the_slow_form(pairs: list[Pair], data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(UNITS))
    share = st.sampled_from([0.0, 0.5, 0.95, 1.0])
    levels = UNITS[UNITS.index(unit) :]

    def stream(*sources: str) -> StreamSettings:
        rates: dict[str, Any] = {f"{kind}_{level}": data.draw(share) for level in levels for kind in ("gamma", "lam")}
        if data.draw(st.booleans()):
            rates |= {"gamma_substep": None, "lam_substep": None}
        kinds = tuple(data.draw(st.sets(st.sampled_from(["thought", "reply", "tool_call"]))))
        return StreamSettings(sources=sources, kinds=kinds, weight=data.draw(st.sampled_from([0.0, 0.5, 2.0])), **rates)

    streams = {"outcome": stream("outcome", "reference_kl"), "scores": stream("judge")}
    lam_critic = data.draw(st.none() | share)
    got = credit(pairs, streams, unit=unit, kl_coef=0.1, lam_critic=lam_critic)
    scored, stats = [one for one, _ in pairs], [stat for _, stat in pairs]
    advantages, returns = slow_credit(scored, stats, streams, unit=unit, kl_coef=0.1, lam_critic=lam_critic)
    for one, advantage, target in zip(got, advantages, returns, strict=True):
        close(one.advantages, advantage, 1e-8)
        for name in streams:
            close(one.returns[name], target[name], 1e-9)


@settings(deadline=None, max_examples=30)
@given(st.lists(experiences(), min_size=1, max_size=4), st.sampled_from(UNITS))
def test_one_stream_of_weight_one_is_no_stream(pairs: list[Pair], unit: str) -> None:
    """Whitened in its stream and once more at the end, or only at the end: the same numbers."""
    streams = {"outcome": OUTCOME}
    bare = {"outcome": StreamSettings(sources=("outcome",), whiten=False)}
    twice, once = credit(pairs, streams, unit=unit), credit(pairs, bare, unit=unit)
    for left, right in zip(twice, once, strict=True):
        np.testing.assert_array_equal(left.advantages, right.advantages)


@pytest.mark.parametrize("unit", UNITS)
def test_every_level_and_outcome_only_is_the_one_recursion_once_a_stream(
    unit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(rewards: Any, *rest: Any, **named: Any) -> Any:
        seen.append(rewards.shape)
        return gae(rewards, *rest, **named)

    monkeypatch.setattr(nested_gae, "gae", watched)
    one = refined(dialogue([[("thought", 2), ("thought", 1), ("reply", 2)], [("reply", 3)]], rewards=[0, 1]), 0, 0, 1)
    stats = stats_of(one, {"a": [0.5] * 8, "b": [0.0] * 8})
    outcome_only = StreamSettings(sources=("outcome",), gamma_turn=1.0, lam_turn=1.0, whiten=False)
    scored = dataclasses.replace(one, evaluator_versions={"judge": "1"})
    (got,) = credit([(scored, stats)], {"a": outcome_only, "b": SCORES_OF_TURNS}, unit=unit, whiten_final=False)
    assert seen == [(1, {"token": 8, "substep": 4, "step": 3, "turn": 2}[unit])] * 2
    close(got.returns["a"], 1.0)  # every token hears of the whole outcome


@settings(deadline=None, max_examples=30)
@given(experiences())
def test_no_reward_is_lost_or_made_up(pair: Pair) -> None:
    one, stats = pair
    rewards = crediting({"outcome": OUTCOME, "scores": SCORES}).rewards(one, stats, progress=0.0)
    close(rewards["outcome"]["outcome"].sum(), sum(turn.reward for turn in one.trajectory.turns))
    close(rewards["scores"]["judge"].sum(), sum(s.score for s in one.scores if s.score is not None))


def test_decoupled_targets_are_monte_carlo_returns() -> None:
    one = dialogue(TWO_TURNS, rewards=[1, 2])
    (got,) = credit([(one, stats_of(one, {"s": VALUES}))], {"s": OUTCOME}, lam_critic=1.0)
    close(got.returns["s"], [1 + 0.99 * 2] * 4 + [2] * 4)


def test_length_adaptive_lambda_replaces_the_token_lambda() -> None:
    one = dialogue([[("reply", 100)]], rewards=[1])
    stats = stats_of(one, {"s": [0.0] * 100})
    fixed = StreamSettings(sources=("outcome",), lam_token=0.8)
    close(raw([(one, stats)], OUTCOME, length_alpha=0.05)[0], raw([(one, stats)], fixed)[0], 1e-12)


def test_clip_bounds_the_final_advantage() -> None:
    one = dialogue([[("reply", 20)]], rewards=[1])
    values = [0.0] * 19 + [50.0]
    (got,) = credit([(one, stats_of(one, {"s": values}))], {"s": OUTCOME}, clip=1.5)
    assert np.abs(got.advantages).max() == 1.5


def test_reference_kl_is_charged_token_by_token() -> None:
    one = dialogue([[("reply", 3)]], rewards=[1.0])
    stats = stats_of(one, {"s": [0.0] * 3}, log_ratio=[0.2, -0.2, 0.0])
    stream = StreamSettings(sources=("outcome", "reference_kl"))
    rewards = crediting({"s": stream}, kl_coef=0.05).rewards(one, stats, progress=0.0)["s"]
    close(rewards["reference_kl"] + rewards["outcome"], [-0.01, 0.01, 1])


def test_the_scale_of_a_stream_changes_what_the_critic_learns_and_not_what_the_policy_does() -> None:
    paid, values = (10.0, -1.0), (2.0, 1.0)
    dialogues = [dialogue(TWO_TURNS[:1], rewards=[reward]) for reward in paid]
    pairs = [(one, stats_of(one, {"s": [value] * 4})) for one, value in zip(dialogues, values, strict=True)]
    scaled = [(one, stats_of(one, {"s": [0.1 * value] * 4})) for one, value in zip(dialogues, values, strict=True)]
    plain = credit(pairs, {"s": StreamSettings(sources=("outcome",))})
    small = credit(scaled, {"s": StreamSettings(sources=("outcome",), reward_scale=0.1)})
    for one, other in zip(plain, small, strict=True):
        close(other.advantages, one.advantages)
        close(other.returns["s"], 0.1 * one.returns["s"])
        close(other.rewards["s"]["outcome"], 0.1 * one.rewards["s"]["outcome"])


def test_br_025_the_reward_falls_where_the_policy_is_above_its_reference() -> None:
    one = dialogue([[("reply", 2)]])
    stats = stats_of(one, {"s": [0.0] * 2}, log_ratio=[-1.0 + 1.5, -2.0 + 1.8])
    stream = StreamSettings(sources=("reference_kl",))
    close(crediting({"s": stream}, kl_coef=0.1).rewards(one, stats, progress=0.0)["s"]["reference_kl"], [-0.05, 0.02])


def test_augmenters_pay_by_progress_and_only_leaf_steps() -> None:
    one = dialogue([[("thought", 1), ("reply", 2)]])
    stats = stats_of(one, {"s": [0.0] * 3})
    stream = {"s": StreamSettings(sources=("fixed",))}
    part = crediting(stream, augmenters=[Fixed({(0, 1): 2.0})]).rewards(one, stats, progress=0.5)["s"]["fixed"]
    close(part, [0, 0, 1])
    with pytest.raises(CreditError, match="no leaf step"):
        crediting(stream, augmenters=[Fixed({(3, 0): 2.0})]).rewards(one, stats, progress=0.5)
    with pytest.raises(CreditError, match="pays step"):
        crediting(stream, augmenters=[Fixed({(0, 0): float("nan")})]).rewards(one, stats, progress=0.5)


def test_failed_and_empty_dialogues_are_dropped_and_counted() -> None:
    good = dialogue([[("reply", 2)]], rewards=[1.0], scores={"judge": {(0, 0): None}})
    broken = dialogue([[("reply", 2)]], termination="error")
    empty = dialogue([], termination="user_left")
    scored = [broken, good, empty]
    stats = [stats_of(one, dict.fromkeys(("a", "b"), [0.0] * one.trajectory.sampled_tokens)) for one in scored]
    credits = crediting({"a": OUTCOME, "b": SCORES})
    got = credits.credit(scored, stats, progress=0.0, reducer=LocalReducer())
    assert [one.scored for one in got] == [good]
    metrics = credits.summary(scored, got, reducer=LocalReducer())
    assert metrics["credit/failed"] == 1
    assert metrics["credit/empty"] == 1
    assert metrics["credit/unscored/judge"] == 1
    with pytest.raises(CreditError, match="failed"):
        NestedGae(NestedGae.Config(), streams={"a": OUTCOME}).assign([broken], [{}], stats[:1], LocalReducer())


def test_no_dialogue_at_all_still_takes_part_in_every_sum() -> None:
    one = dialogue([[("reply", 2)]], rewards=[1.0], scores={"judge": {(0, 0): 0.5}})
    stats = stats_of(one, {"a": [0.1, 0.4], "b": [0.0, 0.0]})
    credits = crediting({"a": OUTCOME, "b": SCORES})

    def work(reducer: Any) -> tuple[list[list[float]], dict[str, float]]:
        share = slice(0, 1) if reducer.rank == 0 else slice(0, 0)
        got = credits.credit([one][share], [stats][share], progress=0.0, reducer=reducer)
        return [e.advantages.tolist() for e in got], credits.summary([one][share], got, reducer=reducer)

    (first, metrics), (second, same) = on_ranks(work)
    (alone,) = credits.credit([one], [stats], progress=0.0, reducer=LocalReducer())
    assert first == [alone.advantages.tolist()]
    assert second == []
    assert metrics == same


def test_summary_numbers() -> None:
    one = dialogue(
        [[("reply", 1)] for _ in range(4)], rewards=[1, 0, 1, 1], scores={"judge": {(t, 0): -1.0 for t in range(4)}}
    )
    streams = {"a": StreamSettings(sources=("outcome",), gamma_turn=0.0), "b": SCORES}
    stats = stats_of(one, {"a": [0.8, 0.3, 0.6, 0.9], "b": [0.0] * 4})
    credits = crediting(streams)
    got = credits.credit([one], [stats], progress=0.0, reducer=LocalReducer())
    metrics = credits.summary([one], got, reducer=LocalReducer())
    close(metrics["credit/a/explained_variance"], 0.65333333, 1e-8)
    close(metrics["credit/a/advantage_mean"], 0.1)
    close(metrics["credit/a/advantage_std"], np.std([0.2, -0.3, 0.4, 0.1]))
    close(metrics["credit/a/advantage_max"], 0.4)
    assert "credit/b/explained_variance" not in metrics  # targets are all equal
    close([metrics["credit/share/outcome"], metrics["credit/share/judge"]], [3 / 7, 4 / 7])
    assert metrics["credit/unscored/judge"] == 0


def test_summary_reads_the_critic_only_where_it_is_supervised_and_scored() -> None:
    one = dialogue([[("reply", 2)]] * 3, scores={"judge": {(0, 0): 1.0, (1, 0): 3.0, (2, 0): None}})
    streams = {"b": SCORES}
    stats = stats_of(one, {"b": [0.5, 90.0, 0.5, 90.0, 0.5, 90.0]})
    credits = crediting(streams, unit="step")
    got = credits.credit([one], [stats], progress=0.0, reducer=LocalReducer())
    metrics = credits.summary([one], got, reducer=LocalReducer())
    close(metrics["credit/b/advantage_mean"], 1.5)
    close(metrics["credit/b/advantage_max"], 2.5)
    close(metrics["credit/b/explained_variance"], 0.0)
    close(metrics["credit/unscored/judge"], 1 / 3)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ({"values": {"other": [0.0] * 3}}, "no head for stream 's'"),
        ({"values": {"s": [0.0] * 2}}, r"shape \(3,\), should be \(4,\)"),
        ({"values": {"s": [0.0, float("nan"), 0.0]}}, "nan at token 1"),
    ],
)
def test_stats_that_do_not_fit_are_named(spoil: dict[str, Any], text: str) -> None:
    one = dialogue([[("reply", 3)]], rewards=[1.0], name="dialogue-7")
    with pytest.raises(CreditError, match=text) as caught:
        credit([(one, stats_of(one, spoil["values"]))], {"s": OUTCOME})
    assert "dialogue-7" in str(caught.value)


def test_an_evaluator_that_never_ran_is_an_error_and_not_zeros() -> None:
    one = dialogue([[("reply", 3)]], scores={"judge": {(0, 0): 1.0}})
    with pytest.raises(CreditError, match="scored by judge, not by 'other'"):
        credit([(one, stats_of(one, {"s": [0.0] * 3}))], {"s": StreamSettings(sources=("other",))})


def test_an_outcome_that_the_turns_did_not_earn_is_an_error() -> None:
    good = dialogue([[("reply", 1)]], rewards=[1.0])
    trajectory = dataclasses.replace(good.trajectory, outcome=2.0)
    one = dataclasses.replace(good, trajectory=trajectory)
    with pytest.raises(CreditError, match="lost or made up"):
        credit([(one, stats_of(one, {"s": [0.0]}))], {"s": OUTCOME})


def test_steps_that_do_not_tile_a_turn_are_an_error() -> None:
    good = dialogue(TWO_TURNS)
    one = dataclasses.replace(good, steps=good.steps[:-1])
    with pytest.raises(CreditError, match="steps of turn 1 end at token 10"):
        credit([(one, stats_of(one, {"s": [0.0] * 8}))], {"s": OUTCOME})


def stream_of(*sources: str, **rest: Any) -> StreamSettings:
    return StreamSettings(sources=sources, **rest)


@pytest.mark.parametrize(
    ("streams", "kinds", "error", "text"),
    [
        ({}, {}, ConfigError, "no reward stream"),
        ({"a": stream_of("outcom")}, {}, ConfigError, "did you mean 'outcome'"),
        ({"a": stream_of("outcome"), "b": stream_of("outcome")}, {}, UnsupportedError, "count twice"),
        ({"a": stream_of("outcome", "outcome")}, {}, UnsupportedError, "count twice"),
        ({"a": stream_of("outcome")}, {"evaluators": ["judge"]}, ConfigError, "evaluator 'judge' feeds no stream"),
        ({"a": stream_of("outcome")}, {"augmenters": ["slots"]}, ConfigError, "augmenter 'slots' feeds no stream"),
        ({"a": stream_of("outcome")}, {"evaluators": ["outcome"]}, ConfigError, "used by two parts"),
        ({"a": stream_of("outcome")}, {"kl_in_reward": True}, ConfigError, "no stream has 'reference_kl'"),
        ({"a": stream_of("outcome", "reference_kl")}, {}, ConfigError, "kl_coef is 0"),
        (
            {"a": stream_of("outcome", "reference_kl")},
            {"kl_in_reward": True, "kl_in_loss": True},
            UnsupportedError,
            "in the reward .* and in the loss",
        ),
        ({"a": stream_of("outcome", kinds=("replies",))}, {}, ConfigError, "did you mean 'reply'"),
        ({"a": stream_of("outcome", weight=-1.0)}, {}, ConfigError, "weight -1.0"),
    ],
)
def test_check_streams_refuses(streams: Any, kinds: Knobs, error: type[Exception], text: str) -> None:
    arguments = {"evaluators": [], "augmenters": [], "kl_in_reward": False, "kl_in_loss": False, **kinds}
    with pytest.raises(error, match=text):
        check_streams(streams, **arguments)


def test_check_streams_accepts_what_counts_once() -> None:
    streams = {"a": stream_of("outcome", "slots", "reference_kl"), "b": stream_of("judge")}
    check_streams(streams, ["judge", "audit"], ["slots"], kl_in_reward=True, kl_in_loss=False, logged_only=["audit"])
    check_streams({"a": stream_of("outcome")}, [], [], kl_in_reward=False, kl_in_loss=True)


def test_crediting_checks_its_streams_at_construction() -> None:
    with pytest.raises(ConfigError, match="feeds no stream"):
        crediting({"a": OUTCOME}, augmenters=[Fixed({})])
    with pytest.raises(ConfigError, match="kl_coef"):
        crediting({"a": OUTCOME}, kl_coef=-1.0)


def test_a_stream_fades_over_the_training_after_its_whitening_and_then_claims_no_token() -> None:
    scores = {"judge": {(0, 0): 1.0, (0, 1): -1.0, (1, 0): 0.5, (1, 1): None}}
    one = dialogue(TWO_TURNS, rewards=[0, 1], scores=scores)
    both = {"o": [0.0] * 8, "s": [0.0] * 8}
    pairs = ([one], [stats_of(one, both)])
    outcome = StreamSettings(sources=("outcome",), kinds=("reply",))
    faded = dataclasses.replace(SCORES, weight=0.3, fade_until=0.5)

    def advantages(streams: Mapping[str, StreamSettings], progress: float) -> AugmentedExperience:
        return crediting(streams, whiten_final=False).credit(*pairs, progress=progress, reducer=LocalReducer())[0]

    for progress, weight in ((0.0, 0.3), (0.25, 0.15), (0.4, 0.06)):
        constant = {"o": outcome, "s": dataclasses.replace(SCORES, weight=weight)}
        close(advantages({"o": outcome, "s": faded}, progress).advantages, advantages(constant, 0.0).advantages)
    for progress in (0.5, 0.9, 1.0):
        late, alone = advantages({"o": outcome, "s": faded}, progress), advantages({"o": outcome}, 0.0)
        close(late.advantages, alone.advantages)
        assert late.policy_mask.tolist() == alone.policy_mask.tolist()
    with pytest.raises(ValueError, match=r"fade_until 1\.5 is out of range"):
        StreamSettings(sources=("judge",), fade_until=1.5)


class TestShutGate:
    """A shut gate is weight 0: the scores are there, and nothing that moves training hears of them."""

    SHAPE: ClassVar[Shape] = TWO_TURNS
    JUDGED: ClassVar[dict[str, dict[tuple[int, int], float | None]]] = {
        "judge": {(0, 0): 0.7, (0, 1): -0.2, (1, 0): 0.4, (1, 1): None}
    }

    def pair(self, *, shut: bool, scores: bool = True) -> Pair:
        one = dialogue(self.SHAPE, rewards=[0, 1], scores=self.JUDGED if scores else None)
        one = dataclasses.replace(one, shut=("judge",) if shut else ())
        return one, stats_of(one, {"o": VALUES, "s": VALUES}, after=0.0)

    def test_a_stream_of_its_own_gives_nothing(self) -> None:
        shut = credit([self.pair(shut=True)], {"o": OUTCOME, "s": SCORES})[0]
        without = credit([self.pair(shut=False, scores=False)], {"o": OUTCOME})[0]
        close(shut.advantages, without.advantages)
        close(shut.policy_mask, without.policy_mask)
        close(shut.rewards["s"]["judge"], 0.0)
        close(shut.returns["s"], VALUES)  # the critic's target is its own word: nothing to learn
        open_gate = credit([self.pair(shut=False)], {"o": OUTCOME, "s": SCORES})[0]
        assert np.abs(open_gate.advantages - without.advantages).max() > 0.1

    def test_in_a_shared_stream_the_other_source_stays_whole(self) -> None:
        shared = StreamSettings(sources=("outcome", "judge"))
        shut = credit([self.pair(shut=True)], {"o": shared})[0]
        without = credit([self.pair(shut=False, scores=False)], {"o": OUTCOME})[0]
        close(shut.advantages, without.advantages)
        close(shut.returns["o"], without.returns["o"])
