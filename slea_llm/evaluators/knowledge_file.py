"""A knowledge file: step patterns that a developer wrote for a domain, read strictly.

docs/steps-and-scores.md describes the file. Whatever it names that is not known here is a ConfigError with its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from slea_llm import assets, strict_yaml
from slea_llm.errors import ConfigError, nearest
from slea_llm.evaluators.dialogue_features import FEATURES, MARKS, Scene, Words
from slea_llm.types import STEP_KINDS, State, Step

NAMED_SLOTS = "$slot"
"""In a condition: every slot that the step names; in a rationale: their names."""

STATE_SLOTS = ("slot_missing", "slot_filled", "slot_confirmed", "slot_unconfirmed", "slot_unneeded")
STATE_FLAGS = ("missing_named", "all_filled", "none_filled", "all_confirmed", "placed")
TEXT_SLOTS = ("slot_heard", "slot_unheard", "slot_heard_now")
TEXT_FLAGS = ("slot_named", *FEATURES)
LAST_STEP = "last_step"
"""A condition on the step alone: whether it is the last of its turn."""
CONDITIONS = (*STATE_SLOTS, *STATE_FLAGS, *TEXT_SLOTS, *TEXT_FLAGS, LAST_STEP)
DEFAULT_LIKENESS = 0.6

Likeness: TypeAlias = Mapping[str, float]
"""Pattern -> cosine of the step with the pattern's nearest example."""


