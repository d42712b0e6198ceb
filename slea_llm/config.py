"""The recipe: one strict YAML file, dotted overrides, everything checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator

from slea_llm import registry, strict_yaml
from slea_llm.errors import ConfigError, nearest
from slea_llm.settings import (
    EvaluationSettings,
    ExportSettings,
    ModelSettings,
    ReplaySettings,
    RolloutSettings,
    RunSettings,
    StreamSettings,
    TrainerSettings,
    WarmStartSettings,
    WeightSettings,
)


class ComponentSpec(BaseModel):
    """A component by registry name, with the options of its own `Config`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

    def line(self) -> str:
        """As a recipe says it, in one line."""
        text: str = yaml.safe_dump(
            self.model_dump(mode="json"), default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
        )
        return text.strip()


class Recipe(BaseModel):
    """Everything a run is made of. Unknown keys are errors; `slea_llm.settings` documents the fixed parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSettings
    environment: ComponentSpec
    user: ComponentSpec = ComponentSpec(name="scripted")
    generation: ComponentSpec = ComponentSpec(name="transformers")
    parser: ComponentSpec = ComponentSpec(name="tagged")
    evaluators: tuple[ComponentSpec, ...] = ()
    augmenters: tuple[ComponentSpec, ...] = ()
    streams: dict[str, StreamSettings] = {"outcome": StreamSettings(sources=("outcome",))}
    weights: WeightSettings = WeightSettings()
    credit: ComponentSpec = ComponentSpec(name="nested_gae")
    losses: tuple[ComponentSpec, ...] = (ComponentSpec(name="ppo"), ComponentSpec(name="value"))
    referee: ComponentSpec = ComponentSpec(name="rules")
    kl_in_reward: float = 0.0
    """Coefficient of the k1 estimate in the reward part `reference_kl`. 0: not in the reward."""
    run: RunSettings = RunSettings()
    rollout: RolloutSettings = RolloutSettings()
    trainer: TrainerSettings = TrainerSettings()
    replay: ReplaySettings = ReplaySettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    export: ExportSettings = ExportSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        rollout, trainer = self.rollout, self.trainer
        if rollout.episodes % rollout.group_size:
            raise ValueError(f"rollout.group_size {rollout.group_size} does not divide episodes {rollout.episodes}")
        if rollout.episodes % trainer.minibatch:
            raise ValueError(f"trainer.minibatch {trainer.minibatch} does not divide episodes {rollout.episodes}")
        if self.evaluation.tasks and rollout.tasks > self.evaluation.panel_seed:
            raise ValueError(
                f"rollout.tasks {rollout.tasks} reaches into the evaluation panel, which starts at task seed "
                f"{self.evaluation.panel_seed}"
            )
        if not self.streams:
            raise ValueError("streams is empty; give at least one, such as outcome: {sources: [outcome]}")
        if not 0 <= self.kl_in_reward < math.inf:
            raise ValueError(f"kl_in_reward {self.kl_in_reward} must be finite and 0 or more")
        return self

    def to_yaml(self) -> str:
        """The resolved recipe, loadable as it is."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class ScoringRecipe(BaseModel):
    """The part of a recipe that scoring logs needs: no model, no environment. The defaults suit any log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parser: ComponentSpec = ComponentSpec(name="auto")
    evaluators: tuple[ComponentSpec, ...] = (ComponentSpec(name="rules"),)
    augmenters: tuple[ComponentSpec, ...] = ()
    streams: dict[str, StreamSettings] = {}
    """Empty: the outcome, and every evaluator's scores at a weight of 0.3."""
    credit: ComponentSpec = ComponentSpec(name="nested_gae")
    kl_in_reward: float = 0.0
    weights: WeightSettings = WeightSettings()


def load_scoring_recipe(path: Path | str | None, overrides: Sequence[str] = ()) -> ScoringRecipe:
    """The sections of a recipe that scoring needs, of a whole recipe or of a file with those sections alone.

    Without a file the defaults. Raises ConfigError as `load_recipe` does.
    """
    document: dict[str, Any] = {}
    if path is not None:
        document = read_document(Path(path))
        if "model" in document:  # the recipe of a training run: the whole of it must be right
            parser = load_recipe(path).parser.model_dump()
            document = {name: document[name] for name in ScoringRecipe.model_fields if name in document}
            document.setdefault("parser", parser)  # training's own default cuts otherwise than that of scoring
    return _scoring_recipe(document, overrides, str(path))


