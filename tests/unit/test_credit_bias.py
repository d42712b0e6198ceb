"""What credit must not prefer: more steps, or longer dialogues. Expectations are taken over every outcome."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.credit.group_relative import GroupRelative
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.interfaces import CreditAssigner, LocalReducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory
from tests.support.experience import Shape, dialogue, stats_of

OUTCOME = {"s": StreamSettings(sources=("outcome",), gamma_turn=1.0, lam_turn=1.0)}
SHORT, LONG = 1, 3
P_LONG, P_SUCCESS = 0.5, 0.8


def credit(assigner: CreditAssigner, scored: Sequence[ScoredTrajectory]) -> Sequence[AugmentedExperience]:
    stats = [stats_of(one, {"s": [0.0] * one.trajectory.sampled_tokens}) for one in scored]
    return Crediting(OUTCOME, (), assigner).credit(scored, stats, progress=0.0, reducer=LocalReducer())


def nested(**options: Any) -> CreditAssigner:
    return NestedGae(NestedGae.Config(**options), streams=OUTCOME)


def groups(**options: Any) -> CreditAssigner:
    plain = {"s": StreamSettings(sources=("outcome",))}
    return GroupRelative(GroupRelative.Config(**options), streams=plain)


def expected_pull(assigner: CreditAssigner, dialogues: int = 3) -> float:
    """The expected gradient on the logit of talking long, which the first token decides; success is another coin."""
    pull = 0.0
    choices = list(itertools.product((SHORT, LONG), (0.0, 1.0)))
    for batch in itertools.product(choices, repeat=dialogues):
        chance = 1.0
        scored = []
        for number, (turns, reward) in enumerate(batch):
            chance *= (P_LONG if turns == LONG else 1 - P_LONG) * (P_SUCCESS if reward else 1 - P_SUCCESS)
            paid = [0.0] * (turns - 1) + [reward]
            scored.append(dialogue([[("reply", 1)]] * turns, rewards=paid, name=str(number)))
        for one, (turns, _) in zip(credit(assigner, scored), batch, strict=True):
            pull += chance * float(one.advantages[0]) * ((turns == LONG) - P_LONG)
    return pull


@pytest.mark.parametrize(
    "made",
    [
        lambda: nested(whiten_by="dialogue"),
        lambda: nested(whiten_by="dialogue", unit="turn"),
        lambda: groups(),
        lambda: groups(scale="unbiased"),
        lambda: groups(baseline="leave_one_out"),
    ],
)
def test_equally_good_short_and_long_dialogues_pull_no_way(made: Callable[[], CreditAssigner]) -> None:
    assert abs(expected_pull(made())) < 1e-12


@pytest.mark.parametrize("made", [lambda: nested(), lambda: nested(whiten_by="unit", unit="turn")])
def test_statistics_over_tokens_or_turns_pull_towards_one_of_them(made: Callable[[], CreditAssigner]) -> None:
    """Long dialogues weigh more in mean and deviation: where most succeed, talking long is favoured for nothing."""
    assert expected_pull(made()) > 0.01


WHOLE: Shape = [[("thought", 4), ("reply", 2)], [("reply", 3)]]
SPLIT: Shape = [[("thought", 1), ("thought", 3), ("reply", 2)], [("reply", 3)]]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
    st.floats(0, 1),
    st.floats(-1, 1),
    st.sampled_from(["token", "substep", "step", "turn"]),
)
def test_splitting_a_step_changes_no_sum_and_at_lambda_one_no_update(
    progress: list[float], between: float, value: float, unit: Any
) -> None:
    """Scores are differences, so the parts of a step share its score; equal values leave the outcome's credit alone."""
    first, reply, last = progress
    scores = {"whole": {(0, 0): first, (0, 1): reply, (1, 0): last}}
    parts = {(0, 0): between * first, (0, 1): first - between * first, (0, 2): reply, (1, 0): last}
    sums, advantages = [], []
    for shape, given_scores in ((WHOLE, scores["whole"]), (SPLIT, parts)):
        one = dialogue(shape, rewards=[0.0, 1.0], scores={"judge": given_scores})
        streams = {
            "s": StreamSettings(sources=("outcome",), whiten=False),
            "judged": StreamSettings(sources=("judge",), weight=0.0, whiten=False),
        }
        method = NestedGae(NestedGae.Config(unit=unit, whiten_final=False), streams=streams)
        stats = stats_of(one, {name: [value] * one.trajectory.sampled_tokens for name in streams})
        (got,) = Crediting(streams, (), method).credit([one], [stats], progress=0.0, reducer=LocalReducer())
        sums.append(float(got.rewards["judged"]["judge"].sum()))
        advantages.append(got.advantages)
    assert sums[0] == pytest.approx(sums[1], abs=1e-12)
    np.testing.assert_allclose(advantages[0], advantages[1], rtol=0, atol=1e-12)
