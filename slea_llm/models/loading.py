"""Loading of tokenizer and base model: safetensors only, no code that came with the model, no dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from slea_llm.errors import ConfigError
from slea_llm.settings import ModelSettings

PICKLED_SUFFIXES: frozenset[str] = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def base_dtype(settings: ModelSettings) -> torch.dtype:
    """The type of the base weights."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[settings.dtype]


def trained_dtype(settings: ModelSettings) -> torch.dtype:
    """The type of adapters, value heads and log-probabilities: never below float32."""
    return torch.float64 if settings.dtype == "float64" else torch.float32


def load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The base model's tokenizer, padding on the right.

    A tokenizer without a padding token pads with its end-of-sequence token: padding is told from the real thing by
    masks everywhere, never by id. Raises ConfigError when there is neither, or when it wants to run its own code.
    """
    _refuse_remote_code(settings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            settings.base, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer could be loaded from {settings.base!r}: {error}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer of {settings.base!r} has neither a padding nor an end-of-sequence token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def load_stop_ids(settings: ModelSettings) -> frozenset[int]:
    """The ids that end a reply by the model's generation config; empty when it has none."""
    try:
        ids = GenerationConfig.from_pretrained(settings.base, revision=settings.revision).eos_token_id
    except OSError:  # a model without a generation config stops at its tokenizer's tokens
        return frozenset()
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def load_base(settings: ModelSettings) -> PreTrainedModel:
    """The base model in `settings.dtype`, frozen, with every dropout switched off.

    Raises ConfigError when nothing is found, when only pickled weights are there (they can run code when read), or
    when the model wants to run its own code and `trust_remote_code` is off.
    """
    _refuse_remote_code(settings)
    _refuse_pickles(settings)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            settings.base,
            revision=settings.revision,
            dtype=base_dtype(settings),
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model could be loaded from {settings.base!r}: {error}") from error
    model.config.use_cache = False
    disable_dropout(model)
    return model.requires_grad_(False)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate to 0: PPO's ratio compares two forward passes, which must not differ by chance."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        rates = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        for name in rates:
            setattr(module, name, 0.0)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Refuse a tokenizer with more entries than the model has embeddings.

    Resizing the embedding is not offered: its new rows are not part of a LoRA adapter, so that the exported adapter
    would load on the original base without a word and without them.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} entries and the model {rows} embeddings; embeddings are never resized "
            "here, because a LoRA adapter would not carry the new rows. Save a base model with the resized embedding "
            "and name that as model.base"
        )


def _refuse_remote_code(settings: ModelSettings) -> None:
    if settings.trust_remote_code:
        return
    try:
        config, _ = PreTrainedConfig.get_config_dict(settings.base, revision=settings.revision)
    except (OSError, ValueError) as error:
        if not Path(settings.base).exists():
            raise ConfigError(
                f"model.base {settings.base!r} is no folder here, and no model of that name could be fetched from the "
                "hub. Where a recipe has a `warm_start`, `slea warm-start RECIPE` makes its base first; "
                f"`slea fetch-model smollm2-135m --folder {settings.base}` builds a small real model there; else name "
                "a folder or a hub name"
            ) from error
        raise ConfigError(f"{settings.base!r} holds no readable model configuration: {error}") from error
    tokenizer: dict[str, Any] = get_tokenizer_config(settings.base, revision=settings.revision)
    for file, content in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        if content.get("auto_map"):
            raise ConfigError(
                f"{file} of {settings.base!r} asks to run Python code that comes with the model "
                f"(auto_map: {', '.join(sorted(content['auto_map']))}). Read that code, then set "
                "model.trust_remote_code=true; or remove auto_map where transformers has the architecture built in"
            )


def _refuse_pickles(settings: ModelSettings) -> None:
    folder = Path(settings.base)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise ConfigError(
            f"{settings.base!r} has its weights only in pickled files ({', '.join(pickled)}), which can run code when "
            "read; convert them to safetensors"
        )
    raise ConfigError(f"{settings.base!r} holds no *.safetensors file")
