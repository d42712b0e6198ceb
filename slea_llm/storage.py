"""Files that are whole or not there, and checked, versioned JSONL logs of trajectories and scored trajectories.

A log is JSON lines in UTF-8: a header with format and version, then one record a line. The last key of each line is the
CRC-32 of what stands before it, so that any JSON reader can read the file and a torn line is always noticed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, Self, TypeVar

from slea_llm import records
from slea_llm.errors import StorageError
from slea_llm.types import ScoredTrajectory, Trajectory

log = logging.getLogger(__name__)

R = TypeVar("R")

_BOM = b"\xef\xbb\xbf"
_CRC = re.compile(rb',"crc32":"([0-9a-f]{8})"\}(?:\r?\n)?\Z')
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def atomic_write(path: Path | str, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file that becomes `path` when the block ends well; `mode` is "w" (UTF-8, \\n) or "wb".

    Until then `path` is what it was. Raises StorageError, which names path and cause, when writing fails; neither then
    nor after any other exception is a part of the file left.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode {mode!r} is not one of w, wb")
    target = Path(path)
    partial = target.with_name(f".{target.name[:100]}.{os.getpid()}.partial")
    text: dict[str, str] = {} if mode == "wb" else {"encoding": "utf-8", "newline": "\n"}
    with _named(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open(mode, **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
            _sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)


def safe_name(name: str) -> str:
    """The name itself when it is fit to be a file or folder name and to stand in a command; raises StorageError if not.

    Allowed: 1 to 128 letters, digits, points, hyphens and underscores of ASCII, beginning with a letter or digit.
    """
    if not _SAFE_NAME.fullmatch(name):
        raise StorageError(
            f"{name[:140]!r} is not a safe name; use 1 to 128 of a-z, A-Z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLine:
    """One line of a JSONL file. `flags` says what had to be mended: non-finite numbers (now null), half characters."""

    number: int
    value: Any
    flags: tuple[str, ...] = ()


def read_json_lines(path: Path | str) -> Iterator[JsonLine]:
    """The lines of any JSONL file, streaming; blank lines are passed over.

    A byte order mark and CRLF are tolerated; NaN and infinities become None, lone surrogates and bytes that are not
    UTF-8 become U+FFFD, and the line is flagged. Raises StorageError for a file that cannot be read and a line that is
    not JSON.
    """
    for number, raw in _lines(Path(path)):
        if raw and not raw.isspace():
            yield parse_json(path, number, raw)


def cut_back(path: Path, position: int) -> None:
    """Cut a growing log back to the size it had once, because what follows will be written again.

    Raises StorageError when the file is shorter than that.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < position:
        raise StorageError(
            f"{path} holds {size} bytes and is to go on from {position}; put the file of that run back or start a "
            "fresh one"
        )
    if size > position:
        with _named(path):
            os.truncate(path, position)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of each line, its end kept."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                yield number, raw.removeprefix(_BOM) if number == 1 else raw
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror or error}") from error


def parse_json(path: Path | str, number: int, raw: bytes) -> JsonLine:
    """One JSON value that begins in line `number`, mended as `read_json_lines` says; raises the same."""
    flags: list[str] = []
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        flags.append(f"not UTF-8 at byte {error.start}")
        text = raw.decode("utf-8", errors="replace")

    def no_number(name: str) -> None:
        flags.append(f"non-finite number {name}")

    try:
        value = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path}, line {number}: not JSON: {error}") from error
    if re.search(r"\\u[dD][89a-fA-F]", text):
        value = mend_json(value, "", flags)
    return JsonLine(number=number, value=value, flags=tuple(flags))


