"""The LoRA adapters on one frozen base: made, switched, saved, merged and restored.

Switching sets the active name on the LoRA layers, found once. PEFT's own `set_adapter` also turns `requires_grad` off
for the adapters it leaves, and autograd reads that flag when the backward pass arrives: with two adapters in one
forward pass the first would silently get no gradient.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from slea_llm.errors import CheckpointError, ConfigError, nearest
from slea_llm.models.lora_linear import fuse
from slea_llm.settings import ModelSettings

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
KEY_PREFIX = "base_model.model."
"""What PEFT's loader expects in front of the base model's own module path."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached; gathered from all ranks when it is sharded (then every rank must call)."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Adapters:
    """Named LoRA adapters on one model. `policy` is active except inside `active(...)`."""

    def __init__(self, base: PreTrainedModel, config: LoraConfig, *, name: str, dtype: torch.dtype, seed: int) -> None:
        self._dtype = dtype
        self._seed = seed
        self.model: PeftModel = get_peft_model(base, config, adapter_name=name)
        self._layers: dict[str, Any] = {
            path: module for path, module in sorted(base.named_modules()) if isinstance(module, LoraLayer)
        }
        fuse(self._layers.values())
        self._target_modules = _target_names(base, set(self._layers))
        self._resting = name
        self._current: str | None = name
        self._reset(name)

    def add(self, config: LoraConfig, *, name: str) -> None:
        """Add a fresh adapter; it changes nothing until it is trained."""
        self.model.add_adapter(name, config)
        self._reset(name)

    def freeze_all_but(self, *names: str) -> None:
        """Let these adapters train and nothing else. Also puts the resting adapter back in use."""
        self._switch(self._resting)
        self.model.requires_grad_(False)
        for name in names:
            for _, parameter in self.parameters(name):
                parameter.requires_grad_(True)

    @property
    def target_modules(self) -> list[str]:
        """Sorted names that select exactly the adapted modules."""
        return list(self._target_modules)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the adapted modules in the base model, sorted."""
        return tuple(self._layers)

    def parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """`(path.lora_A.weight, parameter)` of one adapter, in the order of paths."""
        for path, layer in self._layers.items():
            yield f"{path}.lora_A.weight", layer.lora_A[name].weight
            yield f"{path}.lora_B.weight", layer.lora_B[name].weight

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Whole tensors of one adapter by the base model's module path, on the CPU."""
        return {key: whole(parameter).cpu().contiguous() for key, parameter in self.parameters(name)}

    def active(self, name: str | None) -> AbstractContextManager[None]:
        """Use this adapter (None: the bare base) inside the block."""
        return _Active(self, name)

    def added(self, module: Any) -> torch.Tensor:
        """The weight (out, in) of a linear module with the adapter in use added; gradients reach the adapter."""
        weight: torch.Tensor = getattr(module, "base_layer", module).weight
        if self._current is None or not isinstance(module, LoraLayer):
            return weight
        a, b = module.lora_A[self._current].weight, module.lora_B[self._current].weight
        return torch.addmm(weight, b, a, alpha=module.scaling[self._current])

    def addable(self) -> bool:
        """Whether an update is cheaper with adapters added into the weights: in small models, whole and of one type.

        Beside the products that both ways need, a token costs r (in + out) forward and twice that backward when the
        adapter is applied to it, and in * out backward when it is added. Up to twice as much is won back by what
        dense layers allow.
        """
        applied = added = 0
        for layer in self._layers.values():
            base = layer.base_layer
            if type(base) is not nn.Linear or base.weight.dtype != self._dtype:
                return False
            added += base.in_features * base.out_features
            applied += 3 * max(layer.r.values()) * (base.in_features + base.out_features)
        return added <= 2 * applied

    @property
    def sharded(self) -> bool:
        """Whether weights lie in pieces on several ranks, so that only their own modules put them together."""
        return any(isinstance(parameter, DTensor) for parameter in self.model.parameters())

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For activation checkpointing: the recomputation uses the adapter that the forward pass used."""
        return nullcontext(), _Active(self, self._current)

    def save(self, folder: Path, *, name: str, base: str, revision: str | None) -> Path:
        """Write one adapter as PEFT does: no adapter name in the keys, sorted targets, the base model named."""
        tensors = {f"{KEY_PREFIX}{key}": tensor for key, tensor in self.tensors(name).items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = copy.deepcopy(self.model.peft_config[name])
        config.base_model_name_or_path = base
        config.revision = revision
        config.inference_mode = True
        config.target_modules = self.target_modules
        config.save_pretrained(folder)
        return folder

    def load(self, tensors: Mapping[str, torch.Tensor], *, name: str, source: str) -> None:
        """Fill one adapter. Raises CheckpointError unless keys and shapes are exactly those of the adapter."""
        copy_into(dict(self.parameters(name)), tensors, source=source)

    def merged(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of the base with one adapter merged in, the live weights untouched.

        W + scale * B A is computed in the adapter's type and rounded once to the base's. Weights that no adapter
        touches are the live ones, not copies.
        """
        merged = []
        for key, parameter in self.model.base_model.model.named_parameters():
            path, _, leaf = key.rpartition(".")
            if ".lora_" in key:
                continue
            if not path.endswith(".base_layer"):
                merged.append((key, whole(parameter)))
                continue
            path = path.removesuffix(".base_layer")
            weight = whole(parameter)
            if leaf == "weight":
                weight = (weight.to(self._dtype) + self._delta(path, name)).to(parameter.dtype)
            merged.append((f"{path}.{leaf}", weight))
        return merged

    def _delta(self, path: str, name: str) -> torch.Tensor:
        layer = self._layers[path]
        delta = whole(layer.lora_B[name].weight) @ whole(layer.lora_A[name].weight)
        scale: float = layer.scaling[name]
        return scale * (delta.T if layer.fan_in_fan_out else delta)

    def _reset(self, name: str) -> None:
        # Seeded by adapter name and run seed, in the order of paths: the same on every rank and in every process.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        for layer in self._layers.values():
            for matrix in (layer.lora_A[name], layer.lora_B[name]):
                matrix.to(self._dtype)
            fresh = torch.empty(layer.lora_A[name].weight.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
            with torch.no_grad():
                layer.lora_A[name].weight.copy_(fresh)
                layer.lora_B[name].weight.zero_()

    def _switch(self, name: str | None) -> None:
        chosen = [] if name is None else [name]
        for layer in self._layers.values():
            layer._active_adapter = chosen  # see the module's first lines
        self._current = name


class _Active:
    """Puts one adapter in use and the previous one back; can be entered again, as a recomputation may be."""

    __slots__ = ("_adapters", "_before", "_name")

    def __init__(self, adapters: Adapters, name: str | None) -> None:
        self._adapters = adapters
        self._name = name
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = self._adapters._current
        if self._before != self._name:
            self._adapters._switch(self._name)

    def __exit__(self, *_: object) -> None:
        if self._before != self._name:
            self._adapters._switch(self._before)


def copy_into(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], *, source: str) -> None:
    """Copy tensors into parameters of the same names. Raises CheckpointError on any missing, extra or misshapen one."""
    missing = sorted(set(parameters) - set(tensors))
    extra = sorted(set(tensors) - set(parameters))
    if missing or extra:
        raise CheckpointError(
            f"{source} does not fit this model: {len(missing)} tensors are missing ({_few(missing)}) and "
            f"{len(extra)} are not expected ({_few(extra)})"
        )
    for key, parameter in parameters.items():
        if parameter.shape != tensors[key].shape:
            raise CheckpointError(
                f"{source}: {key} has shape {tuple(tensors[key].shape)}, this model wants {tuple(parameter.shape)}"
            )
    with torch.no_grad():
        for key, parameter in parameters.items():
            tensor = tensors[key].to(parameter.device)
            if isinstance(parameter, DTensor):
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            parameter.copy_(tensor)


