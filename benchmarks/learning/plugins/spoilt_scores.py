"""Evaluators that are wrong on purpose: another's scores with some signs turned, and scores that mean nothing.

What a step gets hangs on a hash of the step alone, so that the same step of the same dialogue always gets the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slea_llm.errors import ConfigError
from slea_llm.evaluators.blend import BuildEvaluator
from slea_llm.evaluators.words import word_on
from slea_llm.types import ScoredStep, Step, Trajectory, leaf_steps


class WrongSigns:
    """What another evaluator says, with the opposite sign for a share of the steps. Steps without a score stay so."""

    name: ClassVar[str] = "wrong_signs"
    needs: ClassVar[frozenset[str]] = frozenset({"build_evaluator"})

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        evaluator: str
        options: dict[str, Any] = field(default_factory=dict)
        """Of the evaluator's own `Config`."""
        share: float = 0.2
        """Of the steps whose sign is turned; in [0, 1]."""

        def __post_init__(self) -> None:
            if not 0.0 <= self.share <= 1.0:
                raise ConfigError(f"share {self.share} is not in [0, 1]")

    def __init__(self, config: Config, *, build_evaluator: BuildEvaluator) -> None:
        self._inner = build_evaluator(config.evaluator, config.options)
        self._share = config.share

    @property
    def version(self) -> str:
        return f"{self._inner.version}/{self._share:g}"

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        texts = {(step.turn, step.index): step.text for step in steps}
        return tuple(
            self._spoilt(word, wrong=draw(trajectory, word.turn, word.step, texts[word.turn, word.step]) < self._share)
            for word in self._inner.score(trajectory, steps)
        )

    def _spoilt(self, word: ScoredStep, *, wrong: bool) -> ScoredStep:
        own = dataclasses.replace(word, evaluator=self.name, version=self.version)
        if not wrong or word.score is None:
            return own
        return dataclasses.replace(own, score=-word.score, rationale=f"sign turned: {word.rationale}")


class RandomScores:
    """A score between -1 and 1 for every step, each as likely as another, whatever the step says."""

    name: ClassVar[str] = "random_scores"
    needs: ClassVar[frozenset[str]] = frozenset()
    version: ClassVar[str] = "1"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        del config

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        return tuple(
            word_on(
                step,
                self.name,
                self.version,
                score=2.0 * draw(trajectory, step.turn, step.index, step.text) - 1.0,
                rationale="by chance",
            )
            for step in leaf_steps(steps)
        )


def draw(trajectory: Trajectory, turn: int, step: int, text: str) -> float:
    """A number in [0, 1) that hangs on the step and its place alone."""
    place = f"{trajectory.environment}/{trajectory.id}/{trajectory.seed}/{turn}/{step}/{text}"
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big") / 2**56
