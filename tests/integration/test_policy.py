"""Policy, critic and reference on a tiny random model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from slea_llm.batching import blank, collate, microbatches
from slea_llm.errors import CheckpointError, ConfigError
from slea_llm.losses.ppo import PpoLoss
from slea_llm.losses.value import ValueLoss
from slea_llm.models.policy import PolicyCritic, build
from slea_llm.models.stats import token_stats
from slea_llm.models.tiny import make_tiny
from slea_llm.settings import ModelSettings
from slea_llm.tensors import Batch
from slea_llm.types import (
    AugmentedExperience,
    ScoredTrajectory,
    TokenSpan,
    TokenTrace,
    Trajectory,
    Turn,
)

pytestmark = pytest.mark.integration

STREAMS = ("outcome", "judge")
TEXTS = ["two pizzas to the harbour please", "what would you like to eat?"] * 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("base"), TEXTS, vocab_size=280, hidden=32, layers=2, heads=2, seed=1)


def made(base: Path, *, temperature: float = 1.0, seed: int = 0, **options: Any) -> PolicyCritic:
    chosen: dict[str, Any] = {"dtype": "float64", "lora_rank": 4, "critic_rank": 2, "lora_alpha": 8, **options}
    return build(ModelSettings(base=str(base), **chosen), streams=STREAMS, temperature=temperature, seed=seed)


def shaken(model: PolicyCritic, scale: float = 0.1) -> PolicyCritic:
    """The model as if it had been trained: no matrix or head is at zero."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for _, parameter in [*model.policy_parameters(), *model.critic_parameters()]:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(scale * noise.to(parameter.dtype))
    return model


