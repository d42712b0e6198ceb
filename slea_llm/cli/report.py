"""Make one HTML file of scored dialogues, or of a training run: to read, to search, and to pass on.

The file opens from the disk and reaches for nothing outside. `slea report mylogs.scores` shows the newest run in the
folder; two folders, or `--runs 1 2` of one, are shown side by side; the folder of a training run adds its curves.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path

from slea_llm.cli.output import say
from slea_llm.errors import ConfigError, nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        help="one or two: results of `slea score`, a scored log, a training run's folder",
    )
    parser.add_argument("--output", type=Path, help="the HTML file (default: the source's name with .html, beside it)")
    parser.add_argument(
        "--runs", nargs="+", metavar="N", help="one or two runs of the results, by number (default: newest)"
    )
    parser.add_argument("--evaluator", help="whose scores are ranked and drawn first (default: the first of the log)")
    parser.add_argument("--title", help="title of the page (default: the source's name)")
    parser.add_argument("--dialogues", type=int, default=2_000, help="dialogues shown whole at most (default 2000)")
    parser.add_argument(
        "--redact", action="store_true", help="blank mail addresses and long numbers (secrets are blanked always)"
    )
    parser.add_argument(
        "--redact-pattern", action="append", default=[], metavar="REGEX", help="blank what matches too, repeatable"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the HTML file if there is one")


def run(arguments: argparse.Namespace) -> int:
    from slea_llm.report import page
    from slea_llm.report.sources import open_source
    from slea_llm.storage import atomic_write

    wanted = _wanted(arguments)
    output = arguments.output or _default_output(arguments.source[0])
    if output.exists() and not arguments.overwrite:
        raise ConfigError(f"{output} exists already; give --overwrite, or another name with --output")
    if arguments.dialogues < 1:
        raise ConfigError(f"--dialogues {arguments.dialogues} must be 1 or more")
    mend = page.mender(personal=arguments.redact, patterns=[_pattern(one) for one in arguments.redact_pattern])
    sources = [open_source(path, number) for path, number in wanted]
    try:
        html = page.make(
            sources,
            evaluator=arguments.evaluator,
            title=arguments.title or " and ".join(source.name for source in sources),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            mend=mend,
            dialogues=arguments.dialogues,
        )
    except KeyError as error:
        known = sorted({name for source in sources for one, _ in source.read() for name in one.evaluator_versions})
        raise ConfigError(
            f"--evaluator {error.args[0]!r} did not score this log; one of {', '.join(known) or 'none'}"
            f"{nearest(str(error.args[0]), known)}"
        ) from error
    with atomic_write(output) as file:
        file.write(html)
    size = len(html.encode("utf-8"))
    say(f"written to {output} ({size / 1e6:.1f} MB); open it in any browser, no network is needed")
    if size > page.MOST_BYTES:
        say("warning: it is larger than 9.5 MB; give a smaller --dialogues, or score fewer logs at once")
    return 0


def _wanted(arguments: argparse.Namespace) -> list[tuple[Path, str | None]]:
    """Path and run of each column. Raises ConfigError for more than two columns."""
    paths, numbers = list(arguments.source), list(arguments.runs or [])
    if len(numbers) > 1 and len(paths) == 1:
        paths *= len(numbers)
    if len(paths) > 2 or len(numbers) not in (0, len(paths)):
        raise ConfigError(
            f"{len(paths)} sources and {len(numbers)} runs; a report shows one, or two side by side (two folders, or "
            "one folder and --runs A B)"
        )
    return list(zip(paths, numbers or [None] * len(paths), strict=True))


def _default_output(source: Path) -> Path:
    place = source.resolve()
    name = place.name.removesuffix(".scores").removesuffix(".jsonl").removesuffix(".scores")
    return source.with_name(f"{name}.html") if source.name not in ("", "..") else Path(f"{name}.html")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"--redact-pattern {text!r} is no regular expression: {error}") from error
