"""`slea fit-evaluator` from a log to a folder that a recipe can name, its gate's line included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slea_llm.assets import find
from slea_llm.cli import main
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.evaluators.reward_model_card import CARD, WEIGHTS, Card
from slea_llm.rollout import play
from slea_llm.score_runs import newest_log
from slea_llm.storage import read_scored, read_trajectories, write_trajectories
from slea_llm.users.scripted import ScriptedUser

pytestmark = pytest.mark.integration

TINY = find("recipes", "order_taking_tiny.yaml")
RECIPE = """
model: {base: none}
environment: {name: order_taking}
evaluators: [{name: knowledge_base}]
evaluation: {tasks: 0}
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment, user = OrderTaking(OrderTaking.Config()), ScriptedUser(ScriptedUser.Config())
    tasks = [environment.task(seed) for seed in range(24)]
    path = tmp_path_factory.mktemp("logs") / "dialogues.jsonl"
    write_trajectories(
        path,
        [
            play(environment, user, environment.expert(task, error_rate=0.4), task, seed=task.seed, max_turns=12)
            for task in tasks
        ],
    )
    return path


def fit(log: Path, output: Path, *more: str) -> int:
    return main(
        [
            "fit-evaluator",
            str(log),
            "--output",
            str(output),
            "--encoder",
            "hashing",
            "--folds",
            "2",
            "--epochs",
            "1",
            *more,
        ]
    )


def test_fit_then_score(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    output = tmp_path / "model"
    assert fit(log, output, "--recipe", str(recipe), "--heuristic", "knowledge_base") == 0
    said = capsys.readouterr().out
    assert "24 dialogues, 24 of them labelled" in said
    assert "rule popularity_with_overlap" in said
    assert "reward_model: gate " in said
    card = Card.read(output / CARD)
    assert set(card.reliability) == {"success", "label"}
    assert set(card.labels) == {"heuristic", "outcome"}
    assert card.data["parser"] == {"name": "tagged"}
    assert (output / WEIGHTS).is_file()

    recipe.write_text(RECIPE.replace("knowledge_base", f"reward_model, model: {output}"), encoding="utf-8")
    scores = tmp_path / "scores"
    assert main(["score", str(log), "--recipe", str(recipe), "--output", str(scores)]) == 0
    said = capsys.readouterr().out
    assert "reward_model: gate " in said
    assert "was fitted on steps" not in said, "they are cut alike"
    scored = list(read_scored(newest_log(scores)))
    assert len(scored) == 24
    assert all(word.score is not None for one in scored for word in one.scores)
    shut = "gate shut" in said
    assert {one.shut for one in scored} == {("reward_model",) if shut else ()}


def test_mistakes_are_said_before_anything_is_fitted(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.jsonl"
    labels.write_text(json.dumps({"trajectory": "nobody", "turn": 0, "step": 0, "label": 1}) + "\n", encoding="utf-8")
    for more, words in (
        (("--labels", str(labels)), "label for trajectory 'nobody', which is not in the logs"),
        (("--heuristic", "knowledge_base"), "none: give --recipe"),
        (("--no-outcome",), "no labelled step"),
    ):
        assert fit(log, tmp_path / "model", *more) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "kept").write_text("", encoding="utf-8")
    assert fit(log, tmp_path / "model") == 2
    assert "exists already" in capsys.readouterr().err


OUTCOMES = ("return_decomposition", "hindsight", "counterfactual_prediction", "tool_use_outcomes")


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_is_fitted_to_outcomes_is_fitted_saved_and_read_by_name(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    output = tmp_path / "model"
    assert main(["fit-evaluator", str(log), "--output", str(output), "--evaluator", name]) == 0
    said = capsys.readouterr().out
    assert "24 dialogues, " in said
    assert "held-out steps: AUC 0." in said
    assert "rule popularity" in said
    assert f"{name}: gate " in said
    assert f"in a recipe: {{name: {name}, model: {output}}}" in said
    recipe, scores = tmp_path / "recipe.yaml", tmp_path / "scores"
    split = "parser: {name: tagged, split_thoughts: true}"
    recipe.write_text(f"{RECIPE.replace('knowledge_base', f'{name}, model: {output}')}{split}\n", encoding="utf-8")
    assert main(["score", str(log), "--recipe", str(recipe), "--output", str(scores)]) == 0
    said = capsys.readouterr().out
    assert f"{name}: gate " in said
    assert "was fitted on steps as parser {name: tagged} cuts them" in said
    assert "here it scores those of {name: tagged, split_thoughts: true}" in said
    model = f"{{name: {name}, model: {output}}}"
    streams = "streams={outcome: {sources: [outcome]}, scores: {sources: [" + name + "]}}"
    for parser, count in (("{name: tagged}", 0), ("{name: tagged, split_thoughts: false}", 0), ("{name: auto}", 1)):
        assert main(["plan", str(TINY), f"evaluators=[{model}]", streams, f"parser={parser}"]) == 0
        assert capsys.readouterr().out.count("was fitted on steps") == count, parser
    assert all(word.score is not None for one in read_scored(newest_log(scores)) for word in one.scores)


def test_what_cannot_be_fitted_is_refused_by_name(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    command = ["fit-evaluator", str(log), "--output", str(output), "--evaluator"]
    for more, words in (
        (("hindsigth",), "'hindsigth' is not one that is fitted"),
        (("hindsigth",), "did you mean 'hindsight'?"),
        (("counterfactual",), "did you mean 'counterfactual_prediction'?"),
        (("hindsight", "--encoder", "hashing"), "--encoder is not read by hindsight, which reads outcomes alone"),
        (("reward_model", "--max-tokens", "9"), "--max-tokens is not read by reward_model, which reads --labels"),
        (("causal_reward_model", "--joint"), "--joint is not read by causal_reward_model"),
        (("causal_reward_model", "--base", "none", "--lora-rank", "0"), "lora_rank 0 is out of range"),
        (("causal_reward_model", "--base", str(log.parent)), "no tokenizer could be loaded from"),
        (("causal_reward_model", "--base", "none", "--epochs", "-1"), "epochs -1 must be 0"),
    ):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
        assert not output.exists()


def test_dialogues_that_all_ended_alike_teach_nothing(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = tmp_path / "alike.jsonl"
    write_trajectories(alike, [one for one in read_trajectories(log) if one.success])
    for name in OUTCOMES:
        command = ["fit-evaluator", str(alike), "--output", str(tmp_path / "model"), "--evaluator", name]
        assert main(command) == 2
        assert "a fit needs both successes and failures" in capsys.readouterr().err
        assert not (tmp_path / "model").exists()
