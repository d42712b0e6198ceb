"""Every tiny recipe that learns from a knowledge file: on dialogues of the expert the file pays for the task."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest

from slea_llm import assets
from slea_llm.cli import compose
from slea_llm.config import Recipe, load_recipe
from slea_llm.errors import UnsupportedError
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.interfaces import Environment
from slea_llm.rollout import play
from slea_llm.users.scripted import ScriptedUser

DIALOGUES = 8
SANDBOXED_DIALOGUES = 2
ERRING = 0.6


def knowing() -> Iterator[Any]:
    for name in assets.names("recipes"):
        if name.endswith("_tiny.yaml") and any(
            row.name == KnowledgeBase.name for row in load_recipe(assets.find("recipes", name)).evaluators
        ):
            yield from (pytest.param(name, language, id=f"{name}-{language}") for language in ("en", "zh"))


def mean_score(recipe: Recipe, environment: Environment, *, error_rate: float) -> float:
    """Of a step by the recipe's knowledge, over dialogues of the scripted expert."""
    rows = tuple(row for row in recipe.evaluators if row.name == KnowledgeBase.name)
    scorer = compose.scorer(recipe.model_copy(update={"evaluators": rows}))
    user, scores = ScriptedUser(ScriptedUser.Config()), list[float]()
    for seed in range(SANDBOXED_DIALOGUES if environment.name == "code_task" else DIALOGUES):
        task = environment.task(seed)
        expert = environment.expert(task, error_rate=error_rate)
        trajectory = play(environment, user, expert, task, seed=seed, max_turns=recipe.rollout.max_turns)
        scored = scorer.score(trajectory).scores
        assert all(word.score is not None for word in scored), "a condition asks for what the state lacks"
        scores += [word.score for word in scored if word.score is not None]
    return fmean(scores)


@pytest.mark.parametrize(("name", "language"), list(knowing()))
def test_the_knowledge_of_a_recipe_pays_for_its_task(name: str, language: str) -> None:
    recipe = load_recipe(assets.find("recipes", name), [f"environment.language={language}"])
    try:
        environment = compose.environment(recipe)
    except UnsupportedError as error:  # code_task, where no sandbox can be made
        pytest.skip(str(error))
    right = mean_score(recipe, environment, error_rate=0.0)
    assert right > 0, "the steps that lead to success are worth less than silence"
    assert right > mean_score(recipe, environment, error_rate=ERRING)
