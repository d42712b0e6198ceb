"""An evaluator's word on a step, written down, and its words on many trajectories, asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slea_llm.interfaces import BatchScoring, StepEvaluator
from slea_llm.types import ScoredStep, Step, Trajectory


def word_on(
    step: Step,
    evaluator: str,
    version: str,
    *,
    score: float | None = None,
    reason: str | None = None,
    rationale: str = "",
    parts: Mapping[str, float] | None = None,
) -> ScoredStep:
    """What an evaluator in this version says of a step: a score with its rationale, or the reason for having none."""
    return ScoredStep(
        turn=step.turn,
        step=step.index,
        evaluator=evaluator,
        version=version,
        score=score,
        reason=reason,
        rationale=rationale,
        parts=parts or {},
    )


def words_on_many(
    evaluator: StepEvaluator, trajectories: Sequence[tuple[Trajectory, Sequence[Step]]]
) -> list[Sequence[ScoredStep]]:
    """What an evaluator says of each trajectory, in their order; one that can is asked about all of them at once.

    What it raises is passed on.
    """
    if isinstance(evaluator, BatchScoring):
        return list(evaluator.score_many(trajectories))
    return [evaluator.score(trajectory, steps) for trajectory, steps in trajectories]