def mend_json(value: Any, place: str, flags: list[str]) -> Any:
    """A copy for strict JSON in UTF-8: non-finite numbers become None, lone surrogates U+FFFD; each is flagged."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            flags.append(f"lone surrogate at {place or '/'}")
            return _SURROGATE.sub("\ufffd", value)
    elif isinstance(value, float):
        if value - value != 0:
            flags.append(f"non-finite number {value} at {place or '/'}")
            return None
    elif isinstance(value, Mapping):
        return {
            mend_json(key, f"{place}/", flags): mend_json(item, f"{place}/{key}", flags) for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        return [mend_json(item, f"{place}/{index}", flags) for index, item in enumerate(value)]
    return value


def _encode(payload: Mapping[str, Any]) -> tuple[bytes, Sequence[str]]:
    """One line with its checksum, and what had to be mended for strict JSON; the line holds that as `flags`."""
    flags: list[str] = []
    try:
        body = _dump(payload)
    except ValueError:  # a number or a half character that is not JSON: rare, so only now is it looked for
        payload = {**mend_json(payload, "", flags), "flags": flags}
        body = _dump(payload)
    return b'%s,"crc32":"%08x"}\n' % (body[:-1], zlib.crc32(body)), flags


def _dump(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def _checked(raw: bytes) -> bytes | None:
    """The line without its checksum; None when it is torn or changed."""
    match = _CRC.search(raw, max(0, len(raw) - 24))
    if match is None:
        return None
    with memoryview(raw) as view:  # lines can be long: no copy before it is known to be whole
        checksum = zlib.crc32(b"}", zlib.crc32(view[: match.start()]))
    return raw[: match.start()] + b"}" if checksum == int(match[1], 16) else None


class Place(NamedTuple):
    """Where a record lies in its log, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat(Generic[R]):
    """A kind of log: its name and version, and how a record becomes JSON values and back."""

    name: str
    version: int
    encode: Callable[[R], dict[str, Any]]
    decode: Callable[[Mapping[str, Any]], R]

    def header(self) -> bytes:
        return _encode({"format": self.name, "version": self.version})[0]

    def line(self, record: R) -> bytes:
        """Raises StorageError when the record would not be read back, as with a NaN where a number must stand."""
        try:
            raw, flags = _encode(self.encode(record))
            if flags:
                value = json.loads(raw)
                del value["crc32"], value["flags"]
                self.decode(value)
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise StorageError(f"a record of {self.name} cannot be written: {error}") from error
        return raw

    def check_header(self, path: Path, raw: bytes) -> None:
        """Raises StorageError when the first line is not the header of this format and version."""
        header = _header(path, raw, self.name)
        if header["format"] != self.name:
            raise StorageError(f"{path} is a {header['format']} log; a {self.name} log is needed here")
        if header.get("version") != self.version:
            raise StorageError(
                f"{path} has version {header.get('version')} of {self.name}; this slea_llm reads version "
                f"{self.version}: read it with the slea_llm that wrote it, or make it anew"
            )

    def read(self, path: Path | str) -> Iterator[R]:
        """The records, streaming. A last line that an interrupted write tore is left out, with a warning in the log.

        Raises StorageError for another format or version, and for a line within the file that is torn or changed.
        """
        file = Path(path)
        lines = _lines(file)
        _, first = next(lines, (0, b""))
        self.check_header(file, first)
        for number, raw in lines:
            body = _checked(raw)
            if body is None:
                if next(lines, None) is not None:
                    raise StorageError(f"{file}, line {number}: the checksum is wrong; the line was damaged or changed")
                log.warning("%s: line %d, torn by an interrupted write, is left out", file, number)
                return
            yield self._decode(file, number, body)

    def read_at(self, path: Path | str, place: Place) -> R:
        """The one record that lies there. Raises StorageError when it is gone, damaged or was changed."""
        file = Path(path)
        try:
            with file.open("rb") as handle:
                handle.seek(place.offset)
                body = _checked(handle.read(place.length))
        except OSError as error:
            raise StorageError(f"{file} could not be read: {error.strerror or error}") from error
        if body is None:
            raise StorageError(f"{file}, byte {place.offset}: the checksum is wrong; the record was damaged or changed")
        return self._decode(file, 0, body)

    def _decode(self, path: Path, number: int, body: bytes) -> R:
        """The record of a line; number 0: a line that was read by its place."""
        value = parse_json(path, number, body).value
        try:
            for flag in value.pop("flags", ()):
                log.warning("%s, line %d was mended when it was written: %s", path, number, flag)
            return self.decode(value)
        except (ArithmeticError, AttributeError, TypeError, ValueError, KeyError) as error:
            raise StorageError(f"{path}, line {number}: not a record of {self.name}: {error}") from error

    def read_line(self, path: Path | str, number: int, raw: bytes) -> R:
        """The record of one line. Raises StorageError when the line was damaged or is no such record."""
        body = _checked(raw)
        if body is None:
            raise StorageError(f"{path}, line {number}: the checksum is wrong; the line was torn, damaged or changed")
        return self._decode(Path(path), number, body)

    def write(self, path: Path | str, items: Iterable[R]) -> int:
        """Write a whole log at once, or nothing; the number of records."""
        count = 0
        with atomic_write(path, "wb") as file:
            file.write(self.header())
            for item in items:
                file.write(self.line(item))
                count += 1
        return count


