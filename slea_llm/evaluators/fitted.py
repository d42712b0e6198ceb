"""What is learnt from logged dialogues: its data, its held-out quality beside plain baselines, and its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from slea_llm.errors import EvaluatorError, StorageError, nearest
from slea_llm.evaluators.ridge import Floats, Ridge, fit_ridge, fold_of
from slea_llm.evaluators.step_features import Moment, moments, words
from slea_llm.folders import sha256_of, whole_folder
from slea_llm.types import ScoredTrajectory

WEIGHTS, CARD = "weights.safetensors", "card.json"
FORMAT = 1
HELD_OUT_SHARE = 5
"""One group in this many is held out for the card."""
INNER_FOLDS = 4
BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One finished dialogue to learn from."""

    group: str
    moments: tuple[Moment, ...]
    success: bool


def examples(data: Sequence[ScoredTrajectory]) -> list[Example]:
    """The dialogues that ended and have steps; those of one task share a group.

    Raises EvaluatorError when none is left, or all ended alike: then there is nothing to tell apart.
    """
    found = []
    for scored in data:
        trajectory = scored.trajectory
        if not trajectory.failed and scored.steps:
            group = str(trajectory.task.get("id", trajectory.id))
            made = tuple(moments(trajectory, scored.steps))
            found.append(Example(group=group, moments=made, success=trajectory.success))
    successes = sum(example.success for example in found)
    if not 0 < successes < len(found):
        raise EvaluatorError(
            f"{len(found)} finished dialogues with {successes} successes; a fit needs both successes and failures"
        )
    return found


