"""Results of scoring, append-only: every run is a log of its own in the folder, beside the earlier ones.

mylogs.scores/
  run-0001.json            who scored what, with which versions and settings, when, and whether it was finished
  run-0001.scores.jsonl    the scored trajectories
  run-0001.credit.jsonl    rewards and advantages of the steps, where they were asked for
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slea_llm.errors import ConfigError, StorageError
from slea_llm.folders import held
from slea_llm.logs.sources import name_of
from slea_llm.storage import LogFormat, atomic_write, mend_json, read_scored
from slea_llm.types import ScoredTrajectory

FORMAT, VERSION = "slea.score_run", 1
_CARD = re.compile(r"run-(\d{4,})\.json")
_HEAD = b'{\n  "format": "slea.score_run"'
"""How a card begins, by which logs/sources.py too tells it from a log of that name."""
EDGE = 65_536
"""Bytes at each end of a source that its fingerprint reads, so that a large log is not read twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCard:
    """What a run says of itself. `started` and `finished` are ISO 8601 times; `finished` None: interrupted or going on.

    `settings` holds parser, evaluators and credit as resolved, `annotations` name and digest of the file that was read,
    `counts` what came of it.
    """

    sources: tuple[Mapping[str, Any], ...]
    parser: str
    evaluators: Mapping[str, str]
    settings: Mapping[str, Any]
    annotations: Mapping[str, Any] | None = None
    started: str = ""
    finished: str | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)

    def same_work(self, other: RunCard) -> list[str]:
        """What differs between two runs of which one is to go on with the other; empty when nothing does."""
        return [
            f"{name}: {mine!r} then, {theirs!r} now"
            for name in ("sources", "parser", "evaluators", "settings", "annotations")
            if (mine := _plain(getattr(self, name))) != (theirs := _plain(getattr(other, name)))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRun:
    """One run in a folder of results."""

    folder: Path
    number: int
    card: RunCard

    @property
    def name(self) -> str:
        return f"run-{self.number:04d}"

    @property
    def scores(self) -> Path:
        return self.folder / f"{self.name}.scores.jsonl"

    @property
    def credit(self) -> Path:
        return self.folder / f"{self.name}.credit.jsonl"

    def held(self) -> AbstractContextManager[None]:
        """Hold the run while it is written. Raises StorageError on entering when another process does."""
        busy = f"{self.folder}/{self.name} is being written by another process; wait until it has ended"
        return held(self.folder / f".{self.name}.lock", busy)

    def read(self) -> Iterator[ScoredTrajectory]:
        """The scored trajectories. Raises StorageError when the file is damaged."""
        return read_scored(self.scores)

    def save(self, card: RunCard) -> ScoreRun:
        """Replace the card, whole or not at all."""
        _write(self.folder / f"{self.name}.json", card)
        return dataclasses.replace(self, card=card)


def runs(folder: Path) -> tuple[ScoreRun, ...]:
    """The runs of a folder of results, oldest first; none when it holds none.

    A file that only has the name of a card, such as a log `run-0001.json`, is passed over. Raises StorageError for a
    card that is broken or of another version.
    """
    if not folder.is_dir():
        return ()
    found = [
        ScoreRun(folder=folder, number=int(match[1]), card=card)
        for path in folder.iterdir()
        if (match := _CARD.fullmatch(path.name)) and path.is_file() and (card := _read(path)) is not None
    ]
    return tuple(sorted(found, key=lambda run: run.number))


def latest(folder: Path) -> ScoreRun:
    """The newest finished run. Raises ConfigError when there is none, and says how to go on with one that broke off."""
    every = runs(folder)
    finished = [run for run in every if run.card.finished]
    if finished:
        return finished[-1]
    if every:
        raise ConfigError(f"{folder}: {every[-1].name} was interrupted; go on with `slea score ... --resume`")
    raise ConfigError(f"{folder} holds no run of `slea score`")


def newest_log(path: Path) -> Path:
    """The scored log of the newest finished run for a folder of results, any other path as it is."""
    return latest(path).scores if runs(path) else path


def find(folder: Path, name: str) -> ScoreRun | None:
    """The run of that name or number (`run-0002`, `2`), or None."""
    for run in runs(folder):
        if name in (run.name, str(run.number)):
            return run
    return None


def chosen(folder: Path, name: str | None) -> ScoreRun:
    """The run of that name or number, the newest finished one without a name. Raises ConfigError when there is none."""
    if name is None:
        return latest(folder)
    found = find(folder, name)
    if found is None:
        known = ", ".join(run.name for run in runs(folder))
        raise ConfigError(f"{folder} holds {f'the runs {known}' if known else 'no run of `slea score`'}, not {name!r}")
    return found


def scored_nothing(counts: Mapping[str, Any]) -> bool:
    """Whether a finished run's `counts` have steps and no evaluator that scored one of them."""
    return bool(counts["steps"]) and not any(one["scored"] for one in counts["evaluators"].values())


def start(folder: Path, card: RunCard) -> ScoreRun:
    """A new run with the next number. Raises ConfigError when the folder is a file or holds something else."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; results are a folder, since every run adds to them: give another name")
    every = runs(folder)
    if not every and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds something else than results of `slea score`; give another name")
    taken = [int(match[1]) for path in (folder.iterdir() if every else ()) if (match := _CARD.fullmatch(path.name))]
    run = ScoreRun(folder=folder, number=max(taken, default=0) + 1, card=card)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Exclusive, so that of two processes that start at once each gets a number of its own or is told.
        (folder / f"{run.name}.json").open("x").close()
    except FileExistsError as error:
        raise StorageError(f"{folder}/{run.name} was started by another process at the same moment; again") from error
    except OSError as error:
        raise StorageError(f"{folder} could not be written: {error.strerror or error}") from error
    return run.save(card)


def discard(run: ScoreRun) -> None:
    """Take back a run that has scored nothing, and its folder where it was the only one."""
    for path in (run.scores, run.folder / f"{run.name}.json"):
        path.unlink(missing_ok=True)
    if all(path.name == f".{run.name}.lock" for path in run.folder.iterdir()):
        shutil.rmtree(run.folder)


def unfinished(folder: Path) -> ScoreRun | None:
    """The newest run when it was interrupted."""
    every = runs(folder)
    return every[-1] if every and not every[-1].card.finished else None


def fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and CRC-32 of both ends of a source: whether it is still the file that a run began with."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            ends = file.read(EDGE)
            if size > EDGE:
                file.seek(max(EDGE, size - EDGE))
                ends += file.read(EDGE)
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror or error}") from error
    return {"name": name_of(path), "bytes": size, "crc32": f"{zlib.crc32(ends):08x}"}


def _plain(value: Any) -> Any:
    """As a card gives it back: tuples and lists are alike, and halves of characters, as in odd file names, mended."""
    return mend_json(json.loads(json.dumps(value, default=list, sort_keys=True)), "", [])


def _write(path: Path, card: RunCard) -> None:
    content = {"format": FORMAT, "version": VERSION, **_plain(dataclasses.asdict(card))}
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _read(path: Path) -> RunCard | None:
    """The card; None for a file that is none by its beginning."""
    try:
        with path.open("rb") as file:
            if (head := file.read(len(_HEAD))) not in (b"", _HEAD):
                return None
            text = (head + file.read()).decode("utf-8")
        content = json.loads(text or "{}")
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} could not be read: {error}") from error
    if not content:  # killed between taking its number and writing its card
        return RunCard(sources=(), parser="", evaluators={}, settings={})
    if content.pop("format", None) != FORMAT or content.pop("version", None) != VERSION:
        raise StorageError(f"{path} is no {FORMAT} of version {VERSION}; read it with the slea_llm that wrote it")
    try:
        return RunCard(**{**content, "sources": tuple(content["sources"])})
    except (KeyError, TypeError) as error:
        raise StorageError(f"{path}: not a {FORMAT}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCredit:
    """Credit of the leaf steps of one trajectory: `steps` are (turn, step), beside them advantages and rewards.

    `rewards[i]` is `stream.part -> reward` of step i. `why_not` is set, and the rest empty, when it carries no credit.
    """

    trajectory: str
    steps: tuple[tuple[int, int], ...] = ()
    advantages: tuple[float, ...] = ()
    rewards: tuple[Mapping[str, float], ...] = ()
    why_not: str | None = None


def _encode_credit(one: StepCredit) -> dict[str, Any]:
    return dataclasses.asdict(one)


def _decode_credit(value: Mapping[str, Any]) -> StepCredit:
    pairs: Sequence[Sequence[int]] = value["steps"]
    return StepCredit(
        trajectory=value["trajectory"],
        steps=tuple((int(turn), int(step)) for turn, step in pairs),
        advantages=tuple(float(number) for number in value["advantages"]),
        rewards=tuple(dict(one) for one in value["rewards"]),
        why_not=value["why_not"],
    )


CREDIT: LogFormat[StepCredit] = LogFormat(
    name="slea.step_credit", version=1, encode=_encode_credit, decode=_decode_credit
)
