"""What credit methods share: the recursion of generalised advantage estimation, and whitening over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slea_llm.interfaces import Reducer

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]

FLAT = 1e-8
"""Standard deviation, relative to max(1, |mean|), at or below which numbers count as all equal."""


def gae(rewards: Floats, values: Floats, gammas: Floats, lams: Floats, *, bootstrap: Floats, mask: Bools) -> Floats:
    """Advantages of padded trajectories, scanned backwards, all trajectories at once.

    Every array has shape (trajectories, tokens) but `bootstrap` (trajectories,), the value after the last token: 0
    where the dialogue terminated, the critic's word where it was cut. `gammas[:, i]` and `lams[:, i]` belong to the
    transition from token i to the next unmasked one. Masked positions (padding, tokens that were not sampled) are
    stepped over: whatever they hold reaches nothing, and their advantage is 0. With i' the next unmasked token:

        delta_i = r_i + gamma_i V_i' - V_i,    A_i = delta_i + gamma_i lam_i A_i'.

    >>> row = lambda *numbers: np.array([numbers], dtype=float)
    >>> gae(row(0, 0, 1), row(.5, .6, .7), row(1, 1, 1), row(.95, .95, .95),
    ...     bootstrap=np.zeros(1), mask=np.ones((1, 3), bool)).round(5).tolist()
    [[0.46575, 0.385, 0.3]]
    """
    count, length = values.shape
    # Columns are walked one by one: laid out by token each of them is contiguous. Masked slots are emptied first, so
    # that not even a NaN in the padding survives.
    live = np.ascontiguousarray(mask.T)
    reward, value, gamma, lam = (
        np.where(live, np.asarray(array, dtype=np.float64).T, 0.0) for array in (rewards, values, gammas, lams)
    )
    decay = gamma * lam
    advantages = np.zeros((length, count))
    following_value = np.asarray(bootstrap, dtype=np.float64)
    following_advantage = np.zeros(count)
    for index in range(length - 1, -1, -1):
        delta = reward[index] + gamma[index] * following_value - value[index]
        here = live[index]
        following_advantage = np.where(here, delta + decay[index] * following_advantage, following_advantage)
        following_value = np.where(here, value[index], following_value)
        advantages[index] = following_advantage
    return np.where(mask, advantages.T, 0.0)


def whiten(
    arrays: Sequence[Floats], masks: Sequence[Bools], reducer: Reducer, weights: Sequence[Floats] | None = None
) -> list[Floats]:
    """Each array to mean 0 and population standard deviation 1 over its mask, over all ranks; 0 outside the mask.

    `weights`, of the shapes of the arrays, say what a number counts for in both statistics; None: each counts once.

    Numbers that are all equal, a single number among them, become 0. No epsilon is added to the deviation, so that
    whitening twice is whitening once. Two sums across ranks whatever the number of arrays, also from an empty rank.
    """
    picked = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
    if weights is None:
        shares = [np.ones(part.size) for part in picked]
    else:
        shares = [weight[mask] for weight, mask in zip(weights, masks, strict=True)]
    pairs = list(zip(picked, shares, strict=True))
    sums = reducer.sum([number for part, w in pairs for number in (float(w.sum()), float((w * part).sum()))])
    counts = [count or 1.0 for count in sums[0::2]]
    means = [total / count for total, count in zip(sums[1::2], counts, strict=True)]
    # Corrected two-pass form (Chan et al. 1983): what rounding left of the mean is taken out with the deviations.
    deviations = [part - mean for part, mean in zip(picked, means, strict=True)]
    pairs = list(zip(deviations, shares, strict=True))
    rests = reducer.sum(
        [number for part, w in pairs for number in (float((w * part).sum()), float((w * np.square(part)).sum()))]
    )
    whitened = []
    for index, (array, mask, part) in enumerate(zip(arrays, masks, deviations, strict=True)):
        rest, square = rests[2 * index] / counts[index], rests[2 * index + 1] / counts[index]
        deviation = math.sqrt(max(square - rest * rest, 0.0))
        result = np.zeros_like(array)
        if deviation > FLAT * max(1.0, abs(means[index])):
            result[mask] = (part - rest) / deviation
        whitened.append(result)
    return whitened


def length_adaptive_lambda(tokens: Ints, alpha: float) -> Floats:
    """lambda = 1 - 1 / (alpha * tokens), at least 0 (VAPO, Yue et al. 2025)."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(tokens, 1)))
