"""Rules that know nothing of what a step says about its surroundings; a fitted evaluator must beat every one of them.

Each is fitted on the same training folds and predicts the same held-out groups as the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slea_llm.evaluators.reward_model_features import EVIDENCE
from slea_llm.fitting.regression import logistic_regression

Floats = NDArray[np.float64]

PRIOR = 2.0
"""Labels that a type or text is credited with at the rate of what it backs off to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Labelled steps of all examples: `evidence` (n, E), texts, types, `targets` (n,) and the fold of each."""

    evidence: Floats
    texts: Sequence[str]
    types: Sequence[str]
    targets: Floats
    fold: NDArray[np.int64]


def held_out_scores(rows: Rows) -> Mapping[str, Floats]:
    """Rule -> (n,) its held-out scores."""
    by_type, by_text, seen = _rates(rows)
    columns = {name: rows.evidence[:, place] for place, name in enumerate(EVIDENCE)}
    position = np.stack([columns["turn"], columns["turn"] ** 2, columns["step_of_turn"]], axis=1)
    length = np.stack([columns["log_length"], columns["log_length"] ** 2], axis=1)
    overlap = np.stack([_logit(by_text), seen, columns["words_in_all"], columns["pieces_in_all"]], axis=1)
    return {
        "position": _logistic(position, rows),
        "length": _logistic(length, rows),
        "type": by_type,
        "popularity": by_text,
        "popularity_with_overlap": _logistic(overlap, rows),
    }


def _rates(rows: Rows) -> tuple[Floats, Floats, Floats]:
    """Held-out rate of a step's type, of its text (backing off to the type), and log count of its text."""
    by_type, by_text, seen = (np.zeros(len(rows.targets)) for _ in range(3))
    for fold in np.unique(rows.fold):
        train = np.flatnonzero(rows.fold != fold)
        base = float(rows.targets[train].mean()) if train.size else 0.5
        types: dict[str, list[float]] = defaultdict(list)
        texts: dict[str, list[float]] = defaultdict(list)
        for place in train:
            types[rows.types[place]].append(float(rows.targets[place]))
            texts[rows.texts[place]].append(float(rows.targets[place]))
        for place in np.flatnonzero(rows.fold == fold):
            of_type, of_text = types.get(rows.types[place], []), texts.get(rows.texts[place], [])
            by_type[place] = _smoothed(of_type, base)
            by_text[place] = _smoothed(of_text, float(by_type[place]))
            seen[place] = math.log1p(len(of_text))
    return by_type, by_text, seen


def _smoothed(labels: Sequence[float], prior: float) -> float:
    return (sum(labels) + PRIOR * prior) / (len(labels) + PRIOR)


def _logit(rates: Floats) -> Floats:
    clipped = np.clip(rates, 1e-3, 1.0 - 1e-3)
    return np.log(clipped / (1.0 - clipped))


def _logistic(features: Floats, rows: Rows) -> Floats:
    scores = np.zeros(len(rows.targets))
    for fold in np.unique(rows.fold):
        train, held = rows.fold != fold, rows.fold == fold
        centre, spread = features[train].mean(axis=0), features[train].std(axis=0) + 1e-9
        weights = logistic_regression((features[train] - centre) / spread, rows.targets[train], ridge=1.0)
        scores[held] = (features[held] - centre) / spread @ weights[1:] + weights[0]
    return scores
