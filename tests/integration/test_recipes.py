"""The recipe of every environment, cut down to seconds: warm start, training, success before and after, step values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slea_llm.assets import find

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SETTINGS = (
    "generation.name=transformers",
    "model.lora_rank=8",
    "model.critic_rank=8",
    "warm_start.dialogues=12",
    "rollout.episodes=4",
    "rollout.max_turns=3",
    "rollout.max_reply_tokens=10",
    "trainer.iterations=1",
    "trainer.epochs=1",
    "trainer.critic_warmup_iterations=0",
    "trainer.minibatch=4",
    "evaluation.tasks=2",
    "warm_start.from_scratch={hidden: 64, layers: 1, heads: 1, vocab_size: 400}",
)


RUN = """
import sys
from slea_llm.cli import main
for command in ("warm-start", "train"):
    if code := main([command, *sys.argv[1:]]):
        sys.exit(code)
"""


@pytest.mark.parametrize("name", ["complaint", "tech_support", "trip_planning", "strategy_game", "code_task"])
def test_recipe_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(find("recipes", f"{name}_tiny.yaml")), *SETTINGS],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for line in ("saved in runs/", "\nbefore: success ", "\nafter: success ", "\nstep values: "):
        assert line in done.stdout
