"""What a run will hold in memory, part by part, from a model's configuration alone: no weight is loaded.

Parameters are counted on torch's meta device and so are exact; activations are an estimate for one forward and
backward pass of the largest micro-batch, every row at `rollout.max_context_tokens`. All figures are for one process
without sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slea_llm.errors import ConfigError

if TYPE_CHECKING:
    from slea_llm.settings import ModelSettings, RolloutSettings, TrainerSettings

GIB = 2**30
_DTYPE_BYTES = (("float64", 8), ("float32", 4), ("bfloat16", 2))
_OPTIMIZER_STATES = (("adamw", 2), ("sgd", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One line of the plan: what is held, how many bytes, and the sum behind them."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder that memory depends on; `linears` holds (module name, inputs, outputs)."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    linears: tuple[tuple[str, int, int], ...]

    def adapter_parameters(self, rank: int, targets: str | Sequence[str]) -> int:
        """Parameters of a LoRA adapter: `rank * (inputs + outputs)` for every targeted layer."""
        return sum(rank * (inputs + outputs) for name, inputs, outputs in self.linears if _targeted(name, targets))

    @property
    def layer_elements_per_token(self) -> int:
        """Values that autograd keeps for one token in one layer whose linear maps all carry an adapter.

        Two RMS norms keep three times the hidden size each and give one output each; attention keeps query, key and
        value (repeated to all heads) and its output; the gated MLP keeps gate, up, activation and product.
        """
        attention = 4 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim
        return 8 * self.hidden + attention + 4 * self.intermediate

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_shape(model: ModelSettings) -> ModelShape:
    """The shape of a model from its config.json.

    Raises ConfigError when there is none, it needs remote code that is off, or it is not a decoder of a known form.
    """
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(model.base, revision=model.revision, trust_remote_code=trust)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration of {model.base!r} could not be read: {error}") from error
    text = config.get_text_config()
    heads = _number(text, "num_attention_heads", model.base)
    hidden = _number(text, "hidden_size", model.base)
    head_of_model = empty.get_output_embeddings()
    return ModelShape(
        parameters=int(empty.num_parameters()),
        layers=_number(text, "num_hidden_layers", model.base),
        hidden=hidden,
        intermediate=_number(text, "intermediate_size", model.base),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or hidden // heads),
        vocabulary=_number(text, "vocab_size", model.base),
        linears=tuple(
            (name, module.in_features, module.out_features)
            for name, module in empty.named_modules()
            if isinstance(module, nn.Linear) and module is not head_of_model
        ),
    )


def plan_memory(
    *,
    model: ModelSettings,
    rollout: RolloutSettings,
    trainer: TrainerSettings,
    streams: int,
    engine: str,
    kv_cache_bytes: int | None = None,
    shape: ModelShape | None = None,
) -> tuple[MemoryPart, ...]:
    """The parts of one process's memory, largest first.

    `engine` is the generator's registry name; each holds its own copy of the weights.
    `kv_cache_bytes` is the engine's fixed cache; None: what `rollout.concurrency` full dialogues would take. Raises
    ConfigError when the model's configuration cannot be read.
    """
    shape = shape if shape is not None else read_shape(model)
    parts = _trained_parts(shape, model, trainer, streams)
    parts += _activation_parts(shape, model, rollout, trainer)
    parts += _engine_parts(shape, model, rollout, engine, kv_cache_bytes)
    return tuple(sorted((part for part in parts if part.bytes), key=lambda part: -part.bytes))


def _trained_parts(shape: ModelShape, model: ModelSettings, trainer: TrainerSettings, streams: int) -> list[MemoryPart]:
    width = dict(_DTYPE_BYTES)[model.dtype]
    trained = max(4, width)  # adapters and heads never go below float32
    policy = shape.adapter_parameters(model.lora_rank, model.lora_targets)
    own = model.critic == "own_adapter"
    critic = shape.adapter_parameters(model.critic_rank, model.lora_targets) if own else 0
    heads = streams * (shape.hidden + 1) if model.critic != "none" else 0
    trainable = policy + critic + heads
    states = dict(_OPTIMIZER_STATES)[trainer.optimizer]
    return [
        MemoryPart(name="base weights", bytes=shape.parameters * width, how=f"{shape.parameters:,} x {width} bytes"),
        MemoryPart(
            name="policy adapter", bytes=policy * trained, how=f"{policy:,} x {trained}, rank {model.lora_rank}"
        ),
        MemoryPart(
            name="critic adapter", bytes=critic * trained, how=f"{critic:,} x {trained}, rank {model.critic_rank}"
        ),
        MemoryPart(name="value heads", bytes=heads * trained, how=f"{streams} x ({shape.hidden} + 1) x {trained}"),
        MemoryPart(name="gradients", bytes=trainable * trained, how=f"{trainable:,} x {trained}"),
        MemoryPart(
            name="optimizer states",
            bytes=states * trainable * trained,
            how=f"{states} x {trainable:,} x {trained}, {trainer.optimizer}",
        ),
    ]


def _activation_parts(
    shape: ModelShape, model: ModelSettings, rollout: RolloutSettings, trainer: TrainerSettings
) -> list[MemoryPart]:
    from slea_llm.models.token_logprobs import LOGITS_AT_ONCE

    weight_bytes = dict(_DTYPE_BYTES)[model.dtype]
    width = 2 if trainer.precision == "bf16" else weight_bytes
    tokens = trainer.microbatch * rollout.max_context_tokens
    passes = 2 if model.critic == "own_adapter" else 1
    layers = shape.layers
    if model.gradient_checkpointing:  # the input of every layer, and one layer in full while it is made again
        elements = tokens * (layers * shape.hidden + shape.layer_elements_per_token)
    else:
        elements = tokens * layers * shape.layer_elements_per_token
    logits = min(tokens * shape.vocabulary, LOGITS_AT_ONCE)
    logit_bytes = max(4, weight_bytes)
    remake = ", layers made again" if model.gradient_checkpointing else ""
    return [
        MemoryPart(
            name="activations (estimate)",
            bytes=passes * elements * width,
            how=f"{trainer.microbatch} rows x {rollout.max_context_tokens} tokens x {passes} passes{remake}",
        ),
        MemoryPart(
            name="logits (estimate)",
            bytes=2 * logits * logit_bytes,
            how=f"{logits:,} x {logit_bytes}, and their gradient",
        ),
    ]


def _engine_parts(
    shape: ModelShape, model: ModelSettings, rollout: RolloutSettings, engine: str, kv_cache_bytes: int | None
) -> list[MemoryPart]:
    width = dict(_DTYPE_BYTES)[model.dtype]
    per_token = shape.kv_elements_per_token * width
    dialogues = min(rollout.concurrency, rollout.episodes)
    if kv_cache_bytes is None:
        size = dialogues * rollout.max_context_tokens * per_token
        how = f"{dialogues} dialogues x {rollout.max_context_tokens} tokens x {per_token:,} bytes"
    else:
        size = kv_cache_bytes
        how = f"set; holds {kv_cache_bytes // per_token:,} tokens of {per_token:,} bytes"
    return [
        MemoryPart(name="engine KV cache", bytes=size, how=how),
        MemoryPart(
            name="engine weights",
            bytes=shape.parameters * width,
            how=f"{shape.parameters:,} x {width} bytes, {engine}'s own copy",
        ),
    ]


def _targeted(name: str, targets: str | Sequence[str]) -> bool:
    if targets == "all-linear":
        return True
    wanted = (targets,) if isinstance(targets, str) else targets
    return any(name == target or name.endswith(f".{target}") for target in wanted)


def _number(config: Any, name: str, base: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ConfigError(f"the configuration of {base!r} has no {name}; the memory plan knows decoders that name it")
    return value
