"""The entropy floor in real trainings: it holds where entropy falls without it, and a resumed run keeps its weight."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slea_llm.losses.entropy import EntropyConfig, EntropyLoss
from slea_llm.models.policy import PolicyCritic
from slea_llm.settings import TrainerSettings
from slea_llm.types import ScoredTrajectory
from tests.support import training

pytestmark = pytest.mark.integration

SETTINGS = TrainerSettings(
    iterations=15,
    epochs=2,
    minibatch=8,
    microbatch=8,
    learning_rate=2e-2,
    target_kl=0.0,
    save_every=10,
    keep_checkpoints=9,
)
FLOOR = EntropyConfig(weight=0.001, floor=1.5, rate=1.0, max_weight=0.5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_base(tmp_path_factory.mktemp("base"))


def loud_policy(base: Path) -> PolicyCritic:
    """One with the logits of a trained model, so that its entropy can fall."""
    model = training.policy(base)
    with torch.no_grad():
        model._base.get_output_embeddings().weight.mul_(12.0)
    return model


def repeated(model: PolicyCritic) -> list[list[list[ScoredTrajectory]]]:
    """The same dialogues in every round, in half of which a few tokens earn: greed would say nothing else."""
    rng = np.random.default_rng(0)
    played = []
    for number in range(8):
        one = training.random_dialogue(rng, str(number))
        (trace,) = one.trajectory.traces
        earns = number % 2
        ids = tuple(token % 3 if earns else token for token in trace.token_ids)
        turns = tuple(dataclasses.replace(turn, reward=float(earns)) for turn in one.trajectory.turns)
        trajectory = dataclasses.replace(
            one.trajectory,
            turns=turns,
            outcome=float(earns * len(turns)),
            traces=(dataclasses.replace(trace, token_ids=ids),),
        )
        played.append(dataclasses.replace(one, trajectory=trajectory))
    return [[training.sampled_by(model, played)]] * SETTINGS.iterations


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def test_the_floor_holds_where_entropy_would_fall_through(base: Path, tmp_path: Path) -> None:
    last = {}
    for name, config in (("floor", FLOOR), ("none", EntropyConfig(weight=FLOOR.weight))):
        model = loud_policy(base)
        training.trainer(model, SETTINGS, repeated(model), tmp_path / name, more_losses=[EntropyLoss(config)]).run()
        seen = metrics(tmp_path / name)
        assert seen[0]["update/entropy"] > FLOOR.floor
        assert [one["entropy/entropy"] for one in seen] == pytest.approx([one["update/entropy"] for one in seen])
        last[name] = seen[-1]
    assert last["none"]["update/entropy"] < 0.5 * FLOOR.floor
    assert last["none"]["entropy/weight"] == pytest.approx(FLOOR.weight)
    assert last["floor"]["update/entropy"] > 0.7 * FLOOR.floor
    assert last["floor"]["entropy/weight"] > 2 * FLOOR.weight


def test_a_resumed_run_goes_on_with_the_weight_that_it_had(base: Path, tmp_path: Path) -> None:
    whole = loud_policy(base)
    shares = repeated(whole)
    training.trainer(whole, SETTINGS, shares, tmp_path / "whole", more_losses=[EntropyLoss(FLOOR)]).run()
    cut = loud_policy(base)
    training.trainer(cut, SETTINGS, shares, tmp_path / "cut", more_losses=[EntropyLoss(FLOOR)]).run(until=10)
    resumed = loud_policy(base)
    term = EntropyLoss(FLOOR)
    trainer = training.trainer(resumed, SETTINGS, shares, tmp_path / "cut", more_losses=[term])
    trainer.resume(tmp_path / "cut" / "checkpoints" / "step-10")
    assert term.weight > FLOOR.weight
    trainer.run()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for name, tensor in whole.trainable_state().items():
        assert torch.equal(tensor, resumed.trainable_state()[name])
