"""Loading of base models and tokenizers, and the tiny model that tests and demo load."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slea_llm.errors import ConfigError
from slea_llm.models.loading import check_vocabulary, disable_dropout, load_base, load_tokenizer
from slea_llm.models.tiny import make_tiny, make_tokenizer
from slea_llm.settings import ModelSettings

pytestmark = pytest.mark.integration

TEXTS = ["<think>ask for the dish</think>what would you like to eat?", "我想要两个披萨"] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "base", TEXTS, vocab_size=280, hidden=32, layers=1, heads=2, seed=1)


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))


def test_base_is_frozen_in_the_asked_type_without_dropout(folder: Path) -> None:
    edit(folder / "config.json", attention_dropout=0.5)
    model = load_base(ModelSettings(base=str(folder), dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.train()
    ids = torch.arange(40).view(1, 40)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_dropout_is_switched_off_in_modules_and_attributes() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)
            self.attention_dropout = 0.2

    layer = Layer()
    disable_dropout(layer)
    assert (layer.drop.p, layer.attention_dropout) == (0.0, 0.0)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_br_091_code_that_comes_with_a_model_is_not_run_unless_the_flag_says_so(folder: Path, file: str) -> None:
    mark = folder / "MARK"
    (folder / "odd.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Odd: pass\n")
    key = "AutoTokenizer" if file.startswith("tokenizer") else "AutoModelForCausalLM"
    edit(
        folder / file,
        auto_map={"AutoConfig": "odd.Odd", key: ["odd.Odd", None] if key == "AutoTokenizer" else "odd.Odd"},
    )
    for load in (load_base, load_tokenizer):
        with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
            load(ModelSettings(base=str(folder)))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickled_weights_are_refused_by_file_name(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch MARK'\ntR.")
    with pytest.raises(ConfigError, match=name):
        load_base(ModelSettings(base=str(folder)))


def test_a_folder_without_weights_or_without_a_model_is_said_so(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        load_base(ModelSettings(base=str(folder)))
    with pytest.raises(ConfigError, match="is no folder here, and no model of that name could be fetched"):
        load_base(ModelSettings(base=str(tmp_path / "nowhere")))


def test_padding_is_the_end_token_where_a_tokenizer_has_no_other(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(ModelSettings(base=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.padding_side == "right"
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="neither a padding nor an end-of-sequence token"):
        load_tokenizer(ModelSettings(base=str(folder)))


def test_br_036_a_tokenizer_with_more_entries_than_embeddings_is_refused(folder: Path) -> None:
    settings = ModelSettings(base=str(folder))
    tokenizer, model = load_tokenizer(settings), load_base(settings)
    check_vocabulary(tokenizer, model)
    tokenizer.add_tokens(["<a>", "<b>", "<c>"])
    rows = int(model.get_input_embeddings().weight.shape[0])
    with pytest.raises(ConfigError, match=f"{rows + 3} entries and the model {rows} embeddings; embeddings are never"):
        check_vocabulary(tokenizer, model)


# ---- the tiny model --------------------------------------------------------------------------------------------------


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    one, two = (make_tiny(tmp_path / name, TEXTS, vocab_size=300, hidden=32, heads=2, seed=7) for name in ("a", "b"))
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    other = make_tiny(tmp_path / "c", TEXTS, vocab_size=300, hidden=32, heads=2, seed=8)
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_the_tiny_model_loads_as_any_other(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelSettings(base=str(folder)))
    model = load_base(ModelSettings(base=str(folder)))
    assert isinstance(model, LlamaForCausalLM)
    assert len(tokenizer) == model.config.vocab_size <= 280
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(TEXTS, vocab_size=300)


def test_tokenizer_reads_every_text_and_keeps_markup_in_plain_text() -> None:
    made = tokenizer()
    for text in ("<think>é 披萨 🙂</think>ok", "<tool_call>{}</tool_call>", " two  spaces\n"):
        assert made.decode(made(text).input_ids, skip_special_tokens=True) == text
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(made(token).input_ids) == 1
    assert made.decode(made("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"
    assert (made.eos_token, made.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_only_appends_and_keeps_thoughts() -> None:
    made = tokenizer()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "take orders"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>greet</think>hello"},
        {"role": "user", "content": "a pizza"},
        {"role": "assistant", "content": "<think>b</think>", "tool_calls": [{"name": "place", "arguments": "{}"}]},
        {"role": "tool", "content": "placed"},
    ]  # fmt: skip
    rendered = [
        made.apply_chat_template(messages[: end + 1], tokenize=False, add_generation_prompt=False)
        for end in range(len(messages))
    ]
    for shorter, longer in itertools.pairwise(rendered):
        assert longer.startswith(shorter)
    assert "<think>greet</think>hello<|im_end|>" in rendered[-1]
    assert '<tool_call>{"name": "place", "arguments": {}}</tool_call><|im_end|>' in rendered[-1]
    prompt = made.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert rendered[2].startswith(prompt)


def test_chat_template_marks_what_the_assistant_samples() -> None:
    made = tokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>x</think>ok"}]
    encoded = made.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids = [token for token, on in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if on]
    assert made.decode(ids) == "<think>x</think>ok<|im_end|>"


def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size 100 is below 263"):
        make_tiny(tmp_path, TEXTS, vocab_size=100, seed=0)


def test_heads_have_the_size_that_the_engine_serves(tmp_path: Path) -> None:
    make_tiny(tmp_path, TEXTS, vocab_size=300, hidden=32, heads=4, seed=0)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.head_dim, config.num_attention_heads, config.hidden_size) == (64, 4, 32)
    with pytest.raises(ConfigError, match="not divisible by 3 heads"):
        make_tiny(tmp_path, TEXTS, vocab_size=300, hidden=32, heads=3, seed=0)
