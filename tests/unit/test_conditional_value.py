"""The value after a step: read right behind it, or by a head of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.batching import collate
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.errors import ConfigError, CreditError
from slea_llm.interfaces import LocalReducer
from slea_llm.losses.value import ValueConfig, ValueLoss
from slea_llm.settings import StreamSettings
from slea_llm.tensors import ModelOutputs
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats
from tests.support.experience import dialogue, experiences, stats_of

OUTCOME = StreamSettings(sources=("outcome",), whiten=False)
UNDISCOUNTED = StreamSettings(sources=("outcome",), whiten=False, gamma_turn=1.0, lam_turn=0.0, lam_step=0.0)
Pair = tuple[ScoredTrajectory, TokenStats]


def credit(pairs: Sequence[Pair], stream: StreamSettings = OUTCOME, **options: Any) -> list[AugmentedExperience]:
    streams = {"s": stream}
    method = NestedGae(NestedGae.Config(whiten_final=False, **options), streams=streams)
    crediting = Crediting(streams, (), method)
    scored, stats = [one for one, _ in pairs], [stat for _, stat in pairs]
    return list(crediting.credit(scored, stats, progress=0.0, reducer=LocalReducer()))


def close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def two_turns(**rest: Any) -> ScoredTrajectory:
    return dialogue([[("reply", 1)], [("reply", 1)]], rewards=[0, 1], **rest)


def test_the_next_value_is_the_one_before_anybody_answered() -> None:
    """By hand: delta_0 = 0.99 * 0.6 - 0.2 = 0.394, A_0 = 0.394 + 0.99 * 0.95 * 0.5; plainly it is 0.76525."""
    one = two_turns()
    stats = stats_of(one, {"s": [0.2, 0.5]}, said_after={"s": [0.6, 0.9]})
    (plain,) = credit([(one, stats)])
    close(plain.advantages, [0.76525, 0.5])
    (got,) = credit([(one, stats)], conditional="after_state")
    close(got.advantages, [0.86425, 0.5])
    close(got.returns["s"], [0.96525, 1.0])
    close(got.returns["s"], plain.returns["s"])  # the critic's targets stay the returns that were seen
    assert got.after_mask is not None
    assert got.after_mask.tolist() == [True, False]
    close(got.after_returns["s"][0], 1.0)  # the return of the turn that followed
    assert plain.after_mask is None


def test_advantages_of_continued_steps() -> None:
    """Values .375, .75, .625, 1 before four steps and 1 at the end: .375, -.125, .375, 0, which sum to .625."""
    one = dialogue([[("thought", 1), ("reply", 1)], [("thought", 1), ("reply", 1)]], rewards=[0, 1])
    values = [0.375, 0.75, 0.625, 1.0]
    stats = stats_of(one, {"s": values}, said_after={"s": [0.75, 0.625, 1.0, 1.0]})
    for options in ({}, {"conditional": "after_state"}):
        (got,) = credit([(one, stats)], UNDISCOUNTED, unit="substep", **options)
        close(got.advantages, [0.375, -0.125, 0.375, 0.0])
        close(got.advantages.sum(), 0.625)


def test_a_q_head_against_the_value_is_the_policy_mean_baseline() -> None:
    """Q .2, .5 and .9 of three replies, taken with chance .5, .3 and .2, have the mean .43 (COMA)."""
    judged = [0.2, 0.5, 0.9]
    pairs = []
    for q in judged:
        one = dialogue([[("reply", 2)]], rewards=[1.0], name=str(q))
        stats = stats_of(one, {"s": [0.43, 9.0], "s_q": [0.0, 0.0]}, said_after={"s_q": [9.0, q]})
        pairs.append((one, stats))
    got = credit(pairs, unit="step", conditional="q_head")
    close([one.advantages for one in got], [[-0.23] * 2, [0.07] * 2, [0.47] * 2])
    close([one.after_returns["s_q"] for one in got], [[1.0, 1.0]] * 3)
    for credited in got:
        assert credited.value_mask.tolist() == [True, False]
        assert credited.after_mask is not None
        assert credited.after_mask.tolist() == [False, True]


@settings(deadline=None, max_examples=30)
@given(st.lists(experiences(streams=("s",)), min_size=1, max_size=3), st.sampled_from(["token", "substep", "turn"]))
def test_a_user_who_surprises_nobody_changes_nothing(pairs: list[Pair], unit: str) -> None:
    """Where the value after a turn is that before the next one, both forms are the same."""
    plain = credit(pairs, unit=unit)
    for one, other in zip(plain, credit(pairs, unit=unit, conditional="after_state"), strict=True):
        close(other.advantages, one.advantages)


def test_the_mean_over_the_users_answers_is_the_same_and_its_spread_smaller() -> None:
    """With right values both are the advantage: one with the user's luck in it, one without. One reply, two answers."""
    value = {"before": 0.6, "good": 0.9, "bad": 0.3}
    after = (value["good"] + value["bad"]) / 2
    pairs = []
    for luck in ("good", "bad"):
        one = dialogue([[("reply", 1)], [("reply", 1)]], rewards=[0, value[luck]], name=luck)
        stats = stats_of(one, {"s": [value["before"], value[luck]]}, said_after={"s": [after, 0.0]})
        pairs.append((one, stats))
    stream = StreamSettings(sources=("outcome",), whiten=False, gamma_turn=1.0)
    plain = [one.advantages[0] for one in credit(pairs, stream)]
    smooth = [one.advantages[0] for one in credit(pairs, stream, conditional="after_state")]
    close([np.mean(plain), np.mean(smooth)], 0.0)
    close(smooth, 0.0)
    assert np.std(plain) > 0.2


