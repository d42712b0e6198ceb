"""A bonus for the policy's entropy, with a floor that it is kept from falling through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from slea_llm.errors import ConfigError
from slea_llm.losses.maths import masked_sum
from slea_llm.tensors import Batch, LossValue, ModelOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyConfig:
    weight: float = 0.001
    """Range in use: 0 to 0.001. 0: entropy is only reported. With a floor it is where the controller starts, and what
    it never goes below: the bonus does not decay."""
    floor: float = 0.0
    """Nats a token, 0 or above: below it the weight grows, above it the weight falls back. 0: the weight is constant.
    About half of what `update/entropy` says at the start keeps exploration alive."""
    rate: float = 0.05
    """Above 0: the largest relative change of the weight in one update."""
    max_weight: float = 0.1
    """At least `weight`: what the controller never goes above."""


class EntropyLoss:
    """Minus the entropy of the tempered distribution in nats, summed over policy tokens.

    With a floor the weight follows `w <- w exp(rate * clip((floor - H) / floor, -1, 1))` after every update, between
    `weight` and `max_weight`: the dual ascent on a bound of the entropy of SAC (Haarnoja et al. 2018, "Soft
    Actor-Critic Algorithms and Applications", section 5) with bounded steps.
    """

    Config: ClassVar = EntropyConfig
    name: ClassVar[str] = "entropy"
    reads_reference: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"entropy": "mean entropy in nats", "weight": "weight of the bonus"}
    )

    def __init__(self, config: EntropyConfig) -> None:
        """Raises ConfigError for a floor that the weight cannot hold."""
        if not (config.floor >= 0 and config.rate > 0):
            raise ConfigError(f"entropy.floor {config.floor} must be 0 or above, rate {config.rate} above 0")
        if config.floor and not 0 < config.weight <= config.max_weight:
            raise ConfigError(
                f"entropy.floor {config.floor} needs a weight above 0 to grow from, up to max_weight "
                f"{config.max_weight}; weight is {config.weight}"
            )
        self.config = config
        self.weight = config.weight

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Policy tokens of the batch."""
        return batch.policy_mask.sum()

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        total = masked_sum(outputs.entropy, batch.policy_mask)
        weight = self.weight * batch.policy_mask.sum().to(total.dtype)
        return LossValue(total=-total, metrics={"entropy": total.detach(), "weight": weight})

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Move the weight by what the last update saw of the entropy."""
        config = self.config
        if config.floor:
            gap = (config.floor - metrics["entropy/entropy"]) / config.floor
            grown = self.weight * math.exp(config.rate * min(max(gap, -1.0), 1.0))
            self.weight = min(max(grown, config.weight), config.max_weight)

    def state(self) -> Mapping[str, Any]:
        """The weight that the controller has come to."""
        return {"weight": self.weight}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the weight again; without a floor the weight is the recipe's."""
        if self.config.floor:
            self.weight = float(state["weight"])
