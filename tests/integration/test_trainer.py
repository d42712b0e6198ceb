"""The loop on a tiny policy: exact resume, checks before the first update, early stop, critic warm-up."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import GeneralTracker

from slea_llm import checkpoint
from slea_llm.errors import CheckpointError, ConfigError, StartupCheckError, TrainingError
from slea_llm.export_links import base_of
from slea_llm.models.policy import PolicyCritic
from slea_llm.models.stats import sampler_stats, token_stats
from slea_llm.records import decode_scored, encode_scored
from slea_llm.settings import TrainerSettings
from slea_llm.trainer import Trainer
from slea_llm.types import ScoredTrajectory, StepKind
from tests.support import training
from tests.support.experience import dialogue

pytestmark = pytest.mark.integration

FAST = TrainerSettings(
    iterations=4,
    epochs=2,
    minibatch=4,
    microbatch=2,
    learning_rate=1e-2,
    critic_learning_rate=1e-2,
    schedule="cosine",
    warmup_updates=3,
    target_kl=0.0,
    save_every=1,
    keep_checkpoints=9,
)
Rounds = list[list[list[ScoredTrajectory]]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def model(base: Path) -> PolicyCritic:
    return training.policy(base)


def rounds(model: PolicyCritic, count: int = 4, *, size: int = 8) -> Rounds:
    """Recorded dialogues of every iteration, all sampled by the policy as it is now."""
    rng = np.random.default_rng(0)
    return [
        [training.sampled_by(model, [training.random_dialogue(rng, f"{number}.{one}") for one in range(size)])]
        for number in range(count)
    ]


def everything(trainer: Trainer, model: PolicyCritic) -> dict[str, Any]:
    """All state that a run has, for comparison to the bit."""
    updater = trainer._updater
    state = checkpoint.optimizer_snapshot(updater.optimizer, trainer._named())
    return {
        "weights": {name: tensor.numpy().tobytes() for name, tensor in model.trainable_state().items()},
        "optimizer": {name: tensor.numpy().tobytes() for name, tensor in state.tensors["optimizer"].items()},
        "groups": state.documents,
        "schedule": updater.scheduler.state_dict(),
        "rng": checkpoint.rng_state(),
        "collector": trainer._parts.collector.state(),
        "counters": (trainer.iteration, trainer.update, trainer.policy_version),
    }


def lines(folder: Path) -> list[dict[str, Any]]:
    """Metrics without the seconds, which no two runs share."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {key: value for key, value in record.items() if key not in {"seconds", "cpu_seconds", "peak_gib"}}
        for record in records
    ]


def seed_all() -> None:
    random.seed(4)
    np.random.seed(4)
    torch.manual_seed(4)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_train_four_equals_train_two_stop_and_resume_two(base: Path, tmp_path: Path, optimizer: Any) -> None:
    settings = dataclasses.replace(FAST, optimizer=optimizer)
    whole_model = training.policy(base)
    shares = rounds(whole_model)
    seed_all()
    whole = training.trainer(whole_model, settings, shares, tmp_path / "whole")
    whole.run()
    expected = everything(whole, whole_model)

    first_model = training.policy(base)
    seed_all()
    first = training.trainer(first_model, settings, shares, tmp_path / "cut")
    first.run(until=2)
    first.run(until=3)  # an iteration that the checkpoint does not know of: it is made again

    seed_all()
    torch.randn(7)  # another process is elsewhere in its random numbers
    second_model = training.policy(base, seed=99)
    second = training.trainer(second_model, settings, shares, tmp_path / "cut")
    second.resume(tmp_path / "cut" / "checkpoints" / "step-2")
    second.run()
    assert everything(second, second_model) == expected
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_a_resumed_sampler_gets_the_version_of_the_checkpoint(base: Path, tmp_path: Path) -> None:
    model = training.policy(base)
    shares = rounds(model)
    training.trainer(model, FAST, shares, tmp_path).run(until=2)
    resumed = training.trainer(training.policy(base), FAST, shares, tmp_path)
    resumed.resume(tmp_path / "checkpoints" / "step-2")
    resumed.run()
    assert resumed._parts.generator.loaded == [0, 2, 3, 4]  # type: ignore[attr-defined]