def trajectory(name: str, lengths: Sequence[int], seed: int) -> Trajectory:
    """A dialogue of one row a length, a third of whose tokens were sampled in two turns."""
    rng = np.random.default_rng(seed)
    traces, spans = [], []
    for row, length in enumerate(lengths):
        mask = np.zeros(length, dtype=bool)
        for start, end in ((2, 2 + length // 4), (length // 2, length // 2 + length // 4)):
            mask[start:end] = True
            spans.append(TokenSpan(row, start, end))
        ids = tuple(int(token) for token in rng.integers(0, 260, length))
        traces.append(TokenTrace(token_ids=ids, sampled_mask=tuple(mask.tolist()), logprobs=(0.0,) * length))
    return Trajectory(
        id=name,
        task={},
        environment="test",
        seed=0,
        policy_version=0,
        turns=tuple(Turn(index=k, context=(), text="", span=span) for k, span in enumerate(spans)),
        traces=tuple(traces),
        outcome=0.0,
        termination="success",
    )


DIALOGUES = tuple(trajectory(f"t{k}", lengths, k) for k, lengths in enumerate([(9,), (23,), (12, 17), (15,), (8,)]))


def stats_of(model: PolicyCritic, dialogues: Sequence[Trajectory] = DIALOGUES, **options: Any) -> list[Any]:
    options = {"microbatch": 3, "policy_version": 4, "critic_version": 6, "pad_id": 0} | options
    return token_stats(model, dialogues, **options)


def experiences(model: PolicyCritic) -> list[AugmentedExperience]:
    rng = np.random.default_rng(3)
    out = []
    for one, stat in zip(DIALOGUES, stats_of(model), strict=True):
        n = one.sampled_tokens
        out.append(
            AugmentedExperience(
                scored=ScoredTrajectory(trajectory=one, steps=(), scores=(), parser="test"),
                stats=stat,
                rewards={},
                advantages=rng.normal(size=n),
                returns={name: rng.normal(size=n) for name in STREAMS},
                weights=np.ones(n),
                value_mask=np.arange(n) % 2 == 0,
                policy_mask=np.ones(n, dtype=bool),
            )
        )
    return out


def batch_of(experiences: Sequence[AugmentedExperience], dtype: torch.dtype = torch.float64) -> Batch:
    return collate(experiences, streams=STREAMS, pad_id=0, dtype=dtype)


def gradients(model: PolicyCritic, pieces: Sequence[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one update over these micro-batches, each term by its own count."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for term in (PpoLoss(PpoLoss.Config()), ValueLoss(ValueLoss.Config())):
        count = sum(float(term.denominator(piece)) for piece in pieces)
        for piece in pieces:
            loss = term(model(piece), piece).total * term.weight / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    named = [*model.policy_parameters(), *model.critic_parameters()]
    assert all(parameter.grad is not None for _, parameter in named)
    return total, {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def slow_logprobs(model: LlamaForCausalLM, row: TokenTrace, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the sampled tokens by the model's own logits of one unpadded row."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.token_ids])).logits[0].double() / temperature
    at = np.flatnonzero(row.sampled_mask)
    return np.asarray(logits.log_softmax(-1)[at - 1, np.array(row.token_ids)[at]])


# ---- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_models_own_logits(base: Path, temperature: float) -> None:
    model = made(base, temperature=temperature)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    batch = batch_of(experiences(model))
    outputs = model(batch)
    expected = np.concatenate([slow_logprobs(plain, row, temperature) for one in DIALOGUES for row in one.traces])
    assert np.allclose(outputs.logprobs[batch.policy_mask].detach().numpy(), expected, atol=1e-6)
    assert not bool(outputs.logprobs[~batch.policy_mask].any())
    assert not bool(outputs.entropy[~batch.policy_mask].any())
    assert bool((outputs.entropy[batch.policy_mask] > 0).all())
    assert torch.equal(outputs.values, torch.zeros_like(outputs.values))  # heads start at zero


def test_update_zero_has_ratio_one_and_no_distance_to_the_reference(base: Path) -> None:
    model = made(base)
    for stat in stats_of(model):
        assert np.abs(stat.proximal - stat.reference).max() <= 1e-12
    batch = batch_of(experiences(model))
    assert torch.allclose(model(batch).logprobs, batch.proximal_logprobs, atol=1e-9)
    assert torch.allclose(model.reference_logprobs(batch), batch.reference_logprobs, atol=1e-9)


def test_policy_critic_and_reference_do_not_read_each_others_adapters(base: Path) -> None:
    model = made(base)
    shaken(model)
    batch = batch_of(experiences(model))
    before, reference = model(batch), model.reference_logprobs(batch)
    with torch.no_grad():
        for name, parameter in model.critic_parameters():
            if name.startswith("critic."):
                parameter.add_(0.3)
    after = model(batch)
    assert torch.equal(before.logprobs, after.logprobs)
    assert not torch.allclose(before.values, after.values)
    with torch.no_grad():
        for _, parameter in model.policy_parameters():
            parameter.add_(0.3)
    assert torch.equal(model(batch).values, after.values)
    assert not torch.allclose(model(batch).logprobs, after.logprobs)
    assert torch.equal(model.reference_logprobs(batch), reference)


@pytest.mark.parametrize("critic", ["own_adapter", "shared_trunk"])
def test_one_backward_pass_reaches_every_trainable_parameter(base: Path, critic: str) -> None:
    model = shaken(made(base, critic=critic))
    _, found = gradients(model, [batch_of(experiences(model))])
    assert all(bool(gradient.any()) for gradient in found.values())
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trainable == {id(parameter) for _, parameter in [*model.policy_parameters(), *model.critic_parameters()]}
    assert any(name.startswith("critic.") for name in found) == (critic == "own_adapter")


def test_without_a_critic_every_value_is_zero_and_only_the_adapter_is_trained(base: Path) -> None:
    model = shaken(made(base, critic="none"))
    assert model.critic_parameters() == []
    outputs = model(batch_of(experiences(model)))
    assert outputs.values.shape[-1] == len(STREAMS)
    assert not outputs.values.any()
    outputs.logprobs.sum().backward()
    assert all(parameter.grad is not None for _, parameter in model.policy_parameters())


def test_a_blank_batch_gives_connected_gradients_of_zero(base: Path) -> None:
    model = shaken(made(base))
    batch = blank(streams=2, pad_id=0, dtype=torch.float64)
    outputs = model(batch)
    (outputs.logprobs.sum() + outputs.entropy.sum() + outputs.values.sum()).backward()
    for name, parameter in [*model.policy_parameters(), *model.critic_parameters()]:
        assert parameter.grad is not None, name
        assert not bool(parameter.grad.any()), name


@pytest.mark.parametrize("critic", ["own_adapter", "shared_trunk"])
def test_gradient_checkpointing_changes_no_gradient(base: Path, critic: str) -> None:
    """The recomputation must use the adapter of its own forward pass, not the one that ran last."""
    found = []
    for checkpointing in (False, True):
        model = shaken(made(base, critic=critic, gradient_checkpointing=checkpointing)).train()
        found.append(gradients(model, [batch_of(experiences(model))])[1])
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], atol=1e-10), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_built_policy_runs_its_layers_again_only_when_it_checkpoints(base: Path, checkpointing: bool) -> None:
    model = made(base, critic="shared_trunk", gradient_checkpointing=checkpointing)
    first = model.model.base_model.model.get_decoder().layers[0]
    calls: list[int] = []
    first.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = batch_of(experiences(model))
    calls.clear()
    outputs = model(batch)
    outputs.logprobs.sum().backward()
    assert len(calls) == 1 + checkpointing


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_padding_and_order_change_neither_loss_nor_gradient(base: Path, size: int) -> None:
    model = shaken(made(base))
    made_once = experiences(model)
    whole, expected = gradients(model, [batch_of(made_once)])
    pieces = [batch_of(group[::-1]) for group in microbatches(made_once, trajectories=size)]
    split, found = gradients(model, pieces)
    assert split == pytest.approx(whole, abs=1e-6)
    for name, gradient in expected.items():
        assert torch.allclose(gradient, found[name], atol=1e-6), name


def test_frozen_base_bf16_with_float32_adapters(base: Path) -> None:
    model = made(base, dtype="bfloat16")
    assert {parameter.dtype for _, parameter in [*model.policy_parameters(), *model.critic_parameters()]} == {
        torch.float32
    }
    batch = batch_of(experiences(model), torch.float32)
    outputs = model(batch)
    assert outputs.logprobs.dtype == outputs.values.dtype == torch.float32
    assert float((outputs.logprobs - batch.proximal_logprobs).detach().abs().max()) < 0.1


def test_a_model_that_caps_its_logits_takes_the_slow_path_and_says_so(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LlamaForCausalLM.forward

    def capped(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.logits = 0.05 * torch.tanh(output.logits / 0.05)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", capped)
    with pytest.warns(UserWarning, match="LlamaForCausalLM changes its logits"):
        model = made(base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for one, stat in zip(DIALOGUES, stats_of(model), strict=True):
        expected = np.concatenate([slow_logprobs(plain, row) for row in one.traces])
        assert np.allclose(stat.proximal, expected, atol=1e-6)
    gradients(shaken(model), [batch_of(experiences(model))])


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone(base: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = made(base, seed=3).trainable_state()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    two, other = made(base, seed=3).trainable_state(), made(base, seed=4).trainable_state()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- stats -----------------------------------------------------------------------------------------------------------


def test_stats_do_not_depend_on_how_rows_are_batched(base: Path) -> None:
    model = shaken(made(base))
    expected = stats_of(model, microbatch=1)
    for microbatch in (2, 3, 50):
        for one, other in zip(expected, stats_of(model, microbatch=microbatch), strict=True):
            assert np.allclose(one.proximal, other.proximal, atol=1e-9)
            assert np.allclose(one.reference, other.reference, atol=1e-9)
            assert all(np.allclose(one.values[name], other.values[name], atol=1e-9) for name in STREAMS)
    backwards = stats_of(model, DIALOGUES[::-1])[::-1]
    for one, other in zip(expected, backwards, strict=True):
        assert np.allclose(one.proximal, other.proximal, atol=1e-9)


def test_stats_are_in_sampled_order_with_the_value_after_the_end_last(base: Path) -> None:
    model = shaken(made(base))
    for one, stat in zip(DIALOGUES, stats_of(model), strict=True):
        assert stat.proximal.shape == stat.reference.shape == (one.sampled_tokens,)
        assert (stat.policy_version, stat.critic_version) == (4, 6)
        expected: dict[str, list[float]] = {name: [] for name in STREAMS}
        for row in one.traces:
            ids = torch.tensor([row.token_ids])
            _, after = model.policy_pass(ids, torch.ones_like(ids).bool(), torch.tensor([row.sampled_mask]))
            for column, name in enumerate(STREAMS):
                expected[name] += [float(after[0, at - 1, column]) for at in np.flatnonzero(row.sampled_mask)]
                last = float(after[0, -1, column])
                if row is one.traces[-1]:
                    expected[name].append(last)
        for name in STREAMS:
            assert np.allclose(stat.values[name], expected[name], atol=1e-9)


def test_training_values_are_those_that_credit_saw(base: Path) -> None:
    model = shaken(made(base))
    batch = batch_of(experiences(model))
    outputs = model(batch)
    assert torch.allclose(outputs.values[batch.value_mask], batch.old_values[batch.value_mask], atol=1e-9)
    assert not bool(outputs.values[~batch.value_mask].any())


def test_a_reference_that_was_not_asked_for_cannot_pass_for_one(base: Path) -> None:
    assert all(np.isnan(stat.reference).all() for stat in stats_of(made(base), reference=False))


def test_logged_text_has_no_stats(base: Path) -> None:
    logged = dataclasses.replace(DIALOGUES[0], traces=(), turns=())
    with pytest.raises(ValueError, match="t0 has no sampled token"):
        stats_of(made(base), [logged])


# ---- adapters in and out ---------------------------------------------------------------------------------------------


def test_br_031_br_033_the_saved_adapter_reloads_in_peft_as_what_was_trained(base: Path, tmp_path: Path) -> None:
    model = shaken(made(base, declared_base="org/base-0.5b", revision=None))
    folder = model.save_adapter(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base-0.5b"
    assert config["target_modules"] == sorted(config["target_modules"])
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        keys = list(file.keys())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in keys
    assert all(key.startswith("base_model.model.model.layers.") and key.endswith(".weight") for key in keys)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    row = DIALOGUES[1].traces[0]
    untrained = slow_logprobs(plain, row)
    reloaded = slow_logprobs(PeftModel.from_pretrained(plain, folder, autocast_adapter_dtype=False), row)
    trained = stats_of(model)[1].proximal
    assert np.abs(reloaded - trained).max() <= 1e-5
    assert np.abs(untrained - trained).max() > 1e-3


def test_br_033_two_exports_are_byte_identical(base: Path, tmp_path: Path) -> None:
    model = shaken(made(base))
    folders = [model.save_adapter(tmp_path / name) for name in ("one", "two")]
    files = sorted(path.name for path in folders[0].iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in files)


def test_br_029_heads_survive_a_reload_and_a_missing_head_is_an_error(base: Path, tmp_path: Path) -> None:
    model = made(base)
    with torch.no_grad():
        for name, parameter in model.critic_parameters():
            if name.startswith("value_head."):
                parameter.fill_(0.25)
    state = model.trainable_state()
    fresh = made(base, seed=8)
    fresh.load_trainable_state(state)
    assert all(float((tensor - state[name]).abs().max()) == 0.0 for name, tensor in fresh.trainable_state().items())
    kept = fresh.trainable_state()
    cut = {name: tensor + 1 for name, tensor in state.items() if name != "value_head.judge.weight"}
    with pytest.raises(CheckpointError, match=r"1 tensors are missing \(value_head\.judge\.weight\)"):
        fresh.load_trainable_state(cut)
    odd = state | {"value_head.judge.weight": torch.zeros(1, 3)}
    with pytest.raises(CheckpointError, match=r"value_head\.judge\.weight has shape"):
        fresh.load_trainable_state(odd)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in fresh.trainable_state().items())
    with safe_open(model.save_adapter(tmp_path) / "adapter_model.safetensors", "pt") as file:
        assert [key for key in file.keys() if "head" in key or "critic" in key] == []  # noqa: SIM118


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_br_034_merged_weights_are_the_trained_policy_in_the_base_type(base: Path, dtype: str) -> None:
    model = shaken(made(base, dtype=dtype), scale=0.05)
    before = model.trainable_state()
    merged = dict(model.merged_weights())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    assert set(merged) == set(plain.state_dict())
    assert {tensor.dtype for tensor in merged.values()} == {getattr(torch, dtype)}
    untouched = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    trained = stats_of(model)
    plain.load_state_dict(merged)
    tolerance = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}[dtype]
    for one, stat in zip(DIALOGUES, trained, strict=True):
        found = np.concatenate([slow_logprobs(plain, row) for row in one.traces])
        assert np.abs(found - stat.proximal).max() <= tolerance
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.trainable_state().items())
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, untouched[name])}
    assert changed == {name for name in merged if "_proj" in name}


def test_br_027_after_a_warm_start_the_reference_is_the_starting_adapter(base: Path, tmp_path: Path) -> None:
    start = shaken(made(base)).save_adapter(tmp_path / "start")
    model = made(base, adapter=str(start))
    for stat in stats_of(model):
        assert np.abs(stat.proximal - stat.reference).max() <= 1e-5
    untrained = stats_of(made(base))
    started = stats_of(model)
    assert np.abs(started[1].reference - untrained[1].reference).max() > 1e-3
    shaken(model)
    moved = stats_of(model)
    assert np.abs(moved[1].reference - started[1].reference).max() <= 1e-12
    assert np.abs(moved[1].proximal - started[1].proximal).max() > 1e-3
    assert not any(name.startswith("reference.") for name, _ in model.policy_parameters())
    assert any(name.startswith("reference.") for name in model.trainable_state())


def test_an_adapter_that_does_not_fit_is_refused_with_the_mend(base: Path, tmp_path: Path) -> None:
    start = made(base).save_adapter(tmp_path / "start")
    with pytest.raises(ConfigError, match=r"set model\.lora_rank=4 and model\.lora_alpha=8"):
        made(base, adapter=str(start), lora_rank=8)
    with pytest.raises(ConfigError, match="holds no adapter_config"):
        made(base, adapter=str(tmp_path / "nothing"))
    weights = start / "adapter_model.safetensors"
    tensors = load_file(weights)
    renamed = {key.replace("base_model.", "module.base_model.", 1): tensor for key, tensor in tensors.items()}
    save_file(renamed, weights)
    with pytest.raises(CheckpointError, match="28 tensors are missing"):
        made(base, adapter=str(start))
    config = json.loads((start / "adapter_config.json").read_text())
    (start / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ConfigError, match="uses use_dora"):
        made(base, adapter=str(start))


def test_named_targets(base: Path, tmp_path: Path) -> None:
    model = made(base, lora_targets=("v_proj", "q_proj"))
    assert len(model.policy_parameters()) == 2 * 2 * 2
    config = json.loads((model.save_adapter(tmp_path) / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match=r"no module is called q_prj \(did you mean 'q_proj'\?\)"):
        made(base, lora_targets=("q_prj", "v_proj"))
    with pytest.raises(ConfigError, match="fit no module"):
        made(base, lora_targets=("nothing",))
    with pytest.raises(ConfigError, match="lm_head"):
        made(base, lora_targets=("lm_head",))


@pytest.mark.parametrize(
    ("streams", "temperature"), [((), 1.0), (("a", "a"), 1.0), (("a.b",), 1.0), (("",), 1.0), (("a",), 0.0)]
)
def test_streams_and_temperature_are_checked(base: Path, streams: tuple[str, ...], temperature: float) -> None:
    with pytest.raises(ConfigError):
        build(ModelSettings(base=str(base)), streams=streams, temperature=temperature, seed=0)
