"""The weight of the entropy bonus grows below the floor, falls back above it, and never leaves its range."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from slea_llm.batching import blank
from slea_llm.errors import ConfigError
from slea_llm.losses.entropy import EntropyConfig, EntropyLoss
from slea_llm.tensors import ModelOutputs

FLOOR = EntropyConfig(weight=0.01, floor=0.5, rate=0.1, max_weight=0.02)


def test_it_follows_the_formula() -> None:
    term = EntropyLoss(FLOOR)
    term.adapt({"entropy/entropy": 0.4})
    assert term.weight == pytest.approx(0.01 * math.exp(0.1 * 0.2))
    term.adapt({"entropy/entropy": 0.75})
    assert term.weight == pytest.approx(0.01)  # never below where it started: the bonus does not decay
    for _ in range(99):
        term.adapt({"entropy/entropy": 0.0})
    assert term.weight == 0.02
    term.adapt({"entropy/entropy": 50.0})
    assert term.weight == pytest.approx(0.02 * math.exp(-0.1))


def test_without_a_floor_nothing_moves() -> None:
    term = EntropyLoss(EntropyConfig(weight=0.003))
    term.adapt({"entropy/entropy": 0.0})
    term.restore({"weight": 9.0})  # the recipe's weight may be changed between runs
    assert term.weight == 0.003


def test_its_state_is_the_weight() -> None:
    term, again = EntropyLoss(FLOOR), EntropyLoss(FLOOR)
    term.adapt({"entropy/entropy": 0.1})
    again.restore(term.state())
    assert again.weight == term.weight > 0.01


def test_the_present_weight_is_reported() -> None:
    batch = dataclasses.replace(
        blank(streams=1, pad_id=0, dtype=torch.float64), policy_mask=torch.ones(1, 2, dtype=torch.bool)
    )
    outputs = ModelOutputs(logprobs=torch.zeros(1, 2), entropy=torch.full((1, 2), 0.7), values=torch.zeros(1, 2, 1))
    value = EntropyLoss(FLOOR)(outputs, batch)
    assert float(value.metrics["weight"] / batch.policy_mask.sum()) == pytest.approx(0.01)
    assert float(value.total) == pytest.approx(-1.4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"floor": -1.0}, "must be 0 or above"),
        ({"floor": 1.0, "weight": 0.0}, "needs a weight above 0"),
        ({"floor": 1.0, "weight": 0.2}, "up to max_weight 0"),
        ({"rate": 0.0}, "rate 0"),
    ],
)
def test_a_floor_that_cannot_be_held_is_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EntropyLoss(EntropyConfig(**options))
