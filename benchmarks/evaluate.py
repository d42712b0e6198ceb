"""Scoring speed and memory of the reward model.

    python benchmarks/evaluate.py [--encoder NAME] [--dialogues N] [--steps N] [--cache N]

Fits a small model on scripted order dialogues, then scores others. The bare forward is the same encoder on the same
texts (those of 64 dialogues in one call, each text once) and the same network on the same positions in the same
batches, prepared beforehand: what is left is the model. The ratio is steps/s of `Scorer.score_many` (cutting, evidence,
memory, encoding, forward, records) over that; the cache of sentence vectors starts without a text of theirs, and there
is none in the second line. Both have their weights loaded. Times are CPU seconds of one thread (set OMP_NUM_THREADS=1),
so that other load does not enter. Memory is the resident set after 1,000 steps and after --steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from slea_llm.encoders import DEFAULT_ENCODER, SentenceEncoder, load_encoder
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.evaluators.reward_model import CHUNK, RewardModel
from slea_llm.evaluators.reward_model_features import Prefixes, prefixes
from slea_llm.evaluators.reward_model_network import RewardNetwork, collate
from slea_llm.fitting.evaluator import FitSettings, FittedEvaluator, fit_evaluator
from slea_llm.fitting.labels import examples, outcome_labels
from slea_llm.fitting.training import TrainingSettings
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.types import Step, Trajectory
from slea_llm.users.scripted import ScriptedUser

PARSER = TaggedParser(TaggedParser.Config())
Parsed = list[tuple[Trajectory, list[Step]]]


def dialogues(count: int, *, first: int, error_rate: float = 0.3) -> list[Trajectory]:
    environment, user = OrderTaking(OrderTaking.Config()), ScriptedUser(ScriptedUser.Config())
    tasks = [environment.task(seed) for seed in range(first, first + count)]
    return [
        play(environment, user, environment.expert(task, error_rate=error_rate), task, seed=task.seed, max_turns=12)
        for task in tasks
    ]


def parsed(trajectories: Sequence[Trajectory]) -> Parsed:
    return [(one, [step for turn in one.turns for step in PARSER.parse(turn, one.id, None)]) for one in trajectories]


def fitted(encoder: SentenceEncoder, count: int) -> FittedEvaluator:
    rows = parsed(dialogues(count, first=0))
    labels = [label for one, steps in rows for label in outcome_labels(one, steps)]
    settings = FitSettings(folds=2, training=TrainingSettings(epochs=1))
    built = examples(rows, labels, encoder, "apart")
    return fit_evaluator(built, labels, encoder=encoder.name, encoding="apart", settings=settings, seed=0)


class Recorder:
    """Notes which texts every call encodes."""

    def __init__(self, inner: SentenceEncoder) -> None:
        self._inner, self.name, self.dimension = inner, inner.name, inner.dimension
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> object:
        self.calls.append(list(texts))
        return self._inner.encode(texts)


def bare(
    network: RewardNetwork, encoder: SentenceEncoder, texts: Sequence[Sequence[str]], rows: Sequence[Sequence[Prefixes]]
) -> float:
    """CPU seconds of encoder and network alone."""
    batches = [collate(part) for part in rows]
    begun = time.process_time()
    with torch.inference_mode():
        for part, batch in zip(texts, batches, strict=True):
            encoder.encode(part)
            network(batch)
    return time.process_time() - begun


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def stream(trajectories: Sequence[Trajectory], steps: int) -> Iterator[Trajectory]:
    sent = 0
    for one in itertools.cycle(trajectories):
        if sent >= steps:
            return
        sent += 2 * len(one.turns)
        yield one


def speed(folder: Path, fit: FittedEvaluator, encoder: SentenceEncoder, rows: Parsed, cache: int, repeats: int) -> None:
    recorder = Recorder(encoder)
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    prepared = [
        [fit.fitted.memory.attached(row) for row in prefixes(part, recorder, "apart")]  # type: ignore[arg-type]
        for part in chunks
    ]
    (warm,) = dialogues(1, first=20_000)
    steps = sum(len(one) - 1 for part in prepared for one in part)
    ratios, rates = [], []
    for _ in range(repeats):
        alone = bare(fit.fitted.network, encoder, recorder.calls, prepared)
        scorer = Scorer(PARSER, [RewardModel(RewardModel.Config(model=str(folder), cache=cache))])
        scorer.score(warm)  # an encoder reads its weights when it is first asked
        begun = time.process_time()
        scored = list(scorer.score_many(one for one, _ in rows))
        whole = time.process_time() - begun
        if sum(len(one.scores) for one in scored) != steps:
            raise SystemExit("the bare forward and the scorer saw other steps")
        ratios.append(alone / whole)
        rates.append((steps / whole, steps / alone))
    own, best = (statistics.median(column) for column in zip(*rates, strict=True))
    print(
        f"cache {cache}: {own:.0f} steps a CPU second, bare forward {best:.0f}, ratio {statistics.median(ratios):.3f} "
        f"(of {', '.join(f'{ratio:.3f}' for ratio in ratios)})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default=DEFAULT_ENCODER)
    parser.add_argument("--dialogues", type=int, default=192)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", type=int, default=RewardModel.Config().cache)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    encoder = load_encoder(arguments.encoder)
    fit = fitted(encoder, 40)
    rows = parsed(dialogues(arguments.dialogues, first=10_000))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        fit.save(folder)
        for cache in (arguments.cache, 0):
            speed(folder, fit, encoder, rows, cache, arguments.repeats)
        scorer = Scorer(PARSER, [RewardModel(RewardModel.Config(model=str(folder), cache=arguments.cache))])
        trajectories = [one for one, _ in rows]
        sizes = []
        for steps in (1_000, arguments.steps):
            count = sum(len(one.scores) for one in scorer.score_many(stream(trajectories, steps)))
            sizes.append(resident())
            print(f"{count} steps scored: {sizes[-1]:.0f} MiB resident", flush=True)
        print(f"growth {sizes[1] - sizes[0]:+.0f} MiB")


if __name__ == "__main__":
    main()
