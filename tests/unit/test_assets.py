"""Recipes, prompts and data are found in exactly two places."""

from __future__ import annotations

from pathlib import Path

import pytest

import slea_llm
from slea_llm import assets
from slea_llm.errors import ConfigError

PACKAGE = Path(slea_llm.__file__).resolve().parent


@pytest.mark.parametrize("kind", ["recipes", "prompts", "data"])
def test_repository_first_then_the_package(kind: assets.AssetKind) -> None:
    assert assets.roots(kind) == (PACKAGE.parent / kind, PACKAGE / "_assets" / kind)


def test_shipped_files_are_found() -> None:
    assert assets.find("data", "order_taking/en.yaml").is_file()
    assert "order_taking/terse.en.md" in assets.names("prompts")


def test_the_wheel_is_the_second_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, wheel = tmp_path / "data", tmp_path / "wheel"
    monkeypatch.setattr(assets, "roots", lambda _kind: (repository, wheel))
    wheel.mkdir()
    (wheel / "a.txt").write_text("wheel", encoding="utf-8")
    assert assets.find("data", "a.txt").read_text(encoding="utf-8") == "wheel"
    repository.mkdir()
    (repository / "a.txt").write_text("repository", encoding="utf-8")
    assert assets.find("data", "a.txt").read_text(encoding="utf-8") == "repository"
    assert assets.names("data") == ("a.txt",)


@pytest.mark.parametrize("name", ["", "/etc/hostname", "../pyproject.toml", "order_taking/../../pyproject.toml"])
def test_name_stays_inside_its_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="relative path"):
        assets.find("data", name)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'order_taking/en\.yaml'"):
        assets.find("data", "order_taking/em.yaml")
    with pytest.raises(ConfigError, match="did you mean 'data'"):
        assets.find("date", "x")  # type: ignore[arg-type]
