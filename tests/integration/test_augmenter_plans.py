"""What `slea plan` takes, notes and refuses of augmenters and weights."""

from __future__ import annotations

import pytest

from slea_llm import planning
from slea_llm.assets import find
from slea_llm.config import load_recipe
from slea_llm.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.timeout(240)  # the losses of a recipe load torch

ALL = find("recipes", "smoke/augment_all.yaml")


def plan(*overrides: str) -> list[str]:
    return planning.check(load_recipe(ALL, overrides))


def test_several_parts_at_once_are_taken_without_a_note() -> None:
    assert not [note for note in plan() if "augmenter" in note]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("weights.use=[loss, sampler]", "counts lambda squared"),
        ("weights.use=[sampler]", "nothing is drawn by weights"),
        ("streams.outcome.gamma_turn=0.9", r"gamma 0\.99, stream outcome by gamma_turn 0\.9"),
        ("streams.outcome.gamma_step=0.95", r"gamma_step 0\.95; set it to 1"),
        ("streams.outcome.gamma_token=0.95", r"gamma_token 0\.95; set it to 1"),
        ("streams.outcome.gamma_substep=0.5", r"gamma_substep 0\.5; set it to 1"),
    ],
)
def test_what_would_count_twice_or_break_a_potential_is_refused(override: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        plan(override)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("weights.sources=[info_density]", "augmenter 'success_backprop' feeds no stream"),
        ("weights.sources=[info_density, success_backprop, slot_progress]", "pays rewards and weighs no steps"),
        ("weights.sources=[info_dense, success_backprop]", r"did you mean 'info_density'"),
        ("streams.scores.sources=[knowledge_base, info_density]", "unknown source 'info_density'"),
        ("weights.power=2", "power 2.* is out of range"),
        ("augmenters.value_shaping.lam=2", r"lam 2.* is not in \[0, 1\]"),
    ],
)
def test_what_leads_nowhere_is_refused(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan(override)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("augmenters.value_shaping.form=unmasked", "form unmasked"),
        ("augmenters.value_shaping.clip=10", "clips what it pays"),
        ("augmenters.value_shaping.refresh_every=0", "nothing is ever fitted"),
        ("augmenters.slot_progress.form=every", "form every"),
    ],
)
def test_what_is_odd_is_said_with_its_mend(override: str, text: str) -> None:
    (note,) = [note for note in plan(override) if "augmenter" in note]
    assert text in note
    assert "set " in note


def test_the_bonus_for_every_step_is_odd() -> None:
    path = find("recipes", "smoke/augment_success_backprop.yaml")
    notes = planning.check(load_recipe(path, ["augmenters.success_backprop.form=each"]))
    assert any("a longer success earns more" in note for note in notes)


POTENTIAL = (
    "evaluators=[]",
    "augmenters=[{name: slot_progress, form: potential, gamma: 0.99}]",
    "streams={outcome: {sources: [outcome, slot_progress], gamma_turn: 0.99}}",
    "model.critic=none",
    "trainer.critic_warmup_iterations=0",
    "losses=[{name: ppo}]",
)


def test_a_potential_wants_a_critic() -> None:
    recipe = find("recipes", "order_taking_tiny.yaml")
    (note,) = planning.check(load_recipe(recipe, POTENTIAL))
    assert note.startswith("augmenter slot_progress pays a potential without a critic")
    groups = ["credit={name: group_relative}", "rollout.group_size=8"]
    with pytest.raises(UnsupportedError, match="beside credit group_relative does nothing at best"):
        planning.check(load_recipe(recipe, [*POTENTIAL, *groups]))
    assert planning.check(load_recipe(recipe, [*POTENTIAL, *groups, "augmenters.slot_progress.form=bonus"])) == []


def test_weights_act_in_the_sampler_or_in_the_loss() -> None:
    drawn = ["replay={share: 0.4, priority: weights}"]
    plan(*drawn, "weights.use=[sampler]")
    with pytest.raises(UnsupportedError, match="lambda would count squared"):
        plan(*drawn)
    with pytest.raises(UnsupportedError, match="names no augmenter"):
        plan(
            *drawn,
            "weights.sources=[]",
            "augmenters=[{name: slot_progress}]",
            "streams.outcome.sources=[outcome, slot_progress]",
        )
