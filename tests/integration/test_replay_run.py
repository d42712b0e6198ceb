"""Replay and imitation in the whole loop: real rollouts, a resumed run, scores made beside play."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slea_llm.encoders import HashingEncoder
from slea_llm.errors import CheckpointError
from slea_llm.imitation import Imitation
from slea_llm.interfaces import LossTerm
from slea_llm.losses.imitation import ImitationConfig, ImitationLoss
from slea_llm.losses.imitation_prototypes import PrototypeConfig, PrototypeLoss
from slea_llm.settings import ReplaySettings, TrainerSettings
from slea_llm.storage import read_scored
from slea_llm.types import ScoredTrajectory
from tests.support import loop, replay, training
from tests.support.training import fresh_accelerator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SETTINGS = TrainerSettings(
    iterations=4, epochs=1, minibatch=2, microbatch=2, learning_rate=1e-2, critic_learning_rate=1e-2, save_every=2,
    target_kl=0.0,
)  # fmt: skip
REPLAY = ReplaySettings(share=0.5, capacity=16, max_age=3, max_draws=4)
STEPS = ImitationConfig(encoder="hashing", gain="advantage", top=1.0, fade_until=1.0, form="awr")
WAYS = PrototypeConfig(encoder="hashing", gain="advantage", fade_until=1.0, states=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loop.write_base(tmp_path_factory.mktemp("base"))


def train(base: Path, folder: Path, *, until: int, resume: Path | None = None, **options: Any) -> dict[str, bytes]:
    """The weights after a run in a fresh process's place."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    running = loop.running(base, folder, SETTINGS, engine="transformers", accelerator=fresh_accelerator(), **options)
    with running as (trainer, model, _):
        if resume is not None:
            trainer.resume(resume)
        trainer.run(until=until)
        weights = {name: tensor.numpy().tobytes() for name, tensor in model.trainable_state().items()}
    torch.set_num_threads(threads)
    return weights


def metrics(folder: Path) -> list[Any]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for record in records:
        del record["seconds"], record["cpu_seconds"], record["peak_gib"]
        record["metrics"].pop("replay/bytes", None)  # a record says how many seconds sampling took
    return records


