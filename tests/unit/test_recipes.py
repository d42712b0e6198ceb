"""Every recipe of a tiny model parses and fits its environment; every environment of this library has one."""

from __future__ import annotations

import pytest

from slea_llm import assets, registry
from slea_llm.cli import compose
from slea_llm.config import load_recipe
from slea_llm.errors import UnsupportedError

TINY = sorted(name for name in assets.names("recipes") if name.endswith("_tiny.yaml"))


@pytest.mark.parametrize("name", TINY)
def test_recipe_allows_the_turns_that_its_environment_allows(name: str) -> None:
    recipe = load_recipe(assets.find("recipes", name))
    try:
        environment = compose.environment(recipe)
    except UnsupportedError as error:  # code_task, where no sandbox can be made
        pytest.skip(str(error))
    assert f"{environment.name}_tiny.yaml" == name
    assert recipe.rollout.max_turns == environment.config.max_turns  # type: ignore[attr-defined]
    assert name in assets.find("recipes", name).read_text(encoding="utf-8")


def test_every_environment_of_this_library_has_a_recipe() -> None:
    named = {name.removesuffix("_tiny.yaml") for name in TINY}
    assert named >= registry.ROWS["environment"].keys() - {"gymnasium", "textworld", "verifiers"}


def test_the_support_recipe_knows_no_support() -> None:
    recipe = load_recipe(assets.find("recipes", "tech_support_tiny.yaml"))
    assert not recipe.evaluators
    assert [stream.sources for stream in recipe.streams.values()] == [("outcome",)]
