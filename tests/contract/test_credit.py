"""What every registered credit method promises, built-in or third-party."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm import registry
from slea_llm.crediting import Crediting
from slea_llm.errors import CreditError
from slea_llm.interfaces import CreditAssigner, LocalReducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats
from tests.support.experience import dialogue, experiences, on_ranks, stats_of

STREAMS = {
    "outcome": StreamSettings(sources=("outcome",)),
    "scores": StreamSettings(sources=("judge",), gamma_step=0.0, gamma_turn=0.0, weight=0.5),
}
Pairs = list[tuple[ScoredTrajectory, TokenStats]]
every_method = pytest.mark.parametrize("name", sorted(registry.names("credit")))
some_dialogues = st.lists(experiences(streams=tuple(STREAMS)), min_size=1, max_size=5)


def crediting(name: str) -> Crediting:
    method = registry.load("credit", name)
    assigner: CreditAssigner = method(method.Config(), streams=STREAMS)
    return Crediting(STREAMS, (), assigner)


def credit(method: Crediting, pairs: Pairs, reducer: Any) -> Sequence[AugmentedExperience]:
    return method.credit([one for one, _ in pairs], [stat for _, stat in pairs], progress=0.5, reducer=reducer)


@every_method
def test_it_is_a_component(name: str) -> None:
    method = registry.load("credit", name)
    assert method.name == name
    config, knob = method.Config(), dataclasses.fields(method.Config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, knob, None)


@every_method
@settings(deadline=None, max_examples=15)
@given(pairs=some_dialogues)
def test_one_finite_number_a_sampled_token(name: str, pairs: Pairs) -> None:
    got = credit(crediting(name), pairs, LocalReducer())
    assert [one.scored for one in got] == [one for one, _ in pairs]
    for one in got:
        n = one.scored.trajectory.sampled_tokens
        for array in (one.advantages, one.weights, *one.returns.values()):
            assert array.shape == (n,)
            assert np.isfinite(array).all()
        for mask in (one.value_mask, one.policy_mask):
            assert (mask.shape, mask.dtype) == ((n,), np.dtype(bool))
        assert set(one.returns) == set(STREAMS)
        assert not one.advantages[~one.policy_mask].any()
        assert one.versions["credit"].startswith(name)


@every_method
@settings(deadline=None, max_examples=15)
@given(pairs=some_dialogues, cut=st.integers(0, 5))
def test_splitting_over_ranks_changes_nothing(name: str, pairs: Pairs, cut: int) -> None:
    method = crediting(name)
    shards = [pairs[:cut], pairs[cut:]]
    together = credit(method, pairs, LocalReducer())
    first, second = on_ranks(lambda reducer: credit(method, shards[reducer.rank], reducer))
    for apart, one in zip([*first, *second], together, strict=True):
        np.testing.assert_allclose(apart.advantages, one.advantages, rtol=0, atol=1e-12)
        for stream in STREAMS:
            np.testing.assert_allclose(apart.returns[stream], one.returns[stream], rtol=0, atol=1e-12)


@every_method
@settings(deadline=None, max_examples=15)
@given(pairs=some_dialogues, order=st.randoms(use_true_random=False))
def test_order_changes_nothing(name: str, pairs: Pairs, order: Any) -> None:
    method = crediting(name)
    places = list(range(len(pairs)))
    order.shuffle(places)
    straight = credit(method, pairs, LocalReducer())
    shuffled = credit(method, [pairs[place] for place in places], LocalReducer())
    for place, one in zip(places, shuffled, strict=True):
        np.testing.assert_allclose(one.advantages, straight[place].advantages, rtol=0, atol=1e-12)


@every_method
def test_a_failed_dialogue_is_refused(name: str) -> None:
    broken = dialogue([[("reply", 2)]], termination="error", scores={"judge": {}})
    stats = stats_of(broken, {stream: [0.0, 0.0] for stream in STREAMS})
    method = registry.load("credit", name)
    rewards = {stream: {settings.sources[0]: np.zeros(2)} for stream, settings in STREAMS.items()}
    with pytest.raises(CreditError, match="failed"):
        method(method.Config(), streams=STREAMS).assign([broken], [rewards], [stats], LocalReducer())


@every_method
def test_no_dialogue_is_no_credit(name: str) -> None:
    assert credit(crediting(name), [], LocalReducer()) == ()
