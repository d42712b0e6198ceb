"""A resumed run with real rollouts is the uninterrupted one to the bit: the sampler's noise is named by its draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slea_llm.settings import TrainerSettings
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
    """Weights, counters, data position and every sampled token of a run in a fresh process's place."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    running = loop.running(base, folder, SETTINGS, engine="transformers", accelerator=fresh_accelerator())
    with running as (trainer, model, log):
        if resume is not None:
            trainer.resume(resume)
        trainer.run(until=until)
        weights = {name: tensor.numpy().tobytes() for name, tensor in model.trainable_state().items()}
        state = dict(trainer._parts.collector.state())
        counters = (trainer.iteration, trainer.update, trainer.policy_version)
    torch.set_num_threads(threads)
    dialogues = [(one.trajectory.id, one.trajectory.policy_version, one.trajectory.traces) for one in log.scored]
    return weights, state, counters, dialogues


def metrics(folder: Path) -> list[Any]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_train_four_equals_train_two_stop_and_resume_two_with_rollouts(tmp_path: Path) -> None:
    base = loop.write_base(tmp_path / "base")
    weights, state, counters, dialogues = train(base, tmp_path / "whole", until=4)
    early = train(base, tmp_path / "cut", until=2)
    late = train(base, tmp_path / "cut", until=4, resume=tmp_path / "cut" / "checkpoints" / "step-2")
    assert counters == late[2] == (4, 16, 4)
    assert [version for _, version, _ in dialogues] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert early[3] + late[3] == dialogues
    assert late[1] == state
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert late[0] == weights
