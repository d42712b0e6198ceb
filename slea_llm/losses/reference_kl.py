"""Distance to the reference policy as a loss; the other place for it is the reward (part `reference_kl`, k1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from slea_llm.errors import ConfigError
from slea_llm.losses.maths import k1, k2, k3, masked, masked_sum
from slea_llm.tensors import Batch, LossValue, ModelOutputs

LARGEST_ERROR = 0.2
"""Of the KL, relative to its target, that the weight answers to in one update (Ziegler et al. 2019)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKlConfig:
    weight: float = 0.005
    """Range in use: 0.001 to 0.01."""
    estimator: str = "k2"
    """`k2`: the gradient of KL(policy || reference), what is nearly always meant. `k3`: that of the forward
    KL(reference || policy), which spreads mass. `k1` is refused: as a loss its expected gradient is 0."""
    target: float = 0.0
    """Nats a token, 0 or above: the weight grows while `reference_kl/k3` is above it and falls while it is below.
    0: the weight is constant."""
    horizon: float = 40.0
    """Updates, above 0, over which the weight would change by the relative error of the KL, which counts up to a
    fifth."""


class ReferenceKlLoss:
    """k2 (or k3) of log p - log p_reference, summed over policy tokens. Gradients: Tang and Munos, arXiv 2506.09477.

    With a target the weight follows `w <- w (1 + clip(KL / target - 1, -0.2, 0.2) / horizon)` after every update
    (Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2).
    """

    Config: ClassVar = ReferenceKlConfig
    name: ClassVar[str] = "reference_kl"
    reads_reference: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "k1": "mean of log p - log p_reference; can be negative",
            "k3": "mean of p_ref/p - 1 - log(p_ref/p): KL(policy || reference), never negative",
            "weight": "weight of the loss",
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
        if not (0 <= config.target < math.inf and 0 < config.horizon < math.inf):
            raise ConfigError(
                f"reference_kl.target {config.target} must be 0 or above, horizon {config.horizon} above 0; both finite"
            )
        if config.target and not config.weight > 0:
            raise ConfigError(
                f"reference_kl.target {config.target} needs a weight above 0 to start from; weight is {config.weight}"
            )
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
            metrics["weight"] = self.weight * mask.sum().to(log_ratio.dtype)
        return LossValue(total=masked_sum(estimate(log_ratio), mask), metrics=metrics)

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Move the weight by how far the last update was from the target."""
        if self.config.target:
            error = metrics["reference_kl/k3"] / self.config.target - 1.0
            self.weight *= 1.0 + min(max(error, -LARGEST_ERROR), LARGEST_ERROR) / self.config.horizon

    def state(self) -> Mapping[str, Any]:
        """The weight that the controller has come to."""
        return {"weight": self.weight}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the weight again; without a target the weight is the recipe's."""
        if self.config.target:
            self.weight = float(state["weight"])
