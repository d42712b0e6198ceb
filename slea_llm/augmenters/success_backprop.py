"""Give the steps of a dialogue that succeeded a share of its success, or a higher priority; or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from slea_llm.augmenters.turns import steps_by_turn
from slea_llm.checks import check_choices, check_least
from slea_llm.errors import CreditError
from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredStep, ScoredTrajectory

TURNING_POINT = 0.5
"""The chance of success below which a step lies before the turning point."""


class SuccessBackprop:
    """A bonus and a weight for steps of successes; dialogues that did not succeed get neither.

    - `spread`: `bonus` is shared out evenly over the turns that count, and within a turn over its steps. Its sum is
      `bonus` whatever the number of turns, and cutting a turn into more steps moves nothing to or from it.
    - `each`: every step that counts earns `bonus`. The sum grows with length: above R (1 - gamma) / gamma a step, for
      a success worth R, a longer dialogue is worth more than a shorter one.

    As a weight (`weights.sources`) every step that counts weighs `priority`, all others 1. With `chance` the steps that
    count are those from the first one after which that evaluator's chance of success never fell below 0.5.
    """

    name: ClassVar[str] = "success_backprop"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        form: Literal["spread", "each"] = "spread"
        bonus: float = 1.0
        """0.1 of the reward for success (10) by default; more than 0.2 of it drowns the outcome. 0: no bonus."""
        priority: float = 2.0
        """Factor on the weight of the steps that count, 1 or above. 1: no priority."""
        chance: str = ""
        """Evaluator whose parts `success_after` or `after` say the chance of success. Empty: all steps count."""

        def __post_init__(self) -> None:
            check_choices(self, form=("spread", "each"))
            check_least(self, bonus=0, priority=1)

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def fits(cls, config: Config, name: str, stream: StreamSettings) -> list[str]:
        """What is odd about feeding this stream."""
        del stream
        if config.form == "each" and config.bonus:
            return [
                f"augmenter {cls.name}, form each: a longer success earns more than a shorter one in stream {name}; "
                "set form to spread"
            ]
        return []

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> bonus` for the steps that count. Raises CreditError without the evaluator of `chance`."""
        del progress
        turns = self._counting(scored)
        if not self.config.bonus:
            return {}
        if self.config.form == "each":
            return {key: self.config.bonus for keys in turns for key in keys}
        return {key: self.config.bonus / len(turns) / len(keys) for keys in turns for key in keys}

    def weights(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> priority` for the steps that count. Raises CreditError without the evaluator of `chance`."""
        del progress
        return {key: self.config.priority for keys in self._counting(scored) for key in keys}

    def _counting(self, scored: ScoredTrajectory) -> list[list[tuple[int, int]]]:
        """The steps that count, by turn; a chance that an evaluator with a shut gate says picks none of them."""
        if not scored.trajectory.counts_as_success:
            return []
        turns = list(steps_by_turn(scored).values())
        if not self.config.chance or self.config.chance in scored.shut:
            return turns
        order = [key for keys in turns for key in keys]
        start = _turning_point(order, self._chances(scored))
        counting = set(order[start:])
        kept = [[key for key in keys if key in counting] for keys in turns]
        return [keys for keys in kept if keys]

    def _chances(self, scored: ScoredTrajectory) -> dict[tuple[int, int], float]:
        """Chance of success after each step that the evaluator scored."""
        name = self.config.chance
        if name not in scored.evaluator_versions:
            known = ", ".join(sorted(scored.evaluator_versions)) or "no evaluator"
            raise CreditError(f"{self.name}: trajectory {scored.trajectory.id} was scored by {known}, not by {name!r}")
        return {key: _after(one) for key, one in scored.scores_of(name).items() if one.score is not None}


def _after(score: ScoredStep) -> float:
    for part in ("success_after", "after"):
        if part in score.parts:
            return score.parts[part]
    raise CreditError(
        f"evaluator {score.evaluator!r} says no chance of success (its parts are {', '.join(score.parts) or 'none'}); "
        "return_decomposition does, and reward_model when it reads progress"
    )


def _turning_point(order: Sequence[tuple[int, int]], chances: Mapping[tuple[int, int], float]) -> int:
    """Place of the first step after which the chance never falls below one half; a step without a chance is no fall."""
    below = [place for place, key in enumerate(order) if chances.get(key, 1.0) < TURNING_POINT]
    return below[-1] + 1 if below else 0
