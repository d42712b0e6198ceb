"""RUDDER: a model of the return at every prefix of a dialogue; a step is worth what its prefix adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from slea_llm.evaluators.attribution import redistribute, rudder_loss
from slea_llm.evaluators.fitted import (
    AUXILIARY,
    Fitted,
    FittedEvaluator,
    Predict,
    card_of,
    cross_predict,
    examples,
    fit_prefixes,
)
from slea_llm.evaluators.ridge import Floats, Ridge
from slea_llm.evaluators.step_features import Moment, hashed, row, start_of, words
from slea_llm.evaluators.words import word_on
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Trajectory

KIND = "return_decomposition"
DECAY = 0.9
"""How much of what was said is left in the memory of a prefix, per step."""


def prefix_rows(made: Sequence[Moment], size: int) -> Floats:
    """One row for every prefix, shape (steps + 1, 3 * size + 6); the first is the opening, before any step.

    A row holds the last step in its situation, what came back, and a decaying memory of all that was said before.
    """
    memory = np.zeros(size)
    rows = []
    for moment in (start_of(made[0]), *made):
        rows.append(np.concatenate([row(moment, size, feedback=True), memory]))
        told = [f"{moment.kind} {word}" for word in words(moment.text)]
        memory = DECAY * memory + (1 - DECAY) * hashed(told, size)
    return np.stack(rows)


def fit(data: Sequence[ScoredTrajectory], *, seed: int = 0, size: int = 256) -> Fitted:
    """Fit g on outcome labels: success is 1, every other end 0.

    The loss is RUDDER's, (g_(T-1) - R)^2 + 0.5 mean_t (g_t - R)^2 for each dialogue, minimised exactly by weighted
    ridge regression on hashed features of `size` each. The card's figures are of dialogues of tasks that the fit had
    not seen; the weights saved are then fitted on all. Raises EvaluatorError without both outcomes.
    """
    every = examples(data)
    rows = [prefix_rows(example.moments, size) for example in every]

    def fit_some(numbers: Sequence[int]) -> Predict:
        model = fit_prefixes(every, rows, numbers, seed=seed)
        return lambda number: model.predict(rows[number][1:])

    predicted = cross_predict(every, fit_some, seed=seed)
    final = fit_prefixes(every, rows, range(len(every)), seed=seed)
    loss = rudder_loss([[float(g) for g in one] for one in predicted], [float(one.success) for one in every])
    card = {
        **card_of(every, predicted, seed=seed),
        "settings": {"size": size, "auxiliary": AUXILIARY, "decay": DECAY, "penalty": final.penalty},
        "held_out_loss": round(loss, 6),
    }
    return Fitted(kind=KIND, arrays=final.arrays(), card=card)


class ReturnDecomposition(FittedEvaluator):
    """Scores a step by the change of the predicted success, and gives the steps what the prediction still lacks.

    With `start: zero` the scores of a finished dialogue sum to its outcome (1 or 0), RUDDER's own form; with `start:
    prior` to the outcome minus what was predicted before the first step. A dialogue that was cut has no outcome yet:
    nothing is added to the differences. Fitted by `fit`; the card beside the weights says how well.
    """

    name: ClassVar[str] = KIND

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        model: str = ""
        """Folder that `fit` saved: weights.safetensors and card.json. Empty: every step is unscored."""
        start: Literal["prior", "zero"] = "prior"
        """The value before the first step: what the model says of the opening, or 0."""
        residual: Literal["uniform", "last", "none"] = "uniform"
        """Where the outcome minus the last prediction goes: to all steps alike, to the last one, or nowhere."""

    def __init__(self, config: Config) -> None:
        """Raises StorageError when the folder holds none of this kind."""
        self.config = config
        super().__init__(config.model)

    def _open(self, fitted: Fitted) -> None:
        self._size = int(fitted.card["settings"]["size"])
        self._model = Ridge.of_arrays(fitted.arrays, penalty=float(fitted.card["settings"]["penalty"]))

    def _settings(self) -> str:
        return f"-{self.config.start}-{self.config.residual}"

    def _say(self, trajectory: Trajectory, leaves: Sequence[Step], made: Sequence[Moment]) -> tuple[ScoredStep, ...]:
        before, *values = (float(value) for value in self._model.predict(prefix_rows(made, self._size)))
        if self.config.start == "zero":
            before = 0.0
        kept = trajectory.truncated or trajectory.termination == "unknown" or self.config.residual == "none"
        outcome = values[-1] if kept else float(trajectory.success)
        residual: Literal["uniform", "last"] = "last" if self.config.residual == "last" else "uniform"
        scores = redistribute(values, outcome, start=before, residual=residual)
        return tuple(
            word_on(
                step,
                self.name,
                self.version,
                score=score,
                parts={"before": prior, "after": after},
                rationale=_rationale(prior, after),
            )
            for step, score, prior, after in zip(leaves, scores, [before, *values], values, strict=False)
        )


def _rationale(before: float, after: float) -> str:
    if math.isclose(before, after, abs_tol=5e-3):
        return f"leaves the predicted success at {after:.2f}"
    return f"{'raises' if after > before else 'lowers'} the predicted success from {before:.2f} to {after:.2f}"
