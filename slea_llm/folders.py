"""Whole folders, or nothing: write beside the target, then rename; and a table of what a folder holds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from slea_llm.errors import StorageError

MANIFEST = "manifest.json"


def make_folder(folder: Path) -> None:
    """Make a folder and what it lies in, where they are missing. Raises StorageError, naming folder and cause."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror or error}; name another folder") from error


@contextmanager
def held(lock: Path, busy: str) -> Iterator[None]:
    """Hold a lock file while the block runs; a process that dies lets go of it.

    Raises StorageError with the text `busy` when another process holds it, and when it cannot be written.
    """
    file = FileLock(lock)
    try:
        file.acquire(blocking=False)
    except Timeout as error:
        raise StorageError(busy) from error
    except OSError as error:
        raise StorageError(f"{lock} could not be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.release()


@contextmanager
def whole_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `target`; when the block ends well it becomes `target`, else it is removed.

    Raises StorageError, before anything is written, when `target` exists and is not empty and `overwrite` is false. An
    interrupted write leaves `target` as it was; the old content goes only after the new one is in place.
    """
    refuse_existing(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:100]}.partial-"))
    except OSError as error:
        raise StorageError(f"could not write {target}: {error}") from error
    try:
        yield partial
        _open_up(partial)
        _flush(partial)
        _put_in_place(partial, target, overwrite=overwrite)
    except OSError as error:
        raise StorageError(f"could not write {target}: {error}; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise StorageError when writing `target` would replace something that nobody asked to replace."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StorageError(f"{target} is not a folder; give another name")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise StorageError(f"{target} exists already and is not overwritten; give another name, or remove it first")


def _put_in_place(partial: Path, target: Path, *, overwrite: bool) -> None:
    refuse_existing(target, overwrite=overwrite)  # somebody else may have finished it meanwhile
    if not target.exists():
        partial.rename(target)
        return
    aside = partial.with_name(partial.name + ".old")
    target.rename(aside)
    partial.rename(target)
    shutil.rmtree(aside)


def _open_up(folder: Path) -> None:
    """Let others read what the umask lets them: mkdtemp and safetensors write for their owner alone."""
    probe = folder / ".probe"
    probe.mkdir()
    mode = probe.stat().st_mode & 0o777  # os.umask tells it only by setting it, for all threads
    probe.rmdir()
    folder.chmod(mode)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | mode & 0o666)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def file_table(folder: Path) -> dict[str, dict[str, Any]]:
    """Relative name -> size in bytes and SHA-256 of every file below `folder`, the manifest itself left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files
    }


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write `manifest.json`: the facts and the table of files, keys sorted, so that equal facts give equal bytes."""
    path = folder / MANIFEST
    text = json.dumps({**facts, "files": file_table(folder)}, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises StorageError when there is none or it is not JSON."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StorageError(f"{folder} holds no {MANIFEST}") from error
    except ValueError as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise StorageError(f"{path} has no table of files")
    return manifest


def changed_files(folder: Path, *, contents: bool = True) -> list[str]:
    """Names in the manifest whose file is missing or differs (in size, and in SHA-256 when `contents`), sorted."""
    wrong = []
    for name, row in read_manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != row["bytes"] or (contents and sha256_of(path) != row["sha256"]):
            wrong.append(name)
    return sorted(wrong)
