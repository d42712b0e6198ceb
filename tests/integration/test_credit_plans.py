"""What can be credited how: the menu of docs/credit.md against recipes, arms and refusals; nothing is loaded."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from slea_llm.assets import find, names
from slea_llm.config import load_recipe
from slea_llm.errors import ConfigError, SleaError, UnsupportedError
from slea_llm.planning import check

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "credit.md").read_text(encoding="utf-8")
TINY = find("recipes", "order_taking_tiny.yaml")
SMOKE = [name for name in names("recipes") if name.startswith("smoke/")]
ARMS = dict(line.split(None, 1) for line in PAGE.partition("```arms\n")[2].partition("```")[0].splitlines())
CRITIC_FREE = (
    "model.critic=none",
    "losses=[{name: ppo}]",
    "trainer.critic_warmup_iterations=0",
    "rollout.group_size=8",
)
GROUPS = ("credit={name: group_relative}", "evaluators=[]", "streams={outcome: {sources: [outcome]}}")


@pytest.mark.parametrize("name", SMOKE)
def test_a_smoke_recipe_can_be_planned(name: str) -> None:
    check(load_recipe(find("recipes", name)))


def test_the_menu_names_the_smoke_recipes_that_there_are() -> None:
    stems = {Path(name).stem for name in SMOKE}
    menu = PAGE.partition("## The menu")[2].partition("\n## ")[0]
    cells = [line.split("|")[-2] for line in menu.splitlines() if line.startswith("|")][2:]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named <= stems
    others = {
        stem for stem in stems if stem.startswith(("augment_", "imitation_", "replay_"))
    }  # other pages tell of them
    assert stems - others == named


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_can_be_planned(name: str) -> None:
    check(load_recipe(TINY, shlex.split(ARMS[name])))


def test_arms_differ() -> None:
    recipes = [load_recipe(TINY, shlex.split(overrides)).to_yaml() for overrides in ARMS.values()]
    assert len(set(recipes)) == len(recipes) == 9


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (["credit.unit=turn"], ConfigError, "gamma_step is 0.0, but with credit unit 'turn'"),
        (["credit.unit=phrase"], ConfigError, "got 'phrase'"),
        (["credit.length_alpha=0.05", "credit.unit=step"], ConfigError, "length_alpha acts on tokens only"),
        (["credit.conditional=q_head"], ConfigError, "set unit to substep, step or turn"),
        (["credit.whiten_by=batch"], ConfigError, "batch"),
        (["losses=[{name: ppo}]"], UnsupportedError, "credit nested_gae reads a critic, but no value loss"),
        ([*CRITIC_FREE, "credit.conditional=after_state"], UnsupportedError, "conditional after_state reads a critic"),
        (list(GROUPS), UnsupportedError, "reads no critic: it would be trained for nothing"),
        ([*GROUPS, *CRITIC_FREE, "losses=[{name: ppo}, {name: value}]"], UnsupportedError, "no values to train"),
        ([*GROUPS, *CRITIC_FREE, "rollout.group_size=1"], UnsupportedError, "every advantage would be 0"),
        ([*GROUPS, *CRITIC_FREE, "streams.outcome.lam_turn=1.0"], ConfigError, "lam_turn is 1.0, but group_relative"),
        ([*GROUPS, *CRITIC_FREE, "credit.baseline=meen"], ConfigError, "baseline"),
        (["losses=[{name: ppo}, {name: value}, {name: entropy, floor: 1, weight: 0}]"], ConfigError, "needs a weight"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(overrides: list[str], error: type[SleaError], text: str) -> None:
    with pytest.raises(error, match=text):
        check(load_recipe(TINY, overrides))


def test_groups_without_a_critic_can_be_planned_and_say_what_a_cut_means() -> None:
    notes = check(load_recipe(TINY, [*GROUPS, *CRITIC_FREE, "rollout.max_turns=6"]))
    assert any("they have no outcome and count as if nothing had followed" in note for note in notes)
