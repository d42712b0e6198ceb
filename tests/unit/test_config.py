"""A recipe is read strictly: every fault at once, with place, value and the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slea_llm.assets import find, names
from slea_llm.config import (
    check_components,
    component_config,
    differences,
    load_recipe,
    load_scoring_recipe,
    parse_recipe,
)
from slea_llm.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"base": "some/model"}, "environment": {"name": "order_taking"}}
RECIPES = [name for name in names("recipes") if name.endswith(".yaml") and "/" not in name]


def recipe_file(folder: Path, document: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_every_fault_is_reported_at_once_with_the_nearest_key() -> None:
    document = {
        **MINIMAL,
        "rollout": {"max_turn": 3, "temperature": 0},
        "streams": {"a": {"sources": ["outcome"], "gama_turn": 1}},
        "trainr": {},
    }
    with pytest.raises(ConfigError) as caught:
        parse_recipe(document)
    text = str(caught.value)
    assert "rollout.max_turn: unknown key" in text
    assert "did you mean 'max_turns'?" in text
    assert "streams.a.gama_turn: unknown key" in text
    assert "did you mean 'gamma_turn'?" in text
    assert "did you mean 'trainer'?" in text


def test_a_value_out_of_range_names_value_and_range() -> None:
    with pytest.raises(ConfigError, match=r"rollout: .*temperature 0\.0 is out of range; allowed: above 0"):
        parse_recipe({**MINIMAL, "rollout": {"temperature": 0}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": {"episodes": 10, "group_size": 4}}, "group_size 4 does not divide episodes 10"),
        ({"rollout": {"episodes": 32}, "trainer": {"minibatch": 10}}, "minibatch 10 does not divide episodes 32"),
        ({"streams": {}}, "streams is empty"),
        ({"kl_in_reward": -1}, r"kl_in_reward -1\.0 must be finite and 0 or more"),
        ({"kl_in_reward": float("nan")}, "kl_in_reward nan must be finite and 0 or more"),
        ({"rollout": {"tasks": 5000}, "evaluation": {"panel_seed": 100}}, "reaches into the evaluation panel"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe({**MINIMAL, **change})


def test_overrides_reach_fields_list_entries_and_component_options(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, {**MINIMAL, "losses": [{"name": "ppo"}, {"name": "value", "weight": 0.5}]})
    overrides = [
        "trainer.learning_rate=1e-4",
        "losses.value.weight=0.25",
        "losses.0.clip_low=0.1",
        "user.name=scripted",
    ]
    recipe = load_recipe(path, overrides)
    assert recipe.trainer.learning_rate == 1e-4
    assert recipe.losses[1].options == {"weight": 0.25}
    assert recipe.losses[0].options == {"clip_low": 0.1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rate", "not of the form key.sub=value"),
        ("losses.valu.weight=1", "did you mean 'value'?"),
        ("model.base.deeper=1", "holds 'some/model', which has no keys"),
        ("trainer.epoch=1", "did you mean 'epochs'?"),
        ("trainer.epochs=[1", "override 'trainer.epochs=[1': its value is not YAML"),
        ("trainer={epochs: 1, epochs: 2}", "'epochs' is given twice"),
        ("warm_start={from_scratch: {hiden: 64}}", "known: heads, hidden, layers, vocab_size (did you mean 'hidden'?)"),
    ],
)
def test_a_bad_override_says_what_is_wrong(tmp_path: Path, override: str, message: str) -> None:
    path = recipe_file(tmp_path, {**MINIMAL, "losses": [{"name": "ppo"}, {"name": "value"}]})
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, [override])
    assert message in str(caught.value)


def test_the_resolved_recipe_reads_back_equal() -> None:
    recipe = parse_recipe({**MINIMAL, "evaluators": [{"name": "knowledge_base", "file": "x.yaml"}]})
    assert parse_recipe(yaml.safe_load(recipe.to_yaml())) == recipe


def test_an_unknown_component_and_an_unknown_option_name_the_nearest() -> None:
    recipe = parse_recipe({**MINIMAL, "credit": {"name": "nested_gea"}, "losses": [{"name": "ppo", "clip_lo": 1}]})
    with pytest.raises(ConfigError) as caught:
        check_components(recipe)
    text = str(caught.value)
    assert "did you mean 'nested_gae'?" in text
    assert "did you mean 'clip_low'?" in text
    nested = parse_recipe({**MINIMAL, "parser": {"name": "reply", "tags": {"tool_tag": ["call"]}}})
    with pytest.raises(ConfigError, match=r"tags\.tool_tag: unknown key; .*did you mean 'tool_tags'"):
        check_components(nested)


def test_component_options_are_validated_by_the_component_itself() -> None:
    recipe = parse_recipe(MINIMAL)
    component, config = component_config("environment", recipe.environment)
    assert component.name == "order_taking"
    assert isinstance(config, component.Config)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses_and_its_components_resolve(name: str) -> None:
    check_components(load_recipe(find("recipes", name)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"model: {base: a}\nenvironment: {name: order_taking}\nmodel: {base: b}\n",
            r"'model' is given twice(.|\n)*line 3",
        ),
        (
            b"model: {base: a}\nenvironment: {name: order_taking, max_turns: 12, max_turns: 20}",
            "'max_turns' is given twice",
        ),
        (b"model: \xff", "is not YAML: 'utf-8' codec"),
        (b"", "must be a mapping of sections, not NoneType"),
    ],
)
def test_a_file_that_says_a_thing_twice_or_nothing_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_missing_file_and_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_recipe(recipe_file(tmp_path, [1, 2]))


def test_a_fault_of_the_whole_recipe_does_not_print_the_recipe() -> None:
    with pytest.raises(ConfigError, match=r"trainer.minibatch 16 does not divide episodes 2$"):
        load_recipe(find("recipes", "order_taking_tiny.yaml"), ["rollout.episodes=2"])


def test_differences_name_place_and_both_values() -> None:
    one, other = (
        {"losses": [{"name": "ppo"}, {"name": "value", "weight": weight}], "streams": streams}
        for weight, streams in ((0.5, {"a": 1}), (0.25, {"a": 1, "b": 2}))
    )
    assert differences(one, other) == ["losses.1.weight: 0.5 before, 0.25 now", "streams.b: None before, 2 now"]
    assert differences(one, {**one, "losses": []}) == [f"losses: {one['losses']!r} before, [] now"]
    assert differences(one, one) == []


def test_logs_are_cut_as_a_training_recipe_cuts_them_also_where_it_leaves_that_to_the_default(tmp_path: Path) -> None:
    assert load_scoring_recipe(recipe_file(tmp_path, MINIMAL)).parser == parse_recipe(MINIMAL).parser
    scoring = load_scoring_recipe(recipe_file(tmp_path, {"evaluators": [{"name": "knowledge_base"}]}))
    assert (scoring.parser.name, [one.name for one in scoring.evaluators]) == ("auto", ["knowledge_base"])
    chosen = {**MINIMAL, "parser": {"name": "tagged", "split_thoughts": True}}
    assert load_scoring_recipe(recipe_file(tmp_path, chosen)).parser.options == {"split_thoughts": True}
