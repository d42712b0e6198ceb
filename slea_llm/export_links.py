"""The links of an export: what PEFT, Hugging Face loaders and the engine make of the written files.

Every function raises ExportError for a link that does not hold.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from slea_llm.errors import ExportError, GenerationError
from slea_llm.export_proof import LinkFigures, Reading, Row, check_link, reloaded_logprobs, trainer_logprobs
from slea_llm.models.adapters import CONFIG_FILE, WEIGHTS_FILE
from slea_llm.models.loading import load_base
from slea_llm.types import GenerationRequest

if TYPE_CHECKING:
    from slea_llm.interfaces import Generator
    from slea_llm.models.policy import PolicyCritic
    from slea_llm.settings import ModelSettings

ADAPTER, MERGED = "adapter", "merged"
REPLY_TOKENS = 32
"""Tokens that the engine samples after every probe; the trainer's log-probabilities of them are compared."""
MERGED_SIZE_LIMIT = 1.05
"""Merged weights over base weights, in bytes."""


class GeneratorFactory(Protocol):
    """Builds the engine for the proof, at the trainer's temperature.

    With `lora` it will be given an adapter by `load` and must serve it as an adapter; without, `settings.base` is a
    folder of merged weights to serve as they are.
    """

    def __call__(self, settings: ModelSettings, *, lora: bool) -> Generator: ...


