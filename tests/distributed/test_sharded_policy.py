"""A policy sharded over two gloo processes gives the gradients, adapter and weights of a whole one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slea_llm.models.policy import PolicyCritic
from tests.distributed.sharded_worker import gradients, moved
from tests.support import training

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    training.write_base(path / "base")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "-m", "tests.distributed.sharded_worker", str(path)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> PolicyCritic:
    return moved(training.policy(folder / "base"))


def same(file: Path, expected: Mapping[str, torch.Tensor]) -> None:
    found = load_file(file)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-12), name


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_gathered_is_the_whole_policy(folder: Path, whole: PolicyCritic, rank: int) -> None:
    same(folder / f"rank{rank}" / "state.safetensors", whole.trainable_state())
    same(folder / f"rank{rank}" / "merged.safetensors", dict(whole.merged_weights()))


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_and_values_are_those_of_the_whole_policy(folder: Path, whole: PolicyCritic, rank: int) -> None:
    """Both ranks see the same rows, so the mean over ranks is the gradient itself."""
    whole.zero_grad()
    same(folder / f"rank{rank}" / "gradients.safetensors", gradients(whole))


def test_the_saved_adapter_is_the_same_file_on_every_rank(folder: Path, whole: PolicyCritic, tmp_path: Path) -> None:
    alone = whole.save_adapter(tmp_path)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        texts = {(place / name).read_bytes() for place in (alone, folder / "rank0", folder / "rank1")}
        assert len(texts) == 1, name
