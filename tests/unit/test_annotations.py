"""Labels and overrides: read strictly, applied where they belong, with who made them and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slea_llm.annotations import Annotations
from slea_llm.errors import ConfigError
from slea_llm.fitting.labels import read_labels
from tests.support.logged import booking, scored

SIGNED = {"by": "ada", "at": "2026-05-02", "why": "a shortcut"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_an_override_replaces_the_score_and_keeps_the_old_one(tmp_path: Path) -> None:
    file = write(tmp_path / "l.jsonl", {"trajectory": "a", "turn": 0, "step": 0, "override": -10, **SIGNED})
    (one,) = scored(booking("a", success=True))
    before, after = one.scores[0], Annotations.read(file).overrule(one).scores[0]
    assert after.score == -10.0
    assert after.parts == {"before_override": before.score}
    assert after.rationale == "overridden by ada on 2026-05-02: a shortcut (was +0.20: the call brought a result)"
    assert Annotations.read(file).overrule(one).scores[1:] == one.scores[1:]


def test_without_a_place_it_is_about_the_last_step(tmp_path: Path) -> None:
    (one,) = scored(booking("a", success=True))
    whole = Annotations.read(write(tmp_path / "a.jsonl", {"trajectory": "a", "override": -10, **SIGNED}))
    turn = Annotations.read(write(tmp_path / "b.jsonl", {"trajectory": "a", "turn": 1, "label": 1}))
    assert [word.score for word in whole.overrule(one).scores][-1] == -10.0
    assert turn.labels(one) == {(1, 1): 1.0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"trajectory": "a", "override": -10}, "names who made it"),
        ({"trajectory": "a", "label": 2}, r"label 2\.0 is not in \[0, 1\]"),
        ({"trajectory": "a", "label": 1, "lable": 1}, "unknown key 'lable'.*did you mean 'label'"),
        ({"trajectory": "a", "label": 1, "step": 2}, "step 2 of which turn"),
        ({"trajectory": "a", "label": "good"}, "must be a number"),
        ({"trajectory": "a", "turn": -1, "label": 1}, "turn -1 must be a whole number"),
        ({"label": 1}, "trajectory .* is missing"),
        ([1], "a JSON object is needed"),
    ],
)
def test_a_bad_line_is_named_with_its_fault(tmp_path: Path, row: Any, words: str) -> None:
    file = write(tmp_path / "l.jsonl", {"trajectory": "a", "label": 1}, row)
    with pytest.raises(ConfigError, match=rf"l\.jsonl, line 2: .*{words}"):
        Annotations.read(file)


def test_a_step_that_is_not_there_and_a_stranger_are_told(tmp_path: Path) -> None:
    (one,) = scored(booking("a", success=True))
    read = Annotations.read(write(tmp_path / "l.jsonl", {"trajectory": "a", "turn": 9, "step": 0, "label": 1}))
    (fault,) = read.misplaced(one)
    assert "no leaf step at turn 9, step 0; the leaf steps (turn, step) are [(0, 0)" in fault
    assert read.labels(one) == {}
    told = "1 annotated trajectories of l.jsonl are not in the log, such as 'a' (did you mean 'ab'?)"
    assert read.unknown(["ab"]) == told
    assert read.unknown(["a"]) is None


def test_fitting_reads_the_same_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "l.jsonl",
        {"trajectory": "a", "turn": 0, "step": 0, "override": -10, **SIGNED},
        {"trajectory": "a", "turn": 1, "step": 0, "label": 0.5, "by": "ada"},
        {"trajectory": "a", "turn": 2, "step": 0, "successes": 1, "n": 4},
    )
    labels = read_labels(file)
    assert [(one.source, one.target, one.weight) for one in labels] == [
        ("override", 0.0, 3.0),
        ("hand", 0.5, 1.0),
        ("mc_soft", 0.25, 1.0),
    ]
    assert Annotations.read(file).count == 2