def files(folder: Path) -> dict[str, list[Any]]:
    """What the buffer's files hold, but for the seconds that sampling took."""

    def steady(line: str) -> Any:
        record = json.loads(line)
        record.pop("crc32")
        record.get("scored", {}).get("trajectory", {}).pop("provenance", None)
        return record

    found = sorted((folder / "replay" / "rank0").glob("*.jsonl"))
    return {path.name: [steady(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in found}


def test_br_055_a_resumed_run_with_replay_is_the_whole_one_to_the_bit(base: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    weights = train(base, whole, until=4, replay=REPLAY)
    train(base, cut, until=3, replay=REPLAY)  # the third iteration is in no checkpoint: it is made again
    late = train(base, cut, until=4, resume=cut / "checkpoints" / "step-2", replay=REPLAY)
    assert metrics(cut) == metrics(whole)
    assert files(cut) == files(whole)
    assert late == weights
    drawn = [record["metrics"]["replay/drawn"] for record in metrics(whole)]
    assert drawn[0] == 0
    assert all(drawn[1:])
    oldest = [record["metrics"]["replay/age_max"] for record in metrics(whole)]
    assert 0 < max(oldest) <= 3
    with pytest.raises(CheckpointError, match="was not written without replay"):
        train(base, cut, until=4, resume=cut / "checkpoints" / "step-2")
    with pytest.raises(CheckpointError, match=r"share: 0.5 there, 0.25 here"):
        train(base, cut, until=4, resume=cut / "checkpoints" / "step-2",
              replay=dataclasses.replace(REPLAY, share=0.25))  # fmt: skip


def test_scoring_beside_play_gives_the_same_numbers(base: Path, tmp_path: Path) -> None:
    found = []
    for ahead in (0, 1, 2):
        kit = loop.Kit(rollout=dataclasses.replace(loop.ROLLOUT, episodes=6, scoring_batch=2, scoring_ahead=ahead))
        folder = tmp_path / str(ahead)
        weights = train(base, folder, until=2, kit=kit)
        scored = list(read_scored(folder / "rollouts" / "rank0.jsonl"))
        bare = [
            (one.trajectory.id, one.trajectory.traces, one.steps, one.scores, one.evaluator_versions) for one in scored
        ]
        found.append((weights, bare, metrics(folder)))
    assert len(found[0][1]) == 12
    assert found[0] == found[1] == found[2]


def succeeded(one: ScoredTrajectory) -> ScoredTrajectory:
    turns = tuple(dataclasses.replace(turn, state_before={"slot": "dish"}) for turn in one.trajectory.turns)
    steps = tuple(dataclasses.replace(step, text=f"{step.text} {len(step.text) % 3}") for step in one.steps)
    return dataclasses.replace(one, trajectory=dataclasses.replace(one.trajectory, turns=turns), steps=steps)


def recorded(model: Any, *, iterations: int = 2, count: int = 6) -> Any:
    rng = np.random.default_rng(4)
    rounds = [[training.random_dialogue(rng, f"{n}.{k}") for k in range(count)] for n in range(iterations)]
    return [[[succeeded(one) for one in training.sampled_by(model, share)]] for share in rounds]


def test_a_batch_of_the_current_policy_weighs_exactly_one(tmp_path: Path) -> None:
    """Drawn dialogues of the very policy that trains: importance weights and ratio are 1, nothing is capped."""
    model = training.policy(training.write_base(tmp_path / "base"))
    still = TrainerSettings(
        iterations=2, epochs=1, minibatch=3, microbatch=8, learning_rate=0.0, critic_learning_rate=0.0, target_kl=0.0,
        proximal="trainer",
    )  # fmt: skip
    with closing(replay.buffer(tmp_path / "own")) as store:
        run = training.trainer(model, still, recorded(model), tmp_path / "run", replay=store)
        batches: list[Any] = []
        collate = run._collate

        def keep(rows: Any) -> Any:
            batches.append(collate(rows))
            return batches[-1]

        run._collate = keep  # type: ignore[method-assign]
        run.run()
    (_, second) = metrics(tmp_path / "run")
    assert second["metrics"]["replay/drawn"] > 0
    assert second["metrics"]["replay/share"] <= 0.5
    assert second["metrics"]["replay/weight"] >= 1.0
    for batch in batches:
        gap = (batch.proximal_logprobs - batch.behaviour_logprobs)[batch.policy_mask]
        assert bool((gap == 0).all())
        assert bool((gap.exp() == 1).all())
    assert second["metrics"]["ppo/importance"] == pytest.approx(1.0, abs=1e-12)
    assert second["metrics"]["ppo/importance_capped"] == 0


def test_imitation_raises_what_is_imitated_and_fades_out(tmp_path: Path) -> None:
    """With nothing else to learn, the chosen tokens become likelier; after the schedule's end nothing is marked."""
    model = training.policy(training.write_base(tmp_path / "base"))
    settings = TrainerSettings(
        iterations=4, epochs=2, minibatch=6, microbatch=3, learning_rate=1e-2, critic_learning_rate=1e-2, target_kl=0.0,
    )  # fmt: skip
    steps = ImitationConfig(encoder="hashing", gain="judge", top=1.0, fade_until=0.75, weight=1.0)
    chooser = Imitation(
        steps,
        dataclasses.replace(WAYS, gain="judge", fade_until=0.75),
        encoders={"hashing": HashingEncoder()},
        streams=training.STREAMS,
    )
    shares = [recorded(model, iterations=1)[0]] * 4
    losses: list[LossTerm] = [ImitationLoss(steps), PrototypeLoss(WAYS)]
    training.trainer(model, settings, shares, tmp_path / "run", more_losses=losses, imitation=chooser).run()
    found = [record["metrics"] for record in metrics(tmp_path / "run")]
    assert [round(one["imitation/fade"], 6) for one in found] == [1.0, 0.666667, 0.333333, 0.0]
    nll = [one["imitation/nll"] for one in found]
    assert nll[0] > nll[1] > nll[2]
    assert [one["update/count"] for one in found] == [2.0] * 4  # what is added makes no further updates
    assert all(one["imitation_prototypes/states"] > 0 for one in found[:2])
    assert found[3]["imitation/steps"] == found[3]["imitation/loss"] == found[3]["imitation_prototypes/states"] == 0


def test_real_rollouts_with_replay_and_imitation_together(base: Path, tmp_path: Path) -> None:
    chooser = Imitation(STEPS, WAYS, encoders={"hashing": HashingEncoder()}, streams=loop.STREAMS)
    kit = loop.Kit(rollout=dataclasses.replace(loop.ROLLOUT, scoring_batch=1, scoring_ahead=2))
    kit = dataclasses.replace(kit, losses=[*kit.losses, ImitationLoss(STEPS), PrototypeLoss(WAYS)])
    train(base, tmp_path, until=2, replay=REPLAY, kit=kit, imitation=chooser)
    assert {"imitation/steps", "imitation_prototypes/states", "replay/drawn"} <= metrics(tmp_path)[1]["metrics"].keys()
