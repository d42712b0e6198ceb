"""Where the turns and leaf steps of a trajectory lie in its sampled order, and which token earns their rewards.

Boundaries come from the spans alone. Reading them off non-zero rewards loses every turn that earned nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slea_llm.errors import CreditError
from slea_llm.types import ScoredTrajectory, Step, StepKind


class PlacedTurn(NamedTuple):
    """Turn `turn` holds the sampled tokens `[start, end)`, counted in sampled order."""

    turn: int
    start: int
    end: int


class PlacedStep(NamedTuple):
    """Leaf step `key` = (turn, step) holds the sampled tokens `[start, end)`; its reward sits on token `earner`.

    `outermost` is the index of the step that it refines at last, its own where it refines none.
    """

    key: tuple[int, int]
    kind: StepKind
    start: int
    end: int
    earner: int
    outermost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One trajectory in sampled order: `tokens` sampled tokens, tiled by the turns, tiled by the leaf steps."""

    trajectory_id: str
    tokens: int
    turns: tuple[PlacedTurn, ...]
    steps: tuple[PlacedStep, ...]


def lay_out(scored: ScoredTrajectory) -> Layout:
    """Sampled order of a trajectory, row after row.

    A step without a token of its own (its text lies inside the last token of the step before it) earns on that token.
    Raises CreditError when the trajectory has no tokens or its leaf steps do not tile a turn's sampled span.
    """
    trajectory = scored.trajectory
    leaves: dict[int, list[Step]] = {turn.index: [] for turn in trajectory.turns}
    for step in scored.leaves():
        if step.turn not in leaves:
            raise CreditError(f"trajectory {trajectory.id}: step {step.turn}.{step.index} is in no turn of it")
        leaves[step.turn].append(step)
    outermost = _outermost(scored.steps)
    turns: list[PlacedTurn] = []
    steps: list[PlacedStep] = []
    position = 0
    for turn in trajectory.turns:
        if turn.span is None:
            raise CreditError(
                f"trajectory {trajectory.id}: turn {turn.index} is text without sampled tokens; "
                "such logs can be scored and imitated, never credited"
            )
        start, row, expected = position, turn.span.row, turn.span.start
        for step in leaves[turn.index]:
            span = step.tokens
            if span is None or (span.row, span.start) != (row, expected):
                raise CreditError(
                    f"trajectory {trajectory.id}: step {step.turn}.{step.index} has tokens {span}, "
                    f"but should start at {expected} in row {row}"
                )
            end = position + span.end - span.start
            earner = end - 1 if end > start else start
            key = (step.turn, step.index)
            steps.append(PlacedStep(key, step.kind, position, end, earner, outermost[key]))
            position, expected = end, span.end
        if expected != turn.span.end:
            raise CreditError(
                f"trajectory {trajectory.id}: the steps of turn {turn.index} end at token {expected} of row {row}, "
                f"the turn at {turn.span.end}"
            )
        turns.append(PlacedTurn(turn.index, start, position))
    return Layout(trajectory_id=trajectory.id, tokens=position, turns=tuple(turns), steps=tuple(steps))


def _outermost(steps: Sequence[Step]) -> dict[tuple[int, int], int]:
    """`(turn, step) -> index of its outermost ancestor`; a parent must stand before its children."""
    found: dict[tuple[int, int], int] = {}
    for step in steps:
        above = (step.turn, step.parent) if step.parent is not None else None
        if above is not None and above not in found:
            raise CreditError(
                f"trajectory {step.trajectory_id}: step {step.turn}.{step.index} refines step {step.parent}, which "
                "does not stand before it"
            )
        found[step.turn, step.index] = step.index if above is None else found[above]
    return found


def unscored_steps(scored: ScoredTrajectory, evaluator: str) -> set[tuple[int, int]]:
    """Leaf steps without a score of this evaluator, whatever its reason."""
    known = {key for key, score in scored.scores_of(evaluator).items() if score.score is not None}
    return {key for step in scored.leaves() if (key := (step.turn, step.index)) not in known}


def known_tokens(scored: ScoredTrajectory, layout: Layout, sources: Collection[str]) -> NDArray[np.bool_]:
    """(n,) false on the tokens of steps that an evaluator among `sources` was to score and did not.

    An evaluator whose gate was shut counts as none at all: with no other source nothing is known anywhere.
    """
    heard = set(sources) - set(scored.shut)
    known = np.full(layout.tokens, bool(heard))
    for evaluator in scored.evaluator_versions:
        if evaluator in heard and (missing := unscored_steps(scored, evaluator)):
            for step in layout.steps:
                if step.key in missing:
                    known[step.start : step.end] = False
    return known
