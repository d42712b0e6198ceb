"""A reader of whole dialogues in plain numpy: attention over steps predicts the return. `reader_learning` fits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]


def initial(size: int, width: int, *, seed: int) -> dict[str, Rows]:
    """Weights of a reader that attends to all steps alike and predicts 0."""
    rng = np.random.default_rng(seed)
    return {
        "key.weight": rng.normal(0.0, size**-0.5, (width, size)).astype(np.float32),
        "value.weight": rng.normal(0.0, size**-0.5, (width, size)).astype(np.float32),
        "value.bias": np.zeros(width, np.float32),
        "query": np.zeros(width, np.float32),
        "out.weight": np.zeros(width, np.float32),
        "out.bias": np.zeros(1, np.float32),
    }


def attention(weights: Arrays, steps: Rows) -> Floats:
    """(T,) softmax(q k / sqrt(width)) over the T steps of a dialogue, rows (T, size)."""
    keys = steps @ weights["key.weight"].T
    logits = np.asarray(keys @ weights["query"], np.float64) / np.sqrt(len(weights["query"]))
    raised = np.exp(logits - logits.max(initial=-np.inf))
    return np.asarray(raised / raised.sum())


def predict(weights: Arrays, steps: Rows) -> float:
    """The return of a dialogue, in the reader's own units."""
    return _out(weights, attention(weights, steps) @ _values(weights, steps))


def leave_one_out(weights: Arrays, steps: Rows) -> Floats:
    """(T,) g(all steps) - g(all but step k): what step k adds to the predicted return."""
    alpha, values = attention(weights, steps), _values(weights, steps)
    whole = alpha @ values
    if len(alpha) == 1:
        return np.array([_out(weights, whole) - _out(weights, np.zeros_like(whole))])
    # Summed over the others rather than subtracted from the whole: a step may hold all of the attention.
    others = 1.0 - np.eye(len(alpha))
    logits = np.log(np.maximum(alpha, np.finfo(np.float64).tiny))
    raised = np.exp(logits - np.where(others > 0, logits, -np.inf).max(axis=1, keepdims=True)) * others
    without = (raised / raised.sum(axis=1, keepdims=True)) @ values
    return np.array([_out(weights, whole) - _out(weights, one) for one in without])


def _values(weights: Arrays, steps: Rows) -> Floats:
    return np.asarray(np.tanh(steps @ weights["value.weight"].T + weights["value.bias"]), np.float64)


def _out(weights: Arrays, read: Floats) -> float:
    return float(read @ weights["out.weight"] + weights["out.bias"][0])
