"""The command line from warm start to a resumed run, in processes of its own, on a base of its own making."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from slea_llm.assets import find
from slea_llm.storage import read_scored

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SETTINGS = (
    "generation.name=transformers",
    "run.output_dir=run",
    "model.base=base",
    "model.lora_rank=8",
    "model.critic_rank=8",
    "warm_start.output=base",
    "warm_start.dialogues=20",
    "warm_start.from_scratch={hidden: 64, layers: 1, heads: 1, vocab_size: 400}",
    "rollout.episodes=4",
    "rollout.max_turns=2",
    "rollout.max_reply_tokens=8",
    "trainer.iterations=4",
    "trainer.epochs=1",
    "trainer.critic_warmup_iterations=0",
    "trainer.minibatch=2",
    "trainer.save_every=2",
    "evaluation.tasks=4",
    "evaluators=[{name: knowledge_base}, {name: reward_model, refresh_every: 2, window: 64, encoder: hashing}]",
    "streams.learnt={sources: [reward_model], gamma_step: 0.0, gamma_turn: 0.0}",
)


def slea(folder: Path, *arguments: str, fails: bool = False) -> str:
    """What the command printed; fails with what it said when it fails. With `fails`, what it said when it failed."""
    command, *options = arguments
    recipe = str(find("recipes", "order_taking_tiny.yaml"))
    done = subprocess.run(
        [sys.executable, "-m", "slea_llm", command, recipe, *SETTINGS, *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done.stderr if fails else done.stdout


def test_a_run_that_was_cut_goes_on_where_its_checkpoint_stands(tmp_path: Path) -> None:
    assert "no folder here" in slea(tmp_path, "train", fails=True)  # and nothing is in the way of the run to come
    assert "saved in base" in slea(tmp_path, "warm-start")
    first = slea(tmp_path, "train", "--until", "3")
    for beginning in (
        "batch: 4 prompts",
        "before: success",
        "trained tokens: assistant",
        "reference: KL 0",
        "reward_model: gate shut, weight 0: nothing was fitted yet",
        "reward_model: not refitted after iteration 2: 0 successes",
    ):
        assert f"\n{beginning}" in f"\n{first}"
    assert "\niteration 3 of 4, 12 dialogues: " in first
    assert "model.lora_alpha: 32 before, 64 now" in slea(
        tmp_path, "train", "--resume", "model.lora_alpha=64", fails=True
    )
    second = slea(tmp_path, "train", "--resume", "streams.outcome.weight=0.5")
    assert "\nnote: resumed under other settings: streams.outcome.weight: 0.25 before, 0.5 now\n" in f"\n{second}"
    assert "\nresumed from step-2: iteration 2, policy version 2\n" in f"\n{second}"
    assert "\nafter: success" in second

    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    played = [one.trajectory for one in read_scored(run / "rollouts" / "rank0.jsonl")]
    assert Counter(one.policy_version for one in played) == dict.fromkeys(range(4), 4)
    assert len({one.id for one in played}) == 16
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert {path.name for path in run.iterdir()} == {
        "checkpoints", "evaluation.jsonl", "logs", "metrics.jsonl", "recipe.yaml", "rollouts",
    }  # fmt: skip
