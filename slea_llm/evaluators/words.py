"""An evaluator's word on a step, written down."""

from __future__ import annotations

from collections.abc import Mapping

from slea_llm.types import ScoredStep, Step


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