class RefereeRecipe(BaseModel):
    """The part of a recipe that judging logs needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    referee: ComponentSpec = ComponentSpec(name="rules")


def load_referee_recipe(path: Path | str) -> RefereeRecipe:
    """The section `referee` of a whole recipe, or of a file with that section alone.

    Raises ConfigError as `load_recipe` does.
    """
    document = read_document(Path(path))
    if "model" in document:
        return RefereeRecipe(referee=load_recipe(path).referee)
    try:
        return RefereeRecipe.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_explain(error, str(path), RefereeRecipe)) from error


def changed_scoring_recipe(recipe: ScoringRecipe, overrides: Sequence[str]) -> ScoringRecipe:
    """The recipe with `key.sub=value` overrides. Raises ConfigError as `load_recipe` does."""
    return _scoring_recipe(recipe.model_dump(mode="json"), overrides, "overrides")


def _scoring_recipe(document: dict[str, Any], overrides: Sequence[str], source: str) -> ScoringRecipe:
    for override in overrides:
        _apply(document, override)
    try:
        return ScoringRecipe.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_explain(error, source, ScoringRecipe)) from error


COMPONENT_SECTIONS: Mapping[str, str] = {
    "environment": "environment",
    "user": "user",
    "generation": "generator",
    "parser": "parser",
    "evaluators": "evaluator",
    "augmenters": "augmenter",
    "credit": "credit",
    "losses": "loss",
    "referee": "referee",
}
"""Section of a recipe -> registry kind."""


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.sub=value` overrides (values in YAML).

    Raises ConfigError that lists every fault at once, each with its place, its value and the nearest known key.
    """
    file = Path(path)
    document = read_document(file)
    for override in overrides:
        _apply(document, override)
    return parse_recipe(document, source=str(file))


def read_document(file: Path, what: str = "recipe") -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises ConfigError, which calls it `what`, for anything else."""
    try:
        document = strict_yaml.load(file.read_text(encoding="utf-8"))
    except OSError as error:
        near = nearest(file.name, [one.name for one in file.parent.iterdir()]) if file.parent.is_dir() else ""
        raise ConfigError(f"{what} {file} cannot be read: {error.strerror or error}{near}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {file} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{what} {file} must be a mapping of sections, not {type(document).__name__}")
    return document


def parse_recipe(document: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """Validate a recipe that is already a mapping."""
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_explain(error, source, Recipe)) from error


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """What two resolved recipes, or parts of them, say differently: `losses.0.weight: 0.5 before, 0.25 now`."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(key, before.get(key), now.get(key)) for key in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(str(index), one, other) for index, (one, other) in enumerate(zip(before, now, strict=True))]
    else:
        return [] if before == now else [f"{place}: {before!r} before, {now!r} now"]
    return [line for key, one, other in pairs for line in differences(one, other, f"{place}.{key}" if place else key)]


def component_config(kind: str, spec: ComponentSpec) -> tuple[Any, Any]:
    """The component class of a spec and its validated `Config` instance.

    Raises ConfigError for an unknown name, an unknown option (with the nearest known one) or a bad value.
    """
    component = registry.load(kind, spec.name)
    config_class = component.Config
    # On its own a dataclass passes unknown keys over; inside a strict model it refuses them, at every depth.
    strict = create_model("Strict", __config__=ConfigDict(extra="forbid"), options=(config_class, ...))
    try:
        return component, strict.model_validate({"options": spec.options}).options  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(_explain(error, f"{kind} {spec.name!r}", config_class, depth=1)) from error


