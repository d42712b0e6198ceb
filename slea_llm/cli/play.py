"""Dialogues outside of training: a session, an adapter if one is given, and the tasks to play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from slea_llm import run_folder
from slea_llm.cli import compose
from slea_llm.cli.output import say
from slea_llm.cli.session import Session, open_session, quiet_third_parties
from slea_llm.config import Recipe
from slea_llm.errors import ConfigError
from slea_llm.evaluation import panel
from slea_llm.models.policy import build
from slea_llm.questions import Asking
from slea_llm.rollout import FailedEpisodesError
from slea_llm.task_order import TaskOrder
from slea_llm.types import Trajectory

Played = TypeVar("Played")


def played_panels(recipe: Recipe, adapter: Path | None, *, user_draws: int = 1) -> list[list[Trajectory]]:
    """The dialogues of the evaluation panel, once for each draw of its users.

    Raises FailedEpisodesError with the records of all draws so far when too many dialogues of one broke.
    """
    if not recipe.evaluation.tasks:
        raise ConfigError("evaluation.tasks is 0; set it to the size of the panel, such as 256")

    def play(session: Session, version: int) -> list[list[Trajectory]]:
        tasks = list(panel(session.environment, recipe.evaluation))
        played: list[list[Trajectory]] = []
        for draw in range(user_draws):
            try:
                played.append(
                    session.panel_rollout.run(
                        tasks, first_episode=0, policy_version=version, progress=True, user_draw=draw
                    )
                )
            except FailedEpisodesError as error:
                before = [one for panel_of_draw in played for one in panel_of_draw]
                raise FailedEpisodesError(str(error), [*before, *error.trajectories]) from error
        return played

    return _with_session(recipe, adapter, play)


def played_tasks(recipe: Recipe, adapter: Path | None) -> list[Trajectory]:
    """The dialogues of one iteration's training tasks."""
    settings = recipe.rollout
    seeds = TaskOrder(tasks=settings.tasks, seed=recipe.run.seed).take(0, settings.episodes // settings.group_size)

    def play(session: Session, version: int) -> list[Trajectory]:
        tasks = [task for task in map(session.environment.task, seeds) for _ in range(settings.group_size)]
        return session.rollout.run(tasks, first_episode=0, policy_version=version, progress=True)

    return _with_session(recipe, adapter, play)


def _with_session(recipe: Recipe, adapter: Path | None, play: Callable[[Session, int], Played]) -> Played:
    with quiet_third_parties(Path(recipe.run.output_dir) / run_folder.LOGS / "play.log"):
        session = open_session(recipe)
        try:
            version = session.generator.policy_version
            if adapter is not None:
                settings = replace(recipe.model, adapter=str(adapter))
                model = build(
                    settings,
                    streams=compose.heads(recipe),
                    temperature=recipe.rollout.temperature,
                    seed=recipe.run.seed,
                )
                version += 1
                session.generator.load(model, version)
                say(f"playing with the adapter in {adapter}")
            return play(session, version)
        finally:
            session.generator.close()
            if isinstance(session.user, Asking):
                say(f"user {session.user.name}: {session.user.usage.line()}")
