"""The causal form of the reward model: fits what no rule can, is refused on noise, and is read back as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slea_llm.cli import main
from slea_llm.errors import ConfigError, EvaluatorError
from slea_llm.evaluators.causal_reward_model import CausalRewardModel
from slea_llm.evaluators.reward_model import RewardModel
from slea_llm.evaluators.reward_model_card import CARD, WEIGHTS, Card
from slea_llm.fitting.causal import CausalSettings, FittedReader, fit_causal, predict, token_examples
from slea_llm.fitting.labels import StepLabel, outcome_labels
from slea_llm.models.step_reader import Opened, open_reader
from slea_llm.models.tiny import make_tiny
from slea_llm.score_runs import newest_log
from slea_llm.settings import ModelSettings
from slea_llm.storage import read_scored, write_trajectories
from slea_llm.types import Trajectory
from tests.support.judged import cut
from tests.support.signals import dialogue, dialogues, write_base

pytestmark = pytest.mark.integration

QUICK = CausalSettings(folds=2, epochs=6, batch=16, learning_rate=3e-3, patience=6)
LIMIT = 28
"""Tokens that hold a dialogue to the end of its thought and not to that of its reply."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def opened(base: Path, *, longest: int = 128) -> Opened:
    return open_reader(settings(base), longest=longest, device="cpu")


def settings(base: Path) -> ModelSettings:
    return ModelSettings(base=str(base), lora_rank=8, lora_alpha=16)


def fit(base: Path, said: Sequence[Trajectory], how: CausalSettings = QUICK) -> FittedReader:
    parsed = [(one, cut(one)) for one in said]
    labels = [label for one, steps in parsed for label in outcome_labels(one, steps)]
    read = opened(base)
    rows, _ = token_examples(parsed, labels, read)
    return fit_causal(rows, labels, read, base=settings(base), settings=how, seed=0)


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fitted") / "model"
    fit(base, dialogues(160)).save(target)
    return target


def test_it_fits_what_no_rule_can_and_its_gate_opens(folder: Path) -> None:
    card = Card.read(folder / CARD)
    found = card.reliability["success"]
    assert found.auc is not None
    assert found.auc > 0.8  # 0.875 at most: the thought, which says nothing, is half of the steps
    assert all(value is not None and value < 0.65 for value in found.baselines.values()), found.baselines
    model = CausalRewardModel(CausalRewardModel.Config(model=str(folder), device="cpu"))
    assert model.gate.open, model.gate.line
    assert CausalRewardModel.preflight(model.config).open
    for light, act, sign in (("red", "wait", 1), ("red", "walk", -1), ("green", "wait", -1), ("green", "walk", 1)):
        one = dialogue("new", light, act)
        thought, reply = model.score(one, cut(one))
        assert thought.score is not None
        assert reply.score is not None
        assert reply.score * sign > 0.2
        whole = reply.parts["success_after"] - thought.parts["success_before"]
        assert thought.score + reply.score == pytest.approx(whole)


def test_no_passes_fit_the_heads_alone(base: Path, folder: Path) -> None:
    fitted = fit(base, dialogues(60), CausalSettings(folds=2, epochs=0))
    whole = load_file(folder / WEIGHTS)
    moved = {name for name, tensor in fitted.tensors.items() if name.endswith("lora_B.weight") and bool(tensor.any())}
    assert not moved
    assert all(bool(whole[name].any()) for name in whole if name.endswith("lora_B.weight"))
    assert bool(fitted.tensors["heads.weight"][1].any())


@pytest.mark.timeout(240)
def test_shuffled_outcomes_are_refused(base: Path) -> None:
    fitted = fit(base, dialogues(120, shuffled=True), CausalSettings(folds=2, epochs=2, batch=16, learning_rate=1e-2))
    assert not fitted.verdict.open
    assert "gate shut, weight 0" in fitted.verdict.line


def test_scores_do_not_depend_on_what_else_is_in_the_batch(folder: Path) -> None:
    said = [*dialogues(5, seed=3), dialogue("long", "red", "wait")]
    long = said[-1].turns[0]
    object.__setattr__(long, "context", (*long.context, *said[0].turns[0].context * 5))
    pairs = [(one, cut(one)) for one in said]
    whole = CausalRewardModel(CausalRewardModel.Config(model=str(folder), device="cpu"))
    narrow = CausalRewardModel(CausalRewardModel.Config(model=str(folder), device="cpu", batch_tokens=1))
    for together, alone, pair in zip(whole.score_many(pairs), narrow.score_many(pairs), pairs, strict=True):
        one = whole.score(*pair)
        assert [word.score for word in together] == pytest.approx([word.score for word in alone], abs=1e-5)
        assert [word.score for word in together] == pytest.approx([word.score for word in one], abs=1e-5)
    assert whole.version == narrow.version


