"""A bonus for the policy's entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from slea_llm.losses.maths import masked_sum
from slea_llm.types import Batch, LossValue, ModelOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyConfig:
    weight: float = 0.001
    """Range in use: 0 to 0.001. 0: entropy is only reported."""


class EntropyLoss:
    """Minus the entropy of the tempered distribution in nats, summed over policy tokens."""

    Config: ClassVar = EntropyConfig
    name: ClassVar[str] = "entropy"
    reads_reference: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType({"entropy": "mean entropy in nats"})

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        self.weight = config.weight

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Policy tokens of the batch."""
        return batch.policy_mask.sum()

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        total = masked_sum(outputs.entropy, batch.policy_mask)
        return LossValue(total=-total, metrics={"entropy": total.detach()})
