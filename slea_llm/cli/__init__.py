"""The command line. Each command is a module of this package, imported only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from slea_llm import __version__
from slea_llm.errors import SleaError, nearest

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("train", "train an agent by a recipe (start it with `accelerate launch`)"),
        "plan": ("plan", "check a recipe, print the batch arithmetic and a memory plan, start nothing"),
        "warm-start": ("warm_start", "imitate scripted dialogues, so that training starts from a model that can talk"),
        "rollout": ("rollout", "run dialogues with a model and write them to a log"),
        "parse": ("parse", "cut logged dialogues or texts into steps and report how far that goes"),
        "fit-evaluator": (
            "fit_evaluator",
            "fit a learnt evaluator on logged dialogues, and say whether it may be used",
        ),
        "score": ("score", "score every step of logged dialogues"),
        "convert": ("convert", "logs of any known format to our own, to OpenAI chat rows or to a Hub dataset"),
        "report": ("report", "one HTML file of scored dialogues or of a training run, to read and to pass on"),
        "referee": ("referee", "say who was to blame for logged dialogues, with the words that show it"),
        "evaluate": ("evaluate", "success of a model on the fixed panel of unseen tasks"),
        "export": ("export", "write the trained adapter or merged weights, proved equal to what was trained"),
        "fetch-model": ("fetch_model", "build a small real model as a local folder"),
        "doctor": ("doctor", "what this machine has, what is missing and how to get it"),
        "list": ("listing", "every component by kind, third-party ones included"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors of this library are printed as one readable text, exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"slea {__version__}\n")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        sys.stderr.write(f"slea: unknown command {name!r}{nearest(name, COMMANDS)}\n\n{overview()}")
        return 2
    # Read by torch when it is first imported: its notes on memory binding are no news to a user.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    module_name, help_text = COMMANDS[name]
    command = importlib.import_module(f"slea_llm.cli.{module_name}")
    parser = argparse.ArgumentParser(prog=f"slea {name}", description=command.__doc__ or help_text)
    command.add_arguments(parser)
    try:
        return int(command.run(_parsed(parser, arguments[1:])))
    except SleaError as error:
        sys.stderr.write(f"slea {name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"\nslea {name}: interrupted; what was written so far is whole\n")
        return 130
    except BrokenPipeError:  # `slea ... | head` wants no more lines; nothing else is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments; an unknown option ends the program with the nearest known one."""
    found, rest = parser.parse_known_intermixed_args(arguments)
    if rest:
        options = re.findall(r"--[a-z][\w-]*", parser.format_help())
        hints = "; ".join(f"{one}{nearest(one.partition('=')[0], options)}" for one in rest)
        settings = any("=" in one for one in rest) and "key.sub=value" in parser.format_help()
        parser.error(
            f"unrecognized arguments: {hints}"
            + ("; settings of the recipe are written without dashes: run.output_dir=FOLDER" if settings else "")
        )
    return found


def overview() -> str:
    """The text of `slea --help`."""
    width = max(map(len, COMMANDS))
    rows = "".join(f"  {name:<{width}}  {text}\n" for name, (_, text) in COMMANDS.items())
    return (
        "usage: slea <command> [options]\n\n"
        "Step-level experience augmented RL for multi-turn LLM agents.\n\n"
        f"commands:\n{rows}\n"
        "`slea <command> --help` has the details; `slea list` has every component.\n"
    )
