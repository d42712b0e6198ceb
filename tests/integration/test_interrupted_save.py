"""A save that is killed, or runs into a full disk, leaves the last whole checkpoint and nothing under the new name."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slea_llm import checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SAVE_FOR_EVER = """
import itertools, sys, torch
from pathlib import Path
from slea_llm import checkpoint
root = Path(sys.argv[1])
for number in itertools.count(1):
    tensors = {f"file{one}": {f"file{one}.w": torch.full((200_000,), float(number))} for one in range(4)}
    checkpoint.write(root, number, checkpoint.Snapshot(tensors=tensors, documents={"trainer": {"number": number}}))
    checkpoint.prune(root, newest=number, keep=2)
    print(number, flush=True)
"""

SAVE_ON_A_SMALL_DISK = """
import resource, sys, torch
from pathlib import Path
from slea_llm import checkpoint
root = Path(sys.argv[1])
weights = {"policy": {"policy.w": torch.ones(10)}}
checkpoint.write(root, 10, checkpoint.Snapshot(tensors=weights))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
weights["critic"] = {"critic.w": torch.ones(100_000)}
checkpoint.write(root, 20, checkpoint.Snapshot(tensors=weights))
"""


def start(script: str, root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_during_a_save_resumes_from_the_last_whole_one(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    process = start(SAVE_FOR_EVER, tmp_path)
    assert process.stdout is not None
    done = 0
    for _ in range(chance.randint(2, 5)):
        done = int(process.stdout.readline())
    time.sleep(chance.uniform(0.0, 0.02))
    process.kill()
    done = max([done, *map(int, process.communicate()[0].split())])
    latest = checkpoint.latest_complete(tmp_path, report=lambda line: pytest.fail(line))
    assert latest is not None
    number = int(latest.name.removeprefix("step-"))
    assert number in {done, done + 1}  # the save may have ended just before its line was printed
    snapshot = checkpoint.read(latest)
    assert snapshot.documents["trainer"] == {"number": number}
    assert all(bool((tensors[f"{name}.w"] == number).all()) for name, tensors in snapshot.tensors.items())
    checkpoint.write(tmp_path, number + 1, snapshot)
    assert not list(tmp_path.glob(".*"))


def test_br_099_a_full_disk_leaves_the_previous_checkpoint_and_says_path_and_cause(tmp_path: Path) -> None:
    process = start(SAVE_ON_A_SMALL_DISK, tmp_path)
    _, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "StorageError" in errors
    assert str(tmp_path / "step-20") in errors
    assert "File too large" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]
    assert checkpoint.read(tmp_path / "step-10").tensors["policy"]["policy.w"].sum() == 10
