"""Fit a reward model on logged dialogues: labels in; weights, a card and the gate's verdict out."""

from __future__ import annotations

import argparse
from pathlib import Path

from slea_llm.cli.output import say
from slea_llm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, nargs="+", help="logs of dialogues, or folders of logs")
    parser.add_argument("--output", type=Path, required=True, help="folder of the fitted model; must be new")
    parser.add_argument("--recipe", type=Path, help="recipe whose parser cuts the steps; without it: tagged")
    parser.add_argument(
        "--labels", type=Path, help="JSON lines of trajectory, turn, step, and label, override, or successes and n"
    )
    parser.add_argument("--no-outcome", action="store_true", help="do not label every step with its dialogue's outcome")
    parser.add_argument("--heuristic", help="evaluator of the recipe whose scores give a cold start")
    parser.add_argument("--heuristic-weight", type=float, default=0.3, help="weight of those labels (default 0.3)")
    parser.add_argument("--encoder", default="use-multilingual", help="sentence encoder (default use-multilingual)")
    parser.add_argument("--joint", action="store_true", help="encode state, message and step as one text, not apart")
    parser.add_argument("--folds", type=int, default=5, help="parts of the groups, each held out once (default 5)")
    parser.add_argument("--epochs", type=int, default=10, help="passes at most (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="splits and starting weights (default 0)")


def run(arguments: argparse.Namespace) -> int:
    from slea_llm.cli import compose
    from slea_llm.cli.score import read_logs
    from slea_llm.config import ComponentSpec, load_recipe
    from slea_llm.encoders import load_encoder
    from slea_llm.evaluators.reward_model_features import Encoding
    from slea_llm.fitting import evaluator, labels
    from slea_llm.fitting.training import TrainingSettings
    from slea_llm.folders import refuse_existing

    refuse_existing(arguments.output, overwrite=False)
    recipe = load_recipe(arguments.recipe) if arguments.recipe else None
    parser = compose.component("parser", recipe.parser if recipe else ComponentSpec(name="tagged"))
    parsed = [
        (one, [step for turn in one.turns for step in parser.parse(turn, one.id, None)])
        for log in arguments.log
        for one in read_logs(log)
    ]
    found = labels.read_labels(arguments.labels) if arguments.labels else []
    if not arguments.no_outcome:
        found += [label for one, steps in parsed for label in labels.outcome_labels(one, steps)]
    if arguments.heuristic:
        specs = {spec.name: spec for spec in recipe.evaluators} if recipe else {}
        if arguments.heuristic not in specs:
            raise ConfigError(
                f"--heuristic {arguments.heuristic!r} is no evaluator of the recipe; one of "
                f"{', '.join(sorted(specs)) or 'none: give --recipe'}"
            )
        rule = compose.component("evaluator", specs[arguments.heuristic])
        weight = arguments.heuristic_weight
        found += [label for one, steps in parsed for label in labels.heuristic_labels(rule, one, steps, weight=weight)]
    encoding: Encoding = "joint" if arguments.joint else "apart"
    rows = labels.examples(parsed, found, load_encoder(arguments.encoder), encoding)
    say(f"{len(parsed)} dialogues, {len(rows)} of them labelled, {len(found)} labels")
    fitted = evaluator.fit_evaluator(
        rows,
        found,
        encoder=arguments.encoder,
        encoding=encoding,
        settings=evaluator.FitSettings(folds=arguments.folds, training=TrainingSettings(epochs=arguments.epochs)),
        seed=arguments.seed,
        report=say,
    )
    fitted.save(arguments.output)
    for line in evaluator.lines(fitted.card):
        say(line)
    say(fitted.verdict.line)
    say(f"written to {arguments.output}; in a recipe: {{name: reward_model, model: {arguments.output}}}")
    return 0