class NoStateError(Exception):
    """The state lacks what a condition asks for; becomes the reason why the step is not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """The part of an order's public state that conditions look at."""

    required: frozenset[str]
    filled: frozenset[str]
    confirmed: frozenset[str]
    placed: bool

    @classmethod
    def of(cls, state: State) -> _Slots:
        for key in ("required", "filled", "confirmed"):
            if not isinstance(state.get(key), Mapping | list | tuple):
                raise NoStateError(f"the state before the turn has no list {key!r}")
        return cls(
            required=frozenset(state["required"]),
            filled=frozenset(state["filled"]),
            confirmed=frozenset(state["confirmed"]),
            placed=state.get("placed") is True,
        )

    def holds(self, name: str, wanted: bool | frozenset[str], named: frozenset[str]) -> bool:
        if isinstance(wanted, bool):
            flags = {
                "missing_named": self.required - self.filled <= named,
                "all_filled": self.required <= self.filled,
                "none_filled": not self.filled,
                "all_confirmed": self.required <= self.filled & self.confirmed,
                "placed": self.placed,
            }
            return flags[name] is wanted
        if name == "slot_unneeded":
            return bool(wanted) and not wanted & (self.required | self.filled)
        slots = {
            "slot_missing": self.required - self.filled,
            "slot_filled": self.filled,
            "slot_confirmed": self.filled & self.confirmed,
            "slot_unconfirmed": self.filled - self.confirmed,
        }
        return bool(wanted) and wanted <= slots[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a matching step is worth when every condition holds."""

    when: Mapping[str, Any]
    score: float
    rationale: str

    def holds(self, state: State, scene: Scene, named: frozenset[str], *, last: bool) -> bool:
        """`named`: slots that the pattern's match names. Raises NoStateError when the state lacks what is asked for."""
        return all(self._one(name, wanted, state, scene, named, last) for name, wanted in self.when.items())

    @staticmethod
    def _one(name: str, wanted: Any, state: State, scene: Scene, named: frozenset[str], last: bool) -> bool:
        if name == LAST_STEP:
            return last is wanted
        if name == "slot_named":
            return bool(named) is wanted
        if name in FEATURES:
            return scene.features[name] is wanted
        if not isinstance(wanted, bool):
            wanted = named if wanted == NAMED_SLOTS else frozenset([wanted] if isinstance(wanted, str) else wanted)
        if name not in TEXT_SLOTS:
            return _Slots.of(state).holds(name, wanted, named)
        told = scene.past.slots_now if name == "slot_heard_now" else scene.past.slots
        return bool(wanted) and (not wanted & told if name == "slot_unheard" else wanted <= told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Matches steps of its kinds by `call` and `labels`, where given, and by a regex or an example, where given."""

    name: str
    kinds: frozenset[str]
    regexes: tuple[re.Pattern[str], ...]
    call: str | None
    labels: frozenset[str]
    examples: tuple[str, ...]
    at_least: float
    cases: tuple[Case, ...]

    def find(self, step: Step, scene: Scene, likeness: Likeness) -> frozenset[str] | None:
        """The slots that the matching parts of the step name; None when nothing matches."""
        if step.kind not in self.kinds or (self.call is not None and _called(scene.text) != self.call):
            return None
        if self.labels and _act(step) not in self.labels:
            return None
        if not self.regexes and not self.examples:
            return scene.named(scene.text) if self.labels else frozenset()
        matches = [match for regex in self.regexes for match in regex.finditer(scene.text)]
        if matches:
            parts = [match["slot"] if "slot" in match.re.groupindex else match[0] for match in matches]
            return frozenset().union(*(scene.named(part or "") for part in parts))
        return scene.named(scene.text) if likeness.get(self.name, -1.0) >= self.at_least else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """A whole file. `slots`: how a step names a slot; `heard`: how user and tools do.

    `environments` are those that it was written for; none: it does not say.
    """

    slots: MARKS
    heard: MARKS
    patterns: tuple[Pattern, ...]
    environments: tuple[str, ...] = ()

    @property
    def examples(self) -> tuple[tuple[str, str], ...]:
        """`(pattern, example)` of every example that steps are compared with."""
        return tuple((pattern.name, example) for pattern in self.patterns for example in pattern.examples)


def read_knowledge(source: str, content: bytes) -> Knowledge:
    """A knowledge file from its bytes. Raises ConfigError that names the pattern and the fault."""
    try:
        document = strict_yaml.load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"knowledge file {source} is not YAML: {error}") from error
    _check_keys(source, document, required=("slots", "patterns"), optional=("description", "environments", "heard"))
    environments = document.get("environments", [])
    if not isinstance(environments, list) or not all(isinstance(name, str) for name in environments):
        raise ConfigError(f"{source}: environments is a list of names, not {environments!r}")
    slots = _marks(source, "slot", document["slots"])
    heard = {**slots, **_marks(source, "heard", document.get("heard", {}))}
    patterns = tuple(_pattern(source, entry, heard) for entry in document["patterns"])
    names = [pattern.name for pattern in patterns]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{source}: patterns named more than once: {', '.join(repeated)}")
    return Knowledge(slots=slots, heard=heard, patterns=patterns, environments=tuple(environments))


def file_for(environment: str) -> str | None:
    """The file of the package that was written for an environment; None when there is none."""
    for name in assets.names("data"):
        if name.startswith("knowledge/"):
            document = strict_yaml.load(assets.find("data", name).read_bytes())
            if environment in document.get("environments", ()):
                return name
    return None


def read_words() -> Words:
    """The empty, settling and questioning words of data/knowledge/words.yaml."""
    source = "knowledge/words.yaml"
    document = strict_yaml.load(assets.find("data", source).read_bytes())
    _check_keys(source, document, required=("empty", "settled", "question"))
    return Words(
        empty=frozenset(word for words in document["empty"].values() for word in words),
        settled=_compile(source, "|".join(_by_language(source, document["settled"]))),
        question=_compile(source, "|".join(_by_language(source, document["question"]))),
    )


def _marks(source: str, what: str, table: Any) -> dict[str, re.Pattern[str]]:
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {what} is a table of names, not {table!r}")
    return {
        str(slot): _compile(f"{source}: {what} {slot!r}", "|".join(_by_language(f"{source}: {what} {slot!r}", texts)))
        for slot, texts in table.items()
    }


def _act(step: Step) -> str:
    """What the parser says that a step does: the last part of a label such as `auto:reply/asks_information(date)`."""
    return (step.label or "").partition("(")[0].rpartition("/")[2].rpartition(":")[2]


def _called(text: str) -> str | None:
    """Name of the tool that a call block calls, None when it is not a call in JSON."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    return name if isinstance(name, str) else None


def _pattern(source: str, entry: Any, slots: Mapping[str, Any]) -> Pattern:
    place = f"{source}: pattern {entry.get('name') if isinstance(entry, dict) else entry!r}"
    optional = ("regex", "call", "labels", "similar", "at_least")
    _check_keys(place, entry, required=("name", "kinds", "cases"), optional=optional)
    if unknown := sorted(set(entry["kinds"]) - set(STEP_KINDS)):
        raise ConfigError(f"{place}: kind {unknown[0]!r} is not one of {', '.join(STEP_KINDS)}")
    labels = entry.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ConfigError(f"{place}: labels {labels!r} is not a list of step labels")
    return Pattern(
        name=entry["name"],
        kinds=frozenset(entry["kinds"]),
        regexes=tuple(_compile(place, text) for text in _by_language(place, entry.get("regex", {}))),
        call=entry.get("call"),
        labels=frozenset(labels),
        examples=tuple(_by_language(place, entry.get("similar", {}))),
        at_least=_number(place, "at_least", entry.get("at_least", DEFAULT_LIKENESS)),
        cases=tuple(_case(place, case, slots) for case in entry["cases"]),
    )


def _case(place: str, entry: Any, slots: Mapping[str, Any]) -> Case:
    _check_keys(place, entry, required=("score", "rationale"), optional=("when",))
    score = _number(place, "score", entry["score"])
    when = entry.get("when", {})
    _check_keys(f"{place}, when", when, optional=CONDITIONS)
    for name, wanted in when.items():
        if name in (*STATE_FLAGS, *TEXT_FLAGS, LAST_STEP):
            if not isinstance(wanted, bool):
                raise ConfigError(f"{place}: condition {name} takes true or false, not {wanted!r}")
            continue
        named = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(named, list) or not named or not set(named) <= {NAMED_SLOTS, *slots}:
            known = ", ".join((NAMED_SLOTS, *slots))
            raise ConfigError(f"{place}: condition {name} takes {known}, not {wanted!r}")
    return Case(when=when, score=score, rationale=str(entry["rationale"]))


def _number(place: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
        raise ConfigError(f"{place}: {name} {value!r} is not a number in [-1, 1]")
    return float(value)


def _by_language(place: str, table: Any) -> list[str]:
    """Every expression of a `language: [expressions]` table. Languages are tried together: models mix them."""
    if not isinstance(table, dict) or not all(isinstance(texts, list) for texts in table.values()):
        raise ConfigError(f"{place}: give regular expressions as 'language: [expression, ...]', not {table!r}")
    return [str(text) for texts in table.values() for text in texts]


def _compile(place: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"{place}: {text!r} is not a regular expression: {error}") from error


def _check_keys(place: str, entry: Any, *, required: Sequence[str] = (), optional: Sequence[str] = ()) -> None:
    known = (*required, *optional)
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: expected a mapping with {', '.join(known)}, found {entry!r}")
    if missing := [key for key in required if key not in entry]:
        raise ConfigError(f"{place}: {missing[0]!r} is missing")
    if unknown := sorted(str(key) for key in entry if key not in known):
        raise ConfigError(f"{place}: unknown key {unknown[0]!r}; known: {', '.join(known)}{nearest(unknown[0], known)}")
