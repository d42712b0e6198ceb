"""What we lean on in TRL. When a release moves it, the failing test here says what moved."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer
from trl.trainer import base_trainer

from slea_llm.models.loading import load_base, load_tokenizer
from slea_llm.settings import ModelSettings
from slea_llm.trl_seam import SftSettings, TrainingRow, make_trainer, supervise
from tests.support import training

pytestmark = pytest.mark.integration

ROWS = [
    TrainingRow(ids=(5, 6, 7, 8, 1), trained=(False, True, True, False, True)),
    TrainingRow(ids=(9, 10, 1), trained=(False, False, True)),
]
SETTINGS = SftSettings(epochs=1, batch=2, learning_rate=1e-2, seed=0)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    settings = ModelSettings(base=str(training.write_base(tmp_path / "base")))
    return load_base(settings).requires_grad_(True), load_tokenizer(settings)


def test_the_release_is_the_one_that_was_tried() -> None:
    assert version("trl") == "1.16.0"


def test_the_settings_that_we_set_exist() -> None:
    names = {field.name for field in dataclasses.fields(SFTConfig)}
    wanted = {"dataset_kwargs", "max_length", "train_sampling_strategy", "gradient_checkpointing", "bf16", "report_to"}
    assert wanted <= names
    assert {"model", "args", "train_dataset", "processing_class", "callbacks"} <= set(
        inspect.signature(SFTTrainer.__init__).parameters
    )


def test_no_telemetry_leaves(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(base_trainer, "send_telemetry", lambda **facts: sent.append(facts))
    assert callable(SFTTrainer._send_telemetry)
    model, tokenizer = parts
    make_trainer(model, tokenizer, ROWS, SETTINGS, folder=tmp_path)
    assert sent == []


def test_br_009_a_pad_token_that_is_also_the_end_of_turn_hides_no_real_one(parts: Any, tmp_path: Path) -> None:
    model, tokenizer = parts
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    rows = [TrainingRow(ids=(2, 3, end), trained=(True,) * 3), TrainingRow(ids=(2, end), trained=(True,) * 2)]
    batch = make_trainer(model, tokenizer, rows, SETTINGS, folder=tmp_path).data_collator(
        [{"input_ids": list(row.ids), "labels": row.labels()} for row in rows]
    )
    assert batch["labels"].tolist() == [[2, 3, end], [2, end, -100]]
    assert batch["input_ids"].tolist() == [[2, 3, end], [2, end, end]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_the_loss_is_the_mean_over_trained_tokens(parts: Any, tmp_path: Path) -> None:
    model, tokenizer = parts
    with torch.no_grad():
        nats = [
            -model(torch.tensor([row.ids])).logits[0, position - 1].log_softmax(-1)[row.ids[position]]
            for row in ROWS
            for position in range(1, len(row.ids))
            if row.trained[position]
        ]
    losses = supervise(model, tokenizer, ROWS, SETTINGS, folder=tmp_path)
    assert len(nats) == 4
    assert losses == [pytest.approx(float(torch.stack(nats).mean()), abs=1e-4)]


def test_training_is_quiet(parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = parts
    capsys.readouterr()
    settings = dataclasses.replace(SETTINGS, epochs=3)
    losses = supervise(model, tokenizer, ROWS * 4, settings, folder=tmp_path / "scratch")
    assert losses[-1] < losses[0]
    assert capsys.readouterr().out == ""
    assert not list((tmp_path / "scratch").rglob("*.safetensors"))
