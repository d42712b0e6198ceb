"""From a file to its raw records: gzip, Zstandard and zip opened, lines told from documents, nothing held for long."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from slea_llm.errors import MissingDependencyError, StorageError

HEAD = 1 << 16
"""Bytes by which the form of a file is told."""
LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
SUFFIXES = frozenset({*LINE_SUFFIXES, ".json", ".traj", ".eval", ".txt"})
PACKED = frozenset({".gz", ".zst"})

Form = Literal["lines", "document", "text", "zip", "empty"]

_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD, _ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_RUN = re.compile(r"(run-\d{4,})\.(?:json|scores\.jsonl|credit\.jsonl)")
_SURE_OBJECT = re.compile(rb'\{\s*(?:"|\})|\[')


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked when it is gzip or Zstandard by its first bytes, without a byte order mark.

    Raises StorageError when it cannot be read, and MissingDependencyError when the package for Zstandard is missing.
    """
    with _reading(path), path.open("rb") as raw:
        start = raw.read(4)
        raw.seek(0)
        file: Any = raw
        if start.startswith(_GZIP):
            file = gzip.GzipFile(fileobj=raw)
        elif start == _ZSTD:
            file = _zstandard(raw)
        buffered = io.BufferedReader(file, HEAD)
        if buffered.peek(3)[:3] == _BOM:
            buffered.read(3)
        yield buffered


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except damage() as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{path} could not be read: {reason}") from error


def damage(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What reading a damaged file raises, and `more`: also zstandard's own error, where that package is loaded."""
    package = sys.modules.get("zstandard")
    own = (package.ZstdError,) if package is not None else ()
    return (OSError, EOFError, zlib.error, zipfile.BadZipFile, *own, *more)


def _zstandard(raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependencyError("reading .zst needs zstandard: pip install zstandard") from error
    reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return reader


def name_of(path: Path) -> str:
    """The name of a file as a text: its bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path.name).decode("utf-8", errors="replace")


def plain_suffix(path: Path) -> str:
    """The suffix of a file in small letters, that of its packing left out."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def form_of(path: Path) -> tuple[Form, bytes]:
    """The form of a file, by its content, and its first bytes."""
    with opened(path) as file:
        head = file.read(HEAD)
    return _form(head, plain_suffix(path)), head


def _form(head: bytes, suffix: str) -> Form:
    if head.startswith(_ZIP):
        return "zip"
    text = head.lstrip()
    if not text:
        return "empty"
    first, _, rest = text.partition(b"\n")
    if not _SURE_OBJECT.match(text):
        return "lines" if suffix in LINE_SUFFIXES else "text"
    if len(text) == len(first) == HEAD and suffix not in LINE_SUFFIXES:
        return "document"  # one long line: values are read one after another, whatever they are
    following = rest.lstrip()
    if _is_json(first):
        return "lines" if following else "document"
    if suffix in LINE_SUFFIXES:
        return "document" if first.strip() in (b"{", b"[", b"[{") else "lines"
    if text.startswith(b"[") or first.strip() == b"{" or rest[:1] in (b" ", b"\t"):
        return "document"
    return "lines" if following.startswith((b"{", b"[")) else "document"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of every line that is not blank."""
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.isspace():
                yield number, raw


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line, its end left out; what is not UTF-8 becomes U+FFFD."""
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            yield number, raw.decode("utf-8", errors="replace").rstrip("\r\n")


def find_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to read (the path itself, or those in the folder by their suffix) and those passed over, sorted.

    Results of `slea score` in folders below are passed over: they hold the dialogues of logs that are read beside them.
    Hidden files are passed over unmentioned. Raises StorageError when there is no such path,
    and for a pipe.
    """
    if not path.exists():
        raise StorageError(f"{path} does not exist")
    if path.is_fifo():
        raise StorageError(f"{path} is a pipe, which can be read only once; write it to a file first")
    if not path.is_dir():
        return [path], []
    below = path.rglob("*")
    files = sorted(one for one in below if one.is_file() and not _hidden(one.relative_to(path)))
    taken = [one for one in files if plain_suffix(one) in SUFFIXES and not (one.parent != path and _of_results(one))]
    return taken, [one for one in files if one not in set(taken)]


def _of_results(file: Path) -> bool:
    """Whether a file belongs to a run in a folder of results: by its name, and by the card of that run."""
    match = _RUN.fullmatch(file.name)
    if match is None:
        return False
    try:
        with file.with_name(f"{match[1]}.json").open("rb") as card:
            return card.read(64).startswith(b'{\n  "format": "slea.score_run"')
    except OSError:
        return False


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
