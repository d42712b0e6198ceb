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

from slea_llm.buffer import ReplayBuffer
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


class Watched(ReplayBuffer):
    """A buffer that notes what it chose from, and what it made of the critic's errors."""

    def __init__(self, folder: Path, *, priority: Any) -> None:
        super().__init__(ReplaySettings(share=0.5, max_age=20, priority=priority), folder, seed=0)
        self.rounds: list[tuple[dict[str, float], float, dict[str, float]]] = []
        self.errors: dict[str, float] = {}

    def draw(self, count: int, *, iteration: int, progress: float) -> list[ScoredTrajectory]:
        stock = dict(zip(self.ids, self.priorities, strict=True))
        drawn = super().draw(count, iteration=iteration, progress=progress)
        self.rounds.append((stock, progress, dict(self._weights)))
        assert sorted(one.trajectory.id for one in drawn) == sorted(self._weights)
        return drawn

    def weigh(self, experiences: Any, *, reducer: Any) -> Any:
        for one in experiences:
            gaps = [np.abs(one.returns[name] - one.stats.values[name][:-1])[one.value_mask] for name in one.returns]
            self.errors[one.scored.trajectory.id] = sum(float(gap.mean()) for gap in gaps) + 0.01
        return super().weigh(experiences, reducer=reducer)


def watched(folder: Path, *, priority: str) -> tuple[Watched, list[Any], list[Any]]:
    """A run of six iterations of six dialogues, of which the first has rewards twenty times as large."""
    model = training.policy(training.write_base(folder / "base"))
    settings = TrainerSettings(
        iterations=6, epochs=1, minibatch=6, microbatch=8, learning_rate=1e-3, critic_learning_rate=1e-3, target_kl=0.0,
    )  # fmt: skip
    shares = recorded(model, iterations=6)
    for share in shares:
        large = share[0][0].trajectory
        turns = tuple(dataclasses.replace(turn, reward=20.0 * turn.reward) for turn in large.turns)
        large = dataclasses.replace(large, turns=turns, outcome=sum(turn.reward for turn in turns))
        share[0][0] = dataclasses.replace(share[0][0], trajectory=large)
        for place, one in enumerate(share[0]):  # a task of its own each, so that none is drawn with others
            alone = dataclasses.replace(one.trajectory, task={"id": one.trajectory.id})
            share[0][place] = dataclasses.replace(one, trajectory=alone)
    batches: list[Any] = []
    with closing(Watched(folder / "buffer", priority=priority)) as store:
        run = training.trainer(model, settings, shares, folder / "run", replay=store)
        collate = run._collate

        def keep(rows: Any) -> Any:
            batches.append(collate(rows))
            return batches[-1]

        run._collate = keep  # type: ignore[method-assign]
        run.run()
    return store, batches, [record["metrics"] for record in metrics(folder / "run")]


def test_priorities_choose_and_importance_weights_undo_it_through_a_training_run(tmp_path: Path) -> None:
    by_error, batches, found = watched(tmp_path / "error", priority="error")
    uniform, _, _ = watched(tmp_path / "uniform", priority="uniform")
    assert [one["replay/beta"] for one in found] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    times: dict[str, float] = {}
    for number, (stock, progress, weights) in enumerate(by_error.rounds):
        assert progress == pytest.approx(number / 6)
        if not number:
            assert not stock
            continue
        # Every dialogue of earlier rounds is there with the critic's error at its last visit.
        chances = {name: priority**0.6 for name, priority in stock.items()}
        scale = len(chances) / sum(chances.values())
        raw = {name: (scale * chance) ** -(0.4 + 0.6 * progress) for name, chance in chances.items()}
        draws = {name: weight / (raw[name] / max(raw.values())) for name, weight in weights.items()}
        assert all(often == pytest.approx(round(often)) for often in draws.values())
        assert sum(draws.values()) == pytest.approx(6)  # half of a batch with six fresh ones
        for name, often in draws.items():
            times[name] = times.get(name, 0.0) + often
    # What was never drawn again keeps the error of its first credit; that of the last round is the last that was had.
    last = dict(zip(by_error.ids, by_error.priorities, strict=True))
    assert last == pytest.approx({name: by_error.errors[name] for name in last})
    seen = {round(float(weight), 9) for batch in batches for weight in batch.weights[batch.policy_mask]}
    given = {round(weight, 9) for _, _, weights in by_error.rounds for weight in weights.values()}
    assert seen == given | {1.0}
    large = [times.get(f"{number}.0", 0.0) for number in range(5)]
    others = [times.get(f"{number}.{k}", 0.0) for number in range(5) for k in range(1, 6)]
    assert np.mean(large) > 3 * np.mean(others)
    assert set(uniform.priorities) == {1.0}
    assert all(set(weights.values()) <= {1.0, 2.0, 3.0, 4.0} for _, _, weights in uniform.rounds)
    assert [set(weights) for *_, weights in uniform.rounds] != [set(weights) for *_, weights in by_error.rounds]


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
