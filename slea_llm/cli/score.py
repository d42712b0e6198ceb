"""Score every step of logged dialogues: a score and a reason each, by the parser and evaluators of a recipe."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from slea_llm.cli.output import say
from slea_llm.config import load_recipe
from slea_llm.errors import ConfigError
from slea_llm.types import ScoredStep, ScoredTrajectory, Trajectory

SHOWN = 5
"""Kinds of steps listed at each end of the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="log of dialogues, or a folder of logs (rollouts of a training run)")
    parser.add_argument("--recipe", type=Path, required=True, help="recipe that names parser and evaluators")
    parser.add_argument("--output", type=Path, required=True, help="scored log to write (JSON lines)")


def run(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe)
    if not recipe.evaluators:
        raise ConfigError(f"{arguments.recipe} names no evaluator; add one, such as {{name: knowledge_base, ...}}")
    if arguments.output.exists():
        raise ConfigError(f"{arguments.output} exists already; give another name")
    from slea_llm.cli import compose
    from slea_llm.measures import wilson
    from slea_llm.storage import write_scored

    scorer = compose.scorer(recipe)
    for gate in scorer.gates().values():
        say(gate.line)
    summary = _Summary()
    count = write_scored(arguments.output, summary.watch(scorer.score_many(read_logs(arguments.log))))
    low, high = wilson(summary.successes, summary.finished) if summary.finished else (0.0, 1.0)
    say(f"{count} dialogues scored into {arguments.output}; {count - summary.finished} of them had failed")
    if summary.finished:
        say(
            f"success {summary.successes}/{summary.finished} = {100 * summary.successes / summary.finished:.1f} % "
            f"(95 % {100 * low:.1f} to {100 * high:.1f})"
        )
    for line in summary.lines():
        say(line)
    for name, usage in scorer.usages().items():
        say(f"{name}: {usage.line()}")
    return 0


def read_logs(path: Path) -> Iterator[Trajectory]:
    """The dialogues of a log, or of every `*.jsonl` of a folder; what an earlier scoring said is left behind."""
    from slea_llm.storage import log_kind, read_scored, read_trajectories

    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no *.jsonl log")
    for file in files:
        if log_kind(file) == "slea.scored_trajectories":
            yield from (one.trajectory for one in read_scored(file))
        else:
            yield from read_trajectories(file)


class _Summary:
    """Running counts over scored dialogues, so that the log is read once and never held in memory."""

    def __init__(self) -> None:
        self.finished = self.successes = self.steps = self.unscored = 0
        self._by_reason: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self._missing: Counter[str] = Counter()

    def watch(self, scored: Iterable[ScoredTrajectory]) -> Iterator[ScoredTrajectory]:
        for one in scored:
            self.finished += not one.trajectory.failed
            self.successes += one.trajectory.success
            for step in one.scores:
                self._count(step)
            yield one

    def _count(self, step: ScoredStep) -> None:
        self.steps += 1
        if step.score is None:
            self.unscored += 1
            self._missing[f"{step.evaluator}: {step.reason}"] += 1
            return
        count, total = self._by_reason[step.rationale]
        self._by_reason[step.rationale] = (count + 1, total + step.score)

    def lines(self) -> Iterator[str]:
        """Share of unscored steps, then the reasons with the highest and the lowest mean score."""
        yield f"{self.steps} step scores, {self.unscored} of them missing with a reason"
        for reason, count in self._missing.most_common(SHOWN):
            yield f"  none   x{count:<6} {reason}"
        ranked = sorted(self._by_reason.items(), key=lambda item: item[1][1] / item[1][0], reverse=True)
        shown = ranked if len(ranked) <= 2 * SHOWN else [*ranked[:SHOWN], *ranked[-SHOWN:]]
        for reason, (count, total) in shown:
            yield f"  {total / count:+.2f}  x{count:<6} {reason or '(no reason given)'}"
