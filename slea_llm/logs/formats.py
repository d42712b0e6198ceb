"""What a log format is: records in, trajectories out. One file a format; a third party's joins by an entry point."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slea_llm.types import Trajectory


class RecordError(ValueError):
    """A record of a log that cannot be read; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One record of a log: a JSON value, or for text formats a text.

    `number` and `line` count from 1; `flags` says what had to be mended to read it; `header` holds what its document
    says before its records; `raw` is its line as it stands in the file, for formats that check it.
    """

    file: str
    number: int
    line: int
    value: Any
    flags: tuple[str, ...] = ()
    header: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What could not be read, and why. `record` is its number in the file, from 1; None for a whole file."""

    file: str
    line: int | None
    record: int | None
    reason: str

    def __str__(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        return f"{self.file}{line}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoConfig:
    """Of a format that has nothing to set."""


class JsonFormat(ABC):
    """A format whose records are JSON values.

    `rows` is the key of a document under which its records stand; what stands before it is their header.
    """

    name: ClassVar[str]
    Config: ClassVar[type] = NoConfig
    rows: ClassVar[str] = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def recognises(self, value: Any) -> bool:
        """Whether a record looks like one of this format; cheap, and never raises."""

    @abstractmethod
    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        """The trajectories of a record. Raises RecordError when it cannot be read."""

    def opens(self, header: Mapping[str, Any]) -> bool:
        """Whether a document that begins like this holds records of this format under `rows`."""
        return bool(self.rows) and not header

    def is_part(self, value: Any) -> bool:  # noqa: ARG002 - for formats that override it
        """Whether an array that begins with this value is one record, not an array of records."""
        return False

    def opens_archive(self, names: Sequence[str]) -> bool:  # noqa: ARG002 - for formats that override it
        """Whether a zip archive with these members is a log of this format."""
        return False

    def archive_records(
        self,
        file: str,  # noqa: ARG002 - for formats that override it
        archive: zipfile.ZipFile,  # noqa: ARG002
    ) -> Iterator[LogRecord | Fault]:
        """The records of such an archive. Nothing of it is ever written to the disk."""
        return iter(())


class TextFormat(ABC):
    """A format that is plain text; the records of a file are made here too."""

    name: ClassVar[str]
    Config: ClassVar[type] = NoConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def recognises_text(self, head: str) -> bool:
        """Whether a file that begins with this text is one of this format."""

    def recognises(self, value: Any) -> bool:  # noqa: ARG002 - for formats that override it
        """Whether a JSON value holds texts of this format; cheap, and never raises."""
        return False

    @abstractmethod
    def records(self, file: str, lines: Iterable[tuple[int, str]]) -> Iterator[LogRecord]:
        """The records of a text, whose lines come with their numbers and without their ends."""

    @abstractmethod
    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        """The trajectories of a record. Raises RecordError when it cannot be read."""
