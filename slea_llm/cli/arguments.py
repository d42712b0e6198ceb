"""Arguments and folders that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from slea_llm import run_folder
from slea_llm.config import Recipe, load_recipe
from slea_llm.errors import ConfigError
from slea_llm.folders import make_folder


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """`RECIPE [key.sub=value ...]`."""
    parser.add_argument("recipe", type=Path, help="recipe file (YAML)")
    # With a default argparse does not call them required when the recipe is missing.
    parser.add_argument(
        "overrides", nargs="*", default=(), metavar="key.sub=value", help="settings to change, values in YAML"
    )


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    return load_recipe(arguments.recipe, arguments.overrides)


def prepare_folder(folder: Path, *, fresh: bool) -> None:
    """Make an output folder that is new, as `clear_folder` has it."""
    clear_folder(folder, fresh=fresh)
    make_folder(folder)


def clear_folder(folder: Path, *, fresh: bool) -> None:
    """Make sure that nothing is in the way; an existing folder is moved aside with `fresh`, never overwritten.

    The logs of commands that only play make no run. Raises ConfigError when it is a file, and when it holds something
    else and `fresh` was not given.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, and a folder is wanted; name another")
    if folder.exists() and any(path.name != run_folder.LOGS for path in folder.iterdir()):
        if not fresh:
            raise ConfigError(f"{folder} already holds {_held(folder)}")
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)


def _held(folder: Path) -> str:
    """What is in the way, and what may be done about it."""
    if not (folder / run_folder.RECIPE).exists():  # a model of `slea warm-start`, or something of the user's own
        return "something; give --fresh to move it aside, or another folder"
    others = "--fresh to move it aside, or another folder by run.output_dir=..."
    if any((folder / run_folder.CHECKPOINTS).glob("step-*")):
        return f"a run; give --resume to go on from its newest checkpoint, {others}"
    return f"a run without a checkpoint (trainer.save_every writes them as it goes); give {others}"