def test_a_step_without_a_score_teaches_the_value_after_it_nothing() -> None:
    judged = StreamSettings(sources=("judge",), whiten=False)
    one = dialogue([[("reply", 1)], [("reply", 1)]], scores={"judge": {(0, 0): 1.0, (1, 0): None}})
    q = stats_of(one, {"s": [0.2, 0.5], "s_q": [0.0, 0.0]}, said_after={"s": [0.6, 0.9], "s_q": [0.7, 0.8]})
    (got,) = credit([(one, q)], judged, unit="turn", conditional="q_head")
    close(got.after_returns["s_q"][1], 0.8)  # its own word
    (got,) = credit([(one, q)], judged, conditional="after_state")
    close(got.after_returns["s"][0], 0.6)  # what follows is not known


@pytest.mark.parametrize("row_a_turn", [False, True])
def test_each_head_is_supervised_where_it_is_read(row_a_turn: bool) -> None:
    """The value stands before the token that it is read before: behind the last token of a row there is a filler."""
    one = two_turns(row_a_turn=row_a_turn)
    stats = stats_of(one, {"s": [0.2, 0.5], "s_q": [0.0, 0.0]}, said_after={"s": [0.3, 0.4], "s_q": [0.7, 0.8]})
    (got,) = credit([(one, stats)], unit="turn", conditional="q_head")
    batch = collate([got], streams=("s", "s_q"), pad_id=0, dtype=torch.float64)
    assert batch.head_mask is not None
    first, second = ([(0, 2), (1, 2)], [(0, 3), (1, 3)]) if row_a_turn else ([(0, 2), (0, 5)], [(0, 3), (0, 6)])
    assert batch.head_mask[..., 0].nonzero().tolist() == [list(place) for place in first]
    assert batch.head_mask[..., 1].nonzero().tolist() == [list(place) for place in second]
    assert (batch.head_mask.any(-1) == batch.value_mask).all()
    assert not (batch.value_mask & ~batch.attention_mask).any()
    assert not (batch.policy_mask & batch.head_mask[..., 1]).any()
    close([batch.returns[place][0] for place in first], [0.96525, 1.0])
    close([batch.returns[place][1] for place in second], [0.96525, 1.0])
    close([batch.old_values[place][1] for place in second], [0.7, 0.8])
    # The loss of outputs that are right at exactly these places, and rubbish elsewhere, is 0.
    values = torch.where(batch.head_mask, batch.returns, torch.full_like(batch.returns, 1e6))
    outputs = ModelOutputs(logprobs=values[..., 0], entropy=values[..., 0], values=values)
    assert float(ValueLoss(ValueConfig())(outputs, batch).total) == 0.0


@pytest.mark.parametrize(
    ("options", "names", "text"),
    [
        ({"conditional": "later"}, ("s",), "conditional 'later' is not one of"),
        ({"conditional": "q_head"}, ("s",), "set unit to substep, step or turn"),
        ({"conditional": "q_head", "unit": "step"}, ("s", "s_q"), "rename a stream"),
    ],
)
def test_what_cannot_be_is_refused(options: Mapping[str, Any], names: Sequence[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        NestedGae(NestedGae.Config(**options), streams=dict.fromkeys(names, OUTCOME))


def test_a_critic_without_that_head_is_an_error() -> None:
    one = two_turns()
    with pytest.raises(CreditError, match="says nothing after a token for head 's_q'"):
        credit([(one, stats_of(one, {"s": [0.2, 0.5]}))], unit="turn", conditional="q_head")
