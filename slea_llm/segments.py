"""Scored trajectories on disk, in a few files that are dropped whole; in memory stands only where each one lies.

A segment is a checked JSONL log like every other of this library: no pickle, a torn last line is noticed, and what
`append` reported as stored is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slea_llm import records
from slea_llm.errors import CheckpointError, StorageError
from slea_llm.storage import LogFormat, Place, RecordLog, cut_back
from slea_llm.types import ScoredTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A trajectory as the buffer keeps it, with the versions of policy and evaluators that it already names.

    `group` is shared by the dialogues of one task and round, which are drawn together. `entered` is the policy version
    from which its age counts: the one that sampled it, or the one that was served when a reviewer changed it.
    """

    scored: ScoredTrajectory
    group: int
    entered: int


def _encode(stored: Stored) -> dict[str, Any]:
    return {"group": stored.group, "entered": stored.entered, "scored": records.encode_scored(stored.scored)}


def _decode(value: Mapping[str, Any]) -> Stored:
    return Stored(
        **{
            **value,
            "group": int(value["group"]),
            "entered": int(value["entered"]),
            "scored": records.decode_scored(value["scored"]),
        }
    )


REPLAY: LogFormat[Stored] = LogFormat(name="slea.replay", version=1, encode=_encode, decode=_decode)


class Location(NamedTuple):
    """Segment number and the place in it."""

    segment: int
    place: Place


class Segments:
    """Numbered files `segment-N.jsonl` of at most `size` trajectories each, written by one process."""

    def __init__(self, folder: Path, *, size: int) -> None:
        if size < 1:
            raise ValueError(f"a segment of {size} trajectories holds nothing; give 1 or more")
        self.folder, self._size = folder, size
        self._log: RecordLog[Stored] | None = None
        self._bytes: dict[int, int] = {}
        self._count = 0

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    @property
    def bytes(self) -> int:
        """Size on the disk."""
        return sum(self._bytes.values())

    def path(self, segment: int) -> Path:
        return self.folder / f"segment-{segment:06d}.jsonl"

    def append(self, stored: Sequence[Stored]) -> list[Location]:
        """Where each lies. When this returns they are on the disk; after an error none of the last segment's is."""
        found: list[Location] = []
        while len(found) < len(stored):
            log = self._writable()
            part = stored[len(found) : len(found) + self._size - self._count]
            segment = max(self._bytes)
            found += [Location(segment, place) for place in log.put(*part)]
            self._count += len(part)
            self._bytes[segment] = log.position
        return found

    def read(self, location: Location) -> Stored:
        """Raises StorageError when the record is gone or damaged."""
        return REPLAY.read_at(self.path(location.segment), location.place)

    def drop(self, dead: Callable[[int], bool]) -> None:
        """Remove the segments that are dead; the one that is written to stays."""
        newest = max(self._bytes, default=0)
        for segment in [number for number in self._bytes if number != newest and dead(number)]:
            self.path(segment).unlink(missing_ok=True)
            del self._bytes[segment]

    def recover(self) -> Iterator[tuple[Location, Stored]]:
        """Everything in the folder, in the order in which it was written; for what a killed process left.

        What is appended afterwards goes into a new segment.
        """
        self.close()
        self._bytes = {number: path.stat().st_size for number, path in self._files()}
        for number in sorted(self._bytes):
            yield from ((Location(number, place), record) for place, record in _whole(self.path(number)))
        self._count = self._size

    def state(self) -> Mapping[str, Any]:
        return {"segments": sorted(self._bytes.items()), "count": self._count}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back: later segments are removed, the last one is cut to what it held.

        Raises CheckpointError when a segment of that time is gone or shorter than it was.
        """
        self.close()
        sizes = {int(number): int(size) for number, size in state["segments"]}
        files = dict(self._files())
        for number, size in sizes.items():
            path = self.path(number)
            if number not in files or path.stat().st_size < size:
                raise CheckpointError(
                    f"{path} is gone or shorter than the {size} bytes that the checkpoint counts on; put the file of "
                    "that run back or start a fresh run"
                )
        for number, path in files.items():
            if number > max(sizes, default=0):
                path.unlink()
            elif number in sizes:
                cut_back(path, sizes[number])
        self._bytes, self._count = sizes, int(state["count"])
        if sizes:
            self._log = RecordLog(self.path(max(sizes)), REPLAY)

    def _writable(self) -> RecordLog[Stored]:
        """The newest segment while there is room in it, else a new one."""
        if self._log is None or self._count >= self._size:
            self.close()
            segment = max(self._bytes, default=0) + 1
            if self.path(segment).exists():
                raise StorageError(
                    f"{self.path(segment)} is there already; a buffer writes over nothing that is not its own"
                )
            self._log = RecordLog(self.path(segment), REPLAY)
            self._bytes[segment], self._count = self._log.position, 0
        return self._log

    def _files(self) -> list[tuple[int, Path]]:
        found = [(path.stem.removeprefix("segment-"), path) for path in self.folder.glob("segment-*.jsonl")]
        return sorted((int(number), path) for number, path in found if number.isdecimal())


def _whole(path: Path) -> Iterator[tuple[Place, Stored]]:
    """The whole records of a segment, with their places; none when a kill tore its very header."""
    with path.open("rb") as file:
        header = file.readline()
        if header != REPLAY.header() and REPLAY.header().startswith(header):
            return
        stored, offset = REPLAY.read(path), len(header)
        for raw in file:
            record = next(stored, None)
            if record is None:  # a torn last line
                return
            yield Place(offset, len(raw)), record
            offset += len(raw)
