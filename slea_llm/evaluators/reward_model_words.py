"""What a fitted reward model says of steps, made of the chances that it gives to every prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from slea_llm.errors import ConfigError, EvaluatorError
from slea_llm.evaluators.reward_model_card import Card, Head
from slea_llm.evaluators.words import word_on
from slea_llm.types import ScoredStep, Step

Read = Literal["auto", "progress", "label"]
READS: tuple[str, ...] = get_args(Read)
UNFITTED = "unfitted"
NOT_FITTED = "no fitted model: `slea fit-evaluator` makes one, `model:` names its folder"

Chances: TypeAlias = Sequence[tuple[float, float]]
"""(good step, success) of every position; position 0 stands before the first step."""


def head_of(card: Card, read: Read, *, source: object) -> Head:
    """The head that is read. Raises ConfigError when the model was not fitted for it."""
    head: Head = card.head() if read == "auto" else "success" if read == "progress" else "label"
    if head not in card.reliability:
        raise ConfigError(
            f"read {read!r}: the model in {source} was fitted on {', '.join(sorted(card.reliability))} only"
        )
    return head


def unscored(name: str, version: str, steps: Sequence[Step], reason: str) -> tuple[ScoredStep, ...]:
    return tuple(word_on(step, name, version, reason=reason) for step in steps)


def words_of(
    name: str, version: str, head: Head, steps: Sequence[Step], chances: Chances, *, beyond: str | None = None
) -> tuple[ScoredStep, ...]:
    """A word on every leaf step: p_k - p_(k-1) of success, or 2 P(good step) - 1.

    Raises EvaluatorError unless there is one position more than steps. Fewer are allowed where `beyond` gives the
    reason: the steps without a position are unscored and say so.
    """
    if steps and (len(chances) > len(steps) + 1 or (beyond is None and len(chances) != len(steps) + 1)):
        raise EvaluatorError(f"{len(steps)} steps have {len(chances)} positions; the steps are not those of the turns")
    words = []
    for place, step in enumerate(steps):
        if place + 1 >= len(chances):
            words.append(word_on(step, name, version, reason=beyond))
            continue
        label, after = chances[place + 1]
        before = chances[place][1]
        if head == "success":
            score, parts = after - before, {"success_before": before, "success_after": after}
            rationale = f"success {'rises' if after > before else 'falls'}"
        else:
            score, parts = 2.0 * label - 1.0, {"label": label}
            rationale = f"{'good' if label > 0.5 else 'bad'} step"
        if math.isfinite(score):
            words.append(word_on(step, name, version, score=score, parts=parts, rationale=rationale))
        else:
            words.append(word_on(step, name, version, reason="the model gave no finite number"))
    return tuple(words)
