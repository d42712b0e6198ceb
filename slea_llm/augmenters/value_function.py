"""A small value function in plain numpy: one or two layers on the rows of places. `value_learning` fits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Arrays = Mapping[str, NDArray[Any]]


def initial(size: int, hidden: int, *, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights of a network that says 0 everywhere: the last layer starts at 0. `hidden` 0: one layer."""
    rng = np.random.default_rng(seed)
    if not hidden:
        return {"out.weight": np.zeros((1, size), np.float32), "out.bias": np.zeros(1, np.float32)}
    return {
        "in.weight": rng.normal(0.0, size**-0.5, (hidden, size)).astype(np.float32),
        "in.bias": np.zeros(hidden, np.float32),
        "out.weight": np.zeros((1, hidden), np.float32),
        "out.bias": np.zeros(1, np.float32),
    }


def predict(weights: Arrays, rows: NDArray[np.float32]) -> Floats:
    """(n,) of rows (n, size), in the network's own units."""
    inner = rows
    if "in.weight" in weights:
        inner = np.tanh(rows @ weights["in.weight"].T + weights["in.bias"])
    values = inner @ weights["out.weight"].T + weights["out.bias"]
    return np.asarray(values[:, 0], np.float64)


def td_targets(
    rewards: Sequence[float], values: Sequence[float], gammas: Sequence[float], *, lam: float, cut: bool
) -> list[float]:
    """TD(lambda) targets of one dialogue: G_k = r_k + gamma_k ((1 - lam) V_(k+1) + lam G_(k+1)).

    `values` holds one more entry than `rewards`, the value after the last; it counts when the dialogue was cut from
    outside, and is 0 when it ended. lam 1: Monte Carlo returns; lam 0: TD(0) (Sutton 1988).

    >>> td_targets([0, 0, 10], [4, 5, 6, 9], [.99] * 3, lam=0., cut=False)
    [4.95, 5.94, 10.0]
    """
    following = values[-1] if cut else 0.0
    target = following
    found: list[float] = []
    for reward, gamma, after in zip(
        reversed(rewards), reversed(gammas), [following, *reversed(values[1:-1])], strict=True
    ):
        target = reward + gamma * ((1.0 - lam) * after + lam * target)
        found.append(float(target))
    return found[::-1]


def polyak(target: Arrays, online: Arrays, tau: float) -> dict[str, NDArray[np.float32]]:
    """target + tau (online - target), entry by entry."""
    return {name: (one + np.float32(tau) * (online[name] - one)).astype(np.float32) for name, one in target.items()}
