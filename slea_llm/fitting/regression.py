"""Logistic regression, small and exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def logistic_regression(features: Floats, targets: Floats, *, ridge: float, rounds: int = 50) -> Floats:
    """(1 + d,) intercept and weights by Newton's method; the ridge spares the intercept. Targets are in [0, 1]."""
    design = np.concatenate([np.ones((len(features), 1)), features], axis=1)
    weights = np.zeros(design.shape[1])
    penalty = np.full(design.shape[1], ridge)
    penalty[0] = 1e-3  # only so much that one kind of label alone stays finite
    for _ in range(rounds):
        chances = 1.0 / (1.0 + np.exp(-np.clip(design @ weights, -30.0, 30.0)))
        gradient = design.T @ (chances - targets) + penalty * weights
        curvature = (design.T * (chances * (1.0 - chances) + 1e-9)) @ design + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights = weights - step
        if float(np.abs(step).max()) < 1e-8:
            break
    return weights