def check_components(recipe: Recipe) -> dict[str, list[tuple[Any, Any]]]:
    """Resolve every component of a recipe: section -> [(class, config)]; all faults are reported at once."""
    resolved: dict[str, list[tuple[Any, Any]]] = {}
    faults: list[str] = []
    for section, kind in COMPONENT_SECTIONS.items():
        value = getattr(recipe, section)
        specs = value if isinstance(value, tuple) else (value,)
        resolved[section] = []
        for spec in specs:
            try:
                resolved[section].append(component_config(kind, spec))
            except ConfigError as error:
                faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return resolved


def _apply(document: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    try:
        value = strict_yaml.load(text) if text else None
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: its value is not YAML: {error}") from error
    keys = path.split(".")
    node: Any = document
    for depth, key in enumerate(keys[:-1]):
        if isinstance(node, list):
            node = node[_list_index(node, key, path)]
        elif isinstance(node, dict):
            node = node.setdefault(key, {})
        else:
            raise ConfigError(f"override {override!r}: {'.'.join(keys[:depth])} holds {node!r}, which has no keys")
    if isinstance(node, list):
        node[_list_index(node, keys[-1], path)] = value
    elif isinstance(node, dict):
        node[keys[-1]] = value
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(keys[:-1])} holds {node!r}, which has no keys")


def _list_index(node: list[Any], key: str, path: str) -> int:
    """Index of a list entry by number, or by the `name` of the component in it."""
    if key.isdigit() and int(key) < len(node):
        return int(key)
    named = [entry.get("name") for entry in node if isinstance(entry, dict)]
    if key in named:
        return named.index(key)
    known = [str(name) for name in named if name]
    raise ConfigError(f"override {path!r}: no entry {key!r}; one of {', '.join(known) or 'none'}{nearest(key, known)}")


def _explain(error: ValidationError, source: str, root: Any, *, depth: int = 0) -> str:
    """Every fault on a line; `root` is the type at `depth` in the validated model."""
    lines = [f"{source}: {error.error_count()} fault(s)"]
    for fault in error.errors(include_url=False):
        location = [str(part) for part in fault["loc"][depth:]]
        place = ".".join(location) or "(top level)"
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = sorted(_known_keys(root, location[:-1]))
            lines.append(
                f"  {place}: unknown key; known: {', '.join(known)}{nearest(location[-1] if location else '', known)}"
            )
        elif fault["type"].startswith("missing"):
            lines.append(f"  {place}: required, not given{_run_together(fault['input'])}")
        elif fault["type"] == "model_type" and isinstance(fault["input"], str):
            lines.append(f"  {place}: a component is a mapping: write {{name: {fault['input']}}}")
        else:
            # A fault of a whole section names its values itself; the section would be a screen of text.
            own = fault["type"] == "value_error"
            got = "" if own or not location else f" (got {fault['input']!r})"
            lines.append(f"  {place}: {fault['msg'].removeprefix('Value error, ')}{got}")
    return "\n".join(lines)


def _run_together(value: Any) -> str:
    """A hint for `{name:x}`, which YAML reads as one key that holds nothing."""
    keys = [str(key) for key, held in value.items() if held is None] if isinstance(value, Mapping) else []
    joined = next((key for key in keys if ":" in key), None)
    return f" (got the key {joined!r}; YAML wants a space after the colon)" if joined else ""


def _known_keys(root: Any, path: Iterable[str]) -> set[str]:
    """Field names at a place inside nested models and dataclasses; mapping keys and list indices are passed over."""
    node = root
    for part in path:
        hints = _fields(node)
        if part in hints:
            node = hints[part]
    return set(_fields(node))


def _fields(node: Any) -> dict[str, Any]:
    if isinstance(node, type) and issubclass(node, BaseModel):
        return {name: _inner(info.annotation) for name, info in node.model_fields.items()}
    if dataclasses.is_dataclass(node):
        hints = get_type_hints(node)
        return {entry.name: _inner(hints[entry.name]) for entry in dataclasses.fields(node)}
    return {}


def _inner(annotation: Any) -> Any:
    """The model or dataclass inside `dict[str, X]` and `tuple[X, ...]`, else the annotation itself."""
    candidates = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type)]
    inner = [a for a in candidates if dataclasses.is_dataclass(a) or issubclass(a, BaseModel)]
    return inner[0] if inner else annotation
