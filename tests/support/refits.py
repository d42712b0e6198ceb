"""A run whose reward model is refitted on the dialogues that a collector shows it, for one rank or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from slea_llm.cotraining import Cotraining
from slea_llm.evaluators.reward_model import RewardModel
from slea_llm.fitting.training import TrainingSettings
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredTrajectory
from tests.support import training
from tests.support.judged import PARSER, TINY, dialogue, drawn

QUICK = dataclasses.replace(TINY, training=TrainingSettings(epochs=2))
ROUND = 48
"""Judged dialogues of one iteration, over all ranks."""


def judged_of(iteration: int, *, rank: int, ranks: int) -> list[ScoredTrajectory]:
    """This rank's piece of an iteration's dialogues; the last rank's is smaller. Pieces in rank order are the whole."""
    rng = drawn(iteration)
    whole = [dataclasses.replace(dialogue(n, rng), id=f"{iteration}-{n}") for n in range(ROUND)]
    border = ROUND if ranks == 1 else 2 * ROUND // 3
    own = whole[:border] if rank == 0 else whole[border:]
    return list(Scorer(PARSER, []).score_many(own))


class Refitting(training.Recording):
    """Plays recorded dialogues, and shows judged ones to a reward model that is refitted every iteration."""

    def __init__(
        self, shares: Sequence[Sequence[Sequence[ScoredTrajectory]]], folder: Path, accelerator: Accelerator
    ) -> None:
        rank, ranks = int(accelerator.process_index), int(accelerator.num_processes)
        super().__init__(shares, rank=rank)
        self.model = RewardModel(RewardModel.Config(encoder="hashing", refresh_every=1, window=96))
        self.said: list[str] = []
        self.versions: list[str] = []
        self._ranks = ranks
        self.cotraining = Cotraining(
            self.model,
            folder=folder / "evaluators",
            parser={"name": "tagged"},
            main=rank == 0,
            gather=gather_object,
            seed=0,
            report=self.said.append,
            settings=QUICK,
        )

    def collect(self, *, iteration: int, policy_version: int) -> Sequence[ScoredTrajectory]:
        found = super().collect(iteration=iteration, policy_version=policy_version)
        self.cotraining.observe(iteration, judged_of(iteration, rank=self._rank, ranks=self._ranks))
        self.versions.append(self.model.version)
        return found

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "observers": dict(self.cotraining.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.cotraining.restore(state["observers"])
