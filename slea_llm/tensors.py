"""What enters a model in one pass, and what comes out of it and of a loss, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The one tensor record. B rows of T positions, S streams; position t holds what concerns predicting token t.

    Padding is on the right and every mask is false on it. `trajectory` (B,) numbers the trajectory of each row within
    the update, `trajectory_tokens` (B,) is the count of policy tokens of that whole trajectory (all its rows).
    """

    input_ids: torch.Tensor  # (B, T) int64
    attention_mask: torch.Tensor  # (B, T) bool
    policy_mask: torch.Tensor  # (B, T) bool, sampled tokens that carry a policy gradient
    imitation_mask: torch.Tensor  # (B, T) bool
    imitation_weights: torch.Tensor  # (B, T) float
    prototypes: torch.Tensor  # (B,) float, share of a row among the prototypes of its state; 0: it is none
    value_mask: torch.Tensor  # (B, T) bool
    behaviour_logprobs: torch.Tensor  # (B, T) float
    proximal_logprobs: torch.Tensor  # (B, T) float
    reference_logprobs: torch.Tensor  # (B, T) float
    advantages: torch.Tensor  # (B, T) float
    weights: torch.Tensor  # (B, T) float
    returns: torch.Tensor  # (B, T, S) float
    old_values: torch.Tensor  # (B, T, S) float
    trajectory: torch.Tensor  # (B,) int64
    trajectory_tokens: torch.Tensor  # (B,) float
    head_mask: torch.Tensor | None = None  # (B, T, S) bool, which head is supervised at a value position; None: all

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutputs:
    """What one forward of policy and critic gives, aligned like Batch; entries outside the masks are 0."""

    logprobs: torch.Tensor  # (B, T), log-probability of token t at the rollout temperature
    entropy: torch.Tensor  # (B, T), nats
    values: torch.Tensor  # (B, T, S), value of the context before token t


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """One loss term over one micro-batch: the *sum* over its units; the trainer divides by the update's global count.

    `metrics` are sums too, divided by the same count, or by `metric_units` where the loss is divided by something
    else. `extremes` are reduced by maximum.
    """

    total: torch.Tensor
    metric_units: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extremes: Mapping[str, torch.Tensor] = field(default_factory=dict)
