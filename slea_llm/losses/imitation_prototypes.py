"""Imitation as a choice among prototypes: what the policy says in a state, over a few steps that did well there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from slea_llm.encoders import DEFAULT_ENCODER
from slea_llm.errors import ConfigError
from slea_llm.losses.maths import masked
from slea_llm.tensors import Batch, LossValue, ModelOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PrototypeConfig:
    weight: float = 0.05
    direction: Literal["forward", "reverse"] = "forward"
    """`forward`: KL(reference || policy), which spreads over all prototypes. `reverse`: KL(policy || reference), which
    settles on one."""
    length_power: float = 1.0
    """A prototype's log-probability is divided by its tokens to this power, in [0, 1]. 0: short ones win."""
    temperature: float = 1.0
    """Of the reference, which is softmax(mean gain / temperature) over the prototypes; above 0."""
    smoothing: float = 0.1
    """Share of the reference that is spread evenly, in (0, 1): it is nowhere 0, so that both directions are finite."""
    prototypes: int = 4
    """Most prototypes of a state, 2 or more."""
    states: int = 2
    """Clusters of states an iteration and rank, those with the most good steps; 1 or more."""
    gain: str = "advantage"
    """What tells that a step gained: `advantage` (mean over its tokens) or an evaluator by name. Above 0 is a gain."""
    encoder: str = DEFAULT_ENCODER
    """Sentence encoder of states and steps."""
    threshold: float = 0.85
    """Cosine from which two states, or two steps, are in one cluster; in (0, 1]."""
    fade_until: float = 0.5
    """Share of the training after which the weight has fallen to 0, in a straight line; in (0, 1]."""


class PrototypeLoss:
    """KL between softmax_k(log p(y_k | s) / |y_k|^power) and a reference over the prototypes y_k, summed over states s.

    The prototypes of a state are rows of one trajectory number, so that no split of a batch parts them. With
    log-probabilities -12, -10 and -15 and 6, 5 and 10 tokens the softmax is .274, .274, .452 at power 1 and .118, .876,
    .006 at power 0: normalising by length changes who wins.
    """

    Config: ClassVar = PrototypeConfig
    name: ClassVar[str] = "imitation_prototypes"
    reads_reference: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"forward": "mean KL(reference || policy) over states", "reverse": "mean KL(policy || reference)"}
    )

    def __init__(self, config: PrototypeConfig) -> None:
        _check(config)
        self.config = config
        self.weight = config.weight

    def denominator(self, batch: Batch) -> torch.Tensor:
        """States of the batch."""
        found = torch.unique(batch.trajectory[batch.prototypes > 0])
        return torch.as_tensor(found.numel(), device=batch.trajectory.device)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        mask = batch.imitation_mask & (batch.prototypes > 0).unsqueeze(-1)
        lengths = mask.sum(dim=1).clamp(min=1)
        scores = masked(outputs.logprobs, mask).sum(dim=1) / lengths**self.config.length_power
        fade = masked(batch.imitation_weights, mask).sum(dim=1) / lengths
        total = 0.0 * scores.sum()  # a batch without prototypes goes through the same modules
        forward, reverse = torch.zeros_like(total), torch.zeros_like(total)
        for name in torch.unique(batch.trajectory[batch.prototypes > 0]):
            rows = batch.trajectory == name
            policy, reference = scores[rows].log_softmax(dim=0), batch.prototypes[rows].log()
            to_policy = (reference.exp() * (reference - policy)).sum()
            to_reference = (policy.exp() * (policy - reference)).sum()
            kept = to_policy if self.config.direction == "forward" else to_reference
            total = total + fade[rows].mean() * kept
            forward, reverse = forward + to_policy.detach(), reverse + to_reference.detach()
        return LossValue(total=total, metrics={"forward": forward, "reverse": reverse})


def _check(config: PrototypeConfig) -> None:
    if config.direction not in ("forward", "reverse"):
        raise ConfigError(f"imitation_prototypes.direction {config.direction!r} is not one of forward, reverse")
    if not 0 <= config.length_power <= 1:
        raise ConfigError(f"imitation_prototypes.length_power {config.length_power} is not in [0, 1]")
    if not 0 < config.smoothing < 1:
        raise ConfigError(
            f"imitation_prototypes.smoothing {config.smoothing} is not in (0, 1); at 0 a reverse KL could be infinite"
        )
    for name in ("threshold", "fade_until"):
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"imitation_prototypes.{name} {getattr(config, name)} is not in (0, 1]")
    if config.temperature <= 0 or config.prototypes < 2 or config.states < 1:
        raise ConfigError(
            f"imitation_prototypes.temperature {config.temperature} must be above 0, prototypes {config.prototypes} 2 "
            f"or more, states {config.states} 1 or more"
        )
