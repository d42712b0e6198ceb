"""What the loop trains on beside fresh dialogues: those of a buffer, and what is imitated. Either may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slea_llm.errors import CheckpointError
from slea_llm.interfaces import Imitator, Reducer, Replay
from slea_llm.types import AugmentedExperience, ScoredTrajectory


class Mixing:
    """A buffer and an imitator around credit: `mix` before it, `credited` after it. Every rank calls both.

    `iteration` counts from 0; `progress` in [0, 1] is the share of training done.
    """

    def __init__(self, replay: Replay | None, imitation: Imitator | None) -> None:
        self._replay, self._imitation = replay, imitation

    def mix(
        self,
        fresh: Sequence[ScoredTrajectory],
        *,
        iteration: int,
        policy_version: int,
        progress: float,
        reducer: Reducer,
    ) -> tuple[Sequence[ScoredTrajectory], Mapping[str, float]]:
        """The fresh dialogues, those that the buffer adds behind them, and metrics."""
        if self._replay is None:
            return fresh, {}
        return self._replay.mix(
            fresh, iteration=iteration, policy_version=policy_version, progress=progress, reducer=reducer
        )

    def credited(
        self, experiences: Sequence[AugmentedExperience], *, iteration: int, progress: float, reducer: Reducer
    ) -> tuple[Sequence[AugmentedExperience], Mapping[str, float]]:
        """The experiences with their importance weights and what is imitated, and metrics."""
        metrics: dict[str, float] = {}
        if self._replay is not None:
            experiences, said = self._replay.weigh(experiences, reducer=reducer)
            metrics |= said
        if self._imitation is not None:
            experiences, said = self._imitation.mark(
                experiences, iteration=iteration, progress=progress, reducer=reducer
            )
            metrics |= said
        return experiences, metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of this rank's buffer, under `replay`; nothing without one."""
        return {} if self._replay is None else {"replay": dict(self._replay.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when one of state and run has a buffer and the other has none."""
        if (self._replay is None) != ("replay" not in state):
            here = "without" if self._replay is None else "with"
            raise CheckpointError(f"the checkpoint was not written {here} replay, as this run is; start a fresh run")
        if self._replay is not None:
            self._replay.restore(state["replay"])
