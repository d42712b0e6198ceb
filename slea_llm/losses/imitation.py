"""Imitation of the best steps of successes: weighted cross-entropy on their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch

from slea_llm.encoders import DEFAULT_ENCODER
from slea_llm.errors import ConfigError, nearest
from slea_llm.losses.maths import masked, masked_sum
from slea_llm.tensors import Batch, LossValue, ModelOutputs

FORMS = ("cross_entropy", "awr", "sil")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationConfig:
    weight: float = 0.05
    """Range in use: 0.05 to 0.1."""
    form: Literal["cross_entropy", "awr", "sil"] = "cross_entropy"
    """What a token weighs. `cross_entropy`: 1. `awr`: min(exp(A / beta), max_weight), A its whitened advantage. `sil`:
    its return above the critic's value, cut to [0, 1], and the critic learns from it too."""
    gain: str = "advantage"
    """What tells that a step gained: `advantage` (mean over its tokens) or an evaluator by name. Above 0 is a gain."""
    top: float = 0.2
    """Share of the steps with a gain that is imitated, the best in each cluster of states; in (0, 1]."""
    beta: float = 1.0
    """Temperature of `awr`, above 0."""
    max_weight: float = 20.0
    """Largest weight of `awr`, at least 1."""
    value_weight: float = 0.01
    """Share of the critic's part in `sil`, 0 or above."""
    encoder: str = DEFAULT_ENCODER
    """Sentence encoder of states and steps."""
    threshold: float = 0.85
    """Cosine from which two states, or two steps, are in one cluster; in (0, 1]."""
    fade_until: float = 0.5
    """Share of the training after which the weight has fallen to 0, in a straight line; in (0, 1]."""
    demonstrations: str = ""
    """Scored log of text whose successes are imitated too, tokenised once. Empty: none."""
    demonstrations_per_iteration: int = 4
    """Logged dialogues an iteration and rank, 1 or more."""


class ImitationLoss:
    """-w log p, summed over the tokens of the chosen steps.

    With w = 1 its mean is the cross-entropy of the steps' empirical distribution, that is the forward
    KL(empirical || policy) and a constant. AWR: Peng et al. 2019. SIL: Oh et al. 2018, eq. 2 and 3, whose critic's part
    is 0.5 ((R - V)+)^2 in every stream. Weights come with the batch, without a gradient. Log-probabilities of -0.1,
    -0.5 and -0.3 have the mean 0.3.
    """

    Config: ClassVar = ImitationConfig
    name: ClassVar[str] = "imitation"
    reads_reference: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"nll": "mean of -log p over the imitated tokens", "weight": "mean weight of an imitated token"}
    )

    def __init__(self, config: ImitationConfig) -> None:
        _check(config)
        self.config = config
        self.weight = config.weight

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Imitated tokens of the batch, whatever they weigh."""
        return _imitated(batch).sum()

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        mask = _imitated(batch)
        weights = masked(batch.imitation_weights, mask)
        total = -masked_sum(weights * outputs.logprobs, mask)
        if self.config.form == "sil":
            read = (mask & batch.value_mask).unsqueeze(-1)
            if batch.head_mask is not None:
                read = read & batch.head_mask
            above = (masked(batch.returns, read) - masked(outputs.values, read)).clamp(min=0.0)
            total = total + self.config.value_weight * 0.5 * above.square().sum()
        metrics = {"nll": -masked_sum(outputs.logprobs.detach(), mask), "weight": weights.sum()}
        return LossValue(total=total, metrics=metrics)


def _imitated(batch: Batch) -> torch.Tensor:
    """(B, T): what is imitated token by token; prototypes are for the loss that compares them with each other."""
    return batch.imitation_mask & (batch.prototypes == 0).unsqueeze(-1)


def _check(config: ImitationConfig) -> None:
    if config.form not in FORMS:
        raise ConfigError(
            f"imitation.form {config.form!r} is not one of {', '.join(FORMS)}{nearest(config.form, FORMS)}"
        )
    for name, low, high in (("top", 0.0, 1.0), ("threshold", 0.0, 1.0), ("fade_until", 0.0, 1.0)):
        if not low < getattr(config, name) <= high:
            raise ConfigError(f"imitation.{name} {getattr(config, name)} is not in (0, 1]")
    if config.beta <= 0 or config.max_weight < 1 or config.value_weight < 0 or config.demonstrations_per_iteration < 1:
        raise ConfigError(
            f"imitation.beta {config.beta} must be above 0, max_weight {config.max_weight} 1 or more, value_weight "
            f"{config.value_weight} 0 or more, demonstrations_per_iteration {config.demonstrations_per_iteration} 1 or "
            "more"
        )
    if config.demonstrations and (config.form != "cross_entropy" or config.gain == "advantage"):
        raise ConfigError(
            f"imitation.demonstrations are text: they have no advantage and no value, so form {config.form!r} and gain "
            f"{config.gain!r} must be 'cross_entropy' and an evaluator that scored the log"
        )
