"""Success of a model on the fixed panel of unseen tasks, with its 95 % interval."""

from __future__ import annotations

import argparse
from pathlib import Path

from slea_llm.cli.arguments import add_recipe, read_recipe
from slea_llm.cli.output import say
from slea_llm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--adapter", type=Path, default=None, help="PEFT adapter to put on model.base (default: none)")
    parser.add_argument("--log", type=Path, default=None, help="also write the dialogues to this file")
    parser.add_argument(
        "--user-seeds",
        type=int,
        default=1,
        metavar="N",
        help="play the panel with N seeds of its users, all else alike, and say how much that alone changes",
    )


def run(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments)
    if arguments.user_seeds < 1:
        raise ConfigError(f"--user-seeds {arguments.user_seeds} is below 1")
    if arguments.log is not None and arguments.log.exists():
        raise ConfigError(f"--log {arguments.log} exists already; give another name")
    from slea_llm.cli.play import played_panels
    from slea_llm.evaluation import noise_floor, report
    from slea_llm.referee import blame_line
    from slea_llm.rollout import FailedEpisodesError
    from slea_llm.storage import write_trajectories

    try:
        panels = played_panels(recipe, arguments.adapter, user_draws=arguments.user_seeds)
    except FailedEpisodesError as error:
        if arguments.log is not None:
            write_trajectories(arguments.log, error.trajectories)
        raise
    everything = [one for panel in panels for one in panel]
    for draw, panel in enumerate(panels):
        line = report(panel, expected=recipe.evaluation.tasks).line()
        say(line if len(panels) == 1 else f"users {draw}: {line}")
    say(blame_line(everything))
    if len(panels) > 1:
        say(noise_floor(panels).line())
    if arguments.log is not None:
        write_trajectories(arguments.log, everything)
    return 0
