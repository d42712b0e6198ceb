"""Convert logs of any known format: to our own, to OpenAI chat rows with scores and weights, or to a Hub dataset."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slea_llm.cli.output import say
from slea_llm.cli.score import add_reading
from slea_llm.errors import ConfigError
from slea_llm.types import ScoredTrajectory

if TYPE_CHECKING:
    from slea_llm.logs.openai_export import Weighting
    from slea_llm.logs.reading import LogReader

TARGETS = ("slea", "openai_chat", "hub_dataset")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="log in any known format, scored log, or a folder of logs")
    parser.add_argument(
        "--to", choices=TARGETS, required=True, help="what to write; hub_dataset is a folder of parquet"
    )
    parser.add_argument("--output", type=Path, required=True, help="file or folder to write; must be new")
    add_reading(parser)
    parser.add_argument("--run", metavar="N", help="run of the results of `slea score`, by number (default: newest)")
    parser.add_argument(
        "--weight-by", metavar="EVALUATOR", help="evaluator of a scored log that gives replies weight 0 or 1"
    )
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.0,
        metavar="SCORE",
        help="mean step score from which a reply weighs 1 (default 0)",
    )
    parser.add_argument("--plain", action="store_true", help="openai_chat: nothing but messages and weights")
    parser.add_argument(
        "--redact", action="store_true", help="blank what looks like a secret, and secrets of this shell"
    )


def run(arguments: argparse.Namespace) -> int:
    from slea_llm.logs.openai_export import Weighting

    if arguments.output.exists():
        raise ConfigError(f"{arguments.output} exists already; give another name")
    if arguments.to == "slea" and (arguments.weight_by or arguments.plain):
        raise ConfigError(
            "--weight-by and --plain are for openai_chat and hub_dataset; slea keeps the scores themselves"
        )
    if not math.isfinite(arguments.at_least):
        raise ConfigError(f"--at-least {arguments.at_least} is no finite score")
    if arguments.at_least and not arguments.weight_by:
        raise ConfigError("--at-least says from which score a reply weighs 1; --weight-by names whose score")
    if arguments.plain and arguments.to != "openai_chat":
        raise ConfigError(f"--plain is for openai_chat; {arguments.to} has its own columns")
    weighting = Weighting(evaluator=arguments.weight_by, threshold=arguments.at_least) if arguments.weight_by else None
    reader, items = read_scored_or_not(
        arguments.log, run=arguments.run, format=arguments.format, strict=arguments.strict
    )
    first = next(items, None)
    if first is None:
        for line in reader.lines() if reader is not None else ():
            say(line)
        raise ConfigError(
            "no dialogue could be read, so nothing was written; `slea list log_format` has the formats that are known, "
            "--format NAME forces one"
        )
    count = _write(arguments, _chain(first, items), weighting)
    if reader is not None:
        for line in reader.lines():
            say(line)
    say(f"{count} trajectories written to {arguments.output} as {arguments.to}")
    return 0


def read_scored_or_not(
    path: Path, *, run: str | None = None, format: str | None = None, strict: bool = False
) -> tuple[LogReader | None, Iterator[ScoredTrajectory]]:
    """The trajectories with the scores of a scored log, or with none; the reader that counts, for other logs.

    Raises ConfigError for a `run` that the path does not hold.
    """
    from slea_llm.errors import StorageError
    from slea_llm.logs.reading import LogReader
    from slea_llm.score_runs import chosen, newest_log
    from slea_llm.storage import log_kind, read_scored

    path = newest_log(path) if run is None else chosen(path, run).scores
    try:
        scored = path.is_file() and log_kind(path) == "slea.scored_trajectories"
    except (StorageError, ValueError):
        scored = False  # no log of ours: the reader says what it is
    if scored:
        return None, read_scored(path)
    reader = LogReader(path, format=format, strict=strict)
    return reader, (ScoredTrajectory(trajectory=one, steps=(), scores=(), parser="") for one in reader)


def _write(arguments: argparse.Namespace, items: Iterator[ScoredTrajectory], weighting: Weighting | None) -> int:
    from slea_llm.logs.hub_export import write_hub_dataset
    from slea_llm.storage import SCORED, TRAJECTORIES

    if arguments.to == "openai_chat":
        return _write_rows(arguments, items, weighting)
    if arguments.redact:
        items = _redacted(items)
    if arguments.to == "hub_dataset":
        return write_hub_dataset(arguments.output, items, weighting)
    first = next(items)
    if first.parser:
        return SCORED.write(arguments.output, _chain(first, items))
    return TRAJECTORIES.write(arguments.output, (one.trajectory for one in _chain(first, items)))


def _chain(first: ScoredTrajectory, rest: Iterator[ScoredTrajectory]) -> Iterator[ScoredTrajectory]:
    yield first
    yield from rest


def _write_rows(arguments: argparse.Namespace, items: Iterator[ScoredTrajectory], weighting: Weighting | None) -> int:
    from slea_llm.logs.openai_export import openai_row
    from slea_llm.redaction import environment_secrets, redact
    from slea_llm.storage import atomic_write

    secrets = environment_secrets() if arguments.redact else ()
    count = 0
    with atomic_write(arguments.output) as file:
        for scored in items:
            row: Any = openai_row(scored, weighting, plain=arguments.plain)
            file.write(json.dumps(redact(row, secrets=secrets) if arguments.redact else row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _redacted(items: Iterator[ScoredTrajectory]) -> Iterator[ScoredTrajectory]:
    """Trajectories without secrets. Raises ConfigError for scored ones: their spans would no longer fit their texts."""
    from slea_llm.records import decode_trajectory, encode_trajectory
    from slea_llm.redaction import environment_secrets, redact

    secrets = environment_secrets()
    for one in items:
        if one.steps:
            raise ConfigError("--redact would move the steps of a scored log; redact the log first, then score it")
        clean = decode_trajectory(redact(encode_trajectory(one.trajectory), secrets=secrets))
        yield ScoredTrajectory(trajectory=clean, steps=(), scores=(), parser="")
