"""How well learnt step scores follow counterfactual values in the order task, where an expert errs by chance.

Fits return_decomposition, hindsight and counterfactual_prediction on some dialogues and scores others. The reference
for every step is the mean of two independent halves of paired continuations; how well the halves agree bounds what any
score can reach. Position is what a score reaches that knows nothing else.

    python benchmarks/attribution.py --train 400 --test 40 --pairs 64 --error-rate 0.35
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slea_llm.continuations import BranchingPlay, ScriptPlayer
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.evaluators import counterfactual, hindsight, return_decomposition
from slea_llm.evaluators.counterfactual import Counterfactual, CounterfactualPrediction
from slea_llm.evaluators.fitted import Fitted
from slea_llm.evaluators.hindsight import HindsightEvaluator
from slea_llm.evaluators.return_decomposition import ReturnDecomposition
from slea_llm.interfaces import Agent, StepEvaluator
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredTrajectory, Task
from slea_llm.users.scripted import ScriptedUser

MAX_TURNS = 12
METHODS: Mapping[str, tuple[Callable[..., Fitted], Any]] = {
    "return_decomposition": (return_decomposition.fit, ReturnDecomposition),
    "hindsight": (hindsight.fit, HindsightEvaluator),
    "counterfactual_prediction": (counterfactual.fit_prediction, CounterfactualPrediction),
}


class Orders:
    """Dialogues of the order task, and a way to play them on."""

    def __init__(self, error_rate: float) -> None:
        self._environment = OrderTaking(OrderTaking.Config())
        self._user = ScriptedUser(ScriptedUser.Config())
        self._error_rate = error_rate
        self._scorer = Scorer(TaggedParser(TaggedParser.Config()), [])

    def play(self, seeds: Sequence[int]) -> list[ScoredTrajectory]:
        tasks = [self._environment.task(seed) for seed in seeds]
        return [
            self._scorer.score(
                play(
                    self._environment,
                    self._user,
                    self._agent(task, task.seed),
                    task,
                    seed=task.seed,
                    max_turns=MAX_TURNS,
                )
            )
            for task in tasks
        ]

    def _agent(self, task: Task, seed: int) -> Agent:
        return self._environment.expert(dataclasses.replace(task, seed=seed), error_rate=self._error_rate)

    def reference(self, data: Sequence[ScoredTrajectory], *, pairs: int, seed: int) -> NDArray[np.float64]:
        """Counterfactual scores of all steps, in order."""
        playing = BranchingPlay(self._environment, self._user, ScriptPlayer(self._agent), max_turns=MAX_TURNS)
        judge = Counterfactual(Counterfactual.Config(pairs=pairs, budget=1.0, seed=seed), continuations=playing)
        return scores(judge, data)


def scores(evaluator: StepEvaluator, data: Sequence[ScoredTrajectory]) -> NDArray[np.float64]:
    words = [word for one in data for word in evaluator.score(one.trajectory, one.steps)]
    missing = [word.reason for word in words if word.score is None]
    if missing:
        raise SystemExit(f"{len(missing)} of {len(words)} steps are unscored: {missing[0]}")
    return np.array([word.score for word in words], dtype=float)


def spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
        _, place, counts = np.unique(np.round(values, 9), return_inverse=True, return_counts=True)
        found: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
        return found

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=400, help="dialogues to fit on")
    parser.add_argument("--test", type=int, default=40, help="dialogues to score, of other tasks")
    parser.add_argument("--pairs", type=int, default=64, help="paired continuations for each step, an even number")
    parser.add_argument("--error-rate", type=float, default=0.35, help="share of the expert's replies that err")
    parser.add_argument("--shuffle", action="store_true", help="shuffle the outcomes over the training dialogues")
    arguments = parser.parse_args()
    orders = Orders(arguments.error_rate)
    train = orders.play(range(100_000, 100_000 + arguments.train))
    test = orders.play(range(arguments.test))
    if arguments.shuffle:
        train = shuffled(train)
    started = time.perf_counter()
    halves = [orders.reference(test, pairs=arguments.pairs // 2, seed=seed) for seed in (1, 2)]
    truth = (halves[0] + halves[1]) / 2.0
    seconds = time.perf_counter() - started
    half = spearman(*halves)
    print(f"{len(truth)} steps of {len(test)} dialogues, {arguments.pairs} pairs each in {seconds:.1f} s")
    print(f"reliability of the reference: halves {half:.3f}, whole {2 * half / (1 + half):.3f} (Spearman-Brown)")
    position = np.array([place for one in test for place in range(len(one.steps))], dtype=float)
    print(f"{'position':<28} Spearman {abs(spearman(position, truth)):+.3f}")
    for name, (fit, cls) in METHODS.items():
        started = time.perf_counter()
        fitted = fit(train, seed=0)
        fit_seconds = time.perf_counter() - started
        with tempfile.TemporaryDirectory() as folder:
            fitted.save(Path(folder) / name)
            evaluator = cls(cls.Config(model=str(Path(folder) / name)))
            started = time.perf_counter()
            found = scores(evaluator, test)
            rate = len(found) / (time.perf_counter() - started)
            print(
                f"{name:<28} Spearman {spearman(found, truth):+.3f}, Pearson {np.corrcoef(found, truth)[0, 1]:+.3f}, "
                f"fit {fit_seconds:.1f} s, {rate:.0f} steps/s"
            )
            print(f"  {evaluator.gate.line}")


def shuffled(data: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The same dialogues with each other's outcomes."""
    order = np.random.default_rng(0).permutation(len(data))
    ends = [data[int(place)].trajectory.termination for place in order]
    return [
        dataclasses.replace(one, trajectory=dataclasses.replace(one.trajectory, termination=end))
        for one, end in zip(data, ends, strict=True)
    ]


if __name__ == "__main__":
    main()