def split(data: Sequence[Example], *, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out dialogues, by group. Raises EvaluatorError when either side lacks an outcome."""
    held = [example for example in data if fold_of(example.group, folds=HELD_OUT_SHARE, seed=seed) == 0]
    kept = [example for example in data if fold_of(example.group, folds=HELD_OUT_SHARE, seed=seed) != 0]
    for name, side in (("training", kept), ("held-out", held)):
        if len({example.success for example in side}) < 2:
            raise EvaluatorError(
                f"the {name} side of the split by task has {len(side)} of {len(data)} dialogues, not of both outcomes; "
                "give more dialogues, or another seed"
            )
    return kept, held


def area_under_curve(scores: Floats, labels: NDArray[np.bool_]) -> float:
    """The chance that a positive scores above a negative, ties counted half; NaN without both."""
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    return float((ranks[labels].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


def calibration_error(scores: Floats, labels: NDArray[np.bool_]) -> float:
    """Expected calibration error over ten equal bins of [0, 1]: mean of |share of positives - mean score|."""
    bins = np.minimum((scores * BINS).astype(int), BINS - 1)
    gaps = [abs(float(np.sum(labels[bins == b]) - np.sum(scores[bins == b]))) for b in range(BINS)]
    return sum(gaps) / len(scores)


def quality(scores: Floats, labels: NDArray[np.bool_]) -> dict[str, float]:
    """AUC, ECE and Brier score of probabilities against outcomes, each rounded to 6 places."""
    numbers = {
        "auc": area_under_curve(scores, labels),
        "ece": calibration_error(scores, labels),
        "brier": float(np.mean((scores - labels) ** 2)),
    }
    return {name: round(value, 6) for name, value in numbers.items()}


def outcomes(data: Sequence[Example]) -> NDArray[np.bool_]:
    """The outcome of its dialogue for every step, in order."""
    return np.array([example.success for example in data for _ in example.moments], dtype=bool)


def fit_rows(data: Sequence[Example], row: Callable[[Moment], Floats], weights: Floats, *, seed: int) -> Ridge:
    """A ridge of the outcome on one row a step, its penalty chosen by folds of groups."""
    rows = np.stack([row(moment) for example in data for moment in example.moments])
    folds = [inner_fold(example, seed=seed) for example in data for _ in example.moments]
    return fit_ridge(rows, outcomes(data).astype(float), weights, np.array(folds))


def inner_fold(example: Example, *, seed: int) -> int:
    """The fold, inside the training side, by which a penalty is chosen."""
    return fold_of(example.group, folds=INNER_FOLDS, seed=seed + 1)


def equal_weights(data: Sequence[Example]) -> Floats:
    return np.ones(sum(len(example.moments) for example in data))


def _position(moment: Moment) -> Floats:
    return np.array([moment.position, np.sqrt(moment.position), moment.turn], dtype=float)


def _length(moment: Moment) -> Floats:
    count = len(words(moment.text))
    return np.array([count, np.log1p(count)], dtype=float)


def _kind(moment: Moment) -> Floats:
    return np.array([moment.kind == kind for kind in ("thought", "reply", "tool_call")], dtype=float)


def baselines(kept: Sequence[Example], held: Sequence[Example], *, seed: int) -> dict[str, dict[str, float]]:
    """What position, length and kind of a step alone predict on the same split."""
    forms: Mapping[str, Callable[[Moment], Floats]] = {"position": _position, "length": _length, "kind": _kind}
    found = {}
    for name, form in forms.items():
        model = fit_rows(kept, form, equal_weights(kept), seed=seed)
        rows = np.stack([form(moment) for example in held for moment in example.moments])
        found[name] = quality(model.predict(rows), outcomes(held))
    return found


def data_facts(data: Sequence[Example], held: Sequence[Example], *, seed: int) -> dict[str, Any]:
    """What a card says of its data."""
    return {
        "dialogues": len(data),
        "successes": sum(example.success for example in data),
        "steps": sum(len(example.moments) for example in data),
        "groups": len({example.group for example in data}),
        "held_out_dialogues": len(held),
        "held_out_steps": sum(len(example.moments) for example in held),
        "seed": seed,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Arrays and card of one learnt part. `card["held_out"]` and `card["baselines"]` hold auc, ece and brier."""

    kind: str
    arrays: Mapping[str, NDArray[Any]]
    card: Mapping[str, Any]
    version: str = field(default="")

    def save(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write weights and card, whole or not at all. Raises StorageError."""
        with whole_folder(folder, overwrite=overwrite) as partial:
            save_file({name: np.ascontiguousarray(array) for name, array in self.arrays.items()}, partial / WEIGHTS)
            document = {"format": FORMAT, "kind": self.kind, "weights": sha256_of(partial / WEIGHTS), **self.card}
            text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
            (partial / CARD).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def check(folder: Path, kind: str) -> None:
        """Raise StorageError unless the folder holds the card of that kind and weights; reads no weights."""
        Fitted._card(folder, kind)
        if not (folder / WEIGHTS).is_file():
            raise StorageError(f"{folder} holds no fitted {kind}: {WEIGHTS} is missing")

    @staticmethod
    def _card(folder: Path, kind: str) -> dict[str, Any]:
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(f"{folder} holds no fitted {kind}: {error}") from error
        if not isinstance(card, dict) or card.get("kind") != kind or card.get("format") != FORMAT:
            found = str(card.get("kind")) if isinstance(card, dict) else "nothing known"
            raise StorageError(f"{folder} holds {found}, not {kind} of format {FORMAT}{nearest(found, [kind])}")
        return card

    @classmethod
    def load(cls, folder: Path, kind: str) -> Fitted:
        """Read what `save` wrote. Raises StorageError when a file is missing, changed, or of another kind."""
        card = cls._card(folder, kind)
        try:
            version, arrays = sha256_of(folder / WEIGHTS), load_file(folder / WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise StorageError(f"{folder} holds no fitted {kind}: {error}") from error
        if card.get("weights") != version:
            raise StorageError(f"{folder / WEIGHTS} is not the file that {CARD} was written for; fit again")
        return cls(kind=kind, arrays=arrays, card=card, version=version[:16])
