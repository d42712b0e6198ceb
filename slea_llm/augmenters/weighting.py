"""Lambda: how much each step matters for learning, used in the sampler of replay or in the loss, and never in both.

In both places it would count squared: the policy would be trained as if lambda squared had been asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from slea_llm.errors import ConfigError, CreditError, UnsupportedError, nearest
from slea_llm.interfaces import Gated, StepWeigher
from slea_llm.settings import WeightSettings
from slea_llm.types import ScoredTrajectory


def check_weights(weights: WeightSettings, weighers: Collection[str], payers: Collection[str]) -> None:
    """Refuse weights that would count twice or come from nowhere; needs nothing but names.

    `weighers` and `payers` name the augmenters of the recipe that give weights and those that give rewards. Raises
    UnsupportedError for weights in the sampler and in the loss, and ConfigError for the rest.
    """
    if weights.sources and set(weights.use) == {"loss", "sampler"}:
        raise UnsupportedError(
            "weights.use names the loss and the sampler: what is drawn in proportion to lambda and then multiplied by "
            "it counts lambda squared; name one of them"
        )
    for source in weights.sources:
        if source in payers and source not in weighers:
            raise ConfigError(f"weights: augmenter {source!r} pays rewards and weighs no steps; name it in a stream")
        if source not in weighers:
            known = ", ".join(sorted(weighers)) or "the recipe has no augmenter that weighs steps"
            raise ConfigError(f"weights: unknown source {source!r}; one of {known}{nearest(source, weighers)}")
    for name in sorted(set(weighers) - set(payers) - set(weights.sources)):
        raise ConfigError(f"augmenter {name!r} weighs steps; name it in weights.sources or take it out")


class StepWeighting:
    """The weights of the leaf steps of a trajectory: those of all sources multiplied, then shaped by the settings.

    A learnt source whose gate is shut, or one that says nothing of a step, weighs it 1.
    """

    def __init__(self, settings: WeightSettings, weighers: Sequence[StepWeigher]) -> None:
        """`weighers` are the sources that the settings name."""
        self.settings = settings
        self._weighers = tuple(weighers)

    @property
    def in_loss(self) -> bool:
        """Whether the weights multiply the policy loss."""
        return bool(self._weighers) and "loss" in self.settings.use

    @property
    def in_sampler(self) -> bool:
        """Whether the weights are a priority in the sampler of replay."""
        return bool(self._weighers) and "sampler" in self.settings.use

    def raw(self, scored: ScoredTrajectory, progress: float) -> dict[tuple[int, int], float]:
        """What the sources say of every leaf step, multiplied, at least the floor; not normalised.

        Raises CreditError for a weight that is negative or not finite, or about a step that is no leaf.
        """
        weights = {(step.turn, step.index): 1.0 for step in scored.leaves()}
        for weigher in self._weighers:
            if isinstance(weigher, Gated) and not weigher.gate.open:
                continue
            for key, weight in weigher.weights(scored, progress).items():
                place = f"trajectory {scored.trajectory.id}: {weigher.name} weighs step {key}"
                if key not in weights:
                    raise CreditError(f"{place}, which is no leaf step")
                if not (math.isfinite(weight) and weight >= 0.0):
                    raise CreditError(f"{place} {weight}; a weight is finite and 0 or above")
                weights[key] *= weight
        return {key: max(weight, self.settings.floor) for key, weight in weights.items()}

    def priority(self, scored: ScoredTrajectory, progress: float) -> float:
        """For the sampler: the mean raw weight of the steps. The sampler itself takes its power.

        1 for a trajectory without steps.
        """
        weights = self.raw(scored, progress)
        return math.fsum(weights.values()) / len(weights) if weights else 1.0

    def for_loss(self, scored: ScoredTrajectory, progress: float) -> dict[tuple[int, int], float]:
        """For the loss: the raw weights shaped within the trajectory to mean 1, then clipped."""
        raw = self.raw(scored, progress)
        if not raw:
            return {}
        settings = self.settings
        values = list(raw.values())
        if settings.temperature:
            shaped = softmax_weights(values, temperature=settings.temperature)
        else:
            shaped = power_weights(values, power=settings.power, floor=settings.floor)
        low, high = settings.clip
        return {key: min(max(weight, low), high) for key, weight in zip(raw, shaped, strict=True)}


def power_weights(values: Sequence[float], *, power: float, floor: float) -> list[float]:
    """max(value, floor) ** power, divided by the mean (Schaul et al. 2016 for the power); all equal: all 1.

    >>> [round(weight, 4) for weight in power_weights([.9, .1, .6, .05], power=.6, floor=.1)]
    [1.7247, 0.4615, 1.3523, 0.4615]
    """
    # Relative to the largest: powers of very small numbers would vanish.
    top = max(max(values), floor)
    if not top > 0.0:
        return [1.0] * len(values)
    raised = [(max(value, floor) / top) ** power for value in values]
    mean = math.fsum(raised) / len(raised)
    return [value / mean for value in raised]


def softmax_weights(values: Sequence[float], *, temperature: float) -> list[float]:
    """Softmax of value / temperature over the steps, times their number, so that the mean is 1.

    >>> [round(weight, 4) for weight in softmax_weights([.2, 1, .5, .1], temperature=1.)]
    [0.7299, 1.6244, 0.9853, 0.6604]
    """
    top = max(values)
    raised = [math.exp((value - top) / temperature) for value in values]
    total = math.fsum(raised)
    return [value * len(raised) / total for value in raised]
