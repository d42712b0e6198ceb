"""Fit a learnt evaluator on logged dialogues: labels in; weights, a card and the gate's verdict out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from slea_llm.cli.output import say
from slea_llm.errors import ConfigError, nearest

if TYPE_CHECKING:
    from slea_llm.config import ComponentSpec, ScoringRecipe
    from slea_llm.fitting.causal import FittedReader
    from slea_llm.fitting.evaluator import FittedEvaluator
    from slea_llm.fitting.labels import StepLabel
    from slea_llm.types import ScoredTrajectory, Verdict

Fitted = TypeVar("Fitted", "FittedEvaluator", "FittedReader")

LABELLED: Mapping[str, Any] = MappingProxyType(
    {"labels": None, "no_outcome": False, "heuristic": None, "heuristic_weight": 0.3, "folds": 5}
)
"""Options of what is fitted to step labels, with their defaults."""

OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "reward_model": {**LABELLED, "epochs": 10, "encoder": "use-multilingual", "joint": False},
        "causal_reward_model": {
            **LABELLED,
            "epochs": 3,
            "base": None,
            "dtype": "float32",
            "max_tokens": 2048,
            "lora_rank": 16,
            "learning_rate": 2e-4,
        },
        "return_decomposition": {},
        "hindsight": {},
        "counterfactual_prediction": {},
        "tool_use_outcomes": {},
    }
)
"""Evaluator -> the options that its fit reads beside log, output, recipe and seed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, nargs="+", help="logs of dialogues, or folders of logs")
    parser.add_argument("--output", type=Path, required=True, help="folder of the fitted model; must be new")
    parser.add_argument(
        "--evaluator", default="reward_model", help=f"what is fitted: {', '.join(OPTIONS)} (default reward_model)"
    )
    parser.add_argument(
        "--recipe", type=Path, help="recipe, or its scoring part alone, whose parser cuts the steps; without it: tagged"
    )
    parser.add_argument("--seed", type=int, default=0, help="splits and starting weights (default 0)")
    both = parser.add_argument_group("reward_model and causal_reward_model")
    both.add_argument("--labels", type=Path, help="JSON lines: labels, overrides or counts of steps (docs/scoring.md)")
    both.add_argument(
        "--no-outcome", action="store_true", default=None, help="do not label every step with its dialogue's outcome"
    )
    both.add_argument("--heuristic", help="evaluator of the recipe whose scores give a cold start")
    both.add_argument("--heuristic-weight", type=float, help="weight of those labels (default 0.3)")
    both.add_argument("--folds", type=int, help="parts of the groups, each held out once (default 5)")
    both.add_argument("--epochs", type=int, help="passes at most (default 10; causal: 3, and 0 fits the heads alone)")
    small = parser.add_argument_group("reward_model")
    small.add_argument("--encoder", help="sentence encoder (default use-multilingual)")
    small.add_argument(
        "--joint", action="store_true", default=None, help="encode state, message and step as one text, not apart"
    )
    causal = parser.add_argument_group("causal_reward_model")
    causal.add_argument("--base", help="folder or name of the chat model that reads the dialogues (required)")
    causal.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of its weights (default float32)")
    causal.add_argument("--max-tokens", type=int, help="tokens of a dialogue that are read (default 2048)")
    causal.add_argument("--lora-rank", type=int, help="rank of the adapter (default 16)")
    causal.add_argument("--learning-rate", type=float, help="of the adapter (default 2e-4)")


def run(arguments: argparse.Namespace) -> int:
    from slea_llm.cli import compose
    from slea_llm.cli.score import read_logs
    from slea_llm.config import load_scoring_recipe
    from slea_llm.folders import refuse_existing
    from slea_llm.scoring import Scorer

    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed} is below 0")
    options = chosen(arguments)
    refuse_existing(arguments.output, overwrite=False)
    recipe = load_scoring_recipe(arguments.recipe) if arguments.recipe else None
    parser = compose.component("parser", _parser(recipe))
    data = list(Scorer(parser, []).score_many(one for log in arguments.log for one in read_logs(log)))
    verdict = FITS[arguments.evaluator](data, options, recipe, arguments)
    say(verdict.line)
    say(f"written to {arguments.output}; in a recipe: {{name: {arguments.evaluator}, model: {arguments.output}}}")
    return 0


