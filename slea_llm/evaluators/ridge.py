"""A weighted ridge regression of the outcome on step features: convex, without chance, chosen by grouped folds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidates for the penalty on squared weights, over the mean weighted loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ridge:
    """`predict(rows)` is `rows @ weights + bias`; clipped to [0, 1] it is read as a probability."""

    weights: Floats  # (features,)
    bias: float
    penalty: float

    def predict(self, rows: Floats) -> Floats:
        """Probabilities, shape (n,), of rows of shape (n, features)."""
        values: Floats = np.clip(rows @ self.weights + self.bias, 0.0, 1.0)
        return values

    def arrays(self) -> dict[str, Floats]:
        return {"weights": self.weights, "bias": np.array([self.bias])}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, penalty: float) -> Ridge:
        return cls(weights=arrays["weights"], bias=float(arrays["bias"][0]), penalty=penalty)


def fit_ridge(rows: Floats, targets: Floats, weights: Floats, folds: NDArray[np.int64]) -> Ridge:
    """The least of sum_i w_i (x_i b + c - y_i)^2 / sum w + penalty |b|^2, the penalty with the least held-out loss.

    `folds[i]` numbers the fold of row i; rows of one dialogue share one. The bias is not penalised. With fewer than
    two folds the largest penalty is taken.
    """
    names = np.unique(folds)
    if len(names) < 2:
        return _solve(rows, targets, weights, (PENALTIES[-1],))[0]
    loss = np.zeros(len(PENALTIES))
    for name in names:
        held = folds == name
        for index, model in enumerate(_solve(rows[~held], targets[~held], weights[~held], PENALTIES)):
            loss[index] += float(np.sum(weights[held] * (model.predict(rows[held]) - targets[held]) ** 2))
    return _solve(rows, targets, weights, (PENALTIES[int(np.argmin(loss))],))[0]


def _solve(rows: Floats, targets: Floats, weights: Floats, penalties: Sequence[float]) -> list[Ridge]:
    share = weights / weights.sum()
    centre, mean = share @ rows, float(share @ targets)
    scaled = np.sqrt(share)[:, None] * (rows - centre)
    wanted = np.sqrt(share) * (targets - mean)
    # The smaller of the two Gram matrices: (features, features), or (n, n) when there are fewer rows than features.
    tall = rows.shape[0] >= rows.shape[1]
    values, vectors = np.linalg.eigh(scaled.T @ scaled if tall else scaled @ scaled.T)
    right = vectors.T @ (scaled.T @ wanted if tall else wanted)
    models = []
    for penalty in penalties:
        solved = vectors @ (right / (np.maximum(values, 0.0) + penalty))
        slope = solved if tall else scaled.T @ solved
        models.append(Ridge(weights=slope, bias=mean - float(centre @ slope), penalty=penalty))
    return models


def fold_of(group: str, *, folds: int, seed: int) -> int:
    """The fold of a group by its name: the same in every process, whatever the order of the data."""
    return zlib.crc32(f"{seed}/{group}".encode("utf-8", "surrogatepass")) % folds