def fresh_config(settings: ModelSettings) -> LoraConfig:
    """The policy's LoRA configuration. Raises ConfigError for targets that an engine cannot serve."""
    targets: str | list[str] = (
        settings.lora_targets if isinstance(settings.lora_targets, str) else sorted(settings.lora_targets)
    )
    refused = {"lm_head", "embed_tokens", "wte"} & (set(targets) if isinstance(targets, list) else {targets})
    if refused:
        raise ConfigError(
            f"model.lora_targets names {', '.join(sorted(refused))}; adapt linear layers inside the blocks"
        )
    if isinstance(targets, str) and targets != "all-linear":
        targets = [targets]
    return lora_config(rank=settings.lora_rank, alpha=settings.lora_alpha, targets=targets)


def lora_config(*, rank: int, alpha: int, targets: str | list[str]) -> LoraConfig:
    """A plain LoRA: no dropout, no bias, nothing beside the two matrices."""
    return LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )


def read_adapter(settings: ModelSettings) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Configuration and tensors (by module path) of the adapter that training starts from.

    Raises ConfigError when the folder is not a plain LoRA adapter in safetensors form, or differs in rank or alpha from
    the settings: the engine is sized by them.
    """
    folder = Path(settings.adapter or "")
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"model.adapter {str(folder)!r} holds no {CONFIG_FILE} with {WEIGHTS_FILE} (never pickles)")
    config = LoraConfig.from_pretrained(str(folder))
    odd = [
        name
        for name in ("use_dora", "modules_to_save", "trainable_token_indices", "rank_pattern", "alpha_pattern",
                     "use_rslora", "lora_bias", "target_parameters", "layer_replication")
        if getattr(config, name, None)
    ]  # fmt: skip
    if config.bias != "none":
        odd.append("bias")
    if odd:
        raise ConfigError(f"the adapter in {str(folder)!r} uses {', '.join(odd)}; only a plain LoRA can be trained on")
    if (config.r, config.lora_alpha) != (settings.lora_rank, settings.lora_alpha):
        raise ConfigError(
            f"the adapter in {str(folder)!r} has rank {config.r} and alpha {config.lora_alpha}, the settings say "
            f"{settings.lora_rank} and {settings.lora_alpha}; set model.lora_rank={config.r} and "
            f"model.lora_alpha={config.lora_alpha}"
        )
    targets = config.target_modules
    config = lora_config(
        rank=config.r, alpha=config.lora_alpha, targets=targets if isinstance(targets, str) else sorted(targets)
    )
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    return config, {key.removeprefix(KEY_PREFIX): tensor for key, tensor in tensors.items()}


def check_targets(adapters: Adapters, config: LoraConfig, base: PreTrainedModel) -> None:
    """Refuse target names that match no module: PEFT leaves out single ones without a word."""
    wanted = set() if isinstance(config.target_modules, str) else set(config.target_modules or ())
    paths = adapters.paths
    unmatched = sorted(name for name in wanted if not any(path == name or path.endswith(f".{name}") for path in paths))
    if unmatched:
        known = {path.rpartition(".")[2] for path, module in base.named_modules() if isinstance(module, nn.Linear)}
        raise ConfigError(
            f"model.lora_targets: no module is called {', '.join(unmatched)}{nearest(unmatched[0], known)}; "
            f"linear modules are {', '.join(sorted(known))}"
        )


def _target_names(base: PreTrainedModel, adapted: set[str]) -> list[str]:
    """The adapted modules' last path parts where these select nothing else, their full paths otherwise."""
    short = {path.rpartition(".")[2] for path in adapted}
    paths = {path for path, _ in base.named_modules() if ".lora_" not in path and not path.endswith(".base_layer")}
    selected = {path for path in paths if path.rpartition(".")[2] in short}
    return sorted(short if selected == adapted else adapted)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"
