"""Run dialogues with a model and write them to a log of this project's format."""

from __future__ import annotations

import argparse
from pathlib import Path

from slea_llm.cli.arguments import add_recipe, read_recipe
from slea_llm.cli.output import say
from slea_llm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--adapter", type=Path, default=None, help="PEFT adapter to put on model.base (default: none)")
    parser.add_argument("--output", type=Path, required=True, help="log to write (JSON lines)")


def run(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments)
    if arguments.output.exists():
        raise ConfigError(f"{arguments.output} exists already; give another name")
    from slea_llm.cli.play import played_tasks
    from slea_llm.referee import blame_line
    from slea_llm.rollout import FailedEpisodesError
    from slea_llm.storage import write_trajectories

    try:
        trajectories = played_tasks(recipe, arguments.adapter)
    except FailedEpisodesError as error:
        write_trajectories(arguments.output, error.trajectories)
        say(f"all {len(error.trajectories)} dialogues, the broken ones included, are in {arguments.output}")
        raise
    write_trajectories(arguments.output, trajectories)
    failed = sum(trajectory.failed for trajectory in trajectories)
    say(blame_line(trajectories))
    say(f"{len(trajectories)} dialogues, {failed} of them failed, in {arguments.output}")
    return 0
