"""A resumed run with real rollouts is the uninterrupted one to the bit: the sampler's noise is named by its draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slea_llm.settings import TrainerSettings
from slea_llm.storage import read_scored
from tests.support import loop
from tests.support.training import fresh_accelerator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SETTINGS = TrainerSettings(
    iterations=4,
    epochs=2,
    minibatch=2,
    microbatch=2,
    learning_rate=1e-2,
    critic_learning_rate=1e-2,
    save_every=2,
    target_kl=0.0,
)


def train(base: Path, folder: Path, *, until: int, resume: Path | None = None) -> tuple[Any, ...]:
    """Weights and counters (groups drawn first) of a run in a fresh process's place; its log is under `folder`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    running = loop.running(base, folder, SETTINGS, engine="transformers", accelerator=fresh_accelerator())
    with running as (trainer, model, _):
        if resume is not None:
            trainer.resume(resume)
        trainer.run(until=until)
        weights = {name: tensor.numpy().tobytes() for name, tensor in model.trainable_state().items()}
        groups = trainer._parts.collector.state()["groups_drawn"]
        counters = (trainer.iteration, trainer.update, trainer.policy_version)
    torch.set_num_threads(threads)
    return weights, (groups, *counters)


def dialogues(folder: Path) -> list[Any]:
    """What the log of a run holds, but for the seconds that sampling took."""
    played = [one.trajectory for one in read_scored(folder / "rollouts" / "rank0.jsonl")]
    return [(one.id, one.policy_version, one.traces) for one in played]


def metrics(folder: Path) -> list[Any]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {key: value for key, value in record.items() if key not in {"seconds", "cpu_seconds", "peak_gib"}}
        for record in records
    ]


def test_train_four_equals_train_two_stop_and_resume_two_with_rollouts(tmp_path: Path) -> None:
    base = loop.write_base(tmp_path / "base")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    weights, counters = train(base, whole, until=4)
    train(base, cut, until=3)  # the third iteration is not in any checkpoint: it is made again
    assert len(dialogues(cut)) == 12
    late = train(base, cut, until=4, resume=cut / "checkpoints" / "step-2")
    assert counters == late[1] == (16, 4, 16, 4)
    assert [version for _, version, _ in dialogues(whole)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert dialogues(cut) == dialogues(whole)
    assert metrics(cut) == metrics(whole)
    assert late[0] == weights
