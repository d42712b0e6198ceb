"""Checkpoints that are whole or absent, hold no pickle, and bring a run back to the bit.

A checkpoint is a folder `step-N`, N being the iterations done. It is written beside its final name, flushed and
renamed, and its manifest lists size and SHA-256 of every file: what an interrupt or a full disk leaves is never taken
for one.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import nn

from slea_llm import folders
from slea_llm.errors import CheckpointError, StorageError

FORMAT = 1
PICKLE_SUFFIXES = frozenset({".bin", ".ckpt", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"})

NamedParameters = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a checkpoint holds: tensors by file (`policy`, `critic`, ...) and name, and JSON documents by file."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    documents: Mapping[str, Any] = field(default_factory=dict)


def write(root: Path, number: int, snapshot: Snapshot) -> Path:
    """Write `root/step-<number>` and return it.

    Raises StorageError, naming path and cause, when the disk is full or not writable; the checkpoints already there are
    untouched and nothing stands under the new name.
    """
    target = root / f"step-{number}"
    _sweep(root)
    with folders.whole_folder(target, overwrite=True) as folder:
        for name, tensors in snapshot.tensors.items():
            dense = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            (folder / f"{name}.safetensors").write_bytes(to_safetensors(dense))
        for name, document in snapshot.documents.items():
            (folder / f"{name}.json").write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
        folders.write_manifest(folder, {"format": FORMAT, "step": number})
    return target


def read(folder: Path) -> Snapshot:
    """The snapshot in a checkpoint folder.

    Raises CheckpointError when a file is missing or changed, when the format is another one, and, naming the file, when
    the folder holds a pickle: such a file can run code and is never opened.
    """
    _refuse_pickles(folder)
    fault = _fault(folder)
    if fault is not None:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {fault}")
    manifest = folders.read_manifest(folder)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {manifest.get('format')!r}; this version reads {FORMAT}")
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    documents: dict[str, Any] = {}
    for path in (folder / name for name in manifest["files"]):
        try:
            if path.suffix == ".safetensors":
                tensors[path.stem] = load_file(path)
            else:
                documents[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return Snapshot(tensors=tensors, documents=documents)


def latest_complete(root: Path, *, report: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint below `root`, or None. Each incomplete one on the way is passed over and reported.

    Raises CheckpointError, naming the file, when a candidate holds a pickle.
    """
    for folder in reversed(_numbered(root)):
        _refuse_pickles(folder)
        fault = _fault(folder)
        if fault is None:
            return folder
        report(f"checkpoint {folder.name} is incomplete and passed over: {fault}")
    return None


def prune(root: Path, *, newest: int, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints up to `newest`, which was just written.

    Later ones are of a line that was given up when an older checkpoint was gone back to: they go too, or a run would
    be gone on with from them.
    """
    found = _numbered(root)
    line = [folder for folder in found if _number(folder) <= newest]
    for folder in [one for one in found if one not in line[-max(keep, 1) :]]:
        # Renamed first: an interrupt must leave no folder that looks like a checkpoint and is half gone.
        doomed = folder.with_name(f".{folder.name}.partial-pruned")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _numbered(root: Path) -> list[Path]:
    """Folders `step-N` below `root`, by N."""
    found = [path for path in root.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _sweep(root: Path) -> None:
    """Remove what a killed save left beside the checkpoints."""
    for folder in root.glob(".step-*.partial-*"):
        shutil.rmtree(folder)


def _fault(folder: Path) -> str | None:
    """Why the folder is not a whole checkpoint, or None."""
    try:
        changed = folders.changed_files(folder)
    except StorageError as error:
        return str(error)
    return f"missing or changed: {', '.join(changed)}" if changed else None


def _refuse_pickles(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.suffix in PICKLE_SUFFIXES:
            raise CheckpointError(
                f"{path} may be a pickle, which can run code when it is read; this checkpoint is refused "
                "(checkpoints of this library hold .safetensors and .json files alone)"
            )


def optimizer_snapshot(optimizer: torch.optim.Optimizer, named: NamedParameters) -> Snapshot:
    """State of an optimizer: tensors as `slot/parameter name`, plain numbers and group options as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in named:
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{slot}/{name}"] = value
            else:
                scalars[f"{slot}/{name}"] = value
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return Snapshot(tensors={"optimizer": tensors}, documents={"optimizer": {"scalars": scalars, "groups": options}})


def restore_optimizer(optimizer: torch.optim.Optimizer, named: NamedParameters, snapshot: Snapshot) -> None:
    """Put a state written by `optimizer_snapshot` back. Raises CheckpointError when it belongs to other parameters."""
    parameters = dict(named)
    stored = {**snapshot.tensors["optimizer"], **snapshot.documents["optimizer"]["scalars"]}
    unknown = sorted({key.split("/", 1)[1] for key in stored} - parameters.keys())
    if unknown:
        raise CheckpointError(f"the optimizer state of the checkpoint is about other parameters: {unknown}")
    for key, value in stored.items():
        slot, name = key.split("/", 1)
        parameter = parameters[name]
        if isinstance(value, torch.Tensor):
            # AdamW keeps its count of steps on the CPU, whatever the device of the weights.
            value = value.to(parameter.device) if value.dim() > 0 else value.clone()
        optimizer.state[parameter][slot] = value
    for group, options in zip(optimizer.param_groups, snapshot.documents["optimizer"]["groups"], strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def rng_state() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch (CPU and CUDA) of this process, as JSON values."""
    version, internal, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    legacy["state"]["key"] = legacy["state"]["key"].tolist()
    return {
        "python": [version, list(internal), gauss],
        "numpy": legacy,
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to a state written by `rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state({**state["numpy"]})
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_from_hex(text) for text in state["cuda"]])


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()
