"""Say who was to blame for logged dialogues: agent, user, environment or scorer, with the words that show it."""

from __future__ import annotations

import argparse
from pathlib import Path

from slea_llm.cli.output import say
from slea_llm.errors import ConfigError

SHOWN = 20
"""Dialogues that are printed when nothing else is asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="log of dialogues, or a folder of logs (rollouts of a training run)")
    parser.add_argument("--recipe", type=Path, default=None, help="recipe, or its section `referee` alone")
    parser.add_argument("--output", type=Path, default=None, help="log to write, with the rulings in each record")
    parser.add_argument("--party", default=None, help="print these alone: agent, user, environment or scorer")
    parser.add_argument("--show", type=int, default=SHOWN, metavar="N", help=f"dialogues to print (default {SHOWN})")


def run(arguments: argparse.Namespace) -> int:
    if arguments.output is not None and arguments.output.exists():
        raise ConfigError(f"{arguments.output} exists already; give another name")
    from slea_llm.cli import compose
    from slea_llm.cli.score import read_logs
    from slea_llm.config import load_referee_recipe
    from slea_llm.errors import nearest
    from slea_llm.referee import PARTIES, Referee, blame_line, meaning
    from slea_llm.storage import write_trajectories

    if arguments.party is not None and arguments.party not in PARTIES:
        raise ConfigError(
            f"--party {arguments.party!r} is not one of {', '.join(PARTIES)}{nearest(arguments.party, PARTIES)}"
        )
    referee = Referee(Referee.Config())
    if arguments.recipe is not None:
        referee = compose.referee(load_referee_recipe(arguments.recipe))
    marked = referee.marked(list(read_logs(arguments.log)))
    if not marked:
        raise ConfigError(
            f"{arguments.log} holds no dialogue that could be read; `slea list log_format` has the formats"
        )
    shown = [
        one
        for one in marked
        if one.provenance["blame"]["party"] in ((arguments.party,) if arguments.party else PARTIES)
    ]
    for one in shown[: arguments.show]:
        blame = one.provenance["blame"]
        quote = repr(blame["quote"]) if blame.get("quote") else "(no words)"
        say(f"{one.id} ({one.termination}): {blame['party']}, turn {blame['turn']}, {blame['kind']}: {quote}")
        say(f"    {meaning(blame['kind'])}{'; ' + blame['note'] if blame.get('note') else ''} (by {blame['by']})")
    if len(shown) > arguments.show:
        say(f"{len(shown) - arguments.show} more; --show {len(shown)} prints all")
    if arguments.output is not None:
        write_trajectories(arguments.output, marked)
    unknown = sum(one.termination == "unknown" for one in marked)
    ends = f", {unknown} of which the log does not say how they ended and that nobody is blamed for" if unknown else ""
    say(f"{len(marked)} dialogues, {sum(one.success for one in marked)} successes{ends}; {blame_line(marked)}")
    if referee.config.endpoint is not None:
        say(f"referee: {referee.usage.line()}")
    return 0
