"""Checkpoints are whole or absent, hold no pickle, and come back to the bit."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slea_llm import checkpoint
from slea_llm.checkpoint import Snapshot
from slea_llm.errors import CheckpointError, StorageError


def snapshot(value: float = 0.0) -> Snapshot:
    return Snapshot(
        tensors={"policy": {"policy.w": torch.full((3, 2), value)}}, documents={"trainer": {"value": value}}
    )


def refuse(line: str) -> None:
    raise AssertionError(f"nothing was to be reported: {line}")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = checkpoint.write(tmp_path, 3, snapshot(0.1))
    assert written == tmp_path / "step-3" == checkpoint.latest_complete(tmp_path, report=refuse)
    back = checkpoint.read(written)
    assert torch.equal(back.tensors["policy"]["policy.w"], torch.full((3, 2), 0.1))
    assert back.documents["trainer"] == {"value": 0.1}
    assert {path.suffix for path in written.iterdir()} == {".safetensors", ".json"}


def test_br_101_an_incomplete_checkpoint_is_passed_over_and_reported(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 10, snapshot(10))
    later = checkpoint.write(tmp_path, 20, snapshot(20))
    (later / "trainer.json").unlink()
    lines: list[str] = []
    assert checkpoint.latest_complete(tmp_path, report=lines.append) == tmp_path / "step-10"
    assert len(lines) == 1
    assert "step-20 is incomplete" in lines[0]
    assert "trainer.json" in lines[0]
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoint.read(later)


def test_br_101_a_folder_of_weights_only_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / "policy.safetensors").write_bytes(b"")
    lines: list[str] = []
    assert checkpoint.latest_complete(tmp_path, report=lines.append) is None
    assert "step-20" in lines[0]


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path, 1, snapshot(1))
    data = bytearray((folder / "policy.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "policy.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"policy\.safetensors"):
        checkpoint.read(folder)


def test_versions_sort_by_number_not_by_name(tmp_path: Path) -> None:
    for number in (9, 100, 20):
        checkpoint.write(tmp_path, number, snapshot(number))
    assert checkpoint.latest_complete(tmp_path, report=refuse) == tmp_path / "step-100"
    checkpoint.prune(tmp_path, newest=100, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100", "step-20"]


def test_going_back_to_an_older_one_gives_up_what_came_after_it(tmp_path: Path) -> None:
    for number in (5, 10, 15):
        checkpoint.write(tmp_path, number, snapshot(number))
    checkpoint.write(tmp_path, 6, snapshot(6))
    checkpoint.prune(tmp_path, newest=6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-6"]


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_br_089_a_pickle_is_refused_by_name_and_never_opened(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "checkpoints", 1, snapshot())
    (folder / "rng_state.pth").write_bytes(pickle.dumps(Bomb(tmp_path / "MARK")))
    for attempt in (lambda: checkpoint.read(folder), lambda: checkpoint.latest_complete(folder.parent, report=refuse)):
        with pytest.raises(CheckpointError, match=r"rng_state\.pth"):
            attempt()
    assert not (tmp_path / "MARK").exists()


def test_what_a_killed_save_left_is_swept_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".step-4.partial-abc"
    left.mkdir()
    (left / "policy.safetensors").write_bytes(b"half")
    assert checkpoint.latest_complete(tmp_path, report=refuse) is None
    checkpoint.write(tmp_path, 5, snapshot())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5"]


def test_a_failed_write_leaves_the_old_ones_and_no_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path, 10, snapshot(10))

    def full(self: Path, _data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"step-20.*No space left"):
        checkpoint.write(tmp_path, 20, snapshot(20))
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def trained(kind: str) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    rows = [
        {"params": [model.weight], "lr": 0.1, "name": "policy"},
        {"params": [model.bias], "lr": 0.2, "name": "critic"},
    ]
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(rows) if kind == "adamw" else torch.optim.SGD(rows, momentum=0.9)
    return model, optimizer


def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(model(torch.arange(3.0, dtype=torch.float64)).square().sum())
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(kind)
    step(model, optimizer)
    folder = checkpoint.write(tmp_path, 1, checkpoint.optimizer_snapshot(optimizer, model.named_parameters()))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(model, optimizer)

    other, restored = trained(kind)
    other.load_state_dict(weights)
    checkpoint.restore_optimizer(restored, other.named_parameters(), checkpoint.read(folder))
    step(other, restored)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_optimizer_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained("adamw")
    step(model, optimizer)
    folder = checkpoint.write(tmp_path, 1, checkpoint.optimizer_snapshot(optimizer, model.named_parameters()))
    with pytest.raises(CheckpointError, match="bias"):
        checkpoint.restore_optimizer(optimizer, [("weight", nn.Parameter(torch.zeros(2, 3)))], checkpoint.read(folder))


def draws() -> tuple[Any, ...]:
    return random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()  # noqa: S311


def test_random_states_come_back_through_a_file(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a spare number behind, which must come back too
    np.random.standard_normal()
    folder = checkpoint.write(tmp_path, 1, Snapshot(documents={"rng": checkpoint.rng_state()}))
    first = (random.gauss(0, 1), draws())
    checkpoint.restore_rng(checkpoint.read(folder).documents["rng"])
    assert (random.gauss(0, 1), draws()) == first
