"""What a recipe amounts to, and what of it is refused, before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slea_llm.augmenters.weighting import check_weights
from slea_llm.config import ComponentSpec, Recipe, ScoringRecipe, check_components, component_config, read_document
from slea_llm.crediting import check_streams
from slea_llm.errors import ConfigError, UnsupportedError, nearest
from slea_llm.evaluators.fitted import CARD
from slea_llm.interfaces import Unrepeatable

LAUNCH_TYPES: Mapping[str, str] = {
    "NO": "one process",
    "MULTI_GPU": "DDP",
    "FSDP": "FSDP2",
    "DEEPSPEED": "DeepSpeed ZeRO",
}


GIVEN_TO_EVALUATORS = frozenset({"continuations", "build_evaluator"})
"""What `slea train` hands to evaluators that ask for it by `needs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a run is started: processes and the way they share weights."""

    processes: int = 1
    kind: str = "NO"

    @classmethod
    def read(cls, path: Path) -> Launch:
        """Read an accelerate config file. Raises ConfigError for what cannot be read, UnsupportedError for what is
        known to start another number of processes than it says."""
        document = read_document(path, "accelerate config")
        kind, processes = str(document.get("distributed_type", "NO")), document.get("num_processes", 1)
        if not isinstance(processes, int) or processes < 1:
            raise ConfigError(f"{path}: num_processes {processes!r} is not a whole number, 1 or more")
        if kind == "MULTI_CPU" or (document.get("use_cpu") and processes > 1):
            raise UnsupportedError(
                f"{path}: this form starts ONE process without a word on the CPU; use distributed_type MULTI_GPU with "
                "use_cpu false, as recipes/accelerate/cpu2.yaml does"
            )
        if kind not in LAUNCH_TYPES:
            raise UnsupportedError(f"{path}: distributed_type {kind!r} is not one of {', '.join(LAUNCH_TYPES)}")
        fsdp: dict[str, Any] = document.get("fsdp_config") or {}
        if kind == "FSDP" and int(fsdp.get("fsdp_version", 1)) != 2:
            raise UnsupportedError(
                f"{path}: FSDP version 1 cannot hold an adapter that trains over a frozen base; use 2"
            )
        return cls(processes=processes, kind=kind)


def check(recipe: Recipe, launch: Launch | None = None, *, gpus: int | None = None) -> list[str]:
    """Refuse every combination that is not supported; return what is supported but odd, each with its mend.

    Raises ConfigError or UnsupportedError.
    """
    components = check_components(recipe)
    user, settings = components["user"][0]
    if hasattr(user, "preflight"):
        user.preflight(settings)
    _check_base(recipe, components["environment"][0][0])
    shut = _check_evaluators(recipe, components["user"][0][0], components["environment"][0][0].name)
    _check_losses(recipe)
    losses = {spec.name: config for spec, (_, config) in zip(recipe.losses, components["losses"], strict=True)}
    _check_replay(recipe, launch or Launch(), losses)
    _check_imitation(recipe, losses, components["credit"][0][1])
    for term, config in components["losses"]:
        if not getattr(term, "needs", frozenset()):
            term(config)  # it refuses what its settings cannot do together
    _check_credit(recipe, *components["credit"][0])
    notes = _check_augmenters(recipe, components["augmenters"], credit=components["credit"][0][0])
    kl_loss = "reference_kl" in losses and losses["reference_kl"].weight != 0
    classes = [component for component, _ in components["augmenters"]]
    payers = [one.name for one in classes if hasattr(one, "augment")]
    check_weights(recipe.weights, [one.name for one in classes if hasattr(one, "weights")], payers)
    _check_sampler(recipe)
    check_streams(
        recipe.streams,
        [spec.name for spec in recipe.evaluators],
        payers,
        kl_in_reward=recipe.kl_in_reward > 0,
        kl_in_loss=kl_loss,
        weighing=recipe.weights.sources,
    )
    if launch is not None:
        _check_launch(recipe, launch, gpus)
    return [*shut, *_odd(recipe, components["environment"][0][1], components["user"][0][1]), *notes]


def _check_base(recipe: Recipe, environment: Any) -> None:
    """A base that only a warm start could make needs an environment with an expert to imitate."""
    made_here = recipe.warm_start.dialogues and Path(recipe.model.base) == Path(recipe.warm_start.output)
    if made_here and not model_is_here(recipe) and not getattr(environment, "has_expert", True):
        raise UnsupportedError(
            f"model.base {recipe.model.base!r} is no folder here, and no warm start can make it: environment "
            f"{recipe.environment.name!r} has no scripted expert to imitate; name a model that is there"
        )


def _check_evaluators(recipe: Recipe, user: Any, environment: str) -> list[str]:
    """Every evaluator, and every part of a blend, finds in a training run what it needs; what is odd about it."""
    shut = []
    for spec, cls, config in _evaluators(recipe):
        missing = sorted(getattr(cls, "needs", frozenset()) - GIVEN_TO_EVALUATORS)
        if missing:
            raise UnsupportedError(
                f"evaluator {spec.name!r} needs {', '.join(missing)}, which a training run does not give; it gives "
                f"{', '.join(sorted(GIVEN_TO_EVALUATORS))}"
            )
        if "continuations" in getattr(cls, "needs", frozenset()) and isinstance(user, Unrepeatable):
            raise UnsupportedError(f"evaluator {spec.name!r} plays dialogues on: {user.unrepeatable}")
        preflight = getattr(cls, "preflight", None)
        if preflight is not None:
            verdict = preflight(config)
            if verdict is not None and not verdict.open:
                shut.append(verdict.line)
        misplaced = getattr(cls, "misplaced", None)
        if misplaced is not None and (note := misplaced(config, {environment})):
            shut.append(note)
    return [*shut, *cut_otherwise(recipe)]


def cut_otherwise(recipe: Recipe | ScoringRecipe) -> list[str]:
    """A note on every fitted evaluator whose card names another parser than the recipe has."""
    here, notes = recipe.parser, []
    for spec, _, config in _evaluators(recipe):
        model = getattr(config, "model", "")
        then = _fitted_parser(Path(model)) if isinstance(model, str) and model else None
        if then is not None and not _same_parser(then, here):
            notes.append(
                f"{spec.name} was fitted on steps as parser {then.line()} cuts them, here it scores those of "
                f"{here.line()}; take that parser, or fit it again on these steps (`slea fit-evaluator --recipe`)"
            )
    return notes


def _fitted_parser(folder: Path) -> ComponentSpec | None:
    """What the card of a fitted evaluator says of its parser; None where it does not, or there is no card."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # what is no card is refused by the evaluator that reads it
    data = card.get("data") if isinstance(card, dict) else None
    said = data.get("parser") if isinstance(data, dict) else None
    return ComponentSpec(**said) if isinstance(said, dict) and isinstance(said.get("name"), str) else None


def _same_parser(then: ComponentSpec, here: ComponentSpec) -> bool:
    """Whether both cut alike, options that were left out filled in."""
    try:
        return then.name == here.name and component_config("parser", then) == component_config("parser", here)
    except ConfigError:
        return False  # that of the card is not known here, or has other options by now


def _evaluators(recipe: Recipe | ScoringRecipe) -> Iterator[tuple[ComponentSpec, Any, Any]]:
    """Spec, class and settings of every evaluator, and of every part of a blend."""
    specs = list(recipe.evaluators)
    while specs:
        spec = specs.pop()
        cls, config = component_config("evaluator", spec)
        yield spec, cls, config
        specs += [ComponentSpec(name=part.name, **part.options) for part in getattr(config, "evaluators", ())]


def _check_losses(recipe: Recipe) -> None:
    names = [spec.name for spec in recipe.losses]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UnsupportedError(f"losses name {', '.join(twice)} twice; give each once, with one weight")
    critic = recipe.model.critic
    if critic == "none" and "value" in names:
        raise UnsupportedError("model.critic none has no values to train; take {name: value} out of losses")
    if critic == "none" and recipe.trainer.critic_warmup_iterations:
        raise UnsupportedError("model.critic none cannot be warmed up; set trainer.critic_warmup_iterations to 0")
    reads_reference = recipe.kl_in_reward > 0 or "reference_kl" in names
    if recipe.trainer.proximal == "sampler" and (critic != "none" or reads_reference):
        what = "the reference is read" if critic == "none" else f"model.critic is {critic}"
        raise UnsupportedError(
            f"trainer.proximal sampler saves a pass that is needed all the same, since {what}; set it to trainer"
        )
    if recipe.evaluation.temperature not in (0.0, recipe.rollout.temperature):
        raise UnsupportedError(
            f"evaluation.temperature {recipe.evaluation.temperature} is neither 0 (greedy) nor rollout.temperature "
            f"{recipe.rollout.temperature}; a sampler has one temperature"
        )
    if recipe.model.dtype == "float64" and recipe.trainer.precision == "bf16":
        raise UnsupportedError("model.dtype float64 with trainer.precision bf16 contradict; choose one")


def _check_replay(recipe: Recipe, launch: Launch, losses: Mapping[str, Any]) -> None:
    """What an earlier policy sampled is weighed by what it said then, and nothing takes the weight away."""
    replay, rollout = recipe.replay, recipe.rollout
    if rollout.scoring_ahead:
        _check_scoring_thread(recipe)
    if not replay.share:
        return
    if recipe.trainer.proximal == "sampler":
        raise UnsupportedError(
            "replay.share with trainer.proximal sampler would clip against the policy that sampled long ago, without a "
            "weight; set trainer.proximal to trainer"
        )
    if "ppo" in losses and losses["ppo"].importance_cap == 0:
        raise UnsupportedError(
            "replay.share with ppo.importance_cap 0 would learn from an earlier policy's dialogues as if today's had "
            "played them; set importance_cap to 2"
        )
    if replay.priority == "error" and recipe.model.critic == "none":
        raise UnsupportedError(
            "replay.priority error is the error of a critic, and model.critic is none; set it to success or uniform"
        )
    least = replay.share / (1 - replay.share) * (rollout.episodes // launch.processes)
    if least < rollout.group_size:
        raise UnsupportedError(
            f"replay.share {replay.share:g} leaves room for {least:.1f} replayed dialogues an iteration and process, "
            f"less than a group of {rollout.group_size}, so that nothing would ever be drawn; raise it or episodes"
        )


def _check_scoring_thread(recipe: Recipe) -> None:
    """Neither parser nor evaluators of a run that scores while it plays use what plays."""
    parser = (recipe.parser, *component_config("parser", recipe.parser))
    for spec, cls, config in (parser, *_evaluators(recipe)):
        endpoint = getattr(config, "endpoint", None)
        if "continuations" in getattr(cls, "needs", frozenset()) or getattr(endpoint, "in_process", False):
            kind = "parser" if spec is recipe.parser else "evaluator"
            raise UnsupportedError(
                f"{kind} {spec.name!r} needs the sampler or an engine in this process, which plays the next "
                "dialogues at the same time; set rollout.scoring_ahead to 0"
            )


def _check_imitation(recipe: Recipe, losses: Mapping[str, Any], credit: Any) -> None:
    evaluators = [spec.name for spec in recipe.evaluators]
    for name in sorted(losses.keys() & {"imitation", "imitation_prototypes"}):
        config = losses[name]
        if config.gain != "advantage" and config.gain not in evaluators:
            known = ["advantage", *evaluators]
            raise ConfigError(
                f"{name}.gain {config.gain!r} is not one of {', '.join(known)}{nearest(config.gain, known)}"
            )
        if getattr(config, "form", "") == "sil":
            _check_self_imitation(recipe, credit)
        shown = getattr(config, "demonstrations", "")
        if shown and not Path(shown).is_file():
            raise ConfigError(f"imitation.demonstrations {shown!r} is no file")


def _check_self_imitation(recipe: Recipe, credit: Any) -> None:
    """Its R is the return that was had, not an estimate that the critic has part in (Oh et al. 2018)."""
    if recipe.model.critic == "none":
        raise UnsupportedError("imitation.form sil compares a return with the critic's value; model.critic is none")
    if getattr(credit, "lam_critic", 1) != 1:
        raise UnsupportedError(
            "imitation.form sil needs returns that were had, not estimated; set credit.lam_critic to 1"
        )


def _check_credit(recipe: Recipe, method: Any, config: Any) -> None:
    """The credit method takes its streams, and finds the critic or the groups that it reads."""
    method(config, streams=recipe.streams)
    critic, trained = recipe.model.critic, any(spec.name == "value" for spec in recipe.losses)
    if getattr(method, "reads_critic", True):
        if critic != "none" and not trained:
            raise UnsupportedError(
                f"credit {method.name} reads a critic, but no value loss trains one; add {{name: value}} to losses"
            )
        if critic == "none" and getattr(config, "conditional", "none") != "none":
            raise UnsupportedError(f"credit.conditional {config.conditional} reads a critic; set model.critic")
        return
    if critic != "none" or trained:
        raise UnsupportedError(
            f"credit {method.name} reads no critic: it would be trained for nothing; set model.critic to none and take "
            "{name: value} out of losses"
        )
    if recipe.rollout.group_size == 1:
        raise UnsupportedError(
            f"credit {method.name} compares dialogues of one task, but rollout.group_size is 1, so every advantage "
            "would be 0; set it to 4 or more"
        )


def _check_augmenters(recipe: Recipe, augmenters: Sequence[tuple[Any, Any]], *, credit: Any) -> list[str]:
    """What the augmenters have to say of the streams that they feed: each may refuse one, or only warn."""
    notes = []
    for component, config in augmenters:
        for name, stream in recipe.streams.items():
            if component.name in stream.sources and hasattr(component, "fits"):
                notes += component.fits(config, name, stream)
            if component.name in stream.sources and getattr(config, "form", "") == "potential":
                notes += _check_potential(recipe, component.name, credit)
        verdict = component.preflight(config) if hasattr(component, "preflight") else None
        if verdict is not None and not verdict.open:
            notes.append(verdict.line)
        if not getattr(config, "refresh_every", 1) and not getattr(config, "model", ""):
            notes.append(
                f"augmenter {component.name} has refresh_every 0 and no model: nothing is ever fitted and it does "
                "nothing; set it above 0, or give the folder of a fitted one"
            )
    return notes


def _check_potential(recipe: Recipe, augmenter: str, credit: Any) -> list[str]:
    """A potential telescopes to nothing only where what follows it is discounted as it is, and read by a critic."""
    if not getattr(credit, "reads_critic", True):
        raise UnsupportedError(
            f"augmenter {augmenter} pays a potential, which beside credit {recipe.credit.name} does nothing at best: "
            "returns of whole dialogues are not discounted, and what is compared starts alike; take another form of "
            "it, or credit {name: nested_gae} with a critic"
        )
    if recipe.model.critic == "none":
        return [
            f"augmenter {augmenter} pays a potential without a critic: a dialogue that is cut keeps its last one, as "
            "if a critic read on; set model.critic, or take another form of it"
        ]
    return []


def _check_sampler(recipe: Recipe) -> None:
    """Weights that the sampler is to use are used by it, and it uses none that the loss uses too."""
    replay, weights = recipe.replay, recipe.weights
    drawn = replay.share > 0 and replay.priority == "weights"
    if weights.sources and "sampler" in weights.use and not drawn:
        raise UnsupportedError(
            "weights.use names the sampler, but nothing is drawn by weights; set replay.share above 0 and "
            "replay.priority to weights, or weights.use to [loss]"
        )
    if drawn and not weights.sources:
        raise UnsupportedError("replay.priority weights: weights.sources names no augmenter; name one")
    if drawn and "sampler" not in weights.use:
        raise UnsupportedError(
            "replay.priority weights draws by lambda and weights.use multiplies the loss by it: lambda would count "
            "squared; set weights.use to [sampler] or replay.priority to error"
        )


def _check_launch(recipe: Recipe, launch: Launch, gpus: int | None) -> None:
    groups = recipe.rollout.episodes // recipe.rollout.group_size
    if groups < launch.processes:
        raise UnsupportedError(
            f"{launch.processes} processes share {groups} groups of dialogues; every process needs at least one: raise "
            "rollout.episodes or lower num_processes"
        )
    if launch.kind in ("FSDP", "DEEPSPEED") and gpus == 0:
        raise UnsupportedError(
            f"{LAUNCH_TYPES[launch.kind]} on a machine without GPUs falls back or fails without a word; use "
            "recipes/accelerate/cpu2.yaml for two processes on the CPU"
        )


def _odd(recipe: Recipe, environment: Any, user: Any) -> list[str]:
    notes = []
    own_limit = getattr(environment, "max_turns", recipe.rollout.max_turns)
    if recipe.rollout.max_turns < own_limit:
        critic_free = recipe.model.critic == "none"
        then = "count as if nothing had followed" if critic_free else "are bootstrapped from the critic"
        notes.append(
            f"rollout.max_turns {recipe.rollout.max_turns} cuts dialogues before the environment's own limit of "
            f"{own_limit}: they have no outcome and {then}; set it to {own_limit}"
        )
    if recipe.rollout.episodes < 16:
        notes.append(
            f"rollout.episodes {recipe.rollout.episodes}: advantages are whitened over few dialogues; 32 or more"
        )
    if recipe.trainer.learning_rate and recipe.trainer.learning_rate < 1e-6:
        notes.append(
            f"trainer.learning_rate {recipe.trainer.learning_rate}: low for LoRA, which wants about 1e-5 to 1e-3"
        )
    if recipe.replay.share and recipe.replay.capacity < recipe.rollout.episodes:
        notes.append(
            f"replay.capacity {recipe.replay.capacity} is less than one iteration's {recipe.rollout.episodes} "
            "dialogues: some are never drawn; set it to max_age times as many"
        )
    endpoint = getattr(user, "endpoint", None)
    if endpoint is not None and endpoint.temperature == 0:
        notes.append(
            f"user {recipe.user.name} is asked at temperature 0: users of a task differ by persona alone; set "
            "user.endpoint.temperature to 0.7"
        )
    if endpoint is not None and endpoint.concurrency < min(recipe.rollout.concurrency, recipe.rollout.episodes):
        notes.append(
            f"user.endpoint.concurrency {endpoint.concurrency} is below the dialogues at once, which then wait; "
            f"set it to {min(recipe.rollout.concurrency, recipe.rollout.episodes)}"
        )
    trainer = recipe.trainer
    if trainer.iterations <= trainer.critic_warmup_iterations:
        notes.append(
            f"trainer.iterations {trainer.iterations} are all trainer.critic_warmup_iterations "
            f"({trainer.critic_warmup_iterations}): the policy never moves; set more iterations, or "
            "fewer to warm up"
        )
    model, warm = recipe.model, recipe.warm_start
    warmed = warm.dialogues and not warm.lora and warm.from_scratch is None and Path(model.base) == Path(warm.output)
    if warmed and model.declared_base:
        notes.append(
            f"model.declared_base {model.declared_base!r} must name the weights that the warm start has made, not "
            "those that it began with: on others the exported adapter does something else; leave it out, and the "
            f"adapter names {model.base}"
        )
    if not recipe.evaluation.tasks:
        notes.append("evaluation.tasks 0: success is not measured before and after; set it to 256")
    return notes


def model_is_here(recipe: Recipe) -> bool:
    """True when the base model is a local folder with a configuration."""
    return (Path(recipe.model.base) / "config.json").is_file()
