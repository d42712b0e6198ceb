"""What a report is made of: results of `slea score`, scored or plain logs, the folder of a training run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from slea_llm import run_folder, score_runs
from slea_llm.config import load_recipe
from slea_llm.errors import ConfigError, StorageError, nearest
from slea_llm.score_runs import CREDIT, StepCredit
from slea_llm.settings import StreamSettings
from slea_llm.storage import log_kind, read_json_lines, read_scored
from slea_llm.types import ScoredTrajectory

log = logging.getLogger(__name__)

Scored: TypeAlias = tuple[ScoredTrajectory, StepCredit | None]
"""A dialogue with the credit of its steps, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One column of a report: dialogues that can be read as often as needed, and a training run's records.

    `name` is that of the folder or file, never its whole path: the report is passed on.
    """

    name: str
    read: Callable[[], Iterator[Scored]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    streams: Mapping[str, StreamSettings] = field(default_factory=dict)
    """Reward streams of the run's recipe, which some alarms ask for."""


def open_source(path: Path, run: str | None = None) -> Source:
    """The source at a path. `run` is the number of a run among results; None: the newest finished one.

    Raises ConfigError for a path that holds nothing to report, and says what to do with a log that nobody scored yet.
    """
    if not path.exists():
        near = nearest(path.name, [one.name for one in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ConfigError(f"{path} is not there{near}")
    if path.is_dir() and score_runs.runs(path):
        return _results(path, run)
    if run is not None:
        raise ConfigError(f"run {run!r} was asked for, but {path} holds no results of `slea score`")
    if path.is_dir():
        return _training(path)
    if path.name.endswith(".scores.jsonl") and (found := score_runs.find(path.parent, path.name.split(".")[0])):
        return _results(path.parent, found.name)
    if _is_scored(path):
        return Source(name=path.name, read=lambda: ((one, None) for one in read_scored(path)))
    raise ConfigError(f"{path} holds no scores yet; run `slea score {path}` first and report the folder that it writes")


def _is_scored(path: Path) -> bool:
    try:
        return log_kind(path) == "slea.scored_trajectories"
    except StorageError:
        return False


def _results(folder: Path, name: str | None) -> Source:
    run = score_runs.chosen(folder, name)
    card = run.card

    def read() -> Iterator[Scored]:
        credit = CREDIT.read(run.credit) if run.credit.exists() else None
        for one in run.read():
            yield one, None if credit is None else next(credit, None)

    return Source(
        name=f"{folder.resolve().name}, {run.name}",
        read=read,
        facts={
            "scored": card.started,
            "finished": card.finished or "not finished",
            "parser": card.parser,
            "sources": [dict(source) for source in card.sources],
            "annotations": card.annotations,
        },
    )


def _training(folder: Path) -> Source:
    logs = sorted((folder / run_folder.ROLLOUTS).glob("*.jsonl")) or sorted(
        path
        for path in folder.glob("*.jsonl")
        if path.name not in (run_folder.METRICS, run_folder.EVALUATIONS) and _is_scored(path)
    )
    metrics = _lines(folder / run_folder.METRICS)
    if not logs and not metrics:
        raise ConfigError(
            f"{folder} holds neither results of `slea score` nor a training run "
            f"(no {run_folder.ROLLOUTS}/*.jsonl, no {run_folder.METRICS})"
        )

    def read() -> Iterator[Scored]:
        for path in logs:
            yield from ((one, None) for one in read_scored(path))

    return Source(
        name=folder.resolve().name,
        read=read,
        metrics=metrics,
        evaluations=_lines(folder / run_folder.EVALUATIONS),
        streams=_streams(folder / run_folder.RECIPE),
    )


def _streams(path: Path) -> Mapping[str, StreamSettings]:
    """The streams of a resolved recipe; none where there is no recipe, or one of another version."""
    try:
        return load_recipe(path).streams
    except ConfigError:
        return {}


def _lines(path: Path) -> tuple[Mapping[str, Any], ...]:
    if not path.is_file():
        return ()
    lines = []
    try:
        for line in read_json_lines(path):
            lines.append(line.value)
    except StorageError:
        # Killed while it wrote its last line: what stands before it is whole. A fault elsewhere is one.
        if b"\n" in _behind(path, len(lines)):
            raise
        log.warning("%s: the last line, torn by an interrupted write, is left out", path)
    return tuple(line for line in lines if isinstance(line, Mapping))


def _behind(path: Path, count: int) -> bytes:
    """What follows the first `count` lines that hold something."""
    rows = [row for row in path.read_bytes().splitlines(keepends=True) if not row.isspace()]
    return b"".join(rows[count:])
