"""What every registered augmenter promises, built-in or third-party: what it pays, what it weighs, where it lands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from slea_llm import registry
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting, earned
from slea_llm.interfaces import Augmenter, Fittable, Gated, LocalReducer, StepWeigher, Versioned
from slea_llm.scoring import Scorer
from slea_llm.settings import StreamSettings, WeightSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats, Turn
from tests.contract.test_components import sample
from tests.support.components import build
from tests.support.experience import stats_of

NAMES = sorted(registry.names("augmenter"))
PAYERS = [name for name in NAMES if hasattr(registry.load("augmenter", name), "augment")]
LEARNT = [name for name in NAMES if hasattr(registry.load("augmenter", name), "fit")]
WEIGHERS = [name for name in NAMES if hasattr(registry.load("augmenter", name), "weights")]
ENDINGS = ["success", "failure", "max_turns", "user_left", "budget", "error"]


def scored_as(termination: Any = "success", **changes: Any) -> ScoredTrajectory:
    broken = termination == "error"
    changes = {"termination": termination, "error": "broke" if broken else None, **changes}
    trajectory = sample(**{**changes, "outcome": None if broken else sum(t.reward for t in changes.get("turns", ()))})
    return Scorer(build("parser", "tagged"), []).score(trajectory, lambda turn: range(len(turn.text) + 1))


def answers(augmenter: Any, scored: ScoredTrajectory, progress: float) -> list[Mapping[tuple[int, int], float]]:
    """What it pays and what it weighs, of the two that it does."""
    kinds = [(Augmenter, "augment"), (StepWeigher, "weights")]
    return [getattr(augmenter, method)(scored, progress) for kind, method in kinds if isinstance(augmenter, kind)]


def credited(
    name: str, scored: list[ScoredTrajectory], stats: list[TokenStats] | None = None
) -> tuple[AugmentedExperience, ...]:
    """The credit of dialogues with this augmenter beside the outcome, its weights in the loss."""
    paid = (name,) if name in PAYERS else ()
    streams = {"outcome": StreamSettings(sources=("outcome", *paid), gamma_turn=0.99)}
    weights = WeightSettings(sources=(name,) if name in WEIGHERS else ())
    crediting = Crediting(
        streams,
        [build("augmenter", name)],
        NestedGae(NestedGae.Config(), streams=streams),
        evaluators=(),
        weights=weights,
    )
    given = stats or [stats_of(one, {"outcome": [0.0] * one.trajectory.sampled_tokens}) for one in scored]
    return crediting.credit(scored, given, progress=1.0, reducer=LocalReducer())


@pytest.mark.parametrize("name", NAMES)
def test_it_pays_or_weighs_and_says_its_version_when_it_was_learnt(name: str) -> None:
    augmenter = build("augmenter", name)
    assert isinstance(augmenter, Augmenter | StepWeigher)
    if isinstance(augmenter, Gated | Fittable):
        assert isinstance(augmenter, Versioned)
        assert isinstance(augmenter, Gated)
        assert augmenter.gate.line.startswith(f"{name}: gate ")


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("termination", ENDINGS)
@pytest.mark.parametrize("name", NAMES)
def test_it_names_leaf_steps_with_finite_numbers_and_again_the_same(
    name: str, termination: Any, progress: float
) -> None:
    augmenter = build("augmenter", name)
    scored = scored_as(termination)
    leaves = {(leaf.turn, leaf.index) for leaf in scored.leaves()}
    for numbers in answers(augmenter, scored, progress):
        assert numbers.keys() <= leaves
        assert all(math.isfinite(number) for number in numbers.values())
        assert termination != "error" or not numbers
    for weights in answers(augmenter, scored, progress)[1 if name in PAYERS else 0 :]:
        assert all(weight >= 0.0 for weight in weights.values())
    assert answers(augmenter, scored, progress) == answers(augmenter, scored, progress)


@pytest.mark.parametrize("name", NAMES)
def test_it_bears_a_dialogue_without_turns(name: str) -> None:
    bare = scored_as(turns=(), traces=())
    assert all(not numbers for numbers in answers(build("augmenter", name), bare, 0.5))


@pytest.mark.parametrize("termination", ["success", "failure", "max_turns", "user_left"])
@pytest.mark.parametrize("name", NAMES)
def test_br_107_what_it_pays_sits_on_the_last_token_of_its_step(name: str, termination: Any) -> None:
    scored = scored_as(termination)
    (got,) = credited(name, [scored])
    if name in PAYERS:
        paid = got.rewards["outcome"][name]
        ends, position = [], 0
        for leaf in scored.leaves():
            position += len(leaf.tokens or ())
            ends.append(position - 1)
        assert not np.delete(paid, ends).any()
        expected = build("augmenter", name).augment(scored, 1.0)
        by_step = {key: parts[name] for key, parts in earned(got).items()}
        assert {key: pay for key, pay in by_step.items() if pay} == {
            k: pytest.approx(v) for k, v in expected.items() if v
        }
    assert got.weights.shape == (scored.trajectory.sampled_tokens,)
    assert got.weights[got.policy_mask].mean() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_br_019_br_021_one_dialogue_or_equal_ones_give_finite_credit(name: str) -> None:
    for scored in ([scored_as()], [scored_as(), scored_as()], [scored_as("failure"), scored_as("error")], []):
        for one in credited(name, scored):
            assert np.isfinite(one.advantages).all()
            assert np.isfinite(one.weights).all()
            assert all(np.isfinite(target).all() for target in one.returns.values())
            assert not one.advantages[~one.policy_mask].any()


@pytest.mark.parametrize("name", LEARNT)
def test_while_its_gate_is_shut_it_changes_nothing_and_claims_no_token(name: str) -> None:
    component = registry.load("augmenter", name)
    scored = scored_as(turns=paid_at_the_end())
    stats = [stats_of(scored, {"outcome": [0.1] * scored.trajectory.sampled_tokens})]

    def credit(sources: tuple[str, ...], parts: list[Any]) -> AugmentedExperience:
        streams = {"outcome": StreamSettings(sources=sources)}
        weights = WeightSettings(sources=(name,) if parts and name in WEIGHERS else ())
        method = NestedGae(NestedGae.Config(), streams=streams)
        crediting = Crediting(streams, parts, method, evaluators=(), weights=weights)
        (got,) = crediting.credit([scored], stats, progress=0.5, reducer=LocalReducer())
        return got

    plain = credit(("outcome",), [])
    beside = credit(("outcome", name), [component(component.Config())])
    np.testing.assert_array_equal(beside.advantages, plain.advantages)
    np.testing.assert_array_equal(beside.weights, plain.weights)
    assert beside.versions[name] == "unfitted"
    assert not credit((name,), [component(component.Config())]).policy_mask.any()


def paid_at_the_end() -> tuple[Turn, ...]:
    turns = sample().turns
    return (*turns[:-1], dataclasses.replace(turns[-1], reward=10.0))


@pytest.mark.parametrize("name", NAMES)
def test_br_017_what_stands_between_sampled_tokens_changes_nothing(name: str) -> None:
    """Prompt tokens are no places: more of them, whatever they are, leave rewards, weights and advantages alone."""
    plain, padded = scored_as(), _with_longer_prompts(scored_as(), extra=5, token=99)
    for one, other in zip(credited(name, [plain]), credited(name, [padded]), strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
        np.testing.assert_array_equal(one.weights, other.weights)
        for part, paid in one.rewards["outcome"].items():
            np.testing.assert_array_equal(paid, other.rewards["outcome"][part])


@pytest.mark.parametrize("name", NAMES)
def test_br_023_nothing_leaks_over_the_border_of_a_dialogue_and_a_cut_is_told_from_an_end(name: str) -> None:
    """What a dialogue is paid and how its steps weigh among themselves is its own, whatever stands beside it."""
    beside = [[scored_as("failure")], [scored_as("max_turns"), scored_as("success", turns=paid_at_the_end())], []]
    for termination in ("success", "failure", "max_turns", "budget"):
        one = scored_as(termination, turns=paid_at_the_end())
        found = [credited(name, [one, *others])[0] for others in beside]
        for other in found[1:]:
            for part, paid in found[0].rewards["outcome"].items():
                np.testing.assert_array_equal(paid, other.rewards["outcome"][part])
            np.testing.assert_allclose(
                found[0].weights / found[0].weights.sum(), other.weights / other.weights.sum(), rtol=1e-12
            )
            np.testing.assert_array_equal(found[0].returns["outcome"], other.returns["outcome"])
    ended, cut = (scored_as(how, turns=paid_at_the_end()) for how in ("success", "max_turns"))
    tokens = ended.trajectory.sampled_tokens
    after = [0.0] * tokens
    told = [credited(name, [one], [stats_of(one, {"outcome": after}, after=0.6)])[0] for one in (ended, cut)]
    plain = [one.returns["outcome"][-1] - sum(part[-1] for part in one.rewards["outcome"].values()) for one in told]
    assert plain == pytest.approx([0.0, 0.99 * 0.6])  # the value after the cut and no value after the end


@pytest.mark.parametrize("name", NAMES)
def test_br_025_the_distance_to_the_reference_is_charged_beside_it_with_the_right_sign(name: str) -> None:
    scored = scored_as()
    tokens = scored.trajectory.sampled_tokens
    paid = (name,) if name in PAYERS else ()
    streams = {"outcome": StreamSettings(sources=("outcome", "reference_kl", *paid), gamma_turn=0.99)}
    method = NestedGae(NestedGae.Config(), streams=streams)
    weights = WeightSettings(sources=(name,) if name in WEIGHERS else ())
    crediting = Crediting(streams, [build("augmenter", name)], method, evaluators=(), weights=weights, kl_coef=0.1)
    for ratio in (0.5, -0.2, 0.0):
        stats = stats_of(scored, {"outcome": [0.0] * tokens}, log_ratio=[ratio] * tokens)
        (got,) = crediting.credit([scored], [stats], progress=1.0, reducer=LocalReducer())
        np.testing.assert_allclose(got.rewards["outcome"]["reference_kl"], -0.1 * ratio, atol=1e-15)
        if name in PAYERS:
            (alone,) = credited(name, [scored])
            np.testing.assert_array_equal(got.rewards["outcome"][name], alone.rewards["outcome"][name])


def _with_longer_prompts(scored: ScoredTrajectory, *, extra: int, token: int) -> ScoredTrajectory:
    """The same dialogue with `extra` more prompt tokens before every turn."""
    trajectory = scored.trajectory
    (trace,) = trajectory.traces
    ids: list[int] = []
    mask: list[bool] = []
    turns, shift, at = [], 0, 0
    for turn in trajectory.turns:
        assert turn.span is not None
        ids += [*trace.token_ids[at : turn.span.start], *[token] * extra]
        mask += [*trace.sampled_mask[at : turn.span.start], *[False] * extra]
        shift += extra
        ids += trace.token_ids[turn.span.start : turn.span.end]
        mask += trace.sampled_mask[turn.span.start : turn.span.end]
        at = turn.span.end
        span = dataclasses.replace(turn.span, start=turn.span.start + shift, end=turn.span.end + shift)
        turns.append(dataclasses.replace(turn, span=span))
    longer = dataclasses.replace(
        trace, token_ids=tuple(ids), sampled_mask=tuple(mask), logprobs=tuple(-1.0 if one else 0.0 for one in mask)
    )
    moved = dataclasses.replace(trajectory, turns=tuple(turns), traces=(longer,))
    return Scorer(build("parser", "tagged"), []).score(moved, lambda turn: range(len(turn.text) + 1))
