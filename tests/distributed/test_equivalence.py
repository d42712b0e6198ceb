"""Two gloo processes under `accelerate launch` do what one process does, and never wait for each other in vain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launching import ROOT, launch
from tests.support import training

OPTIMIZERS = ("sgd", "adamw")
SPLITS = ("even", "uneven", "lonely")
CASES = [f"{optimizer}:{split}" for optimizer in OPTIMIZERS for split in SPLITS]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all cases: one launch of two processes and one of a single one."""
    path = tmp_path_factory.mktemp("distributed")
    training.write_base(path / "base")
    launch(path, [*CASES, "shapes"], processes=2)
    launch(path, [f"{optimizer}:even" for optimizer in OPTIMIZERS], processes=1)
    return path


def metrics(folder: Path, case: str) -> dict[str, Any]:
    (line,) = (folder / case / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = json.loads(line)["metrics"]
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_equal_one_after_two_updates(folder: Path, optimizer: str, split: str) -> None:
    one = load_file(folder / f"equal-{optimizer}-even-1.safetensors")
    two = load_file(folder / f"equal-{optimizer}-{split}-2.safetensors")
    names = [name for name in one if not name.startswith("before/")]
    gap = torch.stack([(one[name] - two[name]).square().sum() for name in names]).sum().sqrt()
    change = torch.stack([(one[name] - one[f"before/{name}"]).square().sum() for name in names]).sum().sqrt()
    assert change > 1e-3
    assert gap / change <= 1e-6
    alone, together = metrics(folder, f"equal-{optimizer}-even-1"), metrics(folder, f"equal-{optimizer}-{split}-2")
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        # In the worker every rank asks its judge as often as the one process does.
        expected = 2 * value if name.startswith("asking/") else value
        assert together[name] == pytest.approx(expected, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_hold_the_same_weights(folder: Path, split: str) -> None:
    first, second = (load_file(folder / f"equal-adamw-{split}-2-rank{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("split", SPLITS)
def test_br_051_ranks_with_other_numbers_of_chunks_make_the_same_number_of_backward_calls(
    folder: Path, split: str
) -> None:
    calls = [json.loads((folder / f"equal-sgd-{split}-2-rank{rank}.json").read_text())["backwards"] for rank in (0, 1)]
    # 11 dialogues in two updates, two to a micro-batch. "uneven" is the case: three chunks on rank 0 and one on rank 1,
    # then two and one; "lonely": three and none, twice.
    assert calls == [{"even": 4, "uneven": 5, "lonely": 6}[split]] * 2


def test_br_051_300_updates_of_random_shapes_finish_with_equal_ranks(folder: Path) -> None:
    for rank in (0, 1):
        assert json.loads((folder / f"shapes-rank{rank}.json").read_text()) == {"updates": 300}
    first, second = (load_file(folder / f"shapes-rank{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_cpu_launch_of_two_that_starts_one_is_refused(tmp_path: Path) -> None:
    options = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no -m"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *options.split(),
            "tests.distributed.worker",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "StartupCheckError" in done.stderr
    assert "--multi_gpu" in done.stderr
