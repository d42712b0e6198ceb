"""Imitate scripted dialogues, so that training starts from a model that can already talk in the task's format."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from slea_llm.cli.arguments import add_recipe, clear_folder, prepare_folder, read_recipe
from slea_llm.cli.output import say
from slea_llm.config import Recipe
from slea_llm.errors import ConfigError
from slea_llm.folders import make_folder
from slea_llm.interfaces import Environment, SimulatedUser
from slea_llm.settings import ModelSettings, TinySettings

VOCABULARY_DIALOGUES = 400
"""Scripted dialogues that the tokenizer of a model made from nothing is trained on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--fresh", action="store_true", help="move an existing output folder aside")


def run(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments)
    warm = recipe.warm_start
    if not warm.dialogues:
        raise ConfigError("warm_start.dialogues is 0, so there is nothing to imitate; set it to 500 or more")
    from slea_llm.cli import compose
    from slea_llm.cli.session import quiet_third_parties
    from slea_llm.models.chat import ChatTokenizer
    from slea_llm.models.loading import load_stop_ids, load_tokenizer
    from slea_llm.warm_start import warm_start

    output = Path(warm.output)
    clear_folder(output, fresh=arguments.fresh)  # made when it is whole
    make_folder(output.parent)
    environment, user = compose.environment(recipe), compose.user(recipe)
    scratch = output.with_name(f"{output.name}-untrained")
    with quiet_third_parties(scratch.with_name(f"{output.name}.log")):
        model = recipe.model
        if warm.from_scratch is not None:
            prepare_folder(scratch, fresh=arguments.fresh)
            model = _make_tiny(recipe, warm.from_scratch, environment, user, scratch)
        chat = ChatTokenizer(load_tokenizer(model), thoughts=recipe.rollout.thoughts, stop_ids=load_stop_ids(model))
        report = warm_start(
            environment,
            user,
            chat,
            model,
            warm,
            output,
            seed=recipe.run.seed,
            max_turns=recipe.rollout.max_turns,
        )
    say(report.line())
    return 0


def _make_tiny(
    recipe: Recipe, tiny: TinySettings, environment: Environment, user: SimulatedUser, folder: Path
) -> ModelSettings:
    """A model with random weights, its tokenizer trained on what agent and user say in scripted dialogues."""
    from slea_llm.models.tiny import make_tiny
    from slea_llm.rollout import play

    texts: list[str] = []
    first = recipe.evaluation.panel_seed - VOCABULARY_DIALOGUES
    for seed in range(max(0, first), max(0, first) + VOCABULARY_DIALOGUES):
        task = environment.task(seed)
        expert = environment.expert(task, error_rate=recipe.warm_start.error_rate)
        trajectory = play(environment, user, expert, task, seed=seed, max_turns=recipe.rollout.max_turns)
        for turn in trajectory.turns:
            texts += [message.content for message in turn.context]
            texts.append(turn.text)
    make_tiny(
        folder,
        texts,
        vocab_size=tiny.vocab_size,
        hidden=tiny.hidden,
        layers=tiny.layers,
        heads=tiny.heads,
        seed=recipe.run.seed,
        max_length=recipe.rollout.max_context_tokens,
    )
    return replace(recipe.model, base=str(folder), adapter=None)