def test_what_is_too_long_or_refused_is_unscored_with_the_reason(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(folder, short)
    card = json.loads((short / CARD).read_text())
    card["network"]["longest"] = LIMIT
    (short / CARD).write_text(json.dumps(card))
    model = CausalRewardModel(CausalRewardModel.Config(model=str(short), device="cpu"))
    one = dialogue("new", "red", "wait")
    words = model.score(one, cut(one))
    assert words[-1].score is None
    assert words[-1].reason == f"it ends beyond the {LIMIT} tokens that the model reads"
    (alien,) = model.score(one, cut(one)[:1])
    assert "its steps do not make up its text" in str(alien.reason)


def test_another_base_weights_or_form_are_refused(folder: Path, base: Path, tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", seed=2)
    with pytest.raises(EvaluatorError, match="base model, tokenizer or chat template are not those"):
        CausalRewardModel(CausalRewardModel.Config(model=str(folder), base=str(other), device="cpu"))
    wider = make_tiny(tmp_path / "wider", ["light red"], vocab_size=300, hidden=128, layers=1, heads=2, seed=2)
    with pytest.raises(EvaluatorError, match="was fitted on another base than"):
        CausalRewardModel(CausalRewardModel.Config(model=str(folder), base=str(wider), device="cpu"))
    with pytest.raises(EvaluatorError, match="holds a causal_reward_model, not a reward_model"):
        RewardModel(RewardModel.Config(model=str(folder)))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / CARD, bare / CARD)
    with pytest.raises(EvaluatorError, match=f"no {WEIGHTS}"):
        CausalRewardModel.preflight(CausalRewardModel.Config(model=str(bare)))
    (bare / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(EvaluatorError, match="does not hold a whole causal_reward_model"):
        CausalRewardModel(CausalRewardModel.Config(model=str(bare), device="cpu"))
    with pytest.raises(ConfigError, match="fitted on success only"):
        CausalRewardModel(CausalRewardModel.Config(model=str(folder), read="label", device="cpu"))
    with pytest.raises(ConfigError, match="device 'tpu0'"):
        open_reader(settings(base), longest=64, device="tpu0")
    with pytest.raises(ConfigError, match="positions of"):
        open_reader(settings(base), longest=100_000)


def test_steps_beyond_the_limit_are_counted_and_teach_nothing(base: Path) -> None:
    said = [(one, cut(one)) for one in dialogues(4)]
    labels = [label for one, steps in said for label in outcome_labels(one, steps)]
    heard: list[str] = []
    rows, left_out = token_examples(said, labels, opened(base, longest=LIMIT), report=heard.append)
    assert left_out == {"labelled steps beyond the tokens that are read": 4}
    assert heard == ["left out: 4 labelled steps beyond the tokens that are read"]
    assert all(one.row.beyond == 1 and not one.weights[2].any() for one in rows)
    assert len({one.context for one in rows}) == 4
    read = opened(base, longest=LIMIT)
    assert [found.shape for found in predict(read.reader, rows, 64)] == [(3, 2)] * 4
    with pytest.raises(ConfigError, match="no labelled step lies within 3 tokens"):
        token_examples(said, labels, opened(base, longest=3))


def test_the_same_data_and_seed_give_the_same_weights(base: Path) -> None:
    how = CausalSettings(folds=2, epochs=1, batch=16)
    first, second = (fit(base, dialogues(24), how) for _ in range(2))
    assert first.card == second.card
    assert all((first.tensors[name] == second.tensors[name]).all() for name in first.tensors)


def test_from_the_command_line_to_scores(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, output, scores = tmp_path / "log.jsonl", tmp_path / "model", tmp_path / "scores"
    write_trajectories(log, dialogues(24))
    command = ["fit-evaluator", str(log), "--output", str(output), "--evaluator", "causal_reward_model"]
    assert main(command) == 2
    assert "give --base" in capsys.readouterr().err
    more = ["--base", str(base), "--folds", "2", "--epochs", "1", "--max-tokens", "64", "--lora-rank", "4"]
    assert main([*command, *more]) == 0
    said = capsys.readouterr().out
    assert "rule popularity_with_overlap" in said
    assert "causal_reward_model: gate " in said
    recipe = tmp_path / "recipe.yaml"
    evaluator = f"{{name: causal_reward_model, model: {output}}}"
    recipe.write_text(f"model: {{base: none}}\nenvironment: {{name: order_taking}}\nevaluators: [{evaluator}]\n")
    assert main(["score", str(log), "--recipe", str(recipe), "--output", str(scores)]) == 0
    assert all(word.score is not None for one in read_scored(newest_log(scores)) for word in one.scores)


def label(one: Trajectory, target: float) -> StepLabel:
    return StepLabel(trajectory=one.id, turn=0, step=1, source="hand", target=target)


def test_hand_labels_train_the_label_head_and_leave_its_gate_shut(base: Path) -> None:
    said = [(one, cut(one)) for one in dialogues(40)]
    labels = [label(one, float(one.success)) for one, _ in said]
    read = opened(base)
    rows, _ = token_examples(said, labels, read)
    how = CausalSettings(folds=2, epochs=1, batch=16)
    fitted = fit_causal(rows, labels, read, base=settings(base), settings=how, seed=0)
    assert set(fitted.card.reliability) == {"label"}
    assert fitted.card.labels == {"hand": 40}
    assert not fitted.verdict.open
