"""`slea parse`: the coverage report over logs, texts and folders."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from slea_llm.assets import find
from slea_llm.cli import main
from slea_llm.parsers.coverage import Coverage, agreement, borders
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.storage import write_trajectories
from slea_llm.types import Trajectory, Turn

TEXT = "<think>First look. Then ask.</think>What dish?"


def trajectory(*texts: str) -> Trajectory:
    turns = tuple(Turn(index=index, context=(), text=text) for index, text in enumerate(texts))
    return Trajectory(
        id="one",
        task={},
        environment="order_taking",
        seed=0,
        policy_version=0,
        turns=turns,
        traces=(),
        outcome=None,
        termination="failure",
    )


def test_a_log_gives_steps_a_turn_unparsed_share_and_disagreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    write_trajectories(log, [trajectory(TEXT, "One is. Two is.")])
    assert main(["parse", str(log), "--parsers", "markers,tagged", "--show", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("one, turn 0:\n")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("markers ", "tagged "))}
    assert rows["markers"][1] == "2.00"  # three leaf steps and one
    assert rows["tagged"][1] == "1.50"
    unparsed = len("<think>First look. Then ask.</think>") + len("One is. Two is.")
    assert rows["tagged"][-2] == f"{100 * unparsed / len(TEXT + 'One is. Two is.'):.1f}"
    assert rows["markers"][-2] == f"{100 * len('One is. Two is.') / len(TEXT + 'One is. Two is.'):.1f}"
    assert "0.333  markers and tagged" in out  # borders: two against one, one in common


def test_texts_lists_and_folders_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(["One.", {"id": "x", "text": "<think>cut"}]), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps({"first": "One.", "second": "Two."}), encoding="utf-8")
    (tmp_path / "ignored.csv").write_text("a,b", encoding="utf-8")
    (tmp_path / "below").mkdir()
    write_trajectories(tmp_path / "below" / "log.jsonl", [trajectory(TEXT)])
    packed = gzip.compress((tmp_path / "below" / "log.jsonl").read_bytes())
    (tmp_path / "packed.jsonl.gz").write_bytes(packed)
    assert main(["parse", str(tmp_path), "--recipe", str(find("recipes", "order_taking_tiny.yaml"))]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("7 turns\n")
    assert err == "1 files passed over: ignored.csv\n"
    assert "recipe, faults: thought never closed 1" in out


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.json", "{", [], "is no JSON"),
        ("a.json", "[1]", [], "entry 0 is neither a string nor an object"),
        ("a.json", "[]", [], "holds no turn"),
        ("a.txt", "x", ["--parsers", "tagd"], "unknown parser 'tagd'.*did you mean 'tagged'"),
        ("a.txt", "x", ["--parsers", ""], "--parsers names no parser"),
    ],
)
def test_what_cannot_be_read_is_named(
    name: str, content: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert main(["parse", str(path), *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_empty_folder_and_a_missing_file_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parse", str(tmp_path)]) == 2
    assert main(["parse", str(tmp_path / "no.txt")]) == 2
    err = capsys.readouterr().err
    assert "holds no log (`slea list log_format`)" in err
    assert "cannot be read" in err


def test_agreement_is_the_boundary_f1() -> None:
    assert agreement({1, 2, 3}, {2, 3, 4, 5}) == (4, 7)
    assert agreement(set(), set()) == (0, 0)


def test_blanks_before_a_step_do_not_count_and_lost_text_is_an_error() -> None:
    turn = Turn(index=0, context=(), text="<think>a</think>  b")
    steps = TaggedParser(TaggedParser.Config()).parse(turn, "t", None)
    assert borders(steps) == {18}
    coverage = Coverage(["tagged"])
    with pytest.raises(ValueError, match="do not rebuild turn 0"):
        coverage.add(turn, {"tagged": steps[:1]})


def test_an_empty_file_among_others_is_named_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").touch()
    (tmp_path / "text.txt").write_text("First, ask for the size. Then ask for the day.")
    assert main(["parse", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "empty.json: is empty" in said.err
    assert "1 turns" in said.out
    assert main(["parse", str(tmp_path / "none.json")]) == 2
