"""The clipped policy loss of PPO, decoupled from the sampler's policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from slea_llm.errors import ConfigError
from slea_llm.losses.maths import masked, masked_sum, safe_exp, truncated_importance
from slea_llm.tensors import Batch, LossValue, ModelOutputs

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoConfig:
    weight: float = 1.0
    clip_low: float = 0.2
    """In (0, 1): the ratio counts down to 1 - clip_low."""
    clip_high: float = 0.28
    """Above 0: the ratio counts up to 1 + clip_high; larger than `clip_low` keeps exploration alive."""
    dual_clip: float = 3.0
    """Above 1: a token with a negative advantage loses at most this many times it. 0: no such bound."""
    importance_cap: float = 2.0
    """Cap C of the weight min(p_proximal / p_behaviour, C) per token, at least 1. 0: no such weight."""
    aggregation: Aggregation = "token-mean"
    """What is averaged: all tokens; or trajectories, each by the mean or the sum of its tokens. The last is no mean but
    the sum over all tokens divided by the constant `norm_length`: a larger minibatch is a larger loss."""
    norm_length: int = 1024
    """What `seq-mean-token-sum-norm` divides by, at least 1."""


class PpoLoss:
    """-w * lambda * min(r A, clip(r, 1 - low, 1 + high) A), bounded below by dual * A where A < 0; summed over tokens.

    r = p / p_proximal, with the proximal policy that of the start of the update; w = min(p_proximal / p_behaviour, C)
    is detached and mends the gap to the policy that really sampled (replay, or another engine's arithmetic); lambda is
    `batch.weights`. PPO: Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020, eq. 5; decoupling: Hilton et al.
    2022. With r = 1.5, A = 2, high = 0.28: min(3, 2.56) = 2.56.
    """

    Config: ClassVar = PpoConfig
    name: ClassVar[str] = "ppo"
    reads_reference: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "approx_kl": "mean of r - 1 - log r: KL(proximal || policy), k3",
            "clip_frac": "share of tokens whose gradient the clip removes",
            "ratio": "mean of p / p_proximal",
            "importance": "mean truncated weight p_proximal / p_behaviour",
            "importance_capped": "share of tokens whose weight was cut",
            "sampler_gap": "mean of |log p_proximal - log p_behaviour|",
        }
    )

    def __init__(self, config: PpoConfig) -> None:
        _check(config)
        self.config = config
        self.weight = config.weight

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Policy tokens of the batch, its trajectories that hold any, or 0 for the aggregation that is a plain sum."""
        if self.config.aggregation == "seq-mean-token-sum-norm":
            return torch.zeros((), dtype=torch.long, device=batch.trajectory.device)
        return self._units(batch)

    def _units(self, batch: Batch) -> torch.Tensor:
        """What metrics are averaged over: policy tokens, or trajectories that hold any."""
        if self.config.aggregation == "token-mean":
            return batch.policy_mask.sum()
        trained = batch.trajectory[batch.trajectory_tokens > 0]
        return torch.as_tensor(torch.unique(trained).numel(), device=batch.trajectory.device)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        mask, config = batch.policy_mask, self.config
        log_ratio = masked(outputs.logprobs, mask) - masked(batch.proximal_logprobs, mask)
        gap = masked(batch.proximal_logprobs, mask) - masked(batch.behaviour_logprobs, mask)
        advantages = masked(batch.advantages, mask)
        ratio = safe_exp(log_ratio)
        importance = truncated_importance(masked(batch.proximal_logprobs, mask), masked(batch.behaviour_logprobs, mask),
                                          config.importance_cap)  # fmt: skip
        clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
        objective = torch.minimum(ratio * advantages, clipped)
        removed = clipped < ratio * advantages
        if config.dual_clip:
            bound = config.dual_clip * advantages
            removed = removed | ((advantages < 0) & (bound > objective))
            objective = torch.where(advantages < 0, torch.maximum(objective, bound), objective)
        unit = self._unit(batch)
        loss = -importance * masked(batch.weights, mask) * objective * unit
        with torch.no_grad():
            share = self._share(batch)
            metrics = {
                "approx_kl": (ratio - 1.0 - log_ratio) * share,
                "clip_frac": removed.to(share.dtype) * share,
                "ratio": ratio * share,
                "importance": importance * share,
                "importance_capped": (gap > math.log(config.importance_cap or math.inf)).to(share.dtype) * share,
                "sampler_gap": gap.abs() * share,
            }
            sums = {name: masked_sum(value, mask) for name, value in metrics.items()}
            extremes = {"ratio_max": masked(ratio, mask).max(), "sampler_gap_max": masked(gap.abs(), mask).max()}
        return LossValue(total=masked_sum(loss, mask), metrics=sums, extremes=extremes, metric_units=self._units(batch))

    def _unit(self, batch: Batch) -> torch.Tensor:
        """(B, 1): what one token counts for in the sum."""
        if self.config.aggregation == "seq-mean-token-mean":
            return 1.0 / batch.trajectory_tokens.clamp(min=1).unsqueeze(-1)
        ones = torch.ones_like(batch.trajectory_tokens).unsqueeze(-1)
        return ones / self.config.norm_length if self.config.aggregation == "seq-mean-token-sum-norm" else ones

    def _share(self, batch: Batch) -> torch.Tensor:
        """(B, 1): what one token counts for in a metric, so that sum over denominator is a mean."""
        if self.config.aggregation == "token-mean":
            return torch.ones_like(batch.trajectory_tokens).unsqueeze(-1)
        return 1.0 / batch.trajectory_tokens.clamp(min=1).unsqueeze(-1)


def _check(config: PpoConfig) -> None:
    if not 0 < config.clip_low < 1:
        raise ConfigError(f"ppo.clip_low {config.clip_low} is not in (0, 1)")
    if config.clip_high <= 0:
        raise ConfigError(f"ppo.clip_high {config.clip_high} is not above 0")
    if config.dual_clip and config.dual_clip <= 1:
        raise ConfigError(f"ppo.dual_clip {config.dual_clip} is neither 0 (off) nor above 1")
    if config.importance_cap and config.importance_cap < 1:
        raise ConfigError(f"ppo.importance_cap {config.importance_cap} is neither 0 (off) nor at least 1")
    if config.norm_length < 1:
        raise ConfigError(f"ppo.norm_length {config.norm_length} is below 1")
    allowed = Aggregation.__args__  # type: ignore[attr-defined]
    if config.aggregation not in allowed:
        raise ConfigError(f"ppo.aggregation {config.aggregation!r} is not one of {', '.join(allowed)}")
