"""RUDDER: a model of the return at every prefix of a dialogue; a step is worth what its prefix adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from slea_llm.errors import ConfigError
from slea_llm.evaluators.attribution import redistribute, rudder_loss
from slea_llm.evaluators.fitted import (
    Example,
    Fitted,
    baselines,
    data_facts,
    examples,
    inner_fold,
    outcomes,
    quality,
    split,
)
from slea_llm.evaluators.ridge import Floats, Ridge, fit_ridge
from slea_llm.evaluators.step_features import Moment, hashed, moments, row, start_of, words
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Trajectory, leaf_steps

KIND = "return_decomposition"
AUXILIARY = 0.5
"""Weight of the mean error over all prefixes beside the error of the last one."""
DECAY = 0.9
"""How much of what was said is left in the memory of a prefix, per step."""


def prefix_rows(made: Sequence[Moment], size: int) -> Floats:
    """One row for every prefix, shape (steps, 3 * size + 6): the last step and, decayed, all that was said before."""
    memory = np.zeros(size)
    rows = []
    for moment in made:
        rows.append(np.concatenate([row(moment, size, feedback=True), memory]))
        told = [f"{moment.kind} {word}" for word in words(moment.text)]
        memory = DECAY * memory + (1 - DECAY) * hashed(told, size)
    return np.stack(rows)


def fit(data: Sequence[ScoredTrajectory], *, seed: int = 0, size: int = 256) -> Fitted:
    """Fit g on outcome labels: success is 1, every other end 0.

    The loss is RUDDER's, (g_(T-1) - R)^2 + 0.5 mean_t (g_t - R)^2 for each dialogue, minimised exactly by weighted
    ridge regression on hashed features of `size` each. The card's figures are of dialogues that the fit has not seen,
    split by task; the weights saved are then fitted on all of them. Raises EvaluatorError without both outcomes.
    """
    every = examples(data)
    kept, held = split(every, seed=seed)
    model = _fit(kept, seed=seed, size=size)
    predicted = [model.predict(prefix_rows(example.moments, size)) for example in held]
    card = {
        "settings": {"size": size, "auxiliary": AUXILIARY, "decay": DECAY},
        "data": data_facts(every, held, seed=seed),
        "labels": "outcome of the dialogue, at every prefix",
        "held_out": quality(np.concatenate(predicted), outcomes(held)),
        "held_out_loss": round(
            rudder_loss([list(map(float, one)) for one in predicted], [float(one.success) for one in held]), 6
        ),
        "baselines": baselines(kept, held, seed=seed),
    }
    final = _fit(every, seed=seed, size=size)
    card["penalty"] = final.penalty
    return Fitted(kind=KIND, arrays={"weights": final.weights, "bias": np.array([final.bias])}, card=card)


def _fit(data: Sequence[Example], *, seed: int, size: int) -> Ridge:
    """The opening, before any step, is a prefix too: that is what the first step is compared with."""
    rows, targets, weights, folds = [], [], [], []
    for one in data:
        rows += [prefix_rows([start_of(one.moments[0])], size), prefix_rows(one.moments, size)]
        count = len(one.moments)
        weights += [AUXILIARY / count] * count + [AUXILIARY / count + 1.0]
        targets += [float(one.success)] * (count + 1)
        folds += [inner_fold(one, seed=seed)] * (count + 1)
    return fit_ridge(np.concatenate(rows), np.array(targets), np.array(weights), np.array(folds))


class ReturnDecomposition:
    """Scores a step by the change of the predicted success, and gives the steps what the prediction still lacks.

    With `start: zero` the scores of a finished dialogue sum to its outcome (1 or 0), RUDDER's own form; with `start:
    prior` to the outcome minus what was predicted before the first step. A dialogue that was cut has no outcome yet:
    nothing is added to the differences. Fitted by `fit`; the card beside the weights says how well.
    """

    name: ClassVar[str] = KIND
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        folder: str
        """Folder that `fit` saved: weights.safetensors and card.json."""
        start: Literal["prior", "zero"] = "prior"
        """The value before the first step: what the model says of the opening, or 0."""
        residual: Literal["uniform", "last", "none"] = "uniform"
        """Where the outcome minus the last prediction goes: to all steps alike, to the last one, or nowhere."""

        def __post_init__(self) -> None:
            if not self.folder:
                raise ConfigError("folder is empty; give the folder of a fitted return_decomposition")

    def __init__(self, config: Config) -> None:
        """Read the weights. Raises StorageError when the folder holds none of this kind."""
        self.config = config
        fitted = Fitted.load(Path(config.folder), KIND)
        self.card: dict[str, Any] = dict(fitted.card)
        self._size = int(self.card["settings"]["size"])
        self._model = Ridge(
            weights=fitted.arrays["weights"],
            bias=float(fitted.arrays["bias"][0]),
            penalty=float(self.card["penalty"]),
        )
        self._version = f"{fitted.version}-{config.start}-{config.residual}"

    @staticmethod
    def preflight(config: Any) -> None:
        """Raise StorageError when the folder holds nothing fitted; called before a run, reads no weights."""
        Fitted.check(Path(config.folder), KIND)

    @property
    def version(self) -> str:
        """Changes with the weights and the settings."""
        return self._version

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A score for every leaf step, in units of success probability; none for a dialogue that broke."""
        leaves = leaf_steps(steps)
        if not leaves:
            return ()
        if trajectory.failed:
            return tuple(self._word(step, reason=f"the dialogue broke: {trajectory.error}") for step in leaves)
        made = moments(trajectory, steps)
        rows = prefix_rows(made, self._size)
        values = [float(value) for value in self._model.predict(rows)]
        before = 0.0
        if self.config.start == "prior":
            before = float(self._model.predict(prefix_rows([start_of(made[0])], self._size))[0])
        shared = self.config.residual
        outcome = values[-1] if trajectory.truncated or shared == "none" else float(trajectory.success)
        scores = redistribute(values, outcome, start=before, residual="last" if shared == "last" else "uniform")
        return tuple(
            self._word(step, score=score, parts={"before": prior, "after": after})
            for step, score, prior, after in zip(leaves, scores, [before, *values], values, strict=False)
        )

    def _word(
        self,
        step: Step,
        *,
        score: float | None = None,
        reason: str | None = None,
        parts: dict[str, float] | None = None,
    ) -> ScoredStep:
        found = parts or {}
        said = ""
        if score is not None:
            moved = found["after"] - found["before"]
            way = "raises" if moved > 0 else "lowers"
            said = f"{way} the predicted success from {found['before']:.2f} to {found['after']:.2f}"
            if math.isclose(moved, 0.0, abs_tol=5e-3):
                said = f"leaves the predicted success at {found['after']:.2f}"
        return ScoredStep(
            turn=step.turn,
            step=step.index,
            evaluator=self.name,
            version=self._version,
            score=score,
            reason=reason,
            parts=found,
            rationale=said,
        )
