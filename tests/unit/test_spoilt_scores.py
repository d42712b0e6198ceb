"""The study's evaluators that are wrong on purpose: how often, how, and always the same for the same step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "learning"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "learning" / "plugins"))

from spoilt_scores import RandomScores, WrongSigns

from slea_llm import registry
from slea_llm.errors import ConfigError
from slea_llm.evaluators.words import word_on
from slea_llm.interfaces import StepEvaluator
from slea_llm.types import ScoredStep, Span, Step, Trajectory


class Right:
    """Says 0.5 of every step but those of the first turn, of which it says nothing."""

    name: ClassVar[str] = "right"
    needs: ClassVar[frozenset[str]] = frozenset()
    version = "1"

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        del trajectory
        return tuple(
            word_on(step, self.name, self.version, score=0.5)
            if step.turn
            else word_on(step, self.name, self.version, reason="too early")
            for step in steps
        )


def dialogue(name: str, count: int) -> tuple[Trajectory, list[Step]]:
    trajectory = Trajectory(
        id=name,
        task={},
        environment="order_taking",
        seed=0,
        policy_version=0,
        turns=(),
        traces=(),
        termination="failure",
        outcome=-1.0,
    )
    steps = [
        Step(trajectory_id=name, turn=turn, index=0, kind="reply", text="What dish?", span=Span(0, 10))
        for turn in range(count)
    ]
    return trajectory, steps


def scores(evaluator: StepEvaluator, name: str, count: int = 4000) -> list[float | None]:
    return [word.score for word in evaluator.score(*dialogue(name, count))]


def test_a_fifth_of_the_signs_is_turned_and_the_same_ones_every_time() -> None:
    config = WrongSigns.Config(evaluator="right")
    found = scores(WrongSigns(config, build_evaluator=lambda *_: Right()), "a")
    assert found[0] is None, "what has no score gets none"
    assert set(found[1:]) == {0.5, -0.5}
    # Four standard errors of a share of 0.2 among 4,000.
    assert sum(one == -0.5 for one in found) / 4000 == pytest.approx(0.2, abs=0.026)
    assert found == scores(WrongSigns(config, build_evaluator=lambda *_: Right()), "a")
    assert found != scores(WrongSigns(config, build_evaluator=lambda *_: Right()), "b"), "other dialogues, other steps"
    word = WrongSigns(config, build_evaluator=lambda *_: Right()).score(*dialogue("a", 2))[1]
    assert word.evaluator == "wrong_signs"


def test_random_scores_are_spread_evenly_and_say_nothing_of_the_step() -> None:
    found = [one for one in scores(RandomScores(RandomScores.Config()), "a") if one is not None]
    assert len(found) == 4000
    assert sum(found) / 4000 == pytest.approx(0.0, abs=4 * (1 / 3) ** 0.5 / 4000**0.5)
    assert sum(one > 0.5 for one in found) / 4000 == pytest.approx(0.25, abs=0.028)
    assert found == scores(RandomScores(RandomScores.Config()), "a")


def test_they_are_found_by_name_where_their_folder_is_on_the_path() -> None:
    assert registry.load("evaluator", "wrong_signs") is WrongSigns
    assert registry.load("evaluator", "random_scores") is RandomScores
    with pytest.raises(ConfigError, match=r"share 1\.5"):
        WrongSigns.Config(evaluator="right", share=1.5)
