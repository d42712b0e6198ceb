"""Looking back from success: how much likelier is a step among successes than among all dialogues in that situation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from slea_llm.errors import ConfigError
from slea_llm.evaluators.attribution import hindsight
from slea_llm.evaluators.fitted import Example, Fitted, baselines, data_facts, examples, outcomes, quality, split
from slea_llm.evaluators.ridge import Floats
from slea_llm.evaluators.step_features import Moment, moments
from slea_llm.evaluators.step_table import Grid, StepTable, build_table
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Trajectory, leaf_steps

KIND = "hindsight"


def fit(data: Sequence[ScoredTrajectory], *, seed: int = 0, grid: Grid | None = None) -> Fitted:
    """Fit pi(step | situation) on all dialogues, h(step | situation, success) on those that succeeded.

    Both are clusters of hashed features with Laplace counts. The card's figures are those of V h / pi as a prediction
    of the outcome, on dialogues of tasks that the fit has not seen. Raises EvaluatorError without both outcomes.
    """
    every = examples(data)
    kept, held = split(every, seed=seed)
    settings = grid or Grid()
    table = build_table(kept, settings, seed=seed)
    card: dict[str, Any] = {
        "data": data_facts(every, held, seed=seed),
        "labels": "outcome of the dialogue, for every step",
        "held_out": quality(_predicted(table, held), outcomes(held)),
        "baselines": baselines(kept, held, seed=seed),
    }
    final = build_table(every, settings, seed=seed)
    card["settings"] = {**asdict(settings), "states": len(final.states), "steps": len(final.steps)}
    return Fitted(kind=KIND, arrays=final.arrays(), card=card)


def _predicted(table: StepTable, data: Sequence[Example]) -> Floats:
    return np.array([_look_back(table, moment, None).q for example in data for moment in example.moments])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    policy: float
    backward: float
    value: float
    lift: float
    q: float
    advantage: float


def _look_back(table: StepTable, moment: Moment, lift_range: tuple[float, float] | None) -> _Word:
    state, step = table.place(moment)
    policy, backward, value = float(table.policy(state)[step]), float(table.backward(state)[step]), table.value(state)
    found = hindsight(policy, backward, value, lift_range=lift_range)
    return _Word(policy=policy, backward=backward, value=value, lift=found.lift, q=found.q, advantage=found.advantage)


class HindsightEvaluator:
    """Scores a step by V (h / pi - 1), which is P(success | situation, step) - P(success | situation).

    The mean of the score under pi is 0 in every situation, so more steps earn nothing; what a step is given follows
    from correlation with the outcome, not from trying an alternative. Reads no outcome of the dialogue that it scores.
    """

    name: ClassVar[str] = KIND
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        folder: str
        """Folder that `fit` saved: weights.safetensors and card.json."""
        lift_min: float = 0.2
        """The lift h / pi is clipped from below to this; in [0, 1]."""
        lift_max: float = 5.0
        """And from above to this; 1 or more."""

        def __post_init__(self) -> None:
            if not self.folder:
                raise ConfigError("folder is empty; give the folder of a fitted hindsight")
            if not 0.0 <= self.lift_min <= 1.0 <= self.lift_max:
                raise ConfigError(
                    f"lift_min {self.lift_min} and lift_max {self.lift_max}: allowed are 0 to 1, and 1 up"
                )

    def __init__(self, config: Config) -> None:
        """Read the counts. Raises StorageError when the folder holds none of this kind."""
        self.config = config
        fitted = Fitted.load(Path(config.folder), KIND)
        self.card: dict[str, Any] = dict(fitted.card)
        self._table = StepTable.of_arrays(fitted.arrays)
        self._version = f"{fitted.version}-{config.lift_min:g}-{config.lift_max:g}"

    @staticmethod
    def preflight(config: Any) -> None:
        """Raise StorageError when the folder holds nothing fitted; called before a run, reads no weights."""
        Fitted.check(Path(config.folder), KIND)

    @property
    def version(self) -> str:
        """Changes with the counts and the settings."""
        return self._version

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A score for every leaf step, in units of success probability, with lift, pi, h and V in `parts`."""
        limits = (self.config.lift_min, self.config.lift_max)
        words = []
        for step, moment in zip(leaf_steps(steps), moments(trajectory, steps), strict=True):
            word = _look_back(self._table, moment, limits)
            words.append(
                ScoredStep(
                    turn=step.turn,
                    step=step.index,
                    evaluator=self.name,
                    version=self._version,
                    score=word.advantage,
                    parts={"lift": word.lift, "policy": word.policy, "backward": word.backward, "value": word.value},
                    rationale=f"{word.lift:.2f} times as common among successes as among all in such a situation",
                )
            )
        return tuple(words)
