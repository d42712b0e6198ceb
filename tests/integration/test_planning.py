"""What `slea plan` takes and refuses, before any model is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from slea_llm import planning
from slea_llm.assets import find, names
from slea_llm.cli import main
from slea_llm.config import Recipe, load_recipe
from slea_llm.errors import ConfigError, SleaError, UnsupportedError
from slea_llm.evaluators.reward_model_card import Card, Reliability
from slea_llm.planning import Launch

LAUNCHES = [name for name in names("recipes") if name.startswith("accelerate/")]
TINY = find("recipes", "order_taking_tiny.yaml")
ENGINE = "{endpoint: {url: engine, model: some/model}}"


def recipe(*overrides: str) -> Recipe:
    return load_recipe(TINY, overrides)


def launch_file(folder: Path, **document: object) -> Path:
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_every_way_of_launching_is_there() -> None:
    assert {f"accelerate/{name}.yaml" for name in ("single", "cpu2", "ddp", "fsdp2", "zero2", "zero3")} == set(LAUNCHES)


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launch_config_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(TINY), "--accelerate", str(find("recipes", name)), "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    launch = Launch.read(find("recipes", name))
    assert f"over {launch.processes} process(es)" in printed
    assert f"launch: {launch.processes} process(es), {planning.LAUNCH_TYPES[launch.kind]}" in printed
    assert "the recipe can be run" in printed.splitlines()[-1]


def test_a_base_that_the_warm_start_makes_is_named_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    command = ["plan", str(TINY), f"model.base={base}"]
    assert main([*command, f"warm_start.output={base}"]) == 0
    assert capsys.readouterr().out.endswith(f"the recipe can be run once `slea warm-start` has made {base}\n")
    assert main([*command, f"warm_start.output={tmp_path / 'other'}"]) == 0
    assert f"the recipe can be run once {base} is there: a folder" in capsys.readouterr().out
    assert main([*command, f"warm_start.output={base}", "environment={name: gymnasium, id: CartPole-v1}"]) == 2
    assert "environment 'gymnasium' has no scripted expert to imitate" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["accelerate/fsdp2.yaml", "accelerate/zero2.yaml", "accelerate/zero3.yaml"])
def test_sharding_without_gpus_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"without GPUs .* use recipes/accelerate/cpu2\.yaml"):
        planning.check(recipe(), Launch.read(find("recipes", name)), gpus=0)


@pytest.mark.parametrize(
    ("document", "error", "text"),
    [
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, UnsupportedError, "starts ONE process"),
        ({"distributed_type": "NO", "use_cpu": True, "num_processes": 2}, UnsupportedError, "starts ONE process"),
        ({"distributed_type": "TPU"}, UnsupportedError, "'TPU' is not one of"),
        ({"num_processes": "two"}, ConfigError, "num_processes 'two' is not a whole number"),
        ({"num_processes": 0}, ConfigError, "num_processes 0 is not a whole number, 1 or more"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, UnsupportedError, "use 2"),
    ],
)
def test_launch_configs_that_would_do_something_else_are_refused(
    tmp_path: Path, document: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Launch.read(launch_file(tmp_path, **document))


def test_a_launch_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        Launch.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["losses.value.name=entropy"], "no value loss trains one"),
        (["losses.value.name=ppo"], "name ppo twice"),
        (["kl_in_reward=0.1", "streams.outcome.sources=[outcome, reference_kl]"], "it would count twice"),
        (["evaluation.temperature=0.5"], "a sampler has one temperature"),
        (["model.dtype=float64", "trainer.precision=bf16"], "contradict"),
        (
            ["augmenters=[{name: slot_progress, gamma: 0.9}]", "streams.outcome.sources=[outcome, slot_progress]"],
            "gamma 0.9, stream outcome by gamma_turn 0.99",
        ),
        (["model.critic=none"], "no values to train"),
        (["model.critic=none", "losses=[{name: ppo}]", "trainer.critic_warmup_iterations=2"], "cannot be warmed up"),
        (["trainer.proximal=sampler"], "since model.critic is own_adapter"),
        (
            [
                "model.critic=none",
                "losses=[{name: ppo}, {name: reference_kl}]",
                "trainer.proximal=sampler",
                "trainer.critic_warmup_iterations=0",
            ],
            "since the reference is read",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        planning.check(recipe(*overrides))


def test_a_process_without_a_group_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="64 processes share 32 groups"):
        planning.check(recipe(), Launch(processes=64, kind="MULTI_GPU"), gpus=64)


def test_what_is_odd_is_said_with_its_mend() -> None:
    changes = [
        "rollout.episodes=8",
        "trainer.minibatch=8",
        "evaluation.tasks=0",
        "rollout.max_turns=4",
        "trainer.iterations=4",
    ]
    said = [" ".join(note.split()[:2]).rstrip(":") for note in planning.check(recipe(*changes))]
    assert said == ["rollout.max_turns 4", "rollout.episodes 8", "trainer.iterations 4", "evaluation.tasks 0"]
    assert planning.check(recipe()) == []


def test_a_name_of_the_weights_before_the_warm_start_is_odd() -> None:
    warm = ["model.base=made", "warm_start.output=made", "warm_start.dialogues=320", "warm_start.from_scratch=null"]
    (note,) = planning.check(recipe(*warm, "model.declared_base=org/model"))
    assert note.startswith("model.declared_base 'org/model' must name the weights that the warm start has made")
    for other in ("model.declared_base=null", "warm_start.lora=true", "model.base=org/model"):
        assert planning.check(recipe(*warm, "model.declared_base=org/model", other)) == []


CARD = Card(
    encoder="hashing",
    encoding="apart",
    network={},
    seed=0,
    data={},
    labels={"outcome": 9},
    settings={},
    calibration={"success": (1.0, 0.0)},
    reliability={
        "success": Reliability(
            steps=90,
            dialogues=30,
            positive_dialogues=15,
            positive_share=0.5,
            auc=0.6,
            ece=0.02,
            brier=0.2,
            baselines={"length": 0.5},
        )
    },
)


def fitted_folder(folder: Path, **changes: Any) -> Path:
    """A card with weights beside it, which no plan opens."""
    folder.mkdir()
    (folder / "card.json").write_text(dataclasses.replace(CARD, **changes).to_json(), encoding="utf-8")
    (folder / "reward_model.safetensors").write_bytes(b"")
    return folder


def judged_by(text: str) -> Recipe:
    name = yaml.safe_load(text)["name"]
    return recipe(f"evaluators=[{text}]", f"streams={{outcome: {{sources: [outcome]}}, steps: {{sources: [{name}]}}}}")


def test_a_plan_reads_the_card_of_a_reward_model_and_says_when_its_gate_is_shut(tmp_path: Path) -> None:
    folder = fitted_folder(tmp_path / "model")
    found = planning.check(judged_by(f"{{name: reward_model, model: {folder}}}"))
    assert len(found) == 1
    assert found[0].startswith("reward_model: gate shut, weight 0: AUC too low; held-out AUC 0.600")
    inner = f"{{name: reward_model, options: {{model: {folder}}}}}"
    mixed = f"{{name: blend, evaluators: [{{name: knowledge_base}}, {inner}]}}"
    assert planning.check(judged_by(mixed)) == found
    causal = fitted_folder(tmp_path / "causal", encoding="causal")
    (line,) = planning.check(judged_by(f"{{name: causal_reward_model, model: {causal}}}"))
    assert line.startswith("causal_reward_model: gate shut")
    good = dataclasses.replace(CARD.reliability["success"], auc=0.8)
    whole = fitted_folder(tmp_path / "good", reliability={"success": good})
    assert planning.check(judged_by(f"{{name: reward_model, model: {whole}}}")) == []


@pytest.mark.parametrize(
    ("evaluator", "text"),
    [
        ("{name: reward_model}", "has no model and is never fitted: give model"),
        ("{name: reward_model, model: %s/none}", "no card of a fitted reward model at"),
        ("{name: reward_model, model: %s/torn}", "is not JSON"),
        ("{name: reward_model, model: %s/bare}", "a card and no reward_model.safetensors"),
        ("{name: reward_model, model: %s/model, read: label}", "fitted on success only"),
        ("{name: causal_reward_model}", "has no model; give the folder"),
        ("{name: causal_reward_model, model: %s/model}", "holds a reward_model, not a causal_reward_model"),
        ("{name: hindsight, model: %s/model}", "holds None, not hindsight"),
    ],
)
def test_a_plan_refuses_a_folder_that_holds_nothing_to_score_by(tmp_path: Path, evaluator: str, text: str) -> None:
    for name in ("model", "torn", "bare"):
        fitted_folder(tmp_path / name)
    (tmp_path / "torn" / "card.json").write_text('{"format": 1', encoding="utf-8")
    (tmp_path / "bare" / "reward_model.safetensors").unlink()
    with pytest.raises(SleaError, match=text):
        planning.check(judged_by(evaluator.replace("%s", str(tmp_path))))


def test_a_model_that_the_run_itself_fits_needs_no_folder() -> None:
    assert planning.check(judged_by("{name: reward_model, refresh_every: 10}")) == []


SIL = "losses=[{name: ppo}, {name: value}, {name: imitation, form: sil}]"
BARE = ["model.critic=none", "losses=[{name: ppo, importance_cap: 2.0}]", "trainer.critic_warmup_iterations=0"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["trainer.proximal=sampler", *BARE], "would clip against the policy that sampled long ago"),
        (["losses=[{name: ppo, importance_cap: 0.0}, {name: value}]"], "ppo.importance_cap 0 would learn"),
        (["losses=[{name: ppo, importance_cap: '0'}, {name: value}]"], "ppo.importance_cap 0 would learn"),
        (BARE, "replay.priority error is the error of a critic"),
        (["rollout.group_size=16", "replay.share=0.25"], r"room for 10\.7 .* less than a group of 16"),
        ([SIL], "needs returns that were had"),
        (["rollout.scoring_batch=8", "rollout.scoring_ahead=1", "evaluators=[{name: counterfactual}]",
          "streams={outcome: {sources: [outcome]}, s: {sources: [counterfactual]}}"], "plays the next dialogues"),
        (["rollout.scoring_batch=8", "rollout.scoring_ahead=1", "streams={all: {sources: [outcome, blend]}}",
          f"evaluators=[{{name: blend, evaluators: [{{name: rules}}, {{name: llm_judge, options: {ENGINE}}}]}}]"],
         "evaluator 'llm_judge' needs the sampler or an engine"),
        (["rollout.scoring_batch=8", "rollout.scoring_ahead=1", f"parser={{name: llm, {ENGINE[1:]}"],
         "parser 'llm' needs the sampler or an engine"),
    ],
)  # fmt: skip
def test_replay_and_imitation_that_would_learn_something_else_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        planning.check(recipe("replay.share=0.5", *overrides))


def test_replay_and_imitation_that_fit_are_taken() -> None:
    planning.check(recipe("replay.share=0.25", SIL, "credit={name: nested_gae, lam_critic: 1.0}"))
    (note,) = planning.check(recipe("replay.share=0.25", "replay.capacity=8"))
    assert note.startswith("replay.capacity 8 is less than one iteration's 32 dialogues")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            "{name: imitation, gain: knowlege_base}",
            r"one of advantage, knowledge_base \(did you mean 'knowledge_base'\?\)",
        ),
        ("{name: imitation_prototypes, gain: judge}", "gain 'judge' is not one of"),
        ("{name: imitation, gain: knowledge_base, demonstrations: nowhere.jsonl}", "'nowhere.jsonl' is no file"),
    ],
)
def test_imitation_of_nothing_is_refused(loss: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        planning.check(recipe(f"losses=[{{name: ppo}}, {{name: value}}, {loss}]"))


def test_knowledge_of_another_environment_is_told_with_the_mend() -> None:
    assert not [note for note in planning.check(recipe()) if "is knowledge of" in note]
    (note,) = [one for one in planning.check(recipe("environment={name: trip_planning}")) if "is knowledge of" in one]
    assert note.startswith(
        "knowledge/order.yaml is knowledge of order_taking, and these are dialogues of trip_planning"
    )
    assert note.endswith("set knowledge_base's file to knowledge/trip_planning.yaml")
