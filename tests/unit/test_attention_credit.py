"""Augmenter `attention_credit`: what it moves, what leaving a step out says, and when attention is trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.augmenters import attention_reader
from slea_llm.augmenters.attention_credit import AttentionCredit, moved
from slea_llm.errors import ConfigError, UnsupportedError
from slea_llm.measures import rank_correlation
from slea_llm.settings import StreamSettings
from tests.support.shaping import REPLY, advantages, talk

TURNS = [(turn, 0) for turn in range(4)]


@pytest.mark.parametrize("raw", [[0.1, 0.2, 0.3, 0.4], [0.05, 0.1, 0.15, 0.2]])
def test_oracle_abc(raw: list[float]) -> None:
    """Beside the outcome the steps earn share alpha R + (1 - share) [last] R; attention is brought to a sum of 1."""
    part = moved(dict(zip(TURNS, raw, strict=True)), outcome=2.0, share=0.5)
    one = talk([REPLY] * 4, rewards=[0, 0, 0, 2])
    earned = [turn.reward + part[turn.index, 0] for turn in one.trajectory.turns]
    assert earned == pytest.approx([0.1, 0.2, 0.3, 1.4], abs=1e-12)
    assert sum(earned) == pytest.approx(2.0)
    # Undiscounted, with a critic of 0, the first advantage is the whole outcome however it is spread.
    got = advantages(one, part, [0.0] * 4, gamma_turn=1.0, lam_turn=1.0)
    assert got.tolist() == pytest.approx([2.0, 1.9, 1.7, 1.4])


def test_oracle_spearman() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 2, 4], [1, 3, 3, 4]) == pytest.approx(1.0)  # equal values share a rank
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([], []) is None


@given(raw=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=9), outcome=st.floats(-10, 10), share=st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_what_is_moved_sums_to_nothing(raw: list[float], outcome: float, share: float) -> None:
    part = moved({(turn, 0): one for turn, one in enumerate(raw)}, outcome=outcome, share=share)
    assert sum(part.values()) == pytest.approx(0.0, abs=1e-9)


def test_no_steps_and_no_attention_move_nothing() -> None:
    assert moved({}, outcome=1.0, share=0.5) == {}
    assert moved({(0, 0): 0.0}, outcome=1.0, share=0.5) == {}


def reader(seed: int, size: int = 6, width: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=one.shape).astype(np.float32)
        for name, one in attention_reader.initial(size, width, seed=0).items()
    }


@given(seed=st.integers(0, 10**6), count=st.integers(2, 7))
@settings(deadline=None, max_examples=40)
def test_leaving_a_step_out_is_reading_the_others(seed: int, count: int) -> None:
    weights, steps = reader(seed), np.random.default_rng(seed + 1).normal(size=(count, 6)).astype(np.float32)
    whole = attention_reader.predict(weights, steps)
    slow = [whole - attention_reader.predict(weights, np.delete(steps, place, axis=0)) for place in range(count)]
    np.testing.assert_allclose(attention_reader.leave_one_out(weights, steps), slow, rtol=0, atol=1e-6)


def test_a_step_with_all_of_the_attention_can_be_left_out() -> None:
    weights = reader(0)
    steps = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    keys = steps @ weights["key.weight"].T
    weights["query"] = (1e4 * keys[1]).astype(np.float32)
    alpha = attention_reader.attention(weights, steps)
    assert alpha.max() == pytest.approx(1.0)
    assert np.isfinite(attention_reader.leave_one_out(weights, steps)).all()
    (only,) = attention_reader.leave_one_out(weights, steps[:1])
    bias = float(weights["out.bias"][0])
    assert only == pytest.approx(attention_reader.predict(weights, steps[:1]) - bias)


def test_before_its_first_fit_it_does_nothing() -> None:
    part = AttentionCredit(AttentionCredit.Config())
    one = talk([REPLY] * 2, rewards=[0, 1])
    assert part.augment(one, 0.0) == {}
    assert part.weights(one, 0.0) == {}
    assert not part.gate.open
    assert part.reads == {"counterfactual"}


def test_a_stream_without_the_outcome_is_refused() -> None:
    config = AttentionCredit.Config()
    both = StreamSettings(sources=("outcome", "attention_credit"), gamma_turn=1.0)
    assert AttentionCredit.fits(config, "s", both) == []
    with pytest.raises(UnsupportedError, match="stream s has no outcome"):
        AttentionCredit.fits(config, "s", StreamSettings(sources=("attention_credit",)))
    (note,) = AttentionCredit.fits(config, "s", StreamSettings(sources=("outcome", "attention_credit")))
    assert "set gamma_turn to 1" in note


@pytest.mark.parametrize(
    "options", [{"read": "mean"}, {"share": 1.5}, {"min_rank": 2.0}, {"width": 0}, {"window": 0}, {"refresh_every": -1}]
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} "):
        AttentionCredit.Config(**options)
