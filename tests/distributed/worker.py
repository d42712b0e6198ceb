"""What each process of a distributed test runs: named cases, each leaving its results in files.

`python -m tests.distributed.worker <folder> <case> ...`; the folder holds a base model under `base`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from slea_llm.buffer import ReplayBuffer
from slea_llm.distributed import make_accelerator
from slea_llm.encoders import HashingEncoder
from slea_llm.imitation import Imitation
from slea_llm.losses.imitation import ImitationConfig, ImitationLoss
from slea_llm.losses.imitation_prototypes import PrototypeConfig, PrototypeLoss
from slea_llm.settings import ReplaySettings, TrainerSettings
from slea_llm.storage import read_scored
from slea_llm.types import ScoredTrajectory
from tests.support import loop, training
from tests.support.refits import Refitting, judged_of

Shares = list[list[list[ScoredTrajectory]]]

# Dialogues of each rank. The same ones in the same order, however they are shared out.
SPLITS = {"even": (6, 6), "uneven": (10, 2), "lonely": (12, 0)}


def cut(dialogues: Sequence[ScoredTrajectory], sizes: Sequence[int]) -> list[list[ScoredTrajectory]]:
    """Consecutive pieces of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [list(dialogues[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def equivalence(folder: Path, accelerator: Accelerator, *, optimizer: Any, split: str) -> None:
    """Two updates of one iteration over the same twelve dialogues, whatever the number of processes."""
    model = training.policy(folder / "base")
    rng = np.random.default_rng(1)
    dialogues = [training.random_dialogue(rng, f"t{number}", max_turns=1 + number % 5) for number in range(12)]
    dialogues = training.sampled_by(model, dialogues)
    dialogues[4] = training.failed("t4")
    shares = [cut(dialogues, SPLITS[split] if accelerator.num_processes == 2 else (12,))]
    settings = TrainerSettings(
        iterations=1,
        epochs=1,
        minibatch=6,
        microbatch=2,
        optimizer=optimizer,
        learning_rate=0.02 if optimizer == "adamw" else 1.0,
        critic_learning_rate=0.02 if optimizer == "adamw" else 1.0,
        target_kl=0.0,
    )
    case = f"equal-{optimizer}-{split}-{accelerator.num_processes}"
    before = model.trainable_state()
    trainer = training.trainer(model, settings, shares, folder / case, accelerator=accelerator)
    backwards = count_backwards(accelerator)
    trainer.run()
    after = model.trainable_state()
    if accelerator.is_main_process:
        save_file({f"before/{k}": v for k, v in before.items()} | after, folder / f"{case}.safetensors")
    (folder / f"{case}-rank{accelerator.process_index}.json").write_text(json.dumps({"backwards": backwards[0]}))
    save_file(after, folder / f"{case}-rank{accelerator.process_index}.safetensors")


def count_backwards(accelerator: Accelerator) -> list[int]:
    calls = [0]
    backward = accelerator.backward

    def counted(loss: torch.Tensor) -> None:
        calls[0] += 1
        backward(loss)

    accelerator.backward = counted
    return calls


def shapes(folder: Path, accelerator: Accelerator) -> None:
    """300 updates over dialogues of random number and shape; a rank may be left with nothing but failures."""
    model = training.policy(folder / "base", dtype="float32")
    rng = np.random.default_rng(2)
    shares: Shares = []
    for iteration in range(50):
        counts = rng.multinomial(6, [0.5, 0.5]) if iteration % 10 else np.array([6, 0])
        shares.append(
            [
                [training.random_dialogue(rng, f"{iteration}.{rank}.{number}", max_turns=3) for number in range(count)]
                for rank, count in enumerate(counts)
            ]
        )
        shares[-1][0].append(training.failed(f"{iteration}.failed"))
        shares[-1][1].append(training.failed(f"{iteration}.failed too"))
    shares[0] = [training.sampled_by(model, share[:-1]) + share[-1:] for share in shares[0]]
    settings = TrainerSettings(
        iterations=50, epochs=3, minibatch=4, microbatch=1, learning_rate=1e-3, critic_learning_rate=1e-3
    )
    run = training.trainer(model, settings, shares, folder / "shapes", accelerator=accelerator, max_error_rate=0.9)
    run.run()
    save_file(model.trainable_state(), folder / f"shapes-rank{accelerator.process_index}.safetensors")
    (folder / f"shapes-rank{accelerator.process_index}.json").write_text(json.dumps({"updates": run.update}))


def rollouts(folder: Path, accelerator: Accelerator, *, engine: str) -> None:
    """Three iterations with rollouts, one sampler a rank."""
    settings = TrainerSettings(
        iterations=3, epochs=1, minibatch=2, microbatch=2, learning_rate=1e-2, critic_learning_rate=1e-2, target_kl=0.0
    )
    running = loop.running(folder / "base", folder / engine, settings, engine=engine, accelerator=accelerator)
    with running as (trainer, model, log):
        trainer.run()
        found = {
            "update": trainer.update,
            "served": trainer._parts.generator.policy_version,
            "dialogues": [[one.trajectory.id, one.trajectory.policy_version] for one in read_scored(log.path)],
        }
    save_file(model.trainable_state(), folder / f"{engine}-rank{accelerator.process_index}.safetensors")
    (folder / f"{engine}-rank{accelerator.process_index}.json").write_text(json.dumps(found))


def replay(folder: Path, accelerator: Accelerator) -> None:
    """Three iterations with a buffer a rank, imitation, and scores made beside play; stopped and resumed after two."""
    settings = TrainerSettings(
        iterations=3, epochs=1, minibatch=2, microbatch=2, learning_rate=1e-2, critic_learning_rate=1e-2,
        target_kl=0.0, save_every=2,
    )  # fmt: skip
    steps = ImitationConfig(encoder="hashing", gain="advantage", top=1.0, fade_until=1.0)
    ways = PrototypeConfig(encoder="hashing", gain="advantage", fade_until=1.0)
    chooser = Imitation(
        steps, ways, encoders={"hashing": HashingEncoder()}, streams=loop.STREAMS, rank=int(accelerator.process_index)
    )
    kit = loop.Kit(rollout=dataclasses.replace(loop.ROLLOUT, scoring_batch=1, scoring_ahead=1))
    kit = dataclasses.replace(kit, losses=[*kit.losses, ImitationLoss(steps), PrototypeLoss(ways)])
    found: dict[str, Any] = {}
    for name, until in (("cut", 2), ("cut", 3), ("whole", 3)):
        running = loop.running(
            folder / "base", folder / f"replay-{name}", settings, engine="transformers", accelerator=accelerator,
            kit=kit, replay=ReplaySettings(share=0.5, capacity=8),
            imitation=chooser,
        )  # fmt: skip
        with running as (trainer, model, _):
            if name == "cut" and until == 3:
                trainer.resume(trainer.checkpoints / "step-2")
            trainer.run(until=until)
            store = trainer._parts.replay
            assert isinstance(store, ReplayBuffer)
            found[name] = {"update": trainer.update, "stored": list(store.ids)}
        save_file(model.trainable_state(), folder / f"replay-{name}-rank{accelerator.process_index}.safetensors")
    (folder / f"replay-rank{accelerator.process_index}.json").write_text(json.dumps(found))


def refits(folder: Path, accelerator: Accelerator) -> None:
    """Three iterations with a refit each; then the second checkpoint again, in fresh objects, up to the same end."""
    rng = np.random.default_rng(3)
    model = training.policy(folder / "base", dtype="float32")
    dialogues = [training.random_dialogue(rng, f"t{number}") for number in range(12)]
    rounds = [cut(training.sampled_by(model, dialogues[at : at + 4]), (2, 2)) for at in (0, 4, 8)]
    if accelerator.num_processes == 1:
        rounds = [[left + right] for left, right in rounds]
    settings = TrainerSettings(
        iterations=3, epochs=1, minibatch=4, microbatch=2, learning_rate=1e-3, critic_learning_rate=1e-3, save_every=1
    )
    name = f"refits-{accelerator.num_processes}"
    first = Refitting(rounds, folder / name, accelerator)
    training.trainer(model, settings, rounds, folder / name, accelerator=accelerator, collector=first).run()
    again = Refitting(rounds, folder / name, accelerator)
    resumed = training.trainer(
        training.policy(folder / "base", dtype="float32"),
        settings,
        rounds,
        folder / name,
        accelerator=accelerator,
        collector=again,
    )
    resumed.resume(folder / name / "checkpoints" / "step-2")
    restored = again.model.version
    resumed.run()
    judged = judged_of(9, rank=0, ranks=1)[0]
    found = {
        "versions": first.versions,
        "restored": restored,
        "again": again.versions,
        "said": first.said,
        "scores": [word.score for word in again.model.score(judged.trajectory, judged.steps)],
        "own": len(again.cotraining.state()["window"]),
    }
    (folder / f"{name}-rank{accelerator.process_index}.json").write_text(json.dumps(found))


def main(arguments: Sequence[str]) -> None:
    folder, cases = Path(arguments[0]), arguments[1:]
    accelerator = make_accelerator(TrainerSettings())
    plain = accelerator.backward
    for case in cases:
        accelerator.backward = plain
        if case == "shapes":
            shapes(folder, accelerator)
        elif case == "replay":
            replay(folder, accelerator)
        elif case == "refits":
            refits(folder, accelerator)
        elif case.startswith("rollouts:"):
            rollouts(folder, accelerator, engine=case.partition(":")[2])
        else:
            optimizer, split = case.split(":")
            equivalence(folder, accelerator, optimizer=optimizer, split=split)
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
