"""A warm start imitates the expert on the expert's own tokens, and its result is where training starts from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import ConfigError, StorageError
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import load_base, load_tokenizer
from slea_llm.models.policy import build
from slea_llm.models.tiny import make_tiny
from slea_llm.settings import ModelSettings, WarmStartSettings
from slea_llm.users.scripted import ScriptedUser
from slea_llm.warm_start import WarmStartReport, messages_of, scripted_dialogues, warm_start

pytestmark = pytest.mark.integration

ENVIRONMENT = OrderTaking(OrderTaking.Config(prompt="terse"))
USER = ScriptedUser(ScriptedUser.Config())
WARM = WarmStartSettings(dialogues=12, batch=4, learning_rate=1e-2, epochs=2)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = tmp_path_factory.mktemp("base")
    texts = [
        m.content for one in scripted_dialogues(ENVIRONMENT, USER, WARM, seed=0, max_turns=12) for m in messages_of(one)
    ]
    make_tiny(folder, texts, vocab_size=600, hidden=32, layers=1, heads=2, seed=0)
    return ModelSettings(base=str(folder), declared_base="org/tiny", lora_rank=8, lora_alpha=16)


def start(settings: ModelSettings, warm: WarmStartSettings, folder: Path) -> WarmStartReport:
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    chat = ChatTokenizer(load_tokenizer(settings))
    return warm_start(ENVIRONMENT, USER, chat, settings, warm, folder, seed=0, progress=False)


def test_all_weights_become_a_base_that_loads(settings: ModelSettings, tmp_path: Path) -> None:
    report = start(settings, WARM, tmp_path / "warm")
    assert report.dialogues == report.successes == 12
    assert report.updates == 6
    assert report.loss_after < report.loss_before
    assert "12 scripted dialogues (12 succeed)" in report.line()
    warmed = dataclasses.replace(settings, base=str(tmp_path / "warm"))
    assert load_tokenizer(warmed).get_vocab() == load_tokenizer(settings).get_vocab()
    before, after = load_base(settings).state_dict(), load_base(warmed).state_dict()
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight"))


def test_only_what_the_expert_says_is_trained(settings: ModelSettings, tmp_path: Path) -> None:
    report = start(settings, WARM, tmp_path / "warm")
    chat = ChatTokenizer(load_tokenizer(settings))
    played = scripted_dialogues(ENVIRONMENT, USER, WARM, seed=0, max_turns=12)
    assert report.trained_tokens == sum(len(chat.encode_reply(turn.text)) for one in played for turn in one.turns)
    assert 0 < report.trained_tokens < report.tokens


def test_an_adapter_becomes_the_start_and_the_reference_of_a_run(settings: ModelSettings, tmp_path: Path) -> None:
    start(settings, dataclasses.replace(WARM, lora=True), tmp_path / "warm")
    config = json.loads((tmp_path / "warm" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "org/tiny"
    warmed = dataclasses.replace(settings, adapter=str(tmp_path / "warm"))
    state = build(warmed, streams=["outcome"], temperature=1.0, seed=0).trainable_state()
    moved = [name for name in state if name.startswith("policy.") and ".lora_B" in name]
    assert moved
    for name in moved:
        assert state[name].abs().max() > 0
        assert torch.equal(state[name], state[name.replace("policy.", "reference.", 1)])


def test_equal_seeds_give_equal_weights(settings: ModelSettings, tmp_path: Path) -> None:
    for name in ("one", "two"):
        start(settings, WARM, tmp_path / name)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_nothing_is_overwritten_and_nothing_to_imitate_is_refused(settings: ModelSettings, tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "mine.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(StorageError, match="exists already"):
        start(settings, WARM, tmp_path / "warm")
    with pytest.raises(ConfigError, match="dialogues is 0"):
        start(settings, WarmStartSettings(), tmp_path / "none")


def test_an_expert_that_errs_succeeds_less_often() -> None:
    erring = dataclasses.replace(WARM, error_rate=0.6, dialogues=60)
    played = scripted_dialogues(ENVIRONMENT, USER, erring, seed=0, max_turns=12)
    assert 0 < sum(one.success for one in played) < 50
