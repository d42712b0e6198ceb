"""The critic's squared error, with PPO's optional clip of how far a value may move in one update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from slea_llm.errors import ConfigError
from slea_llm.losses.maths import masked, masked_sum
from slea_llm.tensors import Batch, LossValue, ModelOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueConfig:
    weight: float = 0.5
    clip_range: float = 0.0
    """How far a value may move from the one that credit used, in units of the return. 0: no bound. With returns of ten
    a bound of 0.2 would hold the critic to 0.2 an iteration."""


class ValueLoss:
    """0.5 * max((v - R)^2, (clip(v, old - c, old + c) - R)^2), summed over supervised tokens and streams."""

    Config: ClassVar = ValueConfig
    name: ClassVar[str] = "value"
    reads_reference: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "squared_error": "mean over supervised tokens of (v - R)^2, summed over streams",
            "value": "mean value, summed over streams",
            "return": "mean return, summed over streams",
            "clip_frac": "share of tokens and streams whose gradient the clip removes, summed over streams",
        }
    )

    def __init__(self, config: ValueConfig) -> None:
        if config.clip_range < 0:
            raise ConfigError(f"value.clip_range {config.clip_range} is below 0 (0: off)")
        self.config = config
        self.weight = config.weight

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Supervised tokens of the batch."""
        return batch.value_mask.sum()

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        mask = batch.value_mask.unsqueeze(-1)
        if batch.head_mask is not None:
            mask = mask & batch.head_mask
        values, returns = masked(outputs.values, mask), masked(batch.returns, mask)
        error = (values - returns).square()
        worst = error
        if self.config.clip_range:
            old, reach = masked(batch.old_values, mask), self.config.clip_range
            bounded = old + (values - old).clamp(-reach, reach)
            worst = torch.maximum(error, (bounded - returns).square())
        metrics = {
            "squared_error": error.detach().sum(),
            "value": values.detach().sum(),
            "return": returns.sum(),
            "clip_frac": (worst > error).sum().to(error.dtype),
        }
        return LossValue(total=0.5 * masked_sum(worst, mask), metrics=metrics)
