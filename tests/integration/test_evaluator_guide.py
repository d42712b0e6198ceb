"""The worked examples of docs/evaluators.md are followed: a fit that is refused, how it reads, written knowledge."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slea_llm.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluators.md").read_text(encoding="utf-8")


def blocks(language: str, part: str) -> list[str]:
    """The code blocks of a language that hold `part`."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language and part in block]


def test_fit_refuse_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (play,) = blocks("python", "write_trajectories")
    # All but the log of 400, which takes most of the time.
    exec(play.replace("range(400))", "range(1))"), {})  # noqa: S102 (the documentation)
    (refused,) = blocks("", "few.jsonl")
    command, *_, verdict = refused.splitlines()
    assert main(command.split()[1:]) == 0
    assert verdict.removesuffix("...") in capsys.readouterr().out
    (reading,) = blocks("", "reading.yaml")
    recipe = reading.split("'")[1].replace("\\n", "\n").replace("models/hindsight", "models/few")
    Path("reading.yaml").write_text(recipe, encoding="utf-8")
    assert main(reading.splitlines()[1].split()[1:]) == 0
    assert re.search(r"hindsight: \d+ steps scored, mean .*, 0 not scored", capsys.readouterr().out)


def test_knowledge_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (knowledge,) = blocks("yaml", "Renting a bicycle")
    (log,) = blocks("", '{"messages"')
    (shown,) = blocks("", "slea score bikes.jsonl")
    Path("bikes.yaml").write_text(knowledge, encoding="utf-8")
    Path("bikes.jsonl").write_text(log, encoding="utf-8")
    command, _, *summary = shown.splitlines()
    assert main(command.split()[1:]) == 0
    assert "\n".join(summary) in capsys.readouterr().out
