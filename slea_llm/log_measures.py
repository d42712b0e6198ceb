"""What a scored log says of its dialogues: how they end, how long they take, where they go wrong, how trials differ."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slea_llm.evaluators.dialogue_features import normalised
from slea_llm.evaluators.tool_results import answers, error_in
from slea_llm.measures import MeanLengths, mean_lengths, mean_over_tasks, pass_at_k, pass_hat_k, wilson
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Trajectory

HARM_SHARE = 0.5
"""A step does harm when its score is below 0 and at most this share of the lowest score of its dialogue."""
LONGEST_TEXT = 2_000
"""Characters by which steps are compared for repeats."""


def group_of(trajectory: Trajectory) -> str | None:
    """The task that a dialogue is a trial of; None when the log names none."""
    task = trajectory.task.get("id")
    return None if task is None else f"{trajectory.environment}/{task}"


def known_end(trajectory: Trajectory) -> bool:
    """Whether the log says how the dialogue ended; a broken one and one of unknown end count for no rate."""
    return trajectory.termination not in ("error", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The numbers of one dialogue. `success` None: the log does not say. Steps are leaf steps.

    `repeats` counts steps whose text the agent has written before; `calls`, `tool_errors` count calls and those that
    were answered with an error; `scores` are those of the evaluator asked about, None where it gave none. `first_harm`
    is the first step that does harm in a dialogue that did not succeed.
    """

    id: str
    group: str | None
    success: bool | None
    failed: bool
    termination: str
    outcome: float | None
    turns: int
    steps: int
    repeats: int
    calls: int
    tool_errors: int
    scores: tuple[float | None, ...]
    first_harm: tuple[int, int] | None

    @property
    def known_scores(self) -> list[float]:
        """Those of the scored steps."""
        return [score for score in self.scores if score is not None]

    @property
    def mean_score(self) -> float | None:
        """The mean over the scored steps."""
        known = self.known_scores
        return math.fsum(known) / len(known) if known else None


def facts(scored: ScoredTrajectory, evaluator: str | None) -> Facts:
    """The numbers of a dialogue by the scores of one evaluator (None: no scores)."""
    trajectory, leaves = scored.trajectory, scored.leaves()
    words = scored.scores_of(evaluator) if evaluator else {}
    answered = answers(trajectory, scored.steps)
    success = trajectory.success if known_end(trajectory) else None
    return Facts(
        id=trajectory.id,
        group=group_of(trajectory),
        success=success,
        failed=trajectory.failed,
        termination=trajectory.termination,
        outcome=trajectory.outcome,
        turns=len(trajectory.turns),
        steps=len(leaves),
        repeats=len(repeated(leaves)),
        calls=len(answered),
        tool_errors=sum(answer is not None and error_in(answer) is not None for answer in answered.values()),
        scores=tuple(word.score if (word := words.get((s.turn, s.index))) else None for s in leaves),
        first_harm=None if success else first_harm(leaves, words),
    )


def repeated(leaves: Sequence[Step]) -> set[tuple[int, int]]:
    """The steps whose text, white space and case aside, the agent has written before in this dialogue."""
    seen: set[str] = set()
    found = set()
    for leaf in leaves:
        text = normalised(leaf.text, LONGEST_TEXT).casefold()
        if text and text in seen:
            found.add((leaf.turn, leaf.index))
        seen.add(text)
    return found


def first_harm(leaves: Sequence[Step], words: Mapping[tuple[int, int], ScoredStep]) -> tuple[int, int] | None:
    """The first step whose score is below 0 and at most half of the dialogue's lowest; None when none is below 0."""
    known = [
        ((leaf.turn, leaf.index), word.score)
        for leaf in leaves
        if (word := words.get((leaf.turn, leaf.index))) and word.score is not None
    ]
    lowest = min((score for _, score in known), default=0.0)
    if lowest >= 0:
        return None
    return next(place for place, score in known if score <= HARM_SHARE * lowest)


