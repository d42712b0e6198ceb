"""Parse and evaluate: the one way from a trajectory to its scored steps, online and offline alike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from slea_llm.errors import CheckpointError, ConfigError, EvaluatorError, SleaError
from slea_llm.evaluators.words import words_on_many
from slea_llm.interfaces import BatchParsing, Composed, Gated, Remembering, StepEvaluator, StepParser
from slea_llm.questions import Asking, Usage
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Trajectory, Turn, Verdict, leaf_steps

StartsOf: TypeAlias = Callable[[Turn], Sequence[int] | None]
"""Turn -> the character at which each of its sampled tokens starts; None for a turn without tokens."""

# What data can do to an evaluator. Errors of the code itself (TypeError, AttributeError, AssertionError) end the run.
EVALUATION_FAILURES = (SleaError, ArithmeticError, LookupError, OSError, RuntimeError, ValueError)


class TokenDecoder(Protocol):
    """The part of a chat tokenizer that scoring needs."""

    def decode(self, ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Text of sampled tokens without the end-of-turn token, and the character at which each token starts."""
        ...


class Scorer:
    """Cuts every turn into steps and asks every evaluator about them.

    An evaluator that fails on a trajectory gives each of its steps the reason why there is no score; a failure is never
    a score of 0. `max_unscored` in [0, 1] is the share of unscored steps of one evaluator above which `check` raises.
    """

    def __init__(
        self,
        parser: StepParser,
        evaluators: Sequence[StepEvaluator],
        chat: TokenDecoder | None = None,
        *,
        max_unscored: float = 0.2,
    ) -> None:
        names = [evaluator.name for evaluator in evaluators]
        if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ConfigError(f"evaluators named more than once: {', '.join(repeated)}; their scores would mix")
        if not 0 <= max_unscored <= 1:
            raise ConfigError(f"max_unscored {max_unscored} is not in [0, 1]")
        self._parser = parser
        self._evaluators = tuple(evaluators)
        self._chat = chat
        self.max_unscored = max_unscored

    def score(self, trajectory: Trajectory, starts_of: StartsOf | None = None) -> ScoredTrajectory:
        """Steps and scores of one trajectory.

        Token spans come from `starts_of`, else from the decoder given as `chat`, else they are left out. Raises
        EvaluatorError when tokens and text of a turn differ, or an evaluator answers about steps that it was not asked.
        """
        (steps,) = self._cut([trajectory], starts_of)
        return self._record(trajectory, steps, [_ask(evaluator, trajectory, steps) for evaluator in self._evaluators])

    def score_many(self, trajectories: Iterable[Trajectory], *, chunk: int = 64) -> Iterator[ScoredTrajectory]:
        """What `score` gives of each, in order; a parser and evaluators that can are asked about `chunk` at a time."""
        waiting = iter(trajectories)
        while part := list(itertools.islice(waiting, chunk)):
            pairs = list(zip(part, self._cut(part, None), strict=True))
            columns = [_ask_many(evaluator, pairs) for evaluator in self._evaluators]
            for place, (trajectory, steps) in enumerate(pairs):
                yield self._record(trajectory, steps, [column[place] for column in columns])

    def _cut(self, trajectories: Sequence[Trajectory], starts_of: StartsOf | None) -> list[tuple[Step, ...]]:
        """The steps of each trajectory."""
        turns: list[tuple[Turn, str, Sequence[int] | None]] = []
        for trajectory in trajectories:
            starts = starts_of or self._decoded_starts(trajectory)
            turns += [(turn, trajectory.id, starts(turn)) for turn in trajectory.turns]
        if isinstance(self._parser, BatchParsing):
            parsed = iter(self._parser.parse_many(turns))
        else:
            parsed = iter([self._parser.parse(*turn) for turn in turns])
        return [tuple(step for _ in trajectory.turns for step in next(parsed)) for trajectory in trajectories]

    def _record(
        self, trajectory: Trajectory, steps: tuple[Step, ...], words: Sequence[Sequence[ScoredStep]]
    ) -> ScoredTrajectory:
        return ScoredTrajectory(
            trajectory=trajectory,
            steps=steps,
            scores=tuple(word for column in words for word in column),
            parser=self._parser.name,
            evaluator_versions={evaluator.name: evaluator.version for evaluator in self._evaluators},
            shut=tuple(sorted(name for name, gate in self.gates().items() if not gate.open)),
        )

    def state(self) -> dict[str, Any]:
        """What evaluators remember from one dialogue to the next, by name, as JSON values."""
        return {one.name: dict(one.state()) for one in self._evaluators if isinstance(one, Remembering)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state`. Raises CheckpointError when it lacks an evaluator that remembers."""
        for one in self._evaluators:
            if isinstance(one, Remembering):
                if one.name not in state:
                    raise CheckpointError(
                        f"the checkpoint holds nothing of evaluator {one.name!r}, which remembers what it scored; "
                        "start a fresh run"
                    )
                one.restore(state[one.name])

    def usages(self) -> dict[str, Usage]:
        """Name of the parser or evaluator that asks a chat model (`blend/llm_judge` for a part) -> its costs so far."""
        parts: list[tuple[str, object]] = [(self._parser.name, self._parser)]
        for one in self._evaluators:
            parts.append((one.name, one))
            if isinstance(one, Composed):
                parts += [(f"{one.name}/{part.name}", part) for part in one.evaluators]
        return {name: part.usage for name, part in parts if isinstance(part, Asking)}

    @property
    def evaluators(self) -> tuple[StepEvaluator, ...]:
        return self._evaluators

    def gates(self) -> dict[str, Verdict]:
        """Learnt evaluator -> whether its scores may move training, and the line that says so."""
        return {one.name: one.gate for one in self._evaluators if isinstance(one, Gated)}

    def check(self, scored: Iterable[ScoredTrajectory]) -> dict[str, ScoreSummary]:
        """Summary by evaluator. Raises EvaluatorError when one left more than `max_unscored` of its steps unscored."""
        summaries = summarize(scored)
        for name, summary in summaries.items():
            if summary.unscored_share > self.max_unscored:
                reason, count = summary.reasons.most_common(1)[0]
                raise EvaluatorError(
                    f"evaluator {name!r} left {summary.unscored} of {summary.steps} steps unscored, a share of "
                    f"{summary.unscored_share:.3f} where max_unscored allows {self.max_unscored}; "
                    f"{count} of them because: {reason}"
                )
        return summaries

    def _decoded_starts(self, trajectory: Trajectory) -> StartsOf:
        def starts_of(turn: Turn) -> Sequence[int] | None:
            if self._chat is None or turn.span is None or not trajectory.traces:
                return None
            ids = trajectory.traces[turn.span.row].token_ids[turn.span.start : turn.span.end]
            text, starts = self._chat.decode(ids)
            if text != turn.text:
                raise EvaluatorError(
                    f"trajectory {trajectory.id!r}, turn {turn.index}: its tokens decode to {text[:80]!r}, "
                    f"its text is {turn.text[:80]!r}; score it with the tokenizer that it was sampled with"
                )
            return starts

        return starts_of


def _ask_many(evaluator: StepEvaluator, pairs: Sequence[tuple[Trajectory, Sequence[Step]]]) -> list[list[ScoredStep]]:
    """`_ask` of every trajectory, in one go where the evaluator can."""
    try:
        words = words_on_many(evaluator, pairs)
    except EVALUATION_FAILURES:
        # Asked one by one, only the trajectory that it fails on loses its scores, with its own reason.
        return [_ask(evaluator, *pair) for pair in pairs]
    return [_checked(evaluator, *pair, one) for pair, one in zip(pairs, words, strict=True)]


def _ask(evaluator: StepEvaluator, trajectory: Trajectory, steps: Sequence[Step]) -> list[ScoredStep]:
    """One word for each leaf step, in the order of the steps."""
    try:
        words = evaluator.score(trajectory, steps)
    except EVALUATION_FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
        return [_unscored(evaluator, (step.turn, step.index), reason) for step in leaf_steps(steps)]
    return _checked(evaluator, trajectory, steps, words)


def _checked(
    evaluator: StepEvaluator, trajectory: Trajectory, steps: Sequence[Step], words: Sequence[ScoredStep]
) -> list[ScoredStep]:
    leaves = [(step.turn, step.index) for step in leaf_steps(steps)]
    given = {(word.turn, word.step): word for word in words}
    if len(given) != len(words) or not given.keys() <= set(leaves):
        raise EvaluatorError(
            f"evaluator {evaluator.name!r} on trajectory {trajectory.id!r}: each leaf step gets one ScoredStep; "
            f"got {len(words)} for {sorted(given)}, the leaf steps are {leaves}"
        )
    return [given.get(place) or _unscored(evaluator, place, "the evaluator gave no answer") for place in leaves]


def _unscored(evaluator: StepEvaluator, place: tuple[int, int], reason: str) -> ScoredStep:
    return ScoredStep(
        turn=place[0],
        step=place[1],
        evaluator=evaluator.name,
        version=evaluator.version,
        score=None,
        reason=reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSummary:
    """What one evaluator did with a set of trajectories. `mean` is over the scored steps, None when there are none."""

    steps: int
    unscored: int
    mean: float | None
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def unscored_share(self) -> float:
        return self.unscored / self.steps if self.steps else 0.0


def summarize(scored: Iterable[ScoredTrajectory]) -> dict[str, ScoreSummary]:
    """Evaluator -> counts, mean score, and the reasons for what is unscored."""
    words: dict[str, list[ScoredStep]] = {}
    for trajectory in scored:
        for word in trajectory.scores:
            words.setdefault(word.evaluator, []).append(word)
    return {name: _summary(group) for name, group in words.items()}


def _summary(words: Sequence[ScoredStep]) -> ScoreSummary:
    scores = [word.score for word in words if word.score is not None]
    return ScoreSummary(
        steps=len(words),
        unscored=len(words) - len(scores),
        mean=sum(scores) / len(scores) if scores else None,
        reasons=Counter(word.reason for word in words if word.reason is not None),
    )
