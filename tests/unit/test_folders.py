"""A folder is whole or not there at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slea_llm.errors import StorageError
from slea_llm.folders import MANIFEST, changed_files, held, read_manifest, sha256_of, whole_folder, write_manifest


def break_off(target: Path, interruption: BaseException, *, overwrite: bool = False) -> None:
    with whole_folder(target, overwrite=overwrite) as folder:
        (folder / "half").write_text("1")
        raise interruption


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_becomes_the_target_only_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert listing(tmp_path / "deep") == ["out", "out/a"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    with pytest.raises(interruption):
        break_off(tmp_path / "out", interruption())
    assert listing(tmp_path) == []


def test_a_full_disk_is_named_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"out.*No space left"), whole_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert listing(tmp_path) == []


def test_never_overwrites_unless_asked(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("keep")
    with pytest.raises(StorageError, match="exists already"), whole_folder(target):
        pytest.fail("the block must not run")
    assert (target / "mine").read_text() == "keep"
    with whole_folder(target, overwrite=True) as folder:
        (folder / "new").write_text("x")
    assert listing(tmp_path) == ["out", "out/new"]


def test_an_interrupted_overwrite_keeps_the_old(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("keep")
    with pytest.raises(KeyboardInterrupt):
        break_off(target, KeyboardInterrupt(), overwrite=True)
    assert listing(tmp_path) == ["out", "out/mine"]


def test_refuses_to_replace_a_file_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(StorageError, match="not a folder"), whole_folder(tmp_path / name, overwrite=True):
            pytest.fail("the block must not run")


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "new") as partial:
        (partial / "sub").mkdir()
        save_file({"a": np.zeros(1)}, partial / "sub" / "weights.safetensors")
        (partial / "config.json").touch()
    plain = tmp_path / "plain.json"
    plain.touch()
    readable = plain.stat().st_mode
    found = [path.stat().st_mode for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert found == [readable, readable]


def test_manifest_names_every_file_and_finds_changes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_text("one")
    (tmp_path / "sub" / "b").write_text("two")
    write_manifest(tmp_path, {"kind": "test"})
    assert read_manifest(tmp_path)["files"]["sub/b"] == {"bytes": 3, "sha256": sha256_of(tmp_path / "sub" / "b")}
    assert sorted(read_manifest(tmp_path)["files"]) == ["a", "sub/b"]
    assert changed_files(tmp_path) == []
    (tmp_path / "a").write_text("eno")
    assert changed_files(tmp_path) == ["a"]
    assert changed_files(tmp_path, contents=False) == []
    (tmp_path / "sub" / "b").unlink()
    assert changed_files(tmp_path, contents=False) == ["sub/b"]


@pytest.mark.parametrize("text", ["{", json.dumps([]), json.dumps({"files": 1})])
def test_a_broken_manifest_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(StorageError, match=MANIFEST):
        read_manifest(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"could not write .*file/below"), whole_folder(tmp_path / "file" / "below"):
        pass


def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    with held(lock, "busy: wait"):
        with pytest.raises(StorageError, match="busy: wait"), held(lock, "busy: wait"):
            pass
        assert lock.exists()
    with held(lock, "busy: wait"):
        pass
    assert listing(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="could not be written: "), held(tmp_path / "file" / "lock", "busy"):
        pass


def test_a_process_that_is_killed_lets_go_of_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    code = (
        "import sys, time; from pathlib import Path; from slea_llm.folders import held\n"
        "with held(Path(sys.argv[1]), 'busy'): print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    with pytest.raises(StorageError, match="busy"), held(lock, "busy"):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with held(lock, "busy"):
        pass
