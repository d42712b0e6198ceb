"""Situations and steps as clusters, and how often each step was taken, and succeeded, in each situation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slea_llm.evaluators.fitted import Example
from slea_llm.evaluators.ridge import Floats
from slea_llm.evaluators.step_features import Moment, situation, utterance

ROUNDS = 50
PRIOR = 2.0
"""Pseudo-dialogues with the success rate of all data that every situation starts with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Counts by situation and step, smoothed so that pi, h and V are those of one joint distribution.

    `joint[s, c, y]` is N(s, c, y) + laplace * P(y | s) with P(y | s) drawn towards the rate of all data: a step never
    seen in a situation has lift 1 there and no credit. By construction V h / pi is P(success | s, c), and the mean of
    P(success | s, c) under pi is V.
    """

    states: Floats  # (situations, size), centres
    steps: Floats  # (steps, size), centres
    joint: Floats  # (situations, steps, 2); last axis: failure, success

    @property
    def size(self) -> int:
        return int(self.states.shape[1])

    def place(self, moment: Moment) -> tuple[int, int]:
        """The nearest situation and the nearest step."""
        return (
            int(nearest_centre(situation(moment, self.size)[None], self.states)[0]),
            int(nearest_centre(utterance(moment, self.size)[None], self.steps)[0]),
        )

    def policy(self, state: int) -> Floats:
        """pi(step | situation), shape (steps,)."""
        taken: Floats = self.joint[state].sum(axis=1)
        shares: Floats = taken / taken.sum()
        return shares

    def backward(self, state: int) -> Floats:
        """h(step | situation, success), shape (steps,)."""
        succeeded: Floats = self.joint[state, :, 1]
        shares: Floats = succeeded / succeeded.sum()
        return shares

    def value(self, state: int) -> float:
        """P(success | situation)."""
        return float(self.joint[state, :, 1].sum() / self.joint[state].sum())

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"states": self.states, "steps": self.steps, "joint": self.joint}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> StepTable:
        return cls(states=arrays["states"], steps=arrays["steps"], joint=arrays["joint"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How fine a table is: numbers of clusters (at most), size of the hashed features, Laplace count of a cell."""

    states: int = 32
    steps: int = 40
    size: int = 128
    laplace: float = 1.0


def build_table(data: Sequence[Example], grid: Grid, *, seed: int) -> StepTable:
    """Cluster situations and steps of the data by k-means, then count."""
    flat = [moment for example in data for moment in example.moments]
    seen = np.stack([situation(moment, grid.size) for moment in flat])
    said = np.stack([utterance(moment, grid.size) for moment in flat])
    states, steps = cluster(seen, grid.states, seed=seed), cluster(said, grid.steps, seed=seed)
    counts = np.zeros((len(states), len(steps), 2))
    success = np.array([int(example.success) for example in data for _ in example.moments])
    np.add.at(counts, (nearest_centre(seen, states), nearest_centre(said, steps), success), 1.0)
    return StepTable(states=states, steps=steps, joint=smoothed(counts, laplace=grid.laplace))


def smoothed(counts: Floats, *, laplace: float) -> Floats:
    """Counts (situations, steps, 2) with a Laplace count of `laplace` a step, shared out as outcomes are there."""
    overall = counts.sum(axis=(0, 1)) / counts.sum()
    by_state = counts.sum(axis=1) + PRIOR * overall
    rates = by_state / by_state.sum(axis=1, keepdims=True)
    joint: Floats = counts + laplace * rates[:, None, :]
    return joint


def nearest_centre(rows: Floats, centres: Floats) -> NDArray[np.int64]:
    """Index of the nearest centre (Euclidean), the first of equals, for rows of shape (n, size)."""
    distances = (centres**2).sum(axis=1)[None] - 2.0 * rows @ centres.T
    places: NDArray[np.int64] = np.argmin(distances, axis=1)
    return places


def cluster(rows: Floats, count: int, *, seed: int) -> Floats:
    """k-means (Lloyd, k-means++ start): centres of at most `count` clusters, fewer when fewer rows differ."""
    rng = np.random.default_rng(seed)
    centres = rows[[int(rng.integers(len(rows)))]]
    gaps = ((rows - centres[0]) ** 2).sum(axis=1)
    while len(centres) < count and gaps.max() > 1e-9:
        chosen = int(rng.choice(len(rows), p=gaps / gaps.sum()))
        centres = np.concatenate([centres, rows[[chosen]]])
        gaps = np.minimum(gaps, ((rows - rows[chosen]) ** 2).sum(axis=1))
    for _ in range(ROUNDS):
        places = nearest_centre(rows, centres)
        members = np.bincount(places, minlength=len(centres)).astype(float)
        sums = np.zeros_like(centres)
        np.add.at(sums, places, rows)
        moved = np.where(members[:, None] > 0, sums / np.maximum(members, 1.0)[:, None], centres)
        if np.allclose(moved, centres, rtol=0.0, atol=1e-12):
            break
        centres = moved
    return centres
