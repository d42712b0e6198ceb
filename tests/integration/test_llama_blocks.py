"""A small Llama without its modules, and rows without their padding, against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slea_llm.generation.decoding import RowCache
from slea_llm.generation.forward import ByBlocks, ByModules, forward_of
from slea_llm.models.llama_blocks import Block, Shape, blocks_of, decode, mixed, projected, rotate, small_shape
from slea_llm.models.packing import Layout, attend_by_rows
from slea_llm.models.policy import PolicyCritic
from slea_llm.settings import ModelSettings
from slea_llm.tensors import Batch

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def made(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model: Any = {
            "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
            "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
            "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=6)),
            "window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
            "biased": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
            "yarn": lambda: LlamaForCausalLM(
                LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4})
            ),
            "relu": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="relu")),
            "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=6)),
            "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=24, n_layer=2, n_head=4, n_positions=64)),
        }[name]()
        for parameter in model.parameters():  # biases and norms too: at their start they hide a mistake
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def own(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight
    return weight


def padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(0, 40, (len(lengths), max(lengths)), generator=generator)
    return ids, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, atol=2e-5 * float(theirs.abs().max()))


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@given(lengths=LENGTHS)
@settings(deadline=None, max_examples=8)
def test_states_are_those_of_the_modules(name: str, lengths: list[int]) -> None:
    model = made(name)
    decoder, shape = model.get_decoder(), small_shape(model, own)
    assert shape is not None
    ids, mask = padded(lengths)
    theirs = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[mask]
    layout, blocks = Layout.of(mask), blocks_of(decoder, own)
    assert close(decode(decoder, shape, blocks, ids, layout, None), theirs)
    wanted = torch.arange(0, len(theirs), 2)
    assert close(decode(decoder, shape, blocks, ids, layout, wanted), theirs[wanted])
    for row, length in enumerate(lengths):  # where a place of the rows lies among the tokens
        assert layout.places[layout.index[row * ids.shape[1] + length - 1]] == row * ids.shape[1] + length - 1


@pytest.mark.parametrize("name", ["window", "biased", "yarn", "relu", "qwen3", "gemma2", "gpt2"])
def test_what_is_no_plain_llama_keeps_its_modules(name: str) -> None:
    model = made(name)
    assert small_shape(model, own) is None
    assert isinstance(forward_of(model, max_context=32), ByModules)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "biased", "yarn", "gpt2"])
def test_rows_without_padding_attend_to_themselves_alone(name: str) -> None:
    model = made(name)
    decoder = model.get_decoder()
    ids, mask = padded([3, 11, 1, 7])
    before = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert attend_by_rows(model)
    packed = decoder(**Layout.of(mask).arguments(ids), use_cache=False).last_hidden_state[0]
    assert close(packed, before[mask])
    assert close(decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[mask], before[mask])


@pytest.mark.parametrize("name", ["window", "gemma2"])
def test_windows_are_not_packed(name: str) -> None:
    model = made(name)
    kept = model.config._attn_implementation
    assert not attend_by_rows(model)
    assert model.config._attn_implementation == kept


def test_turning_back_undoes_a_turn() -> None:
    heads = torch.randn(5, 3, 8, dtype=torch.float64)
    angles = torch.randn(5, 1, 4, dtype=torch.float64)
    turned = heads.clone()
    rotate(turned, angles.cos(), angles.sin())
    assert not torch.allclose(turned, heads)
    rotate(turned, angles.cos(), angles.sin(), back=True)
    assert torch.allclose(turned, heads, atol=1e-14)


def test_gradients_of_both_nodes() -> None:
    generator = torch.Generator().manual_seed(2)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    shape = Shape(heads=2, key_heads=1, size=4, scaling=0.5, eps=1e-5)
    block = Block(
        first_norm=drawn(6), qkv=drawn(16, 6).requires_grad_(), qkv_bias=drawn(16), out=drawn(6, 8).requires_grad_(),
        second_norm=drawn(6), gate_up=drawn(10, 6).requires_grad_(), down=drawn(6, 5).requires_grad_(),
    )  # fmt: skip
    states, attended = drawn(3, 6).requires_grad_(), drawn(3, 8).requires_grad_()
    angles = drawn(3, 1, 2)
    weights = (block.qkv, block.out, block.gate_up, block.down)
    assert torch.autograd.gradcheck(
        lambda x, *_: projected(x, block, angles.cos(), angles.sin(), shape), (states, *weights[:1])
    )
    assert torch.autograd.gradcheck(
        lambda x, attended, *_: mixed(x, attended, block, shape.eps), (states, attended, *weights[1:])
    )


def policy(
    rank: int = 8, *, critic: Any = "own_adapter", checkpointing: bool = False, targets: Any = "all-linear"
) -> PolicyCritic:
    chosen = ModelSettings(
        base="none", lora_rank=rank, critic_rank=rank, critic=critic, gradient_checkpointing=checkpointing,
        lora_targets=targets,
    )  # fmt: skip
    model = PolicyCritic(made("llama"), chosen, streams=("outcome", "scores"), temperature=0.8, seed=0)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for _, parameter in [*model.policy_parameters(), *model.critic_parameters()]:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batch() -> Batch:
    ids, mask = padded([5, 12, 9])
    chosen = mask & (torch.arange(12) % 3 > 0)
    zeros, by_stream = torch.zeros(3, 12), torch.zeros(3, 12, 2)
    return Batch(
        input_ids=ids, attention_mask=mask, policy_mask=chosen, imitation_mask=chosen & (torch.arange(12) > 9),
        imitation_weights=zeros, prototypes=zeros[:, 0], value_mask=mask & (torch.arange(12) % 2 > 0),
        behaviour_logprobs=zeros, proximal_logprobs=zeros, reference_logprobs=zeros, advantages=zeros, weights=zeros,
        returns=by_stream, old_values=by_stream, trajectory=torch.arange(3), trajectory_tokens=zeros[:, 0],
    )  # fmt: skip


def everything(model: PolicyCritic) -> list[torch.Tensor]:
    """Outputs, gradients of a loss that reads all of them, and what the passes without gradient say."""
    one = batch()
    outputs = model(one)
    ramp = torch.linspace(-1, 1, outputs.logprobs.numel()).view_as(outputs.logprobs)
    loss = (ramp * (outputs.logprobs + 0.3 * outputs.entropy)).sum() + (outputs.values.square().sum(-1) * ramp).sum()
    parameters = [parameter for _, parameter in [*model.policy_parameters(), *model.critic_parameters()]]
    gradients = torch.autograd.grad(loss, parameters)
    logprobs, after = model.policy_pass(one.input_ids, one.attention_mask, one.policy_mask)
    reference = model.reference_pass(one.input_ids, one.attention_mask, one.policy_mask)
    return [*vars_of(outputs), *gradients, logprobs, after * one.attention_mask[..., None], reference]


def vars_of(outputs: Any) -> list[torch.Tensor]:
    return [outputs.logprobs.detach(), outputs.entropy.detach(), outputs.values.detach()]


@pytest.mark.parametrize(
    ("critic", "targets"),
    [
        ("own_adapter", "all-linear"),
        ("shared_trunk", "all-linear"),
        ("none", "all-linear"),
        ("own_adapter", ("q_proj", "v_proj")),
        ("none", ("gate_proj",)),
        ("shared_trunk", ("o_proj", "down_proj")),
    ],
)
def test_policy_critic_and_gradients_are_the_same_by_all_three_ways(critic: Any, targets: Any) -> None:
    model = policy(critic=critic, targets=targets)
    assert model._packs
    assert model._shape is not None
    by_blocks = everything(model)
    model._shape = None
    by_rows = everything(model)
    model._packs = False
    for one, two, padded_rows in zip(by_blocks, by_rows, everything(model), strict=True):
        assert close(one, padded_rows)
        assert close(two, padded_rows)


def test_large_models_and_checkpointed_ones_keep_their_modules() -> None:
    assert policy(rank=1)._shape is None
    assert policy(checkpointing=True)._shape is None


def test_a_trial_in_half_precision_is_not_trusted() -> None:
    model = made("llama").to(torch.bfloat16)
    assert small_shape(model, own) is None
    assert attend_by_rows(model)


@torch.no_grad()
def test_decoding_by_blocks_is_decoding_by_modules() -> None:
    model = made("llama")
    ours, theirs = forward_of(model, max_context=32), ByModules(model)
    assert isinstance(ours, ByBlocks)
    for _ in range(2):
        said = [decoded(forward) for forward in (ours, theirs)]
        for one, other in zip(*said, strict=True):
            assert close(one, other)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        ours.refresh()


def decoded(forward: Any) -> list[torch.Tensor]:
    """Logits of three steps of three rows, one of which has a longer prompt; the last two were prefilled together."""
    cache = RowCache(2)
    cache.rearrange(torch.arange(0), 3, 20, used=0)
    ids, _ = padded([9, 9, 9])
    lengths = torch.tensor([8, 3, 4])
    for rows in (torch.tensor([0]), torch.tensor([1, 2])):
        columns = torch.arange(int(lengths[rows].max())).expand(len(rows), -1)
        cache.point(rows, columns, width=columns.shape[1])
        forward.states(
            ids[rows, : columns.shape[1]], columns, torch.arange(columns.shape[1]) <= columns[..., None], cache
        )
    found = []
    for step in range(3):
        positions = (lengths + step)[:, None]
        width = int(positions.max()) + 1
        cache.point(torch.arange(3), positions, width=width)
        seen = torch.arange(width) <= positions[..., None]
        found.append(forward.logits(ids[:, step : step + 1], positions, seen, cache))
    return found
