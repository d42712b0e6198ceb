"""Success of a model on the fixed panel of unseen tasks, with its 95 % interval."""

from __future__ import annotations

import argparse
from pathlib import Path

from slea_llm.cli.arguments import add_recipe, read_recipe
from slea_llm.cli.output import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--adapter", type=Path, default=None, help="PEFT adapter to put on model.base (default: none)")
    parser.add_argument("--log", type=Path, default=None, help="also write the dialogues to this file")


def run(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments)
    from slea_llm.cli.play import played_panel
    from slea_llm.evaluation import report
    from slea_llm.storage import write_trajectories

    trajectories = played_panel(recipe, arguments.adapter)
    if arguments.log is not None:
        write_trajectories(arguments.log, trajectories)
    say(report(trajectories, expected=recipe.evaluation.tasks).line())
    return 0
