"""Score calls by what outcomes say of their kind: a regression on the checks that the steps of a dialogue fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slea_llm.evaluators.fitted import (
    AUXILIARY,
    Fitted,
    FittedEvaluator,
    Predict,
    card_of,
    cross_predict,
    examples,
    finished,
    fit_prefixes,
)
from slea_llm.evaluators.ridge import Floats, Ridge
from slea_llm.evaluators.step_features import Moment
from slea_llm.evaluators.tool_checks import CheckedCall, ToolWords, checked_calls
from slea_llm.evaluators.words import word_on
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Trajectory

KIND = "tool_use_outcomes"
NAMES = (
    "reply", "thought", "other call", "read", "read with a guessed value", "change", "change refused by the tool",
    "change with a guessed value", "change not agreed to", "change made again",
)  # fmt: skip
"""What is counted: of a dialogue only how often each has happened so far is known to the regression."""


def counted(step: Step, call: CheckedCall | None) -> tuple[bool, ...]:
    """Which of `NAMES` a leaf step is."""
    changes = call is not None and call.effect == "changes"
    done = changes and call is not None and not call.failed
    return (
        call is None and step.kind != "thought",
        call is None and step.kind == "thought",
        call is not None and call.effect == "unknown",
        call is not None and call.effect == "reads",
        call is not None and not changes and bool(call.unsaid),
        done,
        changes and not done,
        changes and call is not None and bool(call.unsaid),
        changes and call is not None and call.consent in ("declines", "neither", "unasked"),
        changes and call is not None and call.again,
    )


def prefix_rows(trajectory: Trajectory, leaves: Sequence[Step], words: ToolWords) -> Floats:
    """log(1 + count) of each of `NAMES` at every prefix, shape (steps + 1, names); the first is before any step."""
    calls = checked_calls(trajectory, leaves, words)
    flags = [counted(step, calls.get((step.turn, step.index))) for step in leaves]
    counts = np.cumsum(np.array(flags, dtype=np.float64).reshape(-1, len(NAMES)), axis=0)
    rows: Floats = np.log1p(np.concatenate([np.zeros((1, len(NAMES))), counts]))
    return rows


def fit(data: Sequence[ScoredTrajectory], *, seed: int = 0) -> Fitted:
    """Fit the outcome (success is 1, every other end 0) on the counts, with RUDDER's loss at every prefix.

    The card's figures are of dialogues of tasks that the fit had not seen, and its `weights` say in words what each
    count adds to the predicted success when it first happens. Raises EvaluatorError without both outcomes.
    """
    words = ToolWords.read()
    every, kept = examples(data), finished(data)
    rows = [prefix_rows(one.trajectory, one.leaves(), words) for one in kept]

    def fit_some(numbers: Sequence[int]) -> Predict:
        model = fit_prefixes(every, rows, numbers, seed=seed)
        return lambda number: model.predict(rows[number][1:])

    predicted = cross_predict(every, fit_some, seed=seed)
    final = fit_prefixes(every, rows, range(len(every)), seed=seed)
    card = {
        **card_of(every, predicted, seed=seed),
        "settings": {"auxiliary": AUXILIARY, "penalty": final.penalty, "words": words.digest},
        "weights_by_name": {
            name: round(float(weight) * float(np.log(2.0)), 4)
            for name, weight in zip(NAMES, final.weights, strict=True)
        },
    }
    return Fitted(kind=KIND, arrays=final.arrays(), card=card)


class ToolUseOutcomes(FittedEvaluator):
    """Scores a step by what its checks change in the predicted success: return decomposition by ten named counts.

    The counts are of kinds of calls and of the checks of `tool_use`; no word of a dialogue is among them, so that some
    tens of dialogues are enough to fit and every score can be said in words. The score knows neither how the dialogue
    ended nor what was said. Fitted by `fit`; the card beside the weights says how well.
    """

    name: ClassVar[str] = KIND

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        model: str = ""
        """Folder that `fit` saved: weights.safetensors and card.json. Empty: every step is unscored."""

    def __init__(self, config: Config) -> None:
        """Raises StorageError when the folder holds none of this kind."""
        self.config = config
        self._words = ToolWords.read()
        super().__init__(config.model)

    def _open(self, fitted: Fitted) -> None:
        self._model = Ridge.of_arrays(fitted.arrays, penalty=float(fitted.card["settings"]["penalty"]))

    def _settings(self) -> str:
        return f"-{self._words.digest}"

    def _say(self, trajectory: Trajectory, leaves: Sequence[Step], made: Sequence[Moment]) -> tuple[ScoredStep, ...]:
        del made
        rows = prefix_rows(trajectory, leaves, self._words)
        # Not clipped as a probability is: at the border all later steps would be worth nothing.
        gains = np.diff(rows, axis=0) * self._model.weights
        return tuple(self._word(step, gain) for step, gain in zip(leaves, gains, strict=True))

    def _word(self, step: Step, gains: Floats) -> ScoredStep:
        parts = {name: float(gain) for name, gain in zip(NAMES, gains, strict=True) if gain}
        why = ", ".join(f"{name} {gain:+.3f}" for name, gain in sorted(parts.items(), key=lambda one: one[1]))
        score = float(np.clip(gains.sum(), -1.0, 1.0))
        return word_on(step, self.name, self.version, score=score, parts=parts, rationale=why or "counts for nothing")
