"""Advantages without a model: the training pipeline on one token a step, equal groups at 0, refusals with reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.errors import UnsupportedError
from slea_llm.offline_credit import one_token_a_step, refuse_live_parts, step_credit
from slea_llm.settings import StreamSettings
from slea_llm.types import Trajectory
from tests.support.logged import booking, logged, scored


def crediting(*, whiten: bool = False, **more: StreamSettings) -> Crediting:
    streams = {
        "outcome": StreamSettings(sources=("outcome",), gamma_turn=1.0, lam_turn=1.0, whiten=whiten),
        **more,
    }
    return Crediting(streams, [], NestedGae(NestedGae.Config(whiten_final=whiten), streams=streams))


def test_each_leaf_step_is_one_token_and_the_steps_tile_the_turns() -> None:
    (one,) = scored(booking("a", success=True, errors=1))
    standing = one_token_a_step(one)
    assert [step.tokens and (step.tokens.start, step.tokens.end) for step in standing.leaves()] == [
        (number, number + 1) for number in range(len(one.leaves()))
    ]
    assert standing.scores == one.scores


def test_the_outcome_against_the_mean_of_the_task() -> None:
    won, lost, alone = scored(
        booking("a", success=True, task="t"),
        booking("b", success=False, task="t"),
        booking("c", success=True, task="u"),
    )
    found = step_credit(crediting(), [won, lost, alone])
    assert found[0].advantages == pytest.approx([0.5] * len(won.leaves()))
    assert found[1].advantages == pytest.approx([-0.5] * len(lost.leaves()))
    # Alone in its task: against the mean of the whole log.
    assert found[2].advantages == pytest.approx([1 / 3] * len(alone.leaves()))
    assert found[0].rewards[-1] == {"outcome.outcome": 1.0}


@pytest.mark.parametrize("success", [True, False])
def test_a_group_that_ended_alike_gets_zero(*, success: bool) -> None:
    data = scored(*(booking(f"d{number}", success=success, task="t", errors=number) for number in range(4)))
    for whiten in (False, True):
        found = step_credit(crediting(whiten=whiten), data)
        assert all(number == 0.0 for one in found for number in one.advantages)


@pytest.mark.parametrize("termination", ["failure", "max_turns", "budget"])
def test_a_dialogue_that_was_cut_counts_by_the_outcome_that_the_log_knows(termination: Any) -> None:
    data = scored(*(booking(f"d{number}", success=number < 2, task="t") for number in range(4)))
    data = [
        one
        if one.trajectory.success
        else dataclasses.replace(one, trajectory=dataclasses.replace(one.trajectory, termination=termination))
        for one in data
    ]
    found = step_credit(crediting(), data)
    for one in found[2:]:
        assert one.advantages == pytest.approx([-0.5] * len(one.steps))


@pytest.mark.parametrize("gamma", [0.9, 0.99, 1.0])
def test_equal_ends_give_zero_under_every_discount(gamma: float) -> None:
    streams = {"outcome": StreamSettings(sources=("outcome",), gamma_turn=gamma, whiten=False)}
    made = Crediting(streams, [], NestedGae(NestedGae.Config(whiten_final=False), streams=streams))
    data = scored(*(booking(f"d{number}", success=True, task="t", errors=number) for number in range(4)))
    assert all(number == pytest.approx(0.0, abs=1e-9) for one in step_credit(made, data) for number in one.advantages)


@pytest.mark.parametrize("conditional", ["q_head", "after_state"])
def test_a_credit_that_reads_a_trained_critic_is_refused_before_anything_is_scored(conditional: Any) -> None:
    streams = {"outcome": StreamSettings(sources=("outcome",))}
    made = Crediting(streams, [], NestedGae(NestedGae.Config(unit="turn", conditional=conditional), streams=streams))
    with pytest.raises(UnsupportedError, match=f"credit.conditional {conditional} reads a trained critic"):
        refuse_live_parts(made)


def test_scores_reach_the_steps_that_earned_them() -> None:
    (one,) = scored(booking("a", success=False, errors=1))
    streams = {"scores": StreamSettings(sources=("rules",), gamma_turn=1.0, lam_turn=0.0, lam_step=0.0, whiten=False)}
    made = Crediting(streams, [], NestedGae(NestedGae.Config(whiten_final=False), streams=streams))
    (found,) = step_credit(made, [one])
    assert found.advantages == pytest.approx([word.score for word in one.scores])


def test_who_carries_no_credit_says_why() -> None:
    data = scored(
        logged("a", ([("user", "Hi.")], "Hello."), success=None), booking("b", success=True), logged("c", success=False)
    )
    found = step_credit(crediting(), data)
    assert [one.why_not for one in found] == [
        "the log does not say how it ended",
        None,
        "it holds no step of the agent",
    ]


def test_a_reward_that_the_turns_do_not_add_up_to_is_no_credit_of_others() -> None:
    good, bad = scored(booking("a", success=True), booking("b", success=True))
    bad = dataclasses.replace(bad, trajectory=dataclasses.replace(bad.trajectory, outcome=7.0))
    found = step_credit(crediting(), [good, bad])
    assert found[0].why_not is None
    assert "a reward would be lost or made up" in str(found[1].why_not)


def test_the_kl_to_a_reference_is_refused() -> None:
    streams = {"outcome": StreamSettings(sources=("outcome", "reference_kl"))}
    made = Crediting(streams, [], NestedGae(NestedGae.Config(), streams=streams), kl_coef=0.1)
    with pytest.raises(UnsupportedError, match="a log has neither: set kl_in_reward to 0"):
        step_credit(made, scored(booking("a", success=True)))


def test_success_without_a_number_counts_as_one_and_zero() -> None:
    def unpaid(name: str, *, success: bool) -> Trajectory:
        whole = booking(name, success=success, task="t")
        turns = tuple(dataclasses.replace(turn, reward=0.0) for turn in whole.turns)
        return dataclasses.replace(whole, turns=turns, outcome=None)

    found = step_credit(crediting(), scored(unpaid("a", success=True), unpaid("b", success=False)))
    assert [set(one.advantages) for one in found] == [{0.5}, {-0.5}]
