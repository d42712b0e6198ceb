"""Check a recipe and say what it amounts to: batch arithmetic, memory by part, everything refused. Starts nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from slea_llm.cli import compose
from slea_llm.cli.arguments import add_recipe, read_recipe
from slea_llm.cli.output import say
from slea_llm.config import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--accelerate", type=Path, help="accelerate config file that the run will be launched with")
    parser.add_argument("--gpus", type=int, default=None, help="GPUs of the machine (default: what torch sees here)")
    parser.add_argument("--resolved", action="store_true", help="also print the resolved recipe")


def run(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments)
    from slea_llm import planning

    launch = planning.Launch.read(arguments.accelerate) if arguments.accelerate else planning.Launch()
    import torch

    gpus = torch.cuda.device_count() if arguments.gpus is None else arguments.gpus
    notes = planning.check(recipe, launch, gpus=gpus)
    from slea_llm.memory_plan import GIB, plan_memory
    from slea_llm.startup_checks import arithmetic_line

    say(arithmetic_line(recipe.rollout, recipe.trainer, world_size=launch.processes))
    say(f"launch: {launch.processes} process(es), {planning.LAUNCH_TYPES[launch.kind]}")
    here = planning.model_is_here(recipe)
    if here:
        parts = plan_memory(
            model=recipe.model,
            rollout=recipe.rollout,
            trainer=recipe.trainer,
            streams=len(compose.heads(recipe)),
            engine=recipe.generation.name,
        )
        say("memory of one process, without sharding:")
        for part in parts:
            say(f"  {part.name:<28} {part.bytes / GIB:8.3f} GiB  {part.how}")
        say(f"  {'sum':<28} {sum(part.bytes for part in parts) / GIB:8.3f} GiB")
    else:
        say(
            f"memory: no plan, since {recipe.model.base} is not a folder here yet (a hub name is not looked up by plan)"
        )
    for note in notes:
        say(f"note: {note}")
    if arguments.resolved:
        say(recipe.to_yaml())
    say(f"the recipe can be run{'' if here else _once(recipe)}")
    return 0


def _once(recipe: Recipe) -> str:
    """What has to be there first, where the base model is no folder here."""
    base, warm = recipe.model.base, recipe.warm_start
    if base == warm.output:
        return f" once `slea warm-start` has made {base}"
    return f" once {base} is there: a folder (`slea fetch-model` builds a small one), or a name that the hub knows"
