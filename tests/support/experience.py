"""Small scored dialogues with tokens, their stats, and ranks that sum with each other, for tests of credit."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from slea_llm.types import (
    TRUNCATIONS,
    Message,
    ScoredStep,
    ScoredTrajectory,
    Span,
    Step,
    StepKind,
    Termination,
    TokenSpan,
    TokenStats,
    TokenTrace,
    Trajectory,
    Turn,
)

Result = TypeVar("Result")
Shape = Sequence[Sequence[tuple[StepKind, int]]]
"""Turns of steps, each step a kind and a number of sampled tokens."""
Scores = Mapping[str, Mapping[tuple[int, int], float | None]]
"""Evaluator -> (turn, step) -> score, None where it gave none."""


def dialogue(
    shape: Shape,
    *,
    rewards: Sequence[float] | None = None,
    termination: Termination = "success",
    scores: Scores | None = None,
    row_a_turn: bool = False,
    prompt: int = 2,
    name: str = "t",
    task: str = "a",
    states: Sequence[str] | None = None,
) -> ScoredTrajectory:
    """A scored dialogue of that shape; `prompt` unsampled tokens stand before every turn, one character is a token.

    `states` are the public states before the turns, by default the number of the turn.
    """
    known = list(states) if states is not None else [str(number) for number in range(len(shape))]
    paid = list(rewards) if rewards is not None else [0.0] * len(shape)
    steps: list[Step] = []
    turns: list[Turn] = []
    rows: list[list[bool]] = [] if row_a_turn else [[]]
    for number, turn in enumerate(shape):
        if row_a_turn:
            rows.append([])
        row, mask = len(rows) - 1, rows[-1]
        mask.extend([False] * prompt)
        start = at = len(mask)
        for index, (kind, count) in enumerate(turn):
            steps.append(
                Step(
                    trajectory_id=name,
                    turn=number,
                    index=index,
                    kind=kind,
                    text="x" * count,
                    span=Span(at - start, at - start + count),
                    tokens=TokenSpan(row, at, at + count),
                )
            )
            at += count
        mask.extend([True] * (at - start))
        span = TokenSpan(row, start, at)
        turns.append(
            Turn(
                index=number,
                context=(Message(role="user", content=known[number]),),
                text="x" * (at - start),
                span=span,
                reward=paid[number],
                state_before={"known": known[number]},
            )
        )
    trajectory = Trajectory(
        id=name,
        task={"id": task},
        environment="test",
        seed=0,
        policy_version=0,
        turns=tuple(turns),
        traces=tuple(_trace(mask) for mask in rows),
        outcome=None if termination == "error" else float(sum(paid)),
        termination=termination,
        error="broke" if termination == "error" else None,
    )
    return ScoredTrajectory(
        trajectory=trajectory,
        steps=tuple(steps),
        scores=tuple(_scored(scores or {})),
        parser="test",
        evaluator_versions=dict.fromkeys(scores or {}, "1"),
    )


def _trace(mask: Sequence[bool]) -> TokenTrace:
    return TokenTrace(
        token_ids=tuple(range(len(mask))),
        sampled_mask=tuple(mask),
        logprobs=tuple(-1.0 if sampled else 0.0 for sampled in mask),
    )


def _scored(scores: Scores) -> list[ScoredStep]:
    return [
        ScoredStep(
            turn=turn,
            step=step,
            evaluator=evaluator,
            version="1",
            score=score,
            reason=None if score is not None else "?",
        )
        for evaluator, given in scores.items()
        for (turn, step), score in given.items()
    ]


def stats_of(
    scored: ScoredTrajectory,
    values: Mapping[str, Sequence[float]],
    *,
    after: float = 0.0,
    log_ratio: Sequence[float] | None = None,
    said_after: Mapping[str, Sequence[float]] | None = None,
) -> TokenStats:
    """Stats with these values a stream and `after` as the value after the last token; log-ratio to the reference.

    `said_after`: the values after every token, by default those before the next one.
    """
    n = scored.trajectory.sampled_tokens
    ratio = np.zeros(n) if log_ratio is None else np.asarray(log_ratio, np.float64)
    return TokenStats(
        proximal=np.full(n, -1.0),
        reference=-1.0 - ratio,
        values={name: np.array([*numbers, after], np.float64) for name, numbers in values.items()},
        policy_version=0,
        critic_version=0,
        after={name: np.array([*numbers[1:], after][:n], np.float64) for name, numbers in values.items()}
        | {name: np.asarray(numbers, np.float64) for name, numbers in (said_after or {}).items()},
    )


def spaced(scored: ScoredTrajectory, prompt: int, *, row_a_turn: bool) -> ScoredTrajectory:
    """The same dialogue with `prompt` unsampled tokens before every turn, in one row or in one a turn."""
    rows: list[list[bool]] = [] if row_a_turn else [[]]
    turns: list[Turn] = []
    moves: dict[int, tuple[int, int]] = {}
    for turn in scored.trajectory.turns:
        assert turn.span is not None
        if row_a_turn:
            rows.append([])
        rows[-1].extend([False] * prompt)
        start = len(rows[-1])
        rows[-1].extend([True] * len(turn.span))
        moves[turn.index] = (len(rows) - 1, start - turn.span.start)
        turns.append(dataclasses.replace(turn, span=TokenSpan(len(rows) - 1, start, start + len(turn.span))))
    steps = []
    for step in scored.steps:
        assert step.tokens is not None
        row, by = moves[step.turn]
        steps.append(dataclasses.replace(step, tokens=TokenSpan(row, step.tokens.start + by, step.tokens.end + by)))
    traces = tuple(_trace(mask) for mask in rows)
    trajectory = dataclasses.replace(scored.trajectory, turns=tuple(turns), traces=traces)
    return dataclasses.replace(scored, trajectory=trajectory, steps=tuple(steps))


def refined(scored: ScoredTrajectory, turn: int, first: int, last: int) -> ScoredTrajectory:
    """The same dialogue with a step more, which the leaf steps `first` to `last` of a turn without parents refine."""
    own = [step for step in scored.steps if step.turn == turn]
    inside = own[first : last + 1]
    rows = [step.tokens for step in inside if step.tokens is not None]
    parent = dataclasses.replace(
        inside[0],
        text="".join(step.text for step in inside),
        span=Span(inside[0].span.start, inside[-1].span.end),
        tokens=TokenSpan(rows[0].row, rows[0].start, rows[-1].end),
    )
    place = {step.index: step.index + (step.index >= first) for step in own}
    moved = [
        dataclasses.replace(step, index=place[step.index], parent=first if step in inside else None) for step in own
    ]
    steps = [*moved[:first], parent, *moved[first:]]
    others = {step.turn: [s for s in scored.steps if s.turn == step.turn] for step in scored.steps}
    others[turn] = steps
    scores = tuple(
        dataclasses.replace(score, step=place[score.step]) if score.turn == turn else score for score in scored.scores
    )
    everything = tuple(step for number in sorted(others) for step in others[number])
    return dataclasses.replace(scored, steps=everything, scores=scores)


@st.composite
def shapes(draw: st.DrawFn, max_turns: int = 4, max_steps: int = 3, max_tokens: int = 4) -> Shape:
    """Dialogues of a few turns; a step after the first may be without a token."""
    turns = []
    for _ in range(draw(st.integers(1, max_turns))):
        steps = []
        for index in range(draw(st.integers(1, max_steps))):
            kind: StepKind = draw(st.sampled_from(["thought", "reply", "tool_call"]))
            steps.append((kind, draw(st.integers(1 if index == 0 else 0, max_tokens))))
        turns.append(steps)
    return turns


numbers = st.integers(-24, 24).map(lambda eighths: eighths / 8)
"""A coarse grid: equal numbers and zeros come up often, and nothing sits at the edge of rounding."""


@st.composite
def experiences(
    draw: st.DrawFn, streams: Sequence[str] = ("outcome", "scores"), evaluator: str = "judge"
) -> tuple[ScoredTrajectory, TokenStats]:
    """A dialogue with rewards, scores of one evaluator (some missing), values of these streams and any ending."""
    shape = draw(shapes())
    keys = [(turn, step) for turn, steps in enumerate(shape) for step in range(len(steps))]
    scores = {key: draw(st.none() | numbers) for key in keys}
    one = dialogue(
        shape,
        rewards=[draw(numbers) for _ in shape],
        termination=draw(st.sampled_from(["success", "failure", *sorted(TRUNCATIONS)])),
        scores={evaluator: scores},
        row_a_turn=draw(st.booleans()),
        name=f"t{draw(st.integers(0, 10**6))}",
        task=draw(st.sampled_from("abc")),
        states=[draw(st.sampled_from(["none", "some"])) for _ in shape],
    )
    for turn, steps in enumerate(shape):
        if len(steps) > 1 and draw(st.booleans()):
            first = draw(st.integers(0, len(steps) - 1))
            one = refined(one, turn, first, draw(st.integers(first, len(steps) - 1)))
    n = one.trajectory.sampled_tokens
    values = {name: draw(st.lists(numbers, min_size=n, max_size=n)) for name in streams}
    ratio = draw(st.lists(numbers, min_size=n, max_size=n))
    return one, stats_of(one, values, after=draw(numbers), log_ratio=ratio)


class ThreadReducer:
    """One rank's reducer among threads: every call waits for all ranks, which must make the same calls."""

    def __init__(self, rank: int, slots: list[Sequence[float]], barrier: threading.Barrier) -> None:
        self.rank, self._slots, self._barrier = rank, slots, barrier

    @property
    def world_size(self) -> int:
        return len(self._slots)

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in self._exchange(values)]

    def max(self, values: Sequence[float]) -> list[float]:
        return [max(column) for column in self._exchange(values)]

    def _exchange(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        self._slots[self.rank] = list(values)
        self._barrier.wait()
        columns = list(zip(*self._slots, strict=True))
        self._barrier.wait()
        return columns


def on_ranks(work: Callable[[ThreadReducer], Result], ranks: int = 2) -> list[Result]:
    """What `work` returns on each rank, all ranks running at once; a rank that raises stops all."""
    slots: list[Sequence[float]] = [[] for _ in range(ranks)]
    barrier = threading.Barrier(ranks, timeout=10)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(ThreadReducer(rank, slots, barrier))
        except threading.BrokenBarrierError:
            return  # another rank raised, and its error is the one to show
        except Exception as error:  # noqa: BLE001  (re-raised in the test's thread)
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]


def kinds_of(scored: ScoredTrajectory) -> list[str]:
    """The step kind of every sampled token, in sampled order."""
    return [step.kind for step in scored.leaves() if step.tokens for _ in range(len(step.tokens))]
