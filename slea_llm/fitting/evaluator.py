"""Fit a reward model: held-out reliability beside the baselines, calibration, final network, card and folder."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as to_safetensors

from slea_llm import folders
from slea_llm.checks import check_least
from slea_llm.errors import ConfigError
from slea_llm.evaluators.reward_model_card import CARD, WEIGHTS, Card, Reliability, judge
from slea_llm.evaluators.reward_model_features import Encoding
from slea_llm.evaluators.reward_model_network import NetworkShape
from slea_llm.fitting.baselines import Rows, held_out_scores
from slea_llm.fitting.labels import StepLabel
from slea_llm.fitting.regression import logistic_regression
from slea_llm.fitting.training import Example, FittedNetwork, Floats, TrainingSettings, fit, folds, predict
from slea_llm.measures import area_under_curve, brier, calibration_error, pair_accuracies
from slea_llm.types import Verdict

HEAD_PLACE: Mapping[str, int] = {"label": 0, "success": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    folds: int = 5
    """Groups are split into so many folds; each is predicted by a network that was fitted on the others. 2 or more."""
    width: int = 64
    layers: int = 1
    members: int = 3
    dropout: float = 0.2
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        check_least(self, folds=2, why="one part is held out")
        check_least(self, width=1, layers=1, members=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Every labelled step of one head as predicted by a network that never saw its group."""

    logits: Floats
    targets: Floats
    weights: Floats
    contexts: tuple[str, ...]
    dialogues: NDArray[np.int64]
    """Number of the dialogue of each step."""
    fold: NDArray[np.int64]
    baselines: Mapping[str, Floats]

    @property
    def positive(self) -> NDArray[np.bool_]:
        return self.targets > 0.5

    def calibrated(self) -> Floats:
        """Probabilities, each calibrated on the other folds."""
        chances = np.zeros(len(self.logits))
        for one in np.unique(self.fold):
            slope, shift = platt(self.logits[self.fold != one], self.targets[self.fold != one])
            held = self.fold == one
            chances[held] = _sigmoid(slope * self.logits[held] + shift)
        return chances


def cross_validate(examples: Sequence[Example], settings: FitSettings, *, seed: int) -> dict[str, HeldOut]:
    """Head -> its held-out predictions. Raises ConfigError when there are fewer groups than folds."""
    shape = shape_of(examples, settings)

    def refit(train: Sequence[int], held: Sequence[int], number: int) -> list[Floats]:
        fitted = fit([examples[place] for place in train], shape, settings.training, seed=seed + number)
        return predict(fitted, [examples[place] for place in held])

    return predict_apart(examples, refit, settings.folds, seed=seed)


Refit: TypeAlias = Callable[[Sequence[int], Sequence[int], int], list[Floats]]
"""Numbers of the examples to fit on and of those held out, and of the fold -> logits (P, 2) of those held out."""


def predict_apart(examples: Sequence[Example], refit: Refit, count: int, *, seed: int) -> dict[str, HeldOut]:
    """Head -> what fits on the other folds say of every group. Raises ConfigError for fewer groups than folds."""
    fold = folds([one.group for one in examples], count, seed=seed)
    logits: list[Floats] = [np.zeros((0, 2))] * len(examples)
    for number in range(count):
        train, held = np.flatnonzero(fold != number).tolist(), np.flatnonzero(fold == number).tolist()
        for place, found in zip(held, refit(train, held, number), strict=True):
            logits[place] = found
    heads = {}
    for head, place in HEAD_PLACE.items():
        if any(one.weights[1:, place].any() for one in examples):
            heads[head] = _held_out(examples, logits, fold, place)
    return heads


