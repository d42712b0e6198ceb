"""What would have come of another step: by playing on from the exact state, or by a fitted model's prediction."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from slea_llm.checks import check_least
from slea_llm.errors import ConfigError, EpisodeError
from slea_llm.evaluators.attribution import monte_carlo_label, paired_difference, policy_mean_advantages
from slea_llm.evaluators.fitted import (
    Example,
    Fitted,
    FittedEvaluator,
    Predict,
    card_of,
    cross_predict,
    examples,
    ridge_of,
)
from slea_llm.evaluators.monte_carlo import borders_of, draw
from slea_llm.evaluators.ridge import Floats, Ridge
from slea_llm.evaluators.step_features import Moment, Place, row, utterance
from slea_llm.evaluators.step_table import Grid, StepTable, build_table
from slea_llm.evaluators.words import word_on
from slea_llm.interfaces import Continuations
from slea_llm.types import Continued, ScoredStep, ScoredTrajectory, Step, Trajectory, leaf_steps

PREDICTION = "counterfactual_prediction"
REMEMBERED = 4096
"""Dialogues whose share of the budget is known, so that one asked about again is answered as before."""


class Counterfactual:
    """Plays on from before and from after a step, `continuations` times each with the same seeds.

    The score is the mean over seeds of success after the step minus success when the policy chooses anew: P(success |
    state, step) - P(success | state). The continuations from before the step choose their own steps, so the baseline is
    the mean of the policy's alternatives, the judged step left out; never a step made worse on purpose. `parts` holds
    the paired standard error `se`, both shares `after` and `before`, and `pairs`. A standard error of 0 says that all
    pairs agreed, not that the difference is exact.

    Of all leaf steps that it has been asked about it scores at most the share `budget`; which ones is drawn by a hash
    of dialogue and step. The others are unscored and say so.
    """

    name: ClassVar[str] = "counterfactual"
    needs: ClassVar[frozenset[str]] = frozenset({"continuations"})

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        pairs: int = 8
        """Pairs of continuations for each step, 2 or more; the standard error falls with their square root."""
        budget: float = 0.1
        """Share of steps that are scored at most, in (0, 1]; above 0.1 it costs far more than the dialogues."""
        seed: int = 0
        """Names the draws of steps and of continuations."""

        def __post_init__(self) -> None:
            check_least(self, pairs=2, why="one pair has no standard error")
            if not 0.0 < self.budget <= 1.0:
                raise ConfigError(f"budget {self.budget} is not in (0, 1]")

    def __init__(self, config: Config, *, continuations: Continuations) -> None:
        self.config = config
        self._continuations = continuations
        self._seen = self._scored = 0
        self._rooms: dict[tuple[str, int], int] = {}
        settings = json.dumps(asdict(config), sort_keys=True)
        self._version = hashlib.sha256(f"1/{settings}".encode()).hexdigest()[:16]

    @property
    def version(self) -> str:
        """Changes with the settings. Which policy played on is that of the dialogue's own iteration."""
        return self._version

    def state(self) -> Mapping[str, Any]:
        """The account of the budget, so that a resumed run tries the same steps as one that was never stopped."""
        return {"seen": self._seen, "scored": self._scored}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._seen, self._scored = int(state["seen"]), int(state["scored"])
        self._rooms.clear()

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A word on every leaf step: a difference of success probability, or why it was not tried."""
        leaves = leaf_steps(steps)
        if trajectory.failed:
            return tuple(
                word_on(step, self.name, self._version, reason=f"the dialogue broke: {trajectory.error}")
                for step in leaves
            )
        chosen = self._choose(trajectory, leaves)
        if not chosen:
            return tuple(word_on(step, self.name, self._version, reason=self._not_tried()) for step in leaves)
        borders = {(step.turn, step.index): borders_of(step, trajectory) for step in chosen}
        prefixes = list(dict.fromkeys(prefix for pair in borders.values() for prefix in pair))
        seeds = [draw(f"{self.config.seed}/{trajectory.id}/{pair}") for pair in range(self.config.pairs)]
        try:
            ends = dict(zip(prefixes, self._continuations.branch(trajectory, prefixes, seeds), strict=True))
        except EpisodeError as error:
            broken = str(error)
            return tuple(
                word_on(
                    step,
                    self.name,
                    self._version,
                    reason=broken if (step.turn, step.index) in borders else self._not_tried(),
                )
                for step in leaves
            )
        return tuple(
            self._judge(step, *(ends[prefix] for prefix in borders[step.turn, step.index]))
            if (step.turn, step.index) in borders
            else word_on(step, self.name, self._version, reason=self._not_tried())
            for step in leaves
        )

    def _choose(self, trajectory: Trajectory, leaves: Sequence[Step]) -> list[Step]:
        """As many steps as the budget has room for after these, those with the smallest hash."""
        asked = (trajectory.id, len(leaves))
        if asked not in self._rooms:
            self._seen += len(leaves)
            self._rooms[asked] = min(math.floor(self.config.budget * self._seen + 1e-9) - self._scored, len(leaves))
            self._scored += self._rooms[asked]
        room = self._rooms[asked]
        while len(self._rooms) > REMEMBERED:
            del self._rooms[next(iter(self._rooms))]
        ranked = sorted(leaves, key=lambda s: draw(f"{self.config.seed}/{trajectory.id}/{s.turn}.{s.index}"))
        return ranked[:room]

    def _not_tried(self) -> str:
        return f"not tried: the budget is {self.config.budget:g} of all steps"

    def _judge(self, step: Step, before: Continued, after: Continued) -> ScoredStep:
        reason = before.reason or after.reason
        if reason is not None:
            return word_on(step, self.name, self._version, reason=reason)
        found = paired_difference([float(end) for end in after.successes], [float(end) for end in before.successes])
        with_step = monte_carlo_label(sum(after.successes), len(after.successes)).soft
        without = monte_carlo_label(sum(before.successes), len(before.successes)).soft
        return word_on(
            step,
            self.name,
            self._version,
            score=found.mean,
            parts={"se": found.paired_se, "after": with_step, "before": without, "pairs": float(self.config.pairs)},
            rationale=f"success {with_step:.2f} with this step, {without:.2f} when the policy chooses anew "
            f"({self.config.pairs} pairs, standard error {found.paired_se:.2f})",
        )


def fit_prediction(data: Sequence[ScoredTrajectory], *, seed: int = 0, grid: Grid | None = None) -> Fitted:
    """Fit Q(state, step), a ridge of the outcome on hashed features, and pi(step | situation) over clusters of steps.

    Each cluster is spoken for by its most typical step, whose text the card holds. The card's figures are those of Q on
    dialogues of tasks that the fit had not seen. Raises EvaluatorError without both outcomes.
    """
    every = examples(data)
    settings = grid or Grid()
    rows = [_q_rows(example.moments, settings.size) for example in every]

    def fit_some(numbers: Sequence[int]) -> Predict:
        model = ridge_of(every, rows, numbers, seed=seed)
        return lambda number: model.predict(rows[number])

    predicted = cross_predict(every, fit_some, seed=seed)
    final = ridge_of(every, rows, range(len(every)), seed=seed)
    table = build_table(every, settings, seed=seed)
    card = {
        **card_of(every, predicted, seed=seed),
        "settings": {**asdict(settings), "penalty": final.penalty},
        "alternatives": [{"kind": one.kind, "text": one.text} for one in _typical(table, every)],
    }
    return Fitted(kind=PREDICTION, arrays={**table.arrays(), **final.arrays()}, card=card)


def _q_rows(made: Sequence[Moment], size: int) -> Floats:
    return np.stack([row(moment, size, feedback=False) for moment in made])


def _typical(table: StepTable, data: Sequence[Example]) -> list[Moment]:
    """For every cluster of steps the step nearest to its centre."""
    flat = [moment for example in data for moment in example.moments]
    rows = np.stack([utterance(moment, table.size) for moment in flat])
    gaps = (table.steps**2).sum(axis=1)[None] - 2.0 * rows @ table.steps.T
    return [flat[int(np.argmin(gaps[:, step]))] for step in range(len(table.steps))]


class CounterfactualPrediction(FittedEvaluator):
    """Asks a fitted model what other steps would have led to: Q(state, step) - sum over steps of pi Q(state, step').

    The form for logs without an environment. The alternatives are the typical steps of each cluster, weighted by how
    often they are taken in such a situation; they are put in the place of the step, all else left as it was. What the
    model says of a step that nobody took in this situation is an extrapolation. Fitted by `fit_prediction`.
    """

    name: ClassVar[str] = PREDICTION

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        model: str = ""
        """Folder that `fit_prediction` saved: weights.safetensors and card.json. Empty: every step is unscored."""

    def __init__(self, config: Config) -> None:
        """Raises StorageError when the folder holds none of this kind."""
        self.config = config
        super().__init__(config.model)

    def _open(self, fitted: Fitted) -> None:
        self._table = StepTable.of_arrays(fitted.arrays)
        self._alternatives = [(one["kind"], one["text"]) for one in fitted.card["alternatives"]]
        self._model = Ridge.of_arrays(fitted.arrays, penalty=float(fitted.card["settings"]["penalty"]))

    def _say(self, trajectory: Trajectory, leaves: Sequence[Step], made: Sequence[Moment]) -> tuple[ScoredStep, ...]:
        del trajectory
        return tuple(self._judge(step, one) for step, one in zip(leaves, made, strict=True))

    def _judge(self, step: Step, moment: Moment) -> ScoredStep:
        policy = self._table.policy(self._table.place(moment)[0])
        others = [_instead(moment, kind, text) for kind, text in self._alternatives]
        size = self._table.size
        place = Place.of(moment, size)
        rows = np.stack([row(one, size, feedback=False, place=place) for one in (moment, *others)])
        values = [float(value) for value in self._model.predict(rows)]
        baseline = values[1] - policy_mean_advantages(values[1:], [float(share) for share in policy])[0]
        best = max(range(len(others)), key=lambda other: values[1 + other])
        return word_on(
            step,
            self.name,
            self.version,
            score=values[0] - baseline,
            parts={"q": values[0], "baseline": baseline, "best": values[1 + best]},
            rationale=f"predicted success {values[0]:.2f}, {baseline:.2f} for what is usual here",
        )


def _instead(moment: Moment, kind: str, text: str) -> Moment:
    """The same place with another step; how much that step repeats is not known, so it is taken to repeat nothing."""
    return Moment(
        turn=moment.turn,
        position=moment.position,
        kind=kind,
        text=text,
        before=moment.before,
        heard=moment.heard,
        earlier=moment.earlier,
    )
