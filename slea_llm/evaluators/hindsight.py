"""Looking back from success: how much likelier is a step among successes than among all dialogues in that situation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from slea_llm.errors import ConfigError
from slea_llm.evaluators.attribution import Hindsight, hindsight
from slea_llm.evaluators.fitted import Fitted, FittedEvaluator, Predict, card_of, cross_predict, examples
from slea_llm.evaluators.step_features import Moment
from slea_llm.evaluators.step_table import Grid, StepTable, build_table
from slea_llm.evaluators.words import word_on
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Trajectory

KIND = "hindsight"


def fit(data: Sequence[ScoredTrajectory], *, seed: int = 0, grid: Grid | None = None) -> Fitted:
    """Fit pi(step | situation) on all dialogues, h(step | situation, success) on those that succeeded.

    Both are clusters of hashed features with Laplace counts. The card's figures are those of V h / pi as a prediction
    of the outcome, on dialogues of tasks that the fit had not seen. Raises EvaluatorError without both outcomes.
    """
    every = examples(data)
    settings = grid or Grid()

    def fit_some(numbers: Sequence[int]) -> Predict:
        table = build_table([every[number] for number in numbers], settings, seed=seed)
        return lambda number: np.array([_look_back(table, moment).q for moment in every[number].moments])

    predicted = cross_predict(every, fit_some, seed=seed)
    card = {**card_of(every, predicted, seed=seed), "settings": asdict(settings)}
    return Fitted(kind=KIND, arrays=build_table(every, settings, seed=seed).arrays(), card=card)


def _look_back(table: StepTable, moment: Moment, lift_range: tuple[float, float] | None = None) -> Hindsight:
    state, step = table.place(moment)
    policy, backward = float(table.policy(state)[step]), float(table.backward(state)[step])
    return hindsight(policy, backward, table.value(state), lift_range=lift_range)


class HindsightEvaluator(FittedEvaluator):
    """Scores a step by V (h / pi - 1), which is P(success | situation, step) - P(success | situation).

    The mean of the score under pi is 0 in every situation, so more steps earn nothing; what a step is given follows
    from correlation with the outcome, not from trying an alternative. Reads no outcome of the dialogue that it scores.
    """

    name: ClassVar[str] = KIND

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        model: str = ""
        """Folder that `fit` saved: weights.safetensors and card.json. Empty: every step is unscored."""
        lift_min: float = 0.2
        """The lift h / pi is clipped from below to this; in [0, 1]."""
        lift_max: float = 5.0
        """And from above to this; 1 or more."""

        def __post_init__(self) -> None:
            if not 0.0 <= self.lift_min <= 1.0 <= self.lift_max:
                raise ConfigError(
                    f"lift_min {self.lift_min} and lift_max {self.lift_max}: allowed are 0 to 1, and 1 or more"
                )

    def __init__(self, config: Config) -> None:
        """Raises StorageError when the folder holds none of this kind."""
        self.config = config
        super().__init__(config.model)

    def _open(self, fitted: Fitted) -> None:
        self._table = StepTable.of_arrays(fitted.arrays)

    def _settings(self) -> str:
        return f"-{self.config.lift_min:g}-{self.config.lift_max:g}"

    def _say(self, trajectory: Trajectory, leaves: Sequence[Step], made: Sequence[Moment]) -> tuple[ScoredStep, ...]:
        del trajectory
        return tuple(self._judge(step, moment) for step, moment in zip(leaves, made, strict=True))

    def _judge(self, step: Step, moment: Moment) -> ScoredStep:
        found = _look_back(self._table, moment, (self.config.lift_min, self.config.lift_max))
        return word_on(
            step,
            self.name,
            self.version,
            score=found.advantage,
            parts={"lift": found.lift, "q": found.q, "value": found.q - found.advantage},
            rationale=f"{found.lift:.2f} times as common among successes as among all in such a situation",
        )
