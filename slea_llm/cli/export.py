"""Write what a run has trained, as a PEFT adapter or merged weights, proved equal to the trainer's own outputs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slea_llm import registry, run_folder
from slea_llm.cli import compose
from slea_llm.cli.output import say
from slea_llm.config import ComponentSpec, Recipe, load_recipe
from slea_llm.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from slea_llm.interfaces import Generator
    from slea_llm.models.policy import PolicyCritic
    from slea_llm.settings import ModelSettings

FORMS = ("adapter", "merged", "both")
NO_ENGINE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="output folder of a training run")
    parser.add_argument("--checkpoint", type=Path, default=None, help="checkpoint (default: the newest whole one)")
    parser.add_argument("--form", choices=FORMS, default=None, help="default: export.form of the recipe")
    parser.add_argument(
        "--engine",
        default=None,
        help=f"engine that answers from the export in the proof, {NO_ENGINE!r} for none (default: the recipe's)",
    )
    parser.add_argument("--output", type=Path, default=None, help="folder to write to (default: RUN)")
    parser.add_argument("--name", default="export", help="name of the export's folder in the output folder")
    parser.add_argument("--allow-unchanged", action="store_true", help="an adapter that changes nothing is no failure")
    parser.add_argument("--overwrite", action="store_true", help="replace an export of that name")


def run(arguments: argparse.Namespace) -> int:
    if not (arguments.run / run_folder.RECIPE).is_file():
        raise ConfigError(f"{arguments.run} is no output folder of `slea train`: it holds no {run_folder.RECIPE}")
    recipe = load_recipe(arguments.run / run_folder.RECIPE)
    if arguments.form is not None:
        recipe = recipe.model_copy(update={"export": replace(recipe.export, form=arguments.form)})
    if arguments.engine is not None:
        recipe = _with_engine(recipe, arguments.engine)
    from slea_llm.cli.session import quiet_third_parties
    from slea_llm.export import export

    said = f"proved with {recipe.generation.name}" if recipe.export.verify_engine else "proved without an engine"
    say(f"{said}; --engine names another")
    with quiet_third_parties(arguments.run / run_folder.LOGS / "export.log"):
        model, policy_version = _trained(recipe, arguments.run, arguments.checkpoint)
        report = export(
            model,
            arguments.output or arguments.run,
            settings=recipe.export,
            policy_version=policy_version,
            name=arguments.name,
            generator_factory=_EngineFactory(recipe) if recipe.export.verify_engine else None,
            allow_unchanged=arguments.allow_unchanged,
            overwrite=arguments.overwrite,
        )
    for line in report.lines():
        say(line)
    return 0


def _with_engine(recipe: Recipe, name: str) -> Recipe:
    """The recipe with the engine of the proof. Raises ConfigError for an unknown one."""
    if name == NO_ENGINE:
        return recipe.model_copy(update={"export": replace(recipe.export, verify_engine=False)})
    known = (*registry.names("generator"), NO_ENGINE)
    if name not in known:
        raise ConfigError(f"unknown engine {name!r}; one of {', '.join(known)}{nearest(name, known)}")
    changes: dict[str, Any] = {"export": replace(recipe.export, verify_engine=True)}
    if name != recipe.generation.name:  # its options are of another engine
        changes["generation"] = ComponentSpec(name=name)
    return recipe.model_copy(update=changes)


def _trained(recipe: Recipe, run: Path, chosen: Path | None) -> tuple[PolicyCritic, int]:
    """The model with the weights of a checkpoint, and the policy version that they are."""
    from slea_llm import checkpoint
    from slea_llm.models.policy import build

    folder = chosen or checkpoint.latest_complete(run / run_folder.CHECKPOINTS, report=say)
    if folder is None:
        raise CheckpointError(f"{run / run_folder.CHECKPOINTS} holds no whole checkpoint; train first")
    snapshot = checkpoint.read(folder)
    model = build(
        recipe.model, streams=compose.heads(recipe), temperature=recipe.rollout.temperature, seed=recipe.run.seed
    )
    weights = {key: part for key, part in snapshot.tensors.items() if key != "optimizer"}
    model.load_trainable_state({name: tensor for part in weights.values() for name, tensor in part.items()})
    return model, int(snapshot.documents["trainer"]["policy_version"])


class _EngineFactory:
    """Starts the recipe's engine for the proof: with LoRA requests for an adapter, plain for merged weights."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __call__(self, settings: ModelSettings, *, lora: bool) -> Generator:
        from slea_llm.cli.session import chat_of, start_generator

        recipe = self._recipe.model_copy(update={"model": settings})
        if recipe.generation.name == "vllm":
            options: dict[str, Any] = {**recipe.generation.options, "sync": "adapter" if lora else "merged"}
            recipe = recipe.model_copy(update={"generation": ComponentSpec(name="vllm", **options)})
        return start_generator(recipe, chat_of(recipe), seed=recipe.run.seed)