def reliability(held_out: HeldOut) -> Reliability:
    """Measures of one head, with the AUC of every baseline on the same steps."""
    chances = held_out.calibrated()
    positive = held_out.positive
    shares = [float(positive[held_out.dialogues == one].mean()) for one in np.unique(held_out.dialogues)]
    pairs = pair_accuracies(held_out.logits.tolist(), positive.tolist(), held_out.contexts)
    return Reliability(
        steps=len(positive),
        dialogues=len(shares),
        positive_dialogues=sum(share > 0.5 for share in shares),
        positive_share=float(positive.mean()),
        auc=area_under_curve(held_out.logits, positive),
        ece=calibration_error(chances, held_out.targets),
        brier=brier(chances, held_out.targets),
        baselines={name: area_under_curve(scores, positive) for name, scores in held_out.baselines.items()},
        pair_accuracy=float(np.mean(list(pairs.values()))) if pairs else None,
        pair_contexts=len(pairs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedEvaluator:
    """What was fitted: write it with `save`."""

    fitted: FittedNetwork
    card: Card
    verdict: Verdict

    def save(self, folder: Path, *, overwrite: bool = False) -> None:
        """Weights and card, whole or not at all. Raises StorageError when the folder holds something already."""
        with folders.whole_folder(folder, overwrite=overwrite) as partial:
            tensors = {name: tensor.contiguous() for name, tensor in self.fitted.network.state_dict().items()}
            kept = {f"memory.{name}": torch.from_numpy(one) for name, one in self.fitted.memory.arrays().items()}
            (partial / WEIGHTS).write_bytes(to_safetensors({**tensors, **kept}))
            (partial / CARD).write_text(self.card.to_json() + "\n", encoding="utf-8")


def fit_evaluator(
    examples: Sequence[Example],
    labels: Iterable[StepLabel],
    *,
    encoder: str,
    encoding: Encoding,
    settings: FitSettings,
    seed: int,
    report: Callable[[str], None] = lambda _line: None,
) -> FittedEvaluator:
    """Measure on held-out groups, then fit on everything. The gate judges the measures; it is never bypassed here."""
    if not examples:
        raise ConfigError("no labelled step; give outcomes, a labels file or a heuristic")
    held_out = cross_validate(examples, settings, seed=seed)
    report(f"{settings.folds} folds over {len({one.group for one in examples})} groups measured")
    shape = shape_of(examples, settings)
    fitted = fit(examples, shape, settings.training, seed=seed + settings.folds)
    card = Card(
        encoder=encoder,
        encoding=encoding,
        network=dataclasses.asdict(shape),
        seed=seed,
        labels=dict(Counter(label.source for label in labels)),
        settings=dataclasses.asdict(settings),
        **measured(examples, held_out),
    )
    head = card.head()
    return FittedEvaluator(fitted=fitted, card=card, verdict=judge("reward_model", head, card.reliability.get(head)))


def measured(examples: Sequence[Example], held_out: Mapping[str, HeldOut]) -> dict[str, Any]:
    """What a card says of the data, of calibration and of reliability."""
    return {
        "data": {
            "trajectories": len(examples),
            "groups": len({one.group for one in examples}),
            "steps": sum(len(one.prefixes) - 1 for one in examples),
        },
        "calibration": {head: platt(one.logits, one.targets) for head, one in held_out.items()},
        "reliability": {head: reliability(one) for head, one in held_out.items()},
    }


def lines(card: Card) -> list[str]:
    """The reliability of every head and its baselines, to be printed."""
    found = []
    for head, one in card.reliability.items():
        pairs = (
            "" if one.pair_accuracy is None else f", pairs {one.pair_accuracy:.3f} over {one.pair_contexts} contexts"
        )
        auc = "unknown" if one.auc is None else f"{one.auc:.3f}"
        found.append(
            f"{head}: {one.steps} held-out steps, {100 * one.positive_share:.1f} % positive: AUC {auc}, "
            f"ECE {one.ece:.3f}, Brier {one.brier:.3f}{pairs}"
        )
        found += [
            f"  rule {name:<24} AUC {'unknown' if value is None else f'{value:.3f}'}"
            for name, value in one.baselines.items()
        ]
    return found


def shape_of(examples: Sequence[Example], settings: FitSettings) -> NetworkShape:
    _, segments, dimension = examples[0].prefixes.vectors.shape
    return NetworkShape(
        dimension=dimension,
        segments=segments,
        width=settings.width,
        layers=settings.layers,
        members=settings.members,
        dropout=settings.dropout,
    )


def platt(logits: Floats, targets: Floats) -> tuple[float, float]:
    """(a, b) such that sigmoid(a logit + b) fits the targets (Platt 1999); a is never below 0."""
    spread = float(logits.std()) + 1e-9
    shift, slope = logistic_regression((logits / spread)[:, None], targets, ridge=1e-3)
    return max(0.0, float(slope) / spread), float(shift)


def _held_out(examples: Sequence[Example], logits: Sequence[Floats], fold: NDArray[np.int64], head: int) -> HeldOut:
    places = [
        (index, place)
        for index, one in enumerate(examples)
        for place in range(1, len(one.prefixes))
        if one.weights[place, head] > 0
    ]
    rows = Rows(
        evidence=np.stack([examples[index].prefixes.evidence[place] for index, place in places]).astype(np.float64),
        texts=[examples[index].prefixes.texts[place] for index, place in places],
        types=[examples[index].prefixes.types[place] for index, place in places],
        targets=np.array([examples[index].targets[place, head] for index, place in places]),
        fold=np.array([fold[index] for index, _ in places], np.int64),
    )
    return HeldOut(
        logits=np.array([logits[index][place, head] for index, place in places]),
        targets=rows.targets,
        weights=np.array([examples[index].weights[place, head] for index, place in places]),
        contexts=tuple(_context(examples[index], index, place) for index, place in places),
        dialogues=np.array([index for index, _ in places], np.int64),
        fold=rows.fold,
        baselines=held_out_scores(rows),
    )


def _context(example: Example, index: int, place: int) -> str:
    """Last steps of one context are alternatives to each other; any other step is an alternative to nothing."""
    return example.context if place == len(example.prefixes) - 1 else f"{index} {place}"


def _sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(logits, -60.0, 60.0)))