def chosen(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the evaluator that is fitted. Raises ConfigError for an unknown one, and for an option that its
    fit does not read."""
    name = arguments.evaluator
    if name not in OPTIONS:
        raise ConfigError(
            f"--evaluator {name!r} is not one that is fitted: {', '.join(OPTIONS)}{nearest(name, OPTIONS)}"
        )
    known = OPTIONS[name]
    every = {option for options in OPTIONS.values() for option in options}
    given = {option: getattr(arguments, option) for option in every if getattr(arguments, option) is not None}
    if odd := sorted(given.keys() - known.keys()):
        reads = ", ".join(f"--{option.replace('_', '-')}" for option in known) or "outcomes alone, and no options"
        raise ConfigError(f"--{odd[0].replace('_', '-')} is not read by {name}, which reads {reads}")
    return {**known, **given}


def _labels(
    data: Sequence[ScoredTrajectory], options: Mapping[str, Any], recipe: ScoringRecipe | None
) -> list[StepLabel]:
    from slea_llm.cli import compose
    from slea_llm.fitting import labels

    found = labels.read_labels(options["labels"]) if options["labels"] else []
    if not options["no_outcome"]:
        found += [label for one in data for label in labels.outcome_labels(one.trajectory, one.steps)]
    if options["heuristic"]:
        specs = {spec.name: spec for spec in recipe.evaluators} if recipe else {}
        if options["heuristic"] not in specs:
            raise ConfigError(
                f"--heuristic {options['heuristic']!r} is no evaluator of the recipe; one of "
                f"{', '.join(sorted(specs)) or 'none: give --recipe'}"
            )
        rule, weight = compose.component("evaluator", specs[options["heuristic"]]), options["heuristic_weight"]
        found += [
            label for one in data for label in labels.heuristic_labels(rule, one.trajectory, one.steps, weight=weight)
        ]
    return found


def _fit_network(
    data: Sequence[ScoredTrajectory],
    options: Mapping[str, Any],
    recipe: ScoringRecipe | None,
    arguments: argparse.Namespace,
) -> Verdict:
    from slea_llm.encoders import load_encoder
    from slea_llm.evaluators.reward_model_features import Encoding
    from slea_llm.fitting import evaluator, labels
    from slea_llm.fitting.training import TrainingSettings

    found = _labels(data, options, recipe)
    encoding: Encoding = "joint" if options["joint"] else "apart"
    parsed = [(one.trajectory, one.steps) for one in data]
    rows = labels.examples(parsed, found, load_encoder(options["encoder"]), encoding)
    say(f"{len(data)} dialogues, {len(rows)} of them labelled, {len(found)} labels")
    fitted = evaluator.fit_evaluator(
        rows,
        found,
        encoder=options["encoder"],
        encoding=encoding,
        settings=evaluator.FitSettings(folds=options["folds"], training=TrainingSettings(epochs=options["epochs"])),
        seed=arguments.seed,
        report=say,
    )
    _cut_by(fitted, recipe).save(arguments.output)
    for line in evaluator.lines(fitted.card):
        say(line)
    return fitted.verdict


def _cut_by(fitted: Fitted, recipe: ScoringRecipe | None) -> Fitted:
    return replace(fitted, card=fitted.card.cut_by(_parser(recipe).model_dump(mode="json")))


def _parser(recipe: ScoringRecipe | None) -> ComponentSpec:
    from slea_llm.config import ComponentSpec

    return recipe.parser if recipe else ComponentSpec(name="tagged")


def _fit_causal(
    data: Sequence[ScoredTrajectory],
    options: Mapping[str, Any],
    recipe: ScoringRecipe | None,
    arguments: argparse.Namespace,
) -> Verdict:
    from slea_llm.fitting import causal, evaluator
    from slea_llm.models.step_reader import open_reader
    from slea_llm.settings import ModelSettings

    if not options["base"]:
        raise ConfigError("causal_reward_model reads dialogues by a chat model: give --base, a folder or a hub name")
    try:
        rank, dtype = options["lora_rank"], options["dtype"]
        base = ModelSettings(base=options["base"], dtype=dtype, lora_rank=rank, lora_alpha=2 * rank)
    except ValueError as error:
        raise ConfigError(f"--lora-rank: {error}") from error
    settings = causal.CausalSettings(
        folds=options["folds"], epochs=options["epochs"], learning_rate=options["learning_rate"]
    )
    found = _labels(data, options, recipe)
    if not found:
        raise ConfigError("no labelled step; give outcomes, a labels file or a heuristic")
    opened = open_reader(base, longest=options["max_tokens"], seed=arguments.seed)
    parsed = [(one.trajectory, one.steps) for one in data]
    rows, left_out = causal.token_examples(parsed, found, opened, report=say)
    say(f"{len(data)} dialogues, {len(rows)} of them labelled, {len(found)} labels")
    fitted = causal.fit_causal(
        rows, found, opened, base=base, settings=settings, seed=arguments.seed, left_out=left_out, report=say
    )
    _cut_by(fitted, recipe).save(arguments.output)
    for line in evaluator.lines(fitted.card):
        say(line)
    return fitted.verdict


def _fit_outcomes(
    data: Sequence[ScoredTrajectory],
    _options: Mapping[str, Any],
    recipe: ScoringRecipe | None,
    arguments: argparse.Namespace,
) -> Verdict:
    from slea_llm.evaluators import counterfactual, fitted, hindsight, return_decomposition, tool_use_outcomes

    name = arguments.evaluator
    fits: Mapping[str, Callable[..., fitted.Fitted]] = {
        return_decomposition.KIND: return_decomposition.fit,
        hindsight.KIND: hindsight.fit,
        counterfactual.PREDICTION: counterfactual.fit_prediction,
        tool_use_outcomes.KIND: tool_use_outcomes.fit,
    }
    learnt = fits[name](data, seed=arguments.seed)
    facts = {**learnt.card["data"], "parser": _parser(recipe).model_dump(mode="json")}
    replace(learnt, card={**learnt.card, "data": facts}).save(arguments.output)
    for line in fitted.lines(learnt.card):
        say(line)
    return fitted.judge(name, learnt.card)


FITS: Mapping[str, Callable[..., Verdict]] = MappingProxyType(
    {
        "reward_model": _fit_network,
        "causal_reward_model": _fit_causal,
        "return_decomposition": _fit_outcomes,
        "hindsight": _fit_outcomes,
        "counterfactual_prediction": _fit_outcomes,
        "tool_use_outcomes": _fit_outcomes,
    }
)