def group_advantages(outcomes: Sequence[float]) -> list[float]:
    """(outcome - mean) / standard deviation of the trials of one task; 0, never NaN, where all are equal."""
    if not outcomes:
        return []
    mean = math.fsum(outcomes) / len(outcomes)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in outcomes) / len(outcomes))
    if deviation <= 1e-8 * max(1.0, abs(mean)):
        return [0.0] * len(outcomes)
    return [(one - mean) / deviation for one in outcomes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """pass^k and pass@k over the tasks with at least k trials."""

    k: int
    tasks: int
    pass_hat: float
    pass_at: float


@dataclass(slots=True)
class LogMeasures:
    """Running counts over the dialogues of a log, one `add` each; holds a few numbers a dialogue, never its text."""

    dialogues: int = 0
    broken: int = 0
    unknown: int = 0
    successes: int = 0
    steps: int = 0
    turns: int = 0
    repeats: int = 0
    calls: int = 0
    tool_errors: int = 0
    harmed: int = 0
    unharmed_failures: int = 0
    terminations: Counter[str] = field(default_factory=Counter)
    _lengths: array[int] = field(default_factory=lambda: array("q"))
    _ends: bytearray = field(default_factory=bytearray)
    _wins: Counter[str] = field(default_factory=Counter)
    _known: Counter[str] = field(default_factory=Counter)

    def add(self, one: Facts) -> None:
        self.dialogues += 1
        self.terminations[one.termination] += 1
        if one.failed:
            self.broken += 1
            return
        self.steps += one.steps
        self.turns += one.turns
        self.repeats += one.repeats
        self.calls += one.calls
        self.tool_errors += one.tool_errors
        if one.success is None:
            self.unknown += 1
            return
        self.successes += one.success
        self._lengths.append(one.turns)
        self._ends.append(one.success)
        if not one.success:
            self.harmed += one.first_harm is not None
            self.unharmed_failures += one.first_harm is None and bool(one.known_scores)
        if one.group is not None:
            self._wins[one.group] += one.success
            self._known[one.group] += 1

    @property
    def finished(self) -> int:
        """Dialogues of which the log says how they ended."""
        return self.dialogues - self.broken - self.unknown

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson 95 % interval of the success rate; None without a finished dialogue."""
        return wilson(self.successes, self.finished) if self.finished else None

    @property
    def lengths(self) -> MeanLengths | None:
        """Mean turns of successes and of all finished dialogues."""
        return mean_lengths([float(n) for n in self._lengths], list(map(bool, self._ends))) if self._lengths else None

    @property
    def tasks(self) -> int:
        return len(self._known)

    @property
    def equal_groups(self) -> int:
        """Tasks with several trials that all ended alike: nothing can be learnt from comparing them."""
        return sum(n > 1 and self._wins[name] in (0, n) for name, n in self._known.items())

    def passes(self) -> list[PassRow]:
        """Rows for k = 1 to the most trials that any task has; empty with one trial a task, or no task named."""
        most = max(self._known.values(), default=0)
        if most < 2:
            return []
        rows = []
        for k in range(1, most + 1):
            pairs = [(n, self._wins[name]) for name, n in self._known.items() if n >= k]
            rows.append(
                PassRow(
                    k=k,
                    tasks=len(pairs),
                    pass_hat=mean_over_tasks(pass_hat_k, pairs, k),
                    pass_at=mean_over_tasks(pass_at_k, pairs, k),
                )
            )
        return rows

    def lines(self) -> list[str]:
        """The measures in a few lines to be printed."""
        found = [self._success_line()]
        if (lengths := self.lengths) is not None:
            good = "-" if lengths.successes is None else f"{lengths.successes:.2f}"
            found.append(f"turns: {good} of successes, {lengths.all:.2f} of all")
        whole = self.dialogues - self.broken
        if whole and self.turns:
            found.append(
                f"steps: {self.steps} in {self.turns} turns ({self.steps / self.turns:.2f} a turn); "
                f"{self.repeats} repeat an earlier step; {self.tool_errors} of {self.calls} calls met an error"
            )
        found += self._pass_lines()
        if self.harmed + self.unharmed_failures:
            found.append(
                f"failures: {self.harmed} with a step that scored as harmful, {self.unharmed_failures} in which no "
                "step scored below 0"
            )
        return found

    def _success_line(self) -> str:
        if self.interval is None:
            broke = f", {self.broken} of which broke" if self.broken else ""
            return f"success: unknown, the log does not say how its {self.dialogues} dialogues ended{broke}"
        rest = []
        if self.broken:
            rest.append(f"{self.broken} broke")
        if self.unknown:
            rest.append(f"of {self.unknown} the log does not say how they ended")
        tail = f" ({'; '.join(rest)})" if rest else ""
        low, high = self.interval
        return (
            f"success: {self.successes}/{self.finished} = {100 * self.successes / self.finished:.1f} % "
            f"(95 % {100 * low:.1f} to {100 * high:.1f}){tail}"
        )

    def _pass_lines(self) -> list[str]:
        rows = self.passes()
        if not rows:
            return []
        shown = rows[:8]
        same = {row.tasks for row in shown} == {self.tasks}
        note = "" if same else f"; tasks with so many trials: {', '.join(str(row.tasks) for row in shown)}"
        return [
            f"pass^1..{shown[-1].k}: {', '.join(f'{row.pass_hat:.4f}' for row in shown)} over {self.tasks} tasks{note}",
            f"pass@1..{shown[-1].k}: {', '.join(f'{row.pass_at:.4f}' for row in shown)}; "
            f"{self.equal_groups} tasks whose trials all ended alike",
        ]


def measure(facts_of_log: Iterable[Facts]) -> LogMeasures:
    """The measures of a whole log."""
    found = LogMeasures()
    for one in facts_of_log:
        found.add(one)
    return found
