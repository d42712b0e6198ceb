"""Distance to the reference policy as a loss; the other place for it is the reward (part `reference_kl`, k1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from slea_llm.errors import ConfigError
from slea_llm.losses.maths import k1, k2, k3, masked, masked_sum
from slea_llm.tensors import Batch, LossValue, ModelOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKlConfig:
    weight: float = 0.005
    """Range in use: 0.001 to 0.01."""
    estimator: str = "k2"
    """`k2`: the gradient of KL(policy || reference), what is nearly always meant. `k3`: that of the forward
    KL(reference || policy), which spreads mass. `k1` is refused: as a loss its expected gradient is 0."""


class ReferenceKlLoss:
    """k2 (or k3) of log p - log p_reference, summed over policy tokens. Gradients: Tang and Munos, arXiv 2506.09477."""

    Config: ClassVar = ReferenceKlConfig
    name: ClassVar[str] = "reference_kl"
    reads_reference: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "k1": "mean of log p - log p_reference; can be negative",
            "k3": "mean of p_ref/p - 1 - log(p_ref/p): KL(policy || reference), never negative",
        }
    )

    def __init__(self, config: ReferenceKlConfig) -> None:
        if config.estimator == "k1":
            raise ConfigError(
                "reference_kl.estimator 'k1' does nothing as a loss: its expected gradient is 0. Use 'k2' here, or "
                "put k1 into the reward (a stream with the source reference_kl)"
            )
        if config.estimator not in ("k2", "k3"):
            raise ConfigError(f"reference_kl.estimator {config.estimator!r} is not one of k2, k3")
        self.config = config
        self.weight = config.weight

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Policy tokens of the batch."""
        return batch.policy_mask.sum()

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        mask = batch.policy_mask
        log_ratio = masked(outputs.logprobs, mask) - masked(batch.reference_logprobs, mask)
        estimate = k2 if self.config.estimator == "k2" else k3
        with torch.no_grad():
            metrics = {"k1": masked_sum(k1(log_ratio), mask), "k3": masked_sum(k3(log_ratio), mask)}
        return LossValue(total=masked_sum(estimate(log_ratio), mask), metrics=metrics)
