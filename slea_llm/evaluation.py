"""One panel of unseen tasks, played before and after, and what came of it."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slea_llm.errors import ConfigError, EpisodeError
from slea_llm.interfaces import Environment
from slea_llm.measures import Z95, mean_lengths, wilson
from slea_llm.referee import blame_counts, is_replaced
from slea_llm.settings import EvaluationSettings
from slea_llm.storage import atomic_write, read_json_lines
from slea_llm.types import TERMINATIONS, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """How `n` finished dialogues ended. `errors` more broke: they are counted here and part of no other number.

    `excluded` more were not the agent's to win or lose, by the referee's ruling; those that were played again stand
    there for the dialogue that they were. `blamed` counts all dialogues by whom the referee blames.

    `interval` is the Wilson 95 % interval of `success_rate`. Turns are replies of the agent; `mean_turns_success` is
    None without a success. `mean_return` is the mean sum of rewards. `terminations` counts all dialogues.
    """

    n: int
    successes: int
    success_rate: float
    interval: tuple[float, float]
    errors: int
    mean_turns_success: float | None
    mean_turns: float
    mean_return: float
    terminations: Mapping[str, int]
    excluded: int = 0
    blamed: Mapping[str, int] = field(default_factory=dict)

    def line(self) -> str:
        """The report in one line."""
        low, high = self.interval
        turns = "-" if self.mean_turns_success is None else f"{self.mean_turns_success:.2f}"
        ends = ", ".join(f"{name} {count}" for name, count in self.terminations.items())
        out = f", {self.excluded} left out as others' faults" if self.excluded else ""
        return (
            f"success {self.successes}/{self.n} = {100 * self.success_rate:.1f} % "
            f"(95 % {100 * low:.1f} to {100 * high:.1f}), turns {turns} of successes, {self.mean_turns:.2f} of all, "
            f"return {self.mean_return:.2f}, errors {self.errors} ({ends}){out}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            **dataclasses.asdict(self),
            "interval": list(self.interval),
            "terminations": dict(self.terminations),
            "blamed": dict(self.blamed),
        }


def panel(environment: Environment, settings: EvaluationSettings) -> tuple[Task, ...]:
    """The fixed tasks of an evaluation: seeds from `panel_seed` on, which no training task reaches.

    Raises ConfigError when the environment repeats a task id, since a repeated task is not a second one.
    """
    tasks = tuple(environment.task(settings.panel_seed + number) for number in range(settings.tasks))
    repeated = [task_id for task_id, count in Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        raise ConfigError(f"environment {environment.name!r} gives task id {repeated[0]!r} to several seeds")
    return tasks


def evaluate(run: Callable[[Sequence[Task]], Sequence[Trajectory]], tasks: Sequence[Task]) -> EvaluationReport:
    """Play every task once with `run` and report.

    Raises EpisodeError when `run` loses or adds dialogues, and when none of them finished.
    """
    return report(run(tasks), expected=len(tasks))


def report(trajectories: Sequence[Trajectory], *, expected: int | None = None) -> EvaluationReport:
    """The report of dialogues already played; `expected` is how many there should be."""
    asked = sum(not is_replaced(trajectory) for trajectory in trajectories)
    if expected is not None and asked != expected:
        raise EpisodeError(f"{asked} dialogues came back for {expected} tasks")
    finished = [trajectory for trajectory in trajectories if not trajectory.failed and not trajectory.excluded]
    excluded = [trajectory for trajectory in trajectories if not trajectory.failed and trajectory.excluded]
    if not finished and excluded:
        raise EpisodeError(
            f"the referee excludes all {len(excluded)} dialogues that finished: none says anything about the agent"
        )
    if not finished:
        first = next((trajectory.error for trajectory in trajectories), "no task was given")
        raise EpisodeError(f"none of {len(trajectories)} dialogues finished; the first says: {first}")
    n, successes = len(finished), sum(trajectory.success for trajectory in finished)
    lengths = mean_lengths(
        [float(len(trajectory.turns)) for trajectory in finished], [trajectory.success for trajectory in finished]
    )
    counts = Counter[str](trajectory.termination for trajectory in trajectories)
    return EvaluationReport(
        n=n,
        successes=successes,
        success_rate=successes / n,
        interval=wilson(successes, n),
        errors=len(trajectories) - n - len(excluded),
        excluded=len(excluded),
        blamed={party: count for party, count in blame_counts(trajectories).items() if "/" not in party},
        mean_turns_success=lengths.successes,
        mean_turns=lengths.all,
        mean_return=sum(trajectory.outcome or 0.0 for trajectory in finished) / n,
        terminations={name: counts[name] for name in TERMINATIONS if counts[name]},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """How much the users' seeds alone move the success rate of one agent on one panel.

    `rates` holds one success rate a seed, over the tasks whose dialogues count under every seed (`tasks` of them).
    `spread` is their sample standard deviation, `flips` the share of these tasks that succeed with some seeds and fail
    with others. Two agents whose rates on one panel with one seed differ by less than `floor` (1.96 times the standard
    deviation of a difference of two) cannot be told apart.
    """

    rates: tuple[float, ...]
    tasks: int
    spread: float
    flips: float

    @property
    def floor(self) -> float:
        return Z95 * math.sqrt(2.0) * self.spread

    def line(self) -> str:
        """All of it in one line."""
        rates = ", ".join(f"{100 * rate:.1f}" for rate in self.rates)
        return (
            f"noise floor over {len(self.rates)} seeds of the users and {self.tasks} tasks: success {rates} %, "
            f"standard deviation {100 * self.spread:.2f} points, {100 * self.flips:.1f} % of tasks change; a "
            f"difference below {100 * self.floor:.1f} points is no difference"
        )


def noise_floor(panels: Sequence[Sequence[Trajectory]]) -> NoiseFloor:
    """The noise floor of panels that one agent played with other seeds of the users.

    Raises EpisodeError with fewer than two panels, and when no task's dialogue counts under every seed.
    """
    if len(panels) < 2:
        raise EpisodeError(f"{len(panels)} panels; a noise floor needs 2 or more")
    found = [
        {str(one.task.get("id")): one.success for one in played if not (one.failed or one.excluded)}
        for played in panels
    ]
    tasks = sorted(set.intersection(*map(set, found)))
    if not tasks:
        raise EpisodeError("no task has a dialogue that counts under every seed of its user")
    rates = tuple(sum(one[task] for task in tasks) / len(tasks) for one in found)
    flips = sum(len({one[task] for one in found}) > 1 for task in tasks)
    return NoiseFloor(rates=rates, tasks=len(tasks), spread=statistics.stdev(rates), flips=flips / len(tasks))


def record(path: Path, report: EvaluationReport, *, moment: str, policy_version: int) -> None:
    """Put a report into a JSON-lines file; the file is replaced as a whole, so that no line is ever torn.

    A resumed run that evaluates a moment for the second time replaces what was said of it the first time.
    """
    known = [line.value for line in read_json_lines(path)] if path.exists() else []
    kept = [one for one in known if one.get("moment") != moment]
    lines = [*kept, {"moment": moment, "policy_version": policy_version, **report.to_dict()}]
    with atomic_write(path) as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