def check_base_name(name: str | None) -> str:
    """The base model's name as an adapter may give it.

    Raises ExportError for none and for a folder that will be gone (below the temporary folder and outside the working
    directory): every loader that looks the base up would fail.
    """
    mend = "set model.declared_base to the hub name or lasting folder that the adapter belongs to"
    if not name or not name.strip():
        raise ExportError(f"the adapter would name no base model; {mend}")
    path = Path(name)
    lasting = not path.is_absolute() or path.resolve().is_relative_to(Path.cwd().resolve())
    passing = {Path(root).resolve() for root in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")}  # noqa: S108
    if not lasting and any(path.resolve().is_relative_to(root) for root in passing):
        raise ExportError(f"the adapter would name the temporary folder {name!r} as its base model; {mend}")
    return name


def read_exactly(model: PolicyCritic, rows: Sequence[Row], *, starts: Sequence[int] | None = None) -> Reading:
    """What trained model and base say about the tokens of the rows, in at least float32.

    With a 16-bit base the same weights are read in float32, the trainer's adapter on them.
    """
    read = partial(reloaded_logprobs, rows=rows, starts=starts, temperature=model.temperature, dtype=model.dtype)
    base = base_of(model)
    if model.settings.dtype != "bfloat16":
        return Reading(trained=trainer_logprobs(model, rows, starts=starts), base=read(base))
    base = base.float()
    before = read(base)
    with tempfile.TemporaryDirectory(prefix="slea-adapter-") as folder:
        return Reading(trained=read(load_adapter(base, model.save_adapter(Path(folder)))), base=before)


def check_reloads(
    model: PolicyCritic, folder: Path, rows: Sequence[Row], reading: Reading, *, allow_unseen: bool
) -> list[LinkFigures]:
    """The links that Hugging Face loaders make: PEFT's reload, its merge, and the reload of the merged weights."""
    links = []
    read = partial(reloaded_logprobs, rows=rows, temperature=model.temperature, dtype=model.dtype)
    check = partial(check_link, dtype=model.settings.dtype, reading=reading, allow_unseen=allow_unseen)
    if (folder / ADAPTER).is_dir():
        check_adapter_config(folder / ADAPTER, model)
        reloaded = load_adapter(base_of(model), folder / ADAPTER)
        own = trainer_logprobs(model, rows)
        links.append(check("adapter", "the adapter reloaded by PEFT", served=read(reloaded), trainer=own))
        merged = reloaded.merge_and_unload()
        links.append(check("merge", "the reloaded adapter merged by PEFT", served=read(merged)))
        del reloaded, merged
    if (folder / MERGED).is_dir():
        _check_merged_files(folder / MERGED, model)
        served = read(_load_merged(model, folder / MERGED))
        links.append(check("merged", "the merged weights reloaded", served=served))
    return links


def check_adapter_config(folder: Path, model: PolicyCritic) -> None:
    """Raise ExportError when adapter_config.json names another base, revision, rank or scale, or unsorted targets."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    wanted = {
        "base_model_name_or_path": model.base_name,
        "revision": model.settings.revision,
        "r": model.settings.lora_rank,
        "lora_alpha": model.settings.lora_alpha,
        "modules_to_save": None,
        "use_dora": False,
        "bias": "none",
    }
    for name, value in wanted.items():
        if config.get(name) != value:
            raise ExportError(f"{folder / CONFIG_FILE}: {name} is {config.get(name)!r}, but {value!r} was trained")
    check_base_name(config["base_model_name_or_path"])
    targets = config.get("target_modules")
    if not isinstance(targets, list) or targets != sorted(targets):
        raise ExportError(f"{folder / CONFIG_FILE}: target_modules {targets!r} is not a sorted list of names")


def load_adapter(base: Any, folder: Path) -> PeftModel:
    """The adapter on its base as PEFT loads it, in evaluation mode.

    Raises ExportError for a missing, unexpected, misshapen or changed tensor, where PEFT itself only warns or is
    silent and goes on with the base model's behaviour.
    """
    stored = load_file(folder / WEIGHTS_FILE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            reloaded = PeftModel.from_pretrained(base, str(folder)).eval()
        except (RuntimeError, ValueError) as error:
            raise ExportError(f"PEFT cannot load {folder} on its base model: {error}") from error
    loaded = get_peft_model_state_dict(reloaded, save_embedding_layers=False)
    missing, unexpected = sorted(loaded.keys() - stored.keys()), sorted(stored.keys() - loaded.keys())
    if missing or unexpected:
        warned = [str(w.message).splitlines()[0][:160] for w in said if "key" in str(w.message)]
        raise ExportError(
            f"{folder / WEIGHTS_FILE} would load as the base model: {len(missing)} tensors are missing "
            f"({', '.join(missing[:2]) or 'none'}), {len(unexpected)} are unexpected "
            f"({', '.join(unexpected[:2]) or 'none'}). PEFT said: {'; '.join(warned) or 'nothing'}"
        )
    changed = [key for key, tensor in stored.items() if not torch.equal(tensor, loaded[key].cpu().to(tensor.dtype))]
    if changed:
        raise ExportError(f"{len(changed)} tensors are not those of the file after loading, the first {changed[0]}")
    return reloaded


def base_of(model: PolicyCritic) -> Any:
    base = load_base(model.settings).eval().to(_device(model))
    rows = int(base.get_input_embeddings().weight.shape[0])
    own = int(model.model.get_input_embeddings().weight.shape[0])
    if rows != own:
        raise ExportError(
            f"the trained model has {own} embedding rows and its base {rows}: a LoRA adapter does not carry resized "
            f"embeddings. Save a base with {own} rows and train on that"
        )
    return base


def _load_merged(model: PolicyCritic, folder: Path) -> Any:
    return load_base(replace(model.settings, base=str(folder), revision=None)).eval().to(_device(model))


def _device(model: PolicyCritic) -> torch.device:
    return next(model.parameters()).device


def _check_merged_files(folder: Path, model: PolicyCritic) -> None:
    """The merged weights have the base's type and size."""
    wanted = {"float32": "F32", "bfloat16": "BF16", "float64": "F64"}[model.settings.dtype]
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        size += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            odd = [key for key in file.keys() if file.get_slice(key).get_dtype() != wanted]  # noqa: SIM118  not a dict
        if odd:
            raise ExportError(f"{path}: {len(odd)} tensors are not {model.settings.dtype}, the first {odd[0]}")
    frozen = [p for name, p in model.model.base_model.model.named_parameters() if ".lora_" not in name]
    base_size = sum(p.numel() * p.element_size() for p in frozen)
    if not 0 < size <= MERGED_SIZE_LIMIT * base_size:
        raise ExportError(f"{folder}: merged weights take {size} bytes, the base {base_size}")


def check_engine(
    model: PolicyCritic,
    folder: Path,
    kind: str,
    prompts: Sequence[Row],
    factory: GeneratorFactory,
    *,
    unchanged: bool,
    allow_unseen: bool,
) -> LinkFigures:
    """Let the engine answer the probes from the exported files; trainer and base then read the same tokens."""
    lora = kind == ADAPTER
    settings = replace(model.settings, adapter=None)
    if not lora:
        settings = replace(settings, base=str(folder / MERGED), revision=None)
    with _running(factory, settings, lora=lora) as engine:
        if lora and not unchanged:  # an engine may refuse an adapter that moves nothing, and the base is the same then
            try:
                engine.load(_Exported(model, folder / ADAPTER), version=engine.policy_version + 1)
            except GenerationError as error:
                raise ExportError(f"the engine does not take the exported adapter: {error}") from error
        try:
            replies = asyncio.run(_answers(engine, prompts))
        except GenerationError as error:
            raise ExportError(f"the engine cannot answer the probes: {error}") from error
    pairs = [(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True) if reply[0]]
    rows = [(*prompt, *tokens) for prompt, (tokens, _) in pairs]
    starts = [len(prompt) for prompt, _ in pairs]
    if not rows:
        raise ExportError(f"the engine answered none of {len(prompts)} probes")
    reading = read_exactly(model, rows, starts=starts)
    figures = check_link(
        "engine",
        f"the engine with the exported {'adapter' if lora else 'merged weights'}",
        dtype=model.settings.dtype,
        served=torch.tensor([x for _, (_, logprobs) in pairs for x in logprobs], dtype=model.dtype),
        reading=reading,
        allow_unseen=allow_unseen,
    )
    if figures.share is None and not unchanged:
        raise ExportError(f"{figures.name} sampled only tokens that training did not change; give other probes")
    return figures


@contextmanager
def _running(factory: GeneratorFactory, settings: ModelSettings, *, lora: bool) -> Iterator[Generator]:
    engine = factory(settings, lora=lora)
    try:
        yield engine
    finally:
        engine.close()


async def _answers(engine: Generator, prompts: Sequence[Row]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    requests = [
        GenerationRequest(prompt_ids=prompt, key=(0, index), max_tokens=REPLY_TOKENS)
        for index, prompt in enumerate(prompts)
    ]
    replies = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [(reply.token_ids, reply.logprobs) for reply in replies]


class _Exported:
    """The files that were exported as a source of weights: what the engine gets is what users will get."""

    def __init__(self, model: PolicyCritic, adapter: Path) -> None:
        self._model = model
        self._adapter = adapter

    def save_adapter(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (folder / name).write_bytes((self._adapter / name).read_bytes())
        return folder

    def merged_weights(self) -> list[tuple[str, torch.Tensor]]:
        merged = load_adapter(base_of(self._model), self._adapter).merge_and_unload()
        return [(name, parameter.detach()) for name, parameter in merged.named_parameters()]
