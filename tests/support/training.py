"""A tiny policy, recorded dialogues and everything else a Trainer takes, for tests of the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.interfaces import Imitator, LossTerm, Replay, WeightSource
from slea_llm.losses.ppo import PpoConfig, PpoLoss
from slea_llm.losses.value import ValueConfig, ValueLoss
from slea_llm.models.policy import PolicyCritic, build
from slea_llm.models.stats import token_stats
from slea_llm.models.tiny import make_tiny
from slea_llm.questions import Usage
from slea_llm.settings import ModelSettings, RolloutSettings, StreamSettings, TrainerSettings
from slea_llm.trainer import Collector, Parts, Trainer, TrainerOptions
from slea_llm.types import Generation, GenerationRequest, ScoredTrajectory, StepKind
from tests.support.experience import dialogue

STREAMS: Mapping[str, StreamSettings] = {
    "outcome": StreamSettings(sources=("outcome",)),
    "judge": StreamSettings(sources=("judge",), weight=0.5, kinds=("thought",)),
}
PAD = 0


def write_base(folder: Path) -> Path:
    """A random Llama of one layer and width 16."""
    return make_tiny(folder, ["an order of two pizzas"], vocab_size=270, hidden=16, layers=1, heads=2, seed=3)


def policy(
    base: Path, *, dtype: Any = "float64", seed: int = 5, heads: Sequence[str] = tuple(STREAMS), **options: Any
) -> PolicyCritic:
    settings = ModelSettings(base=str(base), dtype=dtype, lora_rank=8, critic_rank=8, **options)
    return build(settings, streams=heads, temperature=1.0, seed=seed)


def random_dialogue(
    rng: np.random.Generator, name: str, *, max_turns: int = 4, max_tokens: int = 5
) -> ScoredTrajectory:
    """A finished dialogue of random shape, tokens, rewards and scores."""
    kinds: tuple[StepKind, ...] = ("thought", "reply")
    shape = [
        [(kind, int(rng.integers(1, max_tokens + 1))) for kind in kinds] for _ in range(rng.integers(1, max_turns + 1))
    ]
    scores = {(turn, step): float(rng.normal()) for turn in range(len(shape)) for step in range(2)}
    rewards = [float(rng.normal()) for _ in shape]
    one = dialogue(shape, rewards=rewards, scores={"judge": scores}, prompt=int(rng.integers(2, 6)), name=name)
    (trace,) = one.trajectory.traces
    ids = tuple(int(token) for token in rng.integers(0, 260, len(trace)))
    return _with_trace(one, token_ids=ids)


def sampled_by(model: PolicyCritic, scored: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The same dialogues with the log-probabilities that this policy gives their tokens."""
    trajectories = [one.trajectory for one in scored]
    stats = token_stats(model, trajectories, microbatch=8, policy_version=0, critic_version=0, pad_id=PAD)
    out = []
    for one, stat in zip(scored, stats, strict=True):
        (trace,) = one.trajectory.traces
        logprobs = np.zeros(len(trace))
        logprobs[list(trace.sampled_mask)] = np.minimum(stat.proximal, 0.0)
        out.append(_with_trace(one, logprobs=tuple(logprobs.tolist())))
    return out


def failed(name: str) -> ScoredTrajectory:
    return dialogue([], termination="error", name=name)


def _with_trace(one: ScoredTrajectory, **changes: Any) -> ScoredTrajectory:
    (trace,) = one.trajectory.traces
    changed = dataclasses.replace(one.trajectory, traces=(dataclasses.replace(trace, **changes),))
    return dataclasses.replace(one, trajectory=changed)


class Recording:
    """A collector that plays recorded dialogues: `shares[iteration][rank]`. Its state is the count of rounds played."""

    def __init__(self, shares: Sequence[Sequence[Sequence[ScoredTrajectory]]], *, rank: int = 0) -> None:
        self._shares, self._rank, self.rounds = shares, rank, 0

    def collect(self, *, iteration: int, policy_version: int) -> Sequence[ScoredTrajectory]:
        assert policy_version <= iteration == self.rounds
        self.rounds += 1
        return self._shares[iteration][self._rank]

    def spent(self) -> Mapping[str, Usage]:
        return {
            "llm_judge": Usage(questions=3, requests=4, retries=1, prompt_tokens=50, completion_tokens=6, cost=0.25)
        }

    def state(self) -> Mapping[str, Any]:
        return {"rounds": self.rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rounds = state["rounds"]


class SilentGenerator:
    """A sampler that only remembers which versions it was given."""

    def __init__(self) -> None:
        self.loaded = [0]

    @property
    def policy_version(self) -> int:
        return self.loaded[-1]

    async def generate(self, request: GenerationRequest) -> Generation:
        raise NotImplementedError(f"nobody samples here: {request}")

    def load(self, source: WeightSource, version: int) -> None:
        assert source.merged_weights()
        self.loaded.append(version)

    def close(self) -> None: ...


def crediting(streams: Mapping[str, StreamSettings] = STREAMS, **options: Any) -> Crediting:
    return Crediting(streams, [], NestedGae(NestedGae.Config(**options), streams=streams))


def fresh_accelerator() -> Accelerator:
    """An accelerator without what an earlier test left in the process."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    return Accelerator(cpu=True)


def trainer(
    model: PolicyCritic,
    settings: TrainerSettings,
    shares: Sequence[Sequence[Sequence[ScoredTrajectory]]],
    output_dir: Path,
    *,
    accelerator: Accelerator | None = None,
    value_weight: float = 0.5,
    more_losses: Sequence[LossTerm] = (),
    max_error_rate: float = 0.2,
    collector: Collector | None = None,
    replay: Replay | None = None,
    imitation: Imitator | None = None,
    credit: Crediting | None = None,
    report: list[str] | None = None,
    numerics: Any = None,
    **options: Any,
) -> Trainer:
    """A trainer over recorded dialogues; as many episodes an iteration as the recording has."""
    accelerator = accelerator or fresh_accelerator()
    numerics = numerics or ("float64" if model.settings.dtype == "float64" else "float32")
    return Trainer(
        model,
        settings,
        RolloutSettings(episodes=sum(len(share) for share in shares[0]), max_error_rate=max_error_rate),
        Parts(
            losses=[
                PpoLoss(PpoConfig()),
                *([ValueLoss(ValueConfig(weight=value_weight))] if model.settings.critic != "none" else []),
                *more_losses,
            ],
            collector=collector or Recording(shares, rank=int(accelerator.process_index)),
            crediting=credit or crediting(),
            generator=SilentGenerator(),
            replay=replay,
            imitation=imitation,
        ),
        accelerator=accelerator,
        options=TrainerOptions(
            output_dir=output_dir,
            seed=11,
            pad_id=PAD,
            numerics=numerics,
            report=(report if report is not None else []).append,
            **options,
        ),
    )
