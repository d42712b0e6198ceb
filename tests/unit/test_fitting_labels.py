"""Labels from every source, where they land, and what is refused; the rules that a model must beat."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slea_llm.encoders import HashingEncoder
from slea_llm.errors import ConfigError
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.evaluators.reward_model_features import EVIDENCE, prefixes, state_structure
from slea_llm.fitting import labels
from slea_llm.fitting.baselines import Rows, held_out_scores
from slea_llm.fitting.evaluator import FitSettings, cross_validate, platt
from slea_llm.fitting.labels import StepLabel
from slea_llm.fitting.regression import logistic_regression
from slea_llm.fitting.training import folds, set_aside
from slea_llm.types import Message, Termination
from tests.contract.test_components import sample
from tests.support.judged import GOOD, TINY, cut, labelled, of_replies


def label(turn: int, step: int, **values: Any) -> StepLabel:
    return StepLabel(**{"trajectory": "t", "turn": turn, "step": step, "source": "hand", "target": 1.0, **values})


def test_labels_land_on_their_step_and_head() -> None:
    one = of_replies("t", GOOD)
    given = [
        label(1, 1, target=0.0),
        label(1, 1, target=1.0, source="heuristic", weight=0.25),
        label(2, 0, target=0.5, source="mc_soft"),
        label(2, 1, source="mc_hard"),
        label(0, 1, source="outcome"),
    ]
    (example,) = labels.examples([(one, cut(one))], given, HashingEncoder(), "apart")
    step, success = example.targets[:, 0], example.targets[:, 1]
    assert step.tolist() == pytest.approx([0, 0, 0, 0, 0.2, 0, 1])
    assert example.weights[:, 0].tolist() == [0, 0, 0, 0, 1.25, 0, 1]
    assert success.tolist() == [1, 0, 1, 0, 0, 0.5, 0]
    assert example.weights[:, 1].tolist() == [1, 0, 1, 0, 0, 1, 0]
    assert example.prefixes.texts[2] == "which address should it go to?"
    assert example.prefixes.types[2] == "reply asks"


def test_br_061_every_step_has_its_label_position_or_there_is_an_error() -> None:
    """Positions come from the steps, never from a marker in the tokens, which may be tokenised otherwise in context."""
    one = of_replies("t", GOOD)
    steps = cut(one)
    given = [label(step.turn, step.index) for step in steps if step.kind == "reply"]
    (example,) = labels.examples([(one, steps)], given, HashingEncoder(), "apart")
    assert int((example.weights[:, 0] > 0).sum()) == len(given) == 3
    with pytest.raises(ConfigError, match=r"step 0\.7 of trajectory 't', which has no such leaf"):
        labels.examples([(one, steps)], [*given, label(0, 7)], HashingEncoder(), "apart")


def test_labels_for_strangers_and_twins_are_refused() -> None:
    one = of_replies("t-1", GOOD)
    with pytest.raises(ConfigError, match=r"'t', which is not in the logs \(did you mean 't-1'\?\)"):
        labels.examples([(one, cut(one))], [label(0, 0)], HashingEncoder(), "apart")
    with pytest.raises(ConfigError, match="'t-1' occurs more than once"):
        labels.examples([(one, cut(one))] * 2, [], HashingEncoder(), "apart")


@pytest.mark.parametrize(("termination", "target"), [("success", 1.0), ("failure", 0.0), ("user_left", 0.0)])
def test_outcomes_label_every_step(termination: Termination, target: float) -> None:
    one = dataclasses.replace(of_replies("t", GOOD), termination=termination)
    found = labels.outcome_labels(one, cut(one))
    assert [(one.turn, one.step) for one in found] == [(turn, step) for turn in range(3) for step in range(2)]
    assert {one.target for one in found} == {target}


def test_what_was_cut_or_broke_has_no_outcome() -> None:
    one = of_replies("t", GOOD)
    for changes in ({"termination": "max_turns"}, {"termination": "error", "error": "broke", "outcome": None}):
        other = dataclasses.replace(one, **changes)
        assert labels.outcome_labels(other, cut(other)) == []


def test_a_rule_gives_a_cold_start() -> None:
    one = sample()
    found = labels.heuristic_labels(KnowledgeBase(KnowledgeBase.Config()), one, cut(one))
    assert found
    assert {one.source for one in found} == {"heuristic"}
    assert {one.weight for one in found} == {0.3}
    assert {one.target for one in found} <= {0.0, 1.0}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_labels_file_is_read(tmp_path: Path) -> None:
    place = {"trajectory": "t", "turn": 0, "step": 1}
    path = write(
        tmp_path / "labels.jsonl",
        {**place, "label": 0.5},
        {**place, "successes": 3, "n": 8},
        {**place, "successes": 3, "n": 8, "source": "mc_hard", "weight": 2},
    )
    assert [(one.source, one.target, one.weight) for one in labels.read_labels(path)] == [
        ("hand", 0.5, 1.0),
        ("mc_soft", 0.375, 1.0),
        ("mc_hard", 1.0, 2.0),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": 2}, "is not in"),
        ({"lable": 1}, "did you mean 'label'"),
        ({"successes": 1, "n": 2, "label": 1}, "label, or successes and n"),
        ({}, "label, or successes and n"),
        ({"successes": 3, "n": 2}, "3 successes of 2 is not a proportion"),
        ({"label": 1, "source": "hend"}, "did you mean 'hand'"),
        ({"label": 1, "weight": 0}, "weight 0.0 must be above 0"),
        ({"label": None}, "TypeError"),
    ],
)
def test_a_wrong_label_names_its_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    good = {"trajectory": "t", "turn": 0, "step": 1}
    path = write(tmp_path / "labels.jsonl", {**good, "label": 1}, {**good, **change})
    with pytest.raises(ConfigError, match=words) as caught:
        labels.read_labels(path)
    assert "line 2" in str(caught.value)


def test_groups_never_stand_on_both_sides() -> None:
    groups = [f"g{number // 3}" for number in range(60)]
    fold = folds(groups, 5, seed=1)
    assert {len(set(fold[place : place + 3])) for place in range(0, 60, 3)} == {1}
    assert np.bincount(fold).tolist() == [12] * 5
    with pytest.raises(ConfigError, match=r"2 groups .* cannot be split into 5"):
        folds(["a", "b"], 5, seed=0)
    rows, _ = labelled(1)
    with pytest.raises(ConfigError, match=r"1 groups .* cannot be split"):
        cross_validate(rows, TINY, seed=0)
    with pytest.raises(ConfigError, match="folds 1 must be 2 or more"):
        FitSettings(folds=1)


def test_the_task_groups_dialogues_and_the_context_holds_what_came_before() -> None:
    first, second = (of_replies(name, GOOD, task="7") for name in ("a", "b"))
    assert labels.group_of(first) == labels.group_of(second) != labels.group_of(of_replies("c", GOOD))
    other = of_replies("d", (*GOOD[:2], "Nice weather."))
    turn = dataclasses.replace(first.turns[0], context=(Message(role="user", content="else"),))
    changed = dataclasses.replace(first, turns=(turn, *first.turns[1:]))
    rows = prefixes([(one, cut(one)) for one in (first, other, changed)], HashingEncoder(), "apart")
    assert rows[0].contexts == rows[1].contexts
    assert not set(rows[0].contexts[1:]) & set(rows[2].contexts)
    assert len(set(rows[0].contexts)) == len(rows[0])


def test_rules_see_only_what_they_are_named_after() -> None:
    """Labels follow the length alone: the length rule finds it, type and popularity cannot."""
    rng = np.random.default_rng(0)
    evidence = rng.random((400, len(EVIDENCE)))
    targets = (evidence[:, EVIDENCE.index("log_length")] > 0.5).astype(float)
    rows = Rows(
        evidence=evidence,
        texts=[f"text {number}" for number in range(400)],
        types=["reply tells"] * 400,
        targets=targets,
        fold=np.arange(400) % 5,
    )
    found = held_out_scores(rows)

    def right(name: str) -> float:
        return float(((found[name] > np.median(found[name])) == (targets > 0.5)).mean())

    assert right("length") > 0.95
    assert right("position") < 0.6
    assert np.ptp(found["type"]) < 0.1


def test_logistic_regression_is_at_its_minimum_and_platt_undoes_a_scale() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(500, 3))
    chances = 1 / (1 + np.exp(-(0.5 + features @ np.array([1.0, -2.0, 0.0]))))
    targets = (rng.random(500) < chances).astype(float)
    weights = logistic_regression(features, targets, ridge=1.0)
    fitted = 1 / (1 + np.exp(-(weights[0] + features @ weights[1:])))
    np.testing.assert_allclose(features.T @ (fitted - targets) + weights[1:], 0, atol=1e-6)
    logits = np.log(chances / (1 - chances))
    (slope, shift), (scaled, moved) = platt(logits, targets), platt(5.0 * logits + 3.0, targets)
    assert slope == pytest.approx(1.0, rel=0.25)
    np.testing.assert_allclose(scaled * (5.0 * logits + 3.0) + moved, slope * logits + shift, atol=0.05)
    assert platt(-logits, targets)[0] == 0.0


def test_the_structure_of_a_state_holds_its_names_and_not_its_values() -> None:
    first = {"filled": {"dish": "noodles"}, "missing": ["address"], "placed": False, "turn": 1}
    second = {**first, "filled": {"dish": "soup"}, "turn": 4}
    assert state_structure(first) == state_structure(second) == "{filled:{dish:},missing:[address],placed:False,turn:}"
    assert state_structure({**first, "missing": []}) != state_structure(first) != state_structure({})


@pytest.mark.parametrize(("groups", "held"), [(2, 1), (6, 1), (14, 2), (70, 10)])
def test_a_few_groups_are_set_aside_however_few_there_are(groups: int, held: int) -> None:
    names = [f"g{number}" for number in range(groups) for _ in range(3)]
    aside = set_aside(names, 0.15, seed=0)
    assert len({name for name, one in zip(names, aside, strict=True) if one}) == held
    assert not {n for n, one in zip(names, aside, strict=True) if one} & {
        n for n, one in zip(names, aside, strict=True) if not one
    }
