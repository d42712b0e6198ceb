"""Weigh the steps of a turn by how much the user told: "two large pizzas to 5 Oak Street" counts, "thanks" does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import yaml

from slea_llm import assets
from slea_llm.augmenters.turns import heard, names_in, steps_by_turn
from slea_llm.checks import check_choices
from slea_llm.encoders import words
from slea_llm.types import ScoredTrajectory, Turn

WORDS_OF_A_SLOT = 3
"""A newly filled slot tells as much as so many new words."""
HALF = 3.0
"""New words at which the density is one half."""


class InfoDensity:
    """The density n / (n + 3) of what the user told, in [0, 1): n counts content words that nobody said before, and
    each slot that it filled as three more.

    It weighs every step of the turn (`StepWeigher`); floor, power and the mean of 1 are settings of `weights`.
    """

    name: ClassVar[str] = "info_density"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        reads: Literal["answer", "heard"] = "answer"
        """`answer`: what the user said after the turn, which its question earned; a last turn, which ends the dialogue,
        weighs 1. `heard`: what the user had said before it, which the turn has to deal with."""
        slots: str = "filled"
        """Key of the public state that lists the filled slots. Empty: words alone."""

        def __post_init__(self) -> None:
            check_choices(self, reads=("answer", "heard"))

    def __init__(self, config: Config) -> None:
        """Reads the list of words that say nothing from data/knowledge/words.yaml."""
        self.config = config
        document: Mapping[str, Any] = yaml.safe_load(assets.find("data", "knowledge/words.yaml").read_bytes())
        self._empty = frozenset(part for listed in document["empty"].values() for one in listed for part in words(one))

    def weights(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> weight` in [0, 1]. Raises CreditError when a state lacks the key of the slots."""
        del progress
        turns = scored.trajectory.turns
        if scored.trajectory.failed or not turns:
            return {}
        densities = self.densities(scored)
        if self.config.reads == "answer":
            densities = [*densities[1:], 1.0]
        steps = steps_by_turn(scored)
        return {
            key: density for turn, density in zip(turns, densities, strict=True) for key in steps.get(turn.index, ())
        }

    def densities(self, scored: ScoredTrajectory) -> list[float]:
        """How much the user had told before each turn, since the turn before."""
        turns = scored.trajectory.turns
        filled = [self._filled(scored, turn) for turn in turns]
        known: set[str] = set()
        found: list[float] = []
        for place, turn in enumerate(turns):
            told = self._content(heard(turn))
            earlier = filled[place - 1] if place else frozenset()
            count = len(told - known) + WORDS_OF_A_SLOT * len(filled[place] - earlier)
            found.append(count / (count + HALF))
            known |= told | self._content(turn.text)
        return found

    def _content(self, text: str) -> set[str]:
        return set(_kept(words(text), self._empty))

    def _filled(self, scored: ScoredTrajectory, turn: Turn) -> frozenset[str]:
        if not self.config.slots:
            return frozenset()
        return names_in(turn.state_before, self.config.slots, part=self.name, scored=scored, turn=turn.index)


def _kept(found: Sequence[str], empty: frozenset[str]) -> list[str]:
    return [word for word in found if word not in empty]
