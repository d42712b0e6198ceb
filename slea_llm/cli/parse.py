"""Show how parsers cut logged dialogues, or plain reasoning texts, into steps: a coverage report, and the steps."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slea_llm.cli.output import say
from slea_llm.cli.score import add_reading
from slea_llm.errors import ConfigError
from slea_llm.types import Step, Turn

if TYPE_CHECKING:
    from slea_llm.interfaces import StepParser
    from slea_llm.parsers.coverage import Coverage, ParserCoverage

TEXT_SUFFIXES = (".txt", ".md")
TEXT_FORMATS = ("react", "reflexion")
"""Formats whose records are texts: in a list of texts each is one turn here."""
DEFAULT_PARSERS = ("auto", "tagged", "markers", "react", "reply")
SHOWN_CHARACTERS = 90
SHOWN_COUNTS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        type=Path,
        help="log of any known format, text (.txt, .md), list of texts (.json: strings, objects with text), or folder",
    )
    parser.add_argument("--recipe", type=Path, help="recipe whose parser is reported, beside those of --parsers")
    parser.add_argument(
        "--parsers", default=",".join(DEFAULT_PARSERS), help="parsers to compare, by name; the first one is reported"
    )
    add_reading(parser)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the steps of the first N turns")


def run(arguments: argparse.Namespace) -> int:
    from slea_llm.parsers.coverage import Coverage

    parsers = _parsers([name for name in arguments.parsers.split(",") if name], arguments.recipe)
    coverage = Coverage(list(parsers))
    first = next(iter(parsers))
    for trajectory_id, turn in read_turns(arguments.log, format=arguments.format, strict=arguments.strict):
        steps = {name: parser.parse(turn, trajectory_id, None) for name, parser in parsers.items()}
        if coverage.turns < arguments.show:
            for line in step_lines(trajectory_id, turn, steps[first]):
                say(line)
        coverage.add(turn, steps)
    if not coverage.turns:
        raise ConfigError(f"{arguments.log} holds no turn")
    for line in report(coverage, first):
        say(line)
    return 0


def _parsers(names: Sequence[str], recipe: Path | None) -> dict[str, StepParser]:
    from slea_llm.cli import compose
    from slea_llm.config import ComponentSpec, load_scoring_recipe

    found: dict[str, StepParser] = {}
    if recipe is not None:
        found["recipe"] = compose.component("parser", load_scoring_recipe(recipe).parser)
    for name in names:
        found[name] = compose.component("parser", ComponentSpec(name=name))
    if not found:
        raise ConfigError("--parsers names no parser, and no --recipe is given")
    return found


def read_turns(path: Path, *, format: str | None = None, strict: bool = False) -> Iterator[tuple[str, Turn]]:
    """Trajectory id and turn of every reply in a log, a text, a list of texts, or a folder of these.

    A `.json` file that is a log of a known format is read as one. With `format` everything is read as such a log.
    """
    from slea_llm.logs.reading import LogReader, is_log
    from slea_llm.score_runs import newest_log

    path = newest_log(path)
    if path.is_dir() and format is None:
        for file in _files(path):
            yield from read_turns(file, strict=strict)
    elif path.suffix in TEXT_SUFFIXES and format is None:
        yield path.name, Turn(index=0, context=(), text=_read(path))
    elif (
        path.suffix == ".json"
        and format is None
        and path.is_file()
        and path.stat().st_size
        and not is_log(path, besides=TEXT_FORMATS)
    ):
        yield from _listed(path)
    else:
        reader = LogReader(path, format=format, strict=strict)
        yield from ((trajectory.id, turn) for trajectory in reader for turn in trajectory.turns)
        if reader.fault_count:
            for line in reader.lines():
                sys.stderr.write(line + "\n")


def _files(folder: Path) -> list[Path]:
    """The logs and texts in a folder and below; what is passed over is said on standard error.

    Raises ConfigError when it holds none.
    """
    from slea_llm.logs.sources import find_files

    taken, others = find_files(folder)
    texts = [file for file in others if file.suffix in TEXT_SUFFIXES]
    if not taken and not texts:
        raise ConfigError(f"{folder} holds no log (`slea list log_format`) and no .txt, .md or .json text")
    if passed := [file for file in others if file not in texts]:
        names = ", ".join(str(file.relative_to(folder)) for file in passed[:5])
        sys.stderr.write(f"{len(passed)} files passed over: {names}{' ...' if len(passed) > 5 else ''}\n")
    return sorted([*taken, *texts])


def _listed(path: Path) -> Iterator[tuple[str, Turn]]:
    try:
        rows = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if isinstance(rows, dict) and rows and all(isinstance(text, str) for text in rows.values()) and "text" not in rows:
        rows = [{"id": key, "text": text} for key, text in rows.items()]
    for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
        text = row.get("text") if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise ConfigError(f"{path}: entry {index} is neither a string nor an object with a string `text`")
        name = row.get("id", index) if isinstance(row, dict) else index
        yield f"{path.name}#{name}", Turn(index=0, context=(), text=text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def step_lines(trajectory_id: str, turn: Turn, steps: Sequence[Step]) -> Iterator[str]:
    """A turn's steps, one a line, sub-steps under their parent."""
    yield f"{trajectory_id}, turn {turn.index}:"
    depths: dict[int, int] = {}
    for step in steps:
        depths[step.index] = 0 if step.parent is None else depths[step.parent] + 1
        text = " ".join(step.text.split())
        cut = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
        yield f"  {'  ' * depths[step.index]}{step.index:>3} {step.kind:<9} {step.label or '-':<28} {cut}"


def report(coverage: Coverage, first: str) -> Iterator[str]:
    """Steps per turn and unparsed share of every parser, then what the first one found, then who disagrees."""
    yield f"{coverage.turns} turns"
    header = f"{'parser':<10} {'steps a turn':>12} {'median':>7} {'most':>6} {'one step':>9} {'sub-steps of':>13}"
    yield f"{header} {'unparsed':>9}"
    for name, counts in coverage.by_parser.items():
        single = sum(count == 1 for count in counts.steps) / len(counts.steps)
        yield (
            f"{name:<10} {counts.mean_steps:>12.2f} {statistics.median(counts.steps):>7g} {max(counts.steps):>6} "
            f"{100 * single:>7.1f} % {counts.parents:>13} {100 * counts.unparsed_share:>7.1f} %"
        )
    yield "unparsed: characters in unmarked steps of more than one sentence; sub-steps of: steps that have sub-steps"
    yield from _found(first, coverage.by_parser[first])
    pairs = coverage.disagreement()
    if pairs:
        yield "disagreement (1 - F1 of the borders of leaf steps):"
        for (one, other), value in sorted(pairs.items(), key=lambda item: -item[1]):
            yield f"  {value:.3f}  {one} and {other}"


def _found(name: str, one: ParserCoverage) -> Iterator[str]:
    groups: Mapping[str, Mapping[str, int]] = {
        "picked": dict(one.picked.most_common()),
        "marked by": dict(one.forms.most_common(SHOWN_COUNTS)),
        "does": dict(one.does.most_common(SHOWN_COUNTS)),
        "faults": dict(one.faults.most_common()),
    }
    for title, counts in groups.items():
        if counts:
            yield f"{name}, {title}: " + ", ".join(f"{key} {count}" for key, count in counts.items())
