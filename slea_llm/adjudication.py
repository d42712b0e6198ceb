"""Rollouts under a referee: every record says who was to blame, and what was not the agent's fault is played again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from slea_llm.referee import Referee
from slea_llm.rollout import FailedEpisodesError, Rollout
from slea_llm.types import Task, Trajectory

REDRAWS = 1000
"""Draws of the user's seed that lie between two draws asked for by the caller: room for those played again."""


class Playing(Protocol):
    """What plays tasks: a rollout, or one under a referee."""

    def run(
        self,
        tasks: Sequence[Task],
        *,
        first_episode: int,
        policy_version: int,
        progress: bool = False,
        user_draw: int = 0,
    ) -> list[Trajectory]: ...


class RefereedRollout:
    """A rollout whose records hold the referee's ruling as `provenance["blame"]`.

    A dialogue that the referee excludes is played again, `redraws` times at most, with another seed of its user; the
    record that it replaces is kept, with `redrawn` in its ruling, behind the others.
    """

    def __init__(self, rollout: Rollout, referee: Referee) -> None:
        self._rollout, self._referee = rollout, referee

    def run(
        self,
        tasks: Sequence[Task],
        *,
        first_episode: int,
        policy_version: int,
        progress: bool = False,
        user_draw: int = 0,
    ) -> list[Trajectory]:
        """One record for every task, in their order, then those that were replaced.

        Raises what a rollout raises; the records of a FailedEpisodesError hold rulings too.
        """
        try:
            played = self._rollout.run(
                tasks,
                first_episode=first_episode,
                policy_version=policy_version,
                progress=progress,
                user_draw=user_draw * REDRAWS,
            )
        except FailedEpisodesError as error:
            raise FailedEpisodesError(str(error), self._referee.marked(error.trajectories)) from error
        records = self._referee.marked(played)
        replaced: list[Trajectory] = []
        for redraw in range(1, self._referee.config.redraws + 1):
            again = [place for place, one in enumerate(records) if one.excluded and not one.failed]
            if not again:
                break
            fresh = self._again(
                [tasks[place] for place in again],
                again,
                first_episode=first_episode,
                policy_version=policy_version,
                user_draw=user_draw,
                redraw=redraw,
            )
            for place, one in zip(again, fresh, strict=True):
                replaced.append(_replaced(records[place]))
                records[place] = one
        return [*records, *replaced]

    def _again(
        self,
        tasks: Sequence[Task],
        places: Sequence[int],
        *,
        first_episode: int,
        policy_version: int,
        user_draw: int,
        redraw: int,
    ) -> list[Trajectory]:
        try:
            played: Sequence[Trajectory] = self._rollout.run(
                tasks,
                first_episode=first_episode,
                policy_version=policy_version,
                episodes=[first_episode + place for place in places],
                user_draw=user_draw * REDRAWS + redraw,
            )
        except FailedEpisodesError as error:  # a few dialogues of many: the share that broke says nothing here
            played = error.trajectories
        return self._referee.marked(played)


def _replaced(trajectory: Trajectory) -> Trajectory:
    blame = {**trajectory.provenance["blame"], "redrawn": True}
    return replace(trajectory, provenance={**trajectory.provenance, "blame": blame})
