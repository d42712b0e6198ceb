"""Dialogues for a replay buffer, and the buffer itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slea_llm.buffer import ReplayBuffer
from slea_llm.settings import ReplaySettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, Termination
from tests.support.experience import dialogue, stats_of


def one(name: str, *, version: int = 0, task: str = "", termination: Termination = "success") -> ScoredTrajectory:
    """A dialogue of one turn with a thought and a reply, one of a task if it is named."""
    shape = [[("thought", 2), ("reply", 3)]]
    scores = {"judge": {(0, 0): 0.5, (0, 1): -0.25}}
    made = dialogue(shape, rewards=[1.0], scores=scores, name=name, termination=termination)  # type: ignore[arg-type]
    changed = dataclasses.replace(made.trajectory, policy_version=version, task={"id": task} if task else {})
    return dataclasses.replace(made, trajectory=changed)


def several(*names: str, version: int = 0) -> list[ScoredTrajectory]:
    return [one(name, version=version) for name in names]


def buffer(folder: Path, *, seed: int = 0, **options: Any) -> ReplayBuffer:
    """A buffer with half of every batch replayed and uniform priorities, unless said otherwise."""
    known = {field.name for field in dataclasses.fields(ReplaySettings)}
    settings = {"share": 0.5, "priority": "uniform", **{key: options.pop(key) for key in known & options.keys()}}
    given = {"overrides": options.pop("overrides_from", None), "priority": options.pop("priority_of", None)}
    return ReplayBuffer(ReplaySettings(**settings), folder, seed=seed, **given, **options)


def credited(scored: ScoredTrajectory, *, error: float = 0.0) -> AugmentedExperience:
    """Credit that found the critic wrong by `error` at every token."""
    n = scored.trajectory.sampled_tokens
    on = np.ones(n, bool)
    return AugmentedExperience(
        scored=scored,
        stats=stats_of(scored, {"outcome": [0.0] * n}),
        rewards={},
        advantages=np.zeros(n),
        returns={"outcome": np.full(n, error)},
        weights=np.ones(n),
        value_mask=on,
        policy_mask=on,
    )


def ids(scored: Sequence[ScoredTrajectory]) -> list[str]:
    return [each.trajectory.id for each in scored]