def test_br_029_a_checkpoint_without_a_value_head_is_refused(base: Path, tmp_path: Path) -> None:
    model = training.policy(base)
    with torch.no_grad():
        for name, parameter in model.critic_parameters():
            if name.startswith("value_head."):
                parameter.fill_(0.25)
    shares = rounds(model)
    trainer = training.trainer(model, FAST, shares, tmp_path)
    folder = trainer.save()
    other = training.policy(base, seed=1)
    training.trainer(other, FAST, shares, tmp_path).resume(folder)
    heads = {name: tensor for name, tensor in other.trainable_state().items() if name.startswith("value_head.")}
    assert len(heads) == 2
    assert max(float((tensor - 0.25).abs().max()) for tensor in heads.values()) == 0.0

    snapshot = checkpoint.read(folder)
    tensors = {name: part for name, part in snapshot.tensors.items() if name != "value_head"}
    headless = checkpoint.write(tmp_path / "headless", 1, dataclasses.replace(snapshot, tensors=tensors))
    with pytest.raises(CheckpointError, match="value_head"):
        training.trainer(other, FAST, shares, tmp_path).resume(headless)


class Queue(training.Recording):
    """A collector that holds finished dialogues which no update has drawn yet."""

    def __init__(self, waiting: list[ScoredTrajectory]) -> None:
        super().__init__([[waiting]])
        self.waiting = waiting

    def state(self) -> dict[str, Any]:
        return {"waiting": [encode_scored(one) for one in self.waiting]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.waiting = [decode_scored(one) for one in state["waiting"]]


def test_br_055_what_a_collector_still_holds_is_in_the_checkpoint(base: Path, tmp_path: Path) -> None:
    """There is no replay buffer yet: what is kept is whatever state a collector has, finished dialogues included."""
    model = training.policy(base)
    rng = np.random.default_rng(0)
    five = [training.random_dialogue(rng, f"t{number}") for number in range(1, 6)]
    aged = [dataclasses.replace(one.trajectory, policy_version=number) for number, one in enumerate(five)]
    queue = Queue([dataclasses.replace(one, trajectory=old) for one, old in zip(five, aged, strict=True)])
    del queue.waiting[:2]
    shares = [[five + five[:3]]]
    folder = training.trainer(model, FAST, shares, tmp_path, collector=queue).save()
    emptied = Queue([])
    training.trainer(model, FAST, shares, tmp_path, collector=emptied).resume(folder)
    assert [one.trajectory.id for one in emptied.waiting] == ["t3", "t4", "t5"]
    assert [one.trajectory.policy_version for one in emptied.waiting] == [2, 3, 4]
    assert emptied.waiting == queue.waiting


def test_a_checkpoint_of_other_settings_is_refused(base: Path, tmp_path: Path) -> None:
    model = training.policy(base)
    shares = rounds(model)
    folder = training.trainer(model, FAST, shares, tmp_path).save()
    changed = dataclasses.replace(FAST, learning_rate=0.5, iterations=9)
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.01 there, 0\.5 here"):
        training.trainer(model, changed, shares, tmp_path).resume(folder)


def test_the_checks_are_said_once_and_in_words(model: PolicyCritic, tmp_path: Path) -> None:
    said: list[str] = []
    training.trainer(model, FAST, rounds(model), tmp_path, report=said).run()
    beginnings = [
        "batch: 8 prompts x 1 dialogues",
        "updates: 4",
        "trained tokens: assistant",
        "steps: 2.0 a reply",
        "sampler against trainer",
    ]
    beginnings += ["reference: KL 0", "gradients: all", "first update: ratio 1"]
    assert [line.startswith(start) for line, start in zip(said, beginnings, strict=True)] == [True] * 8


@pytest.mark.parametrize("reads", [False, True])
def test_the_reference_runs_only_for_the_first_check_when_nothing_reads_it(
    model: PolicyCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    passes: list[int] = []
    run = PolicyCritic.reference_pass

    def counted(self: PolicyCritic, *tensors: torch.Tensor) -> torch.Tensor:
        passes.append(trainer.iteration)
        return run(self, *tensors)

    trainer = training.trainer(model, FAST, rounds(model), tmp_path, reference=reads)
    monkeypatch.setattr(PolicyCritic, "reference_pass", counted)
    trainer.run()
    assert set(passes) == ({0, 1, 2, 3} if reads else {0})


@pytest.mark.parametrize("proximal", ["trainer", "sampler"])
def test_the_pass_of_the_trainer_is_left_out_when_the_samplers_word_is_taken(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proximal: Any
) -> None:
    """The first iteration makes it all the same: it proves that the sampler's word can be taken."""
    model = training.policy(base, critic="none")
    passes: list[int] = []
    run = PolicyCritic.policy_pass

    def counted(self: PolicyCritic, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        passes.append(trainer.iteration)
        return run(self, *tensors)

    trainer = training.trainer(
        model, dataclasses.replace(FAST, proximal=proximal), rounds(model), tmp_path, reference=False
    )
    monkeypatch.setattr(PolicyCritic, "policy_pass", counted)
    trainer.run()
    assert set(passes) == ({0, 1, 2, 3} if proximal == "trainer" else {0})
    assert trainer.policy_version == FAST.iterations


def test_what_the_sampler_said_is_what_the_trainer_says_of_the_same_weights(model: PolicyCritic) -> None:
    dialogues = [one.trajectory for one in rounds(model, 1)[0][0]]
    said = sampler_stats(dialogues, streams=model.streams, critic_version=3)
    own = token_stats(model, dialogues, microbatch=4, policy_version=0, critic_version=3, pad_id=0, reference=False)
    for sampled, passed in zip(said, own, strict=True):
        assert np.allclose(sampled.proximal, passed.proximal, atol=1e-9)
        assert np.isnan(sampled.reference).all()
        assert {name: value.shape for name, value in sampled.values.items()} == {
            name: value.shape for name, value in passed.values.items()
        }


def test_lines_come_through_report_where_there_is_no_terminal(model: PolicyCritic, tmp_path: Path) -> None:
    said: list[str] = []
    training.trainer(model, FAST, rounds(model), tmp_path, report=said, progress=True).run()
    assert said[-1].startswith("iteration 4 of 4, 32 dialogues: success 1.00 over the last 4, ")
    assert "seconds: collect " in said[-1]


def test_a_sampler_of_other_weights_is_refused(model: PolicyCritic, tmp_path: Path) -> None:
    shares = rounds(model)
    other = [[training.random_dialogue(np.random.default_rng(1), f"t{one}") for one in range(8)]]
    with pytest.raises(StartupCheckError, match="sampler and trainer disagree"):
        training.trainer(model, FAST, [other, *shares[1:]], tmp_path).run()


def test_br_048_a_head_that_no_loss_trains_is_listed_and_refused(model: PolicyCritic, tmp_path: Path) -> None:
    before = model.trainable_state()
    with pytest.raises(StartupCheckError, match=r"value_head\.judge\.weight, value_head\.outcome\.weight") as caught:
        training.trainer(model, FAST, rounds(model), tmp_path, value_weight=0.0).run()
    assert "value 0" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.trainable_state().items())


def test_critic_warm_up_leaves_the_policy_and_its_version_alone(model: PolicyCritic, tmp_path: Path) -> None:
    settings = dataclasses.replace(FAST, critic_warmup_iterations=2)
    before = model.trainable_state()
    trainer = training.trainer(model, settings, rounds(model), tmp_path)
    trainer.run(until=2)
    after = model.trainable_state()
    assert (trainer.policy_version, trainer.update) == (0, 8)
    moved = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"critic", "value_head"}
    trainer.run()
    assert trainer.policy_version == 2


def test_the_early_stop_keeps_the_number_of_updates(model: PolicyCritic, tmp_path: Path) -> None:
    settings = dataclasses.replace(FAST, target_kl=1e-9)
    trainer = training.trainer(model, settings, rounds(model), tmp_path)
    trainer.run()
    assert trainer.update == 16
    counts = [line["metrics"]["update/policy_count"] for line in lines(tmp_path)]
    # The schedule starts at rate 0, so the first step of the run leaves the KL at 0 and a second one follows.
    assert counts == [2, 1, 1, 1]


@pytest.mark.parametrize("turns", [1, 6])
def test_updates_do_not_depend_on_turns(model: PolicyCritic, tmp_path: Path, turns: int) -> None:
    rng = np.random.default_rng(3)
    some = [training.random_dialogue(rng, f"t{one}", max_turns=turns) for one in range(8)]
    trainer = training.trainer(model, FAST, [[training.sampled_by(model, some)]] * 4, tmp_path)
    trainer.run(until=1)
    assert trainer.update == 4


@pytest.mark.parametrize("steps", [1, 12])
def test_updates_do_not_depend_on_steps(model: PolicyCritic, tmp_path: Path, steps: int) -> None:
    """Twelve tokens a turn, as one step or as twelve."""
    shape: list[list[tuple[StepKind, int]]] = [[("reply", 12 // steps)] * steps] * 2
    scores = {"judge": {(turn, step): 0.5 for turn in range(2) for step in range(steps)}}
    some = [dialogue(shape, rewards=[0.0, float(one % 2)], scores=scores, name=f"t{one}") for one in range(8)]
    trainer = training.trainer(model, FAST, [[training.sampled_by(model, some)]] * 4, tmp_path)
    trainer.run(until=1)
    assert trainer.update == 4


def test_failed_dialogues_are_counted_and_dropped(model: PolicyCritic, tmp_path: Path) -> None:
    shares = rounds(model, 1)
    shares[0][0][3] = training.failed("broken")
    training.trainer(model, FAST, shares, tmp_path).run(until=1)
    (line,) = lines(tmp_path)
    assert line["metrics"]["episodes/failed"] == 1
    assert line["metrics"]["episodes/played"] == 7
    assert line["update"] == 4


def test_too_many_failures_stop_the_run_with_the_reason(model: PolicyCritic, tmp_path: Path) -> None:
    shares = rounds(model, 1)
    shares[0][0][:3] = [training.failed(f"broken {number}") for number in range(3)]
    with pytest.raises(TrainingError, match=r"3 of 8 dialogues .* failed, more than the share 0\.2.*broke"):
        training.trainer(model, FAST, shares, tmp_path).run()


def test_a_run_that_goes_on_whatever_breaks_says_so_when_nothing_is_left(model: PolicyCritic, tmp_path: Path) -> None:
    shares = rounds(model, 2)
    shares[1][0] = [training.failed(f"broken {number}") for number in range(8)]
    with pytest.raises(TrainingError, match="0 dialogues are left for 2 minibatches; 8 of this iteration broke"):
        training.trainer(model, FAST, shares, tmp_path, max_error_rate=1.0).run()


class Tracker(GeneralTracker):  # type: ignore[misc]  # accelerate has no types here
    """Keeps what it is told."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    @property
    def tracker(self) -> Tracker:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, float], step: int, **_: Any) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_br_095_trackers_get_numbers_and_the_trainers_own_settings(model: PolicyCritic, tmp_path: Path) -> None:
    tracker = Tracker()
    training.fresh_accelerator()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    settings = dataclasses.replace(FAST, trackers=("kept",))
    training.trainer(model, settings, rounds(model), tmp_path, accelerator=accelerator).run()
    accelerator.end_training()
    assert set(tracker.config) == {field.name for field in dataclasses.fields(TrainerSettings)} - {"trackers"}
    assert [step for step, _ in tracker.logged] == [1, 2, 3, 4]
    assert all(isinstance(value, int | float) for _, values in tracker.logged for value in values.values())
    assert {"ppo/loss", "episodes/success", "seconds/update"} <= set(tracker.logged[0][1])
    assert tracker.finished


def test_a_minibatch_that_does_not_divide_is_refused(model: PolicyCritic, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="minibatch 3"):
        training.trainer(model, dataclasses.replace(FAST, minibatch=3), rounds(model, 1), tmp_path)


def test_old_checkpoints_go_only_when_newer_ones_are_whole(
    model: PolicyCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = training.trainer(model, dataclasses.replace(FAST, keep_checkpoints=2), rounds(model), tmp_path)
    seen: list[list[str]] = []
    prune: Callable[..., None] = checkpoint.prune

    def watched(root: Path, *, newest: int, keep: int) -> None:
        seen.append(sorted(path.name for path in root.iterdir()))
        prune(root, newest=newest, keep=keep)

    monkeypatch.setattr(checkpoint, "prune", watched)
    trainer.run()
    assert seen[2] == ["step-1", "step-2", "step-3"]
    assert sorted(path.name for path in trainer.checkpoints.iterdir()) == ["step-3", "step-4"]


def test_under_autocast_the_first_ratio_is_one(base: Path, tmp_path: Path) -> None:
    """accelerate wraps `forward` alone: the pass before the updates must ask for the same arithmetic by itself."""
    model = training.policy(base, dtype="float32")
    with torch.no_grad():  # random weights say next to nothing, and rounding would not show
        base_of(model).get_output_embeddings().weight.mul_(15.0)
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    settings = dataclasses.replace(FAST, iterations=1, epochs=1, minibatch=8, microbatch=8, precision="bf16")
    said: list[str] = []
    options: Any = {"accelerator": accelerator, "report": said, "numerics": "bfloat16"}
    training.trainer(model, settings, rounds(model, 1), tmp_path, **options).run()
    (line,) = [one for one in said if one.startswith("first update")]
    assert "ratio 1 within 0.00e+00 nats" in line
