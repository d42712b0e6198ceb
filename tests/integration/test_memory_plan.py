"""The plan's numbers against a real tiny model: counts exactly, activations by a factor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slea_llm.errors import ConfigError
from slea_llm.memory_plan import ModelShape, plan_memory, read_shape
from slea_llm.settings import ModelSettings, RolloutSettings, TrainerSettings

pytestmark = pytest.mark.integration

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY = 64, 3, 4, 2, 96, 320


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("base")
    LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INNER,
        vocab_size=VOCABULARY,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shape(base: Path) -> ModelShape:
    return read_shape(ModelSettings(base=str(base)))


def with_adapter(base: Path, targets: str | list[str]) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))


def test_weights_are_counted_by_hand(shape: ModelShape) -> None:
    head = HIDDEN // HEADS
    attention = HIDDEN * HIDDEN * 2 + HIDDEN * KV_HEADS * head * 2
    by_hand = LAYERS * (attention + 3 * HIDDEN * INNER + 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN
    assert shape.parameters == by_hand
    assert shape.kv_elements_per_token == 2 * LAYERS * KV_HEADS * head


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapter_parameters_are_peft_s(base: Path, shape: ModelShape, targets: str | list[str]) -> None:
    model = with_adapter(base, targets)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.adapter_parameters(4, targets) == trainable


def test_activations_are_near_what_autograd_keeps(base: Path, shape: ModelShape) -> None:
    import torch

    model = with_adapter(base, "all-linear")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows, length = 4, 48
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.base_model.model.model(torch.randint(0, VOCABULARY, (rows, length)))[0]
    assert hidden.requires_grad
    estimate = 4 * rows * length * LAYERS * shape.layer_elements_per_token
    assert 0.6 < sum(kept.values()) / estimate < 1.4


def test_the_plan_by_hand(base: Path, shape: ModelShape) -> None:
    model = ModelSettings(base=str(base), dtype="bfloat16", lora_rank=4, critic_rank=2)
    rollout = RolloutSettings(episodes=8, concurrency=128, max_context_tokens=100)
    parts = plan_memory(
        model=model, rollout=rollout, trainer=TrainerSettings(microbatch=2), streams=2, engine="vllm", shape=shape
    )
    sizes = {part.name: part.bytes for part in parts}
    policy = shape.adapter_parameters(4, "all-linear")
    trainable = policy + policy // 2 + 2 * (HIDDEN + 1)
    assert sizes["base weights"] == sizes["engine weights"] == 2 * shape.parameters
    assert sizes["policy adapter"] == 4 * policy
    assert sizes["optimizer states"] == 2 * sizes["gradients"] == 8 * trainable
    assert sizes["engine KV cache"] == 8 * 100 * 2 * shape.kv_elements_per_token
    assert sizes["logits (estimate)"] == 2 * 200 * VOCABULARY * 4
    assert [part.bytes for part in parts] == sorted(sizes.values(), reverse=True)


def test_settings_change_the_parts_they_name(shape: ModelShape, base: Path) -> None:
    model, rollout, trainer = ModelSettings(base=str(base)), RolloutSettings(), TrainerSettings()

    def sizes(model: ModelSettings, trainer: TrainerSettings) -> dict[str, int]:
        parts = plan_memory(model=model, rollout=rollout, trainer=trainer, streams=1, engine="vllm", shape=shape)
        return {part.name: part.bytes for part in parts}

    full = sizes(model, trainer)
    shared = sizes(replace(model, critic="shared_trunk"), trainer)
    assert full["activations (estimate)"] == 2 * shared["activations (estimate)"]
    assert "critic adapter" not in shared
    assert "optimizer states" not in sizes(model, replace(trainer, optimizer="sgd"))
    checkpointed = sizes(replace(model, gradient_checkpointing=True), trainer)
    assert checkpointed["activations (estimate)"] < full["activations (estimate)"]
    assert full["engine weights"] == full["base weights"]


def test_a_fixed_cache_says_how_much_it_holds(shape: ModelShape, base: Path) -> None:
    parts = plan_memory(
        model=ModelSettings(base=str(base)),
        rollout=RolloutSettings(),
        trainer=TrainerSettings(),
        streams=1,
        engine="vllm",
        kv_cache_bytes=4 * shape.kv_elements_per_token * 1000,
        shape=shape,
    )
    assert next(part.how for part in parts if part.name == "engine KV cache").startswith("set; holds 1,000 tokens")


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be read"):
        read_shape(ModelSettings(base=str(tmp_path / "absent")))
