"""Dialogues outside of training: a session, an adapter if one is given, and the tasks to play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slea_llm.cli import compose
from slea_llm.cli.output import say
from slea_llm.cli.session import Session, open_session, quiet_third_parties
from slea_llm.config import Recipe
from slea_llm.errors import ConfigError
from slea_llm.evaluation import panel
from slea_llm.models.policy import build
from slea_llm.task_order import TaskOrder
from slea_llm.types import Trajectory


def played_panel(recipe: Recipe, adapter: Path | None) -> list[Trajectory]:
    """The dialogues of the evaluation panel."""
    if not recipe.evaluation.tasks:
        raise ConfigError("evaluation.tasks is 0; set it to the size of the panel, such as 256")

    def play(session: Session, version: int) -> list[Trajectory]:
        tasks = list(panel(session.environment, recipe.evaluation))
        return session.panel_rollout.run(tasks, first_episode=0, policy_version=version, progress=True)

    return _with_session(recipe, adapter, play)


def played_tasks(recipe: Recipe, adapter: Path | None) -> list[Trajectory]:
    """The dialogues of one iteration's training tasks."""
    settings = recipe.rollout
    seeds = TaskOrder(tasks=settings.tasks, seed=recipe.run.seed).take(0, settings.episodes // settings.group_size)

    def play(session: Session, version: int) -> list[Trajectory]:
        tasks = [task for task in map(session.environment.task, seeds) for _ in range(settings.group_size)]
        return session.rollout.run(tasks, first_episode=0, policy_version=version, progress=True)

    return _with_session(recipe, adapter, play)


def _with_session(
    recipe: Recipe, adapter: Path | None, play: Callable[[Session, int], list[Trajectory]]
) -> list[Trajectory]:
    with quiet_third_parties(Path(recipe.run.output_dir) / "logs" / "play.log"):
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