TRAJECTORIES: LogFormat[Trajectory] = LogFormat(
    name="slea.trajectories", version=1, encode=records.encode_trajectory, decode=records.decode_trajectory
)
SCORED: LogFormat[ScoredTrajectory] = LogFormat(
    name="slea.scored_trajectories", version=1, encode=records.encode_scored, decode=records.decode_scored
)


def log_kind(path: Path | str) -> str:
    """The format name in the header of a log. Raises StorageError when the file is no log of this project."""
    file = Path(path)
    _, first = next(_lines(file), (0, b""))
    return str(_header(file, first, "slea")["format"])


def _header(path: Path, raw: bytes, wanted: str) -> dict[str, Any]:
    body = _checked(raw)
    header: dict[str, Any] = json.loads(body) if body else {}
    if "format" not in header:
        raise StorageError(f"{path} does not begin with the header of a {wanted} log; is it of another kind?")
    return header


class RecordLog(Generic[R]):
    """A log that grows, by one writer. After `append` returns, the records are on the disk.

    Opening a log that a killed process left cuts its torn last line off and says so in `cut_bytes` and in the log file.
    Raises StorageError when the file is of another kind, or damaged before its last line.
    """

    def __init__(self, path: Path | str, form: LogFormat[R]) -> None:
        self.path = Path(path)
        self.cut_bytes = 0
        self._end = 0
        self._form = form
        with _named(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            try:
                self._recover()
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def position(self) -> int:
        """Bytes on the disk; a log that is cut back to them holds what it holds now."""
        return self._end

    def rewind(self, position: int) -> None:
        """Cut the log back to an earlier `position`. Raises StorageError when it is shorter."""
        cut_back(self.path, position)
        self._end = position

    def append(self, *items: R) -> None:
        """Write these records, all or none. Raises StorageError when one cannot be written or the disk is full."""
        self.put(*items)

    def put(self, *items: R) -> list[Place]:
        """`append`, and where each record lies."""
        lines = [self._form.line(item) for item in items]
        ends = list(itertools.accumulate(map(len, lines), initial=self._end))
        self._write(b"".join(lines))
        return [Place(offset, len(line)) for offset, line in zip(ends, lines, strict=False)]

    def _write(self, content: bytes) -> None:
        with _named(self.path):
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(self._end)
                raise
        self._end += len(content)

    def _recover(self) -> None:
        """Cut a torn last line, end a whole one that lacks its end, and give an empty log its header."""
        size = self.path.stat().st_size
        self._end, ended = self._whole_lines(size)
        if self._end < size:
            self._file.truncate(self._end)
            self.cut_bytes = size - self._end
            log.warning("%s: %d bytes at its end, torn by an interrupted write, were cut", self.path, self.cut_bytes)
        if not ended:
            self._write(b"\n" if self._end else self._form.header())

    def _whole_lines(self, size: int) -> tuple[int, bool]:
        """Where the last whole line ends, and whether it has its line end."""
        header = self._form.header()
        end, ended = 0, False
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                torn_header = number == 1 and raw != header and header.startswith(raw)
                if number == 1 and not torn_header:
                    self._form.check_header(self.path, raw.removeprefix(_BOM))
                elif torn_header or _checked(raw) is None:
                    if end + len(raw) < size:
                        raise StorageError(f"{self.path}, line {number}: the checksum is wrong; the line was damaged")
                    break
                end, ended = end + len(raw), raw.endswith(b"\n")
        return end, ended


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the system become a StorageError that names path and cause."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}; what it held is kept") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class TrajectoryLog(RecordLog[Trajectory]):
    """A growing log of trajectories."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, TRAJECTORIES)


class ScoredLog(RecordLog[ScoredTrajectory]):
    """A growing log of scored trajectories."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, SCORED)


def write_trajectories(path: Path | str, trajectories: Iterable[Trajectory]) -> int:
    """Write a log of these trajectories, whole or not at all; how many they were."""
    return TRAJECTORIES.write(path, trajectories)


def read_trajectories(path: Path | str) -> Iterator[Trajectory]:
    """The trajectories of a log, one by one; see `LogFormat.read`."""
    return TRAJECTORIES.read(path)


def write_scored(path: Path | str, scored: Iterable[ScoredTrajectory]) -> int:
    """Write a log of these scored trajectories, whole or not at all; how many they were."""
    return SCORED.write(path, scored)


def read_scored(path: Path | str) -> Iterator[ScoredTrajectory]:
    """The scored trajectories of a log, one by one; see `LogFormat.read`."""
    return SCORED.read(path)
