"""Read logs of any format: every record becomes a trajectory, or a fault with file, line and reason."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slea_llm import registry
from slea_llm.errors import StorageError
from slea_llm.logs import sources
from slea_llm.logs.fields import shown
from slea_llm.logs.formats import Fault, JsonFormat, LogRecord, RecordError, TextFormat
from slea_llm.logs.json_stream import Decoded, JsonStream, NotJsonError
from slea_llm.logs.own import OwnLog
from slea_llm.storage import parse_json
from slea_llm.types import Trajectory

KEPT_FAULTS = 1_000
"""Faults that are kept with their places; all are counted."""
SHOWN_FAULTS = 10
KEPT_FLAG = 120
"""Characters of a mending that are counted as one kind."""
MARKED_IDS = 1 << 25
"""Bits of the table of ids seen (4 MiB). Of a million ids one in a hundred thousand is wrongly taken for repeated."""

_NUMBERS = re.compile(r"\[\d+\]")


class LogReader:
    """The trajectories of log files and folders, in order; iterate once, then read the counts.

    `format` names a format of the registry, else each record's is found by its content: by ours in the order of the
    registry, then by those of other packages. With `strict` the first fault
    raises StorageError. An id that was met before gets `#` and the number of its record; the id as written is kept in
    `provenance["id_written"]`. Memory is that of the longest record, not of the file.
    """

    def __init__(self, *paths: Path | str, format: str | None = None, strict: bool = False) -> None:
        self._paths = [Path(path) for path in paths]
        self._strict = strict
        known = registry.ROWS["log_format"]
        self.formats: list[Any] = [_make(name, known) for name in known] if format is None else [_make(format)]
        self._forced = format is not None
        self._others: list[Any] | None = None
        self._seen = _SeenIds()
        self._file_name = ""
        self._headers = 0
        self.files: list[str] = []
        self.passed_over: list[str] = []
        self.faults: list[Fault] = []
        self.fault_count = self.records = self.trajectories = self.repeated_ids = 0
        self.by_format: Counter[str] = Counter()
        self.flags: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Trajectory]:
        for path in self._paths:
            found, passed = sources.find_files(path)
            self.passed_over += map(str, passed)
            if not found:
                raise StorageError(
                    f"{path} holds no log; files end in {', '.join(sorted(sources.SUFFIXES))}, packed or not by "
                    f"{' or '.join(sorted(sources.PACKED))}"
                )
            for file in found:
                self.files.append(str(file))
                yield from self._file(file)

    def lines(self) -> Iterator[str]:
        """What was read and what was not, in words."""
        formats = ", ".join(f"{name} {count}" for name, count in self.by_format.most_common())
        yield (
            f"{len(self.files)} files, {self.records} records, {self.trajectories} trajectories"
            f"{f' ({formats})' if formats else ''}, {self.fault_count} not read"
        )
        for fault in self.faults[:SHOWN_FAULTS]:
            yield f"  not read: {fault}"
        if self.fault_count > SHOWN_FAULTS:
            yield f"  and {self.fault_count - SHOWN_FAULTS} more that were not read"
        if self.passed_over:
            names, more = ", ".join(self.passed_over[:SHOWN_FAULTS]), len(self.passed_over) - SHOWN_FAULTS
            yield f"  no logs by their names, or results of scoring, passed over: {names}" + (
                f" and {more} more" if more > 0 else ""
            )
        if self.repeated_ids:
            yield f"  {self.repeated_ids} trajectories had an id that was met before; theirs end in # and a number"
        for flag, count in self.flags.most_common(SHOWN_FAULTS):
            yield f"  mended, x{count}: {flag}"

    def _file(self, path: Path) -> Iterator[Trajectory]:
        self._file_name = str(path)
        try:
            yield from self._read(path, *sources.form_of(path))
        except StorageError as error:
            if self._strict:
                raise
            self._fault(Fault(file=str(path), line=None, record=None, reason=str(error).removeprefix(f"{path} ")))

    def _read(self, path: Path, form: sources.Form, head: bytes) -> Iterator[Trajectory]:
        before = self.records + self._headers
        if form == "zip":
            yield from self._archive(path)
        elif form == "text":
            yield from self._text(path, head)
        else:
            for item in self.raw_records(path, form):
                if isinstance(item, Fault):
                    self.records += 1
                    self._fault(item)
                else:
                    yield from self._record(item)
        if self.records + self._headers == before:
            raise StorageError(f"{path} {'is empty' if form == 'empty' else 'holds no record'}")

    def raw_records(self, path: Path, form: sources.Form) -> Iterator[LogRecord | Fault]:
        """The JSON records of a file, whatever their format, and what is not JSON."""
        return self._lines(path) if form == "lines" else self._document(path)

    def _lines(self, path: Path) -> Iterator[LogRecord | Fault]:
        for count, (line, raw) in enumerate(sources.lines_of(path), start=1):
            try:
                parsed = parse_json(path, line, raw)
            except (StorageError, RecursionError) as error:
                reason = str(error).removeprefix(f"{path}, line {line}: ")
                yield Fault(file=str(path), line=line, record=count, reason=reason)
                continue
            yield LogRecord(
                file=sources.name_of(path), number=count, line=line, value=parsed.value, flags=parsed.flags, raw=raw
            )

    def _document(self, path: Path) -> Iterator[LogRecord | Fault]:
        """The records of one JSON value after another: items of an array, rows of a document, or values as a whole."""
        with sources.opened(path) as file:
            stream = JsonStream(file)
            count = 0
            while stream.peek():
                line = stream.line
                try:
                    for item, header in self._values(stream):
                        count += 1
                        if isinstance(item, NotJsonError):
                            yield Fault(file=str(path), line=stream.line, record=count, reason=str(item))
                        else:
                            yield LogRecord(
                                file=sources.name_of(path),
                                number=count,
                                line=item.line,
                                value=item.value,
                                flags=item.flags,
                                header=header,
                            )
                except NotJsonError as error:
                    count += 1
                    yield Fault(file=str(path), line=line, record=count, reason=str(error))
                    stream.skip_line()

    def _values(self, stream: JsonStream) -> Iterator[tuple[Decoded | NotJsonError, Mapping[str, Any]]]:
        if stream.peek() == "[":
            yield from self._array(stream)
        elif stream.peek() == "{":
            yield from self._object(stream)
        else:
            yield stream.value(), {}

    def _array(self, stream: JsonStream) -> Iterator[tuple[Decoded | NotJsonError, Mapping[str, Any]]]:
        items = stream.items()
        line = stream.line
        first = next(items, None)
        if isinstance(first, Decoded) and any(one.is_part(first.value) for one in self._json_formats()):
            rest = list(items)
            broken = [item for item in rest if isinstance(item, NotJsonError)]
            whole = [first, *(item for item in rest if isinstance(item, Decoded))]
            flags = tuple(flag for item in whole for flag in item.flags) + tuple(map(str, broken))
            yield Decoded([item.value for item in whole], line, flags), {}
            return
        if first is not None:
            yield first, {}
        for item in items:
            yield item, {}

    def _object(self, stream: JsonStream) -> Iterator[tuple[Decoded | NotJsonError, Mapping[str, Any]]]:
        """An object as a whole, or its rows where its beginning says that it has some."""
        line = stream.line
        stream.take("{")
        found: dict[str, Any] = {}
        flags: list[str] = []
        streamed = False
        while not stream.take("}"):
            key = stream.value()
            if not isinstance(key.value, str) or not stream.take(":"):
                raise NotJsonError(f"not JSON: {shown(key.value)} where a key and a colon must stand")
            rows = [one for one in self._json_formats() if one.rows == key.value and one.opens(found)]
            if rows and stream.peek() == "[":
                streamed = True
                for item in stream.items():
                    yield item, found
            else:
                value = stream.value()
                found[key.value] = value.value
                flags += value.flags
            if not stream.take(",") and stream.peek() != "}":
                raise NotJsonError("the object is not closed: the file was cut, or holds what is not JSON")
        if not streamed:
            yield Decoded(found, line, tuple(flags)), {}

    def _json_formats(self) -> list[JsonFormat]:
        return [one for one in self.formats if isinstance(one, JsonFormat)]

    def _text(self, path: Path, head: bytes) -> Iterator[Trajectory]:
        text = head.decode("utf-8", errors="replace")
        if "\x00" in text:
            raise StorageError(f"{path} is no text in UTF-8 and no JSON")
        for one in self.formats:
            if isinstance(one, TextFormat) and (self._forced or one.recognises_text(text)):
                for record in one.records(sources.name_of(path), sources.text_lines(path)):
                    yield from self._record(record, one)
                return
        raise StorageError(f"{path} begins with {shown(text)}, which is the beginning of no known format")

    def _archive(self, path: Path) -> Iterator[Trajectory]:
        try:
            with zipfile.ZipFile(path) as archive:
                one = next((one for one in self._json_formats() if one.opens_archive(archive.namelist())), None)
                if one is None:
                    raise StorageError(f"{path} is a zip archive that no format reads")
                for item in one.archive_records(str(path), archive):
                    if isinstance(item, Fault):
                        self.records += 1
                        self._fault(item)
                    else:
                        yield from self._record(item, one)
        except sources.damage(NotImplementedError, ValueError) as error:
            raise StorageError(f"{path} could not be read: {error}") from error

    def _record(self, record: LogRecord, found: Any = None) -> Iterator[Trajectory]:
        """The trajectories of a record; none of them when it is faulty."""
        one = found or self._format_of(record.value)
        try:
            trajectories = list(one.read(record))
        except (RecordError, RecursionError) as error:
            self.records += 1
            self._fault(Fault(file=self._file_name, line=record.line, record=record.number, reason=str(error)))
            return
        self.records += bool(trajectories)
        self._headers += not trajectories  # of our own logs, which are no records
        for trajectory in trajectories:
            yield self._counted(trajectory, one.name, record)

    def _format_of(self, value: Any) -> Any:
        if self._forced:
            return self.formats[0]
        found = next((one for one in self.formats if one.recognises(value)), None)
        if found is None:
            found = next((one for one in self._third_parties() if one.recognises(value)), _NO_FORMAT)
        return found

    def _third_parties(self) -> list[Any]:
        """Formats of other packages, searched for only when a record is of none of ours: the search takes a while."""
        if self._others is None:
            known = registry.names("log_format")
            self._others = [_make(name, known) for name in known if name not in registry.ROWS["log_format"]]
        return self._others

    def _counted(self, trajectory: Trajectory, name: str, record: LogRecord) -> Trajectory:
        self.trajectories += 1
        self.by_format[name] += 1
        for flag in () if name == OwnLog.name else trajectory.provenance.get("flags", ()):
            kind = _NUMBERS.sub("[]", str(flag))[:KEPT_FLAG]
            self.flags[kind if kind in self.flags or len(self.flags) < KEPT_FAULTS else "other kinds"] += 1
        if not self._seen.is_new(trajectory.id):
            self.repeated_ids += 1
            written, unique = trajectory.id, f"{trajectory.id}#{record.number}"
            while not self._seen.is_new(unique):
                unique += "'"
            trajectory = replace(trajectory, id=unique, provenance={**trajectory.provenance, "id_written": written})
        return trajectory

    def _fault(self, fault: Fault) -> None:
        if self._strict:
            raise StorageError(str(fault))
        self.fault_count += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(fault)


def is_log(path: Path, *, besides: Sequence[str] = ()) -> bool:
    """Whether the file begins with a record of a known format, `besides` these. Raises StorageError as reading does."""
    reader = LogReader(path)
    formats = [one for one in reader.formats if one.name not in besides]
    form, head = sources.form_of(path)
    if form == "text":
        text = head.decode("utf-8", errors="replace")
        return any(isinstance(one, TextFormat) and one.recognises_text(text) for one in formats)
    if form not in ("lines", "document"):
        return form == "zip"
    first = next(reader.raw_records(path, form), None)
    return isinstance(first, LogRecord) and any(one.recognises(first.value) for one in formats)


class _SeenIds:
    """A Bloom filter: whether an id was met before, in memory of a fixed size. It may say so of a new one, rarely."""

    def __init__(self) -> None:
        self._bits = bytearray(MARKED_IDS // 8)

    def is_new(self, name: str) -> bool:
        """Whether it was not met, which it is from now on."""
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=28).digest()
        new = False
        for start in range(0, 28, 4):
            place = int.from_bytes(digest[start : start + 4], "little") % MARKED_IDS
            byte, bit = place >> 3, 1 << (place & 7)
            if not self._bits[byte] & bit:
                self._bits[byte] |= bit
                new = True
        return new


class _NoFormat:
    """Of a record that no format knows."""

    name = ""

    def read(self, record: LogRecord) -> list[Trajectory]:
        raise RecordError(f"it is of no known format: {_keys(record.value)}")


_NO_FORMAT = _NoFormat()


def _make(name: str, known: Mapping[str, str] | None = None) -> Any:
    found = registry.load("log_format", name, known)
    return found(found.Config())


def _keys(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(shown, list(value)[:8])) or 'nothing'}"
    return f"{type(value).__name__} {shown(value)}"
