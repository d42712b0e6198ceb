"""Score steps by patterns that a developer wrote for the task, judged against the public state before the turn."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from slea_llm import assets
from slea_llm.errors import ConfigError, nearest
from slea_llm.types import STEP_KINDS, ScoredStep, State, Step, Trajectory, leaf_steps

NAMED_SLOTS = "$slot"
"""In a condition: every slot that the step names; in a rationale: their names."""

SLOT_CONDITIONS = ("slot_missing", "slot_filled", "slot_confirmed", "slot_unconfirmed", "slot_unneeded")
FLAG_CONDITIONS = ("slot_named", "missing_named", "all_filled", "none_filled", "all_confirmed", "placed")
LAST_STEP = "last_step"
"""A condition on the step alone: whether it is the last of its turn."""
CONDITIONS = (*SLOT_CONDITIONS, *FLAG_CONDITIONS, LAST_STEP)

_TAG = re.compile(r"</?[^\W\d][\w.-]*[ \t]*>")


class _NoStateError(Exception):
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
                raise _NoStateError(f"the state before the turn has no list {key!r}")
        return cls(
            required=frozenset(state["required"]),
            filled=frozenset(state["filled"]),
            confirmed=frozenset(state["confirmed"]),
            placed=state.get("placed") is True,
        )

    def flag(self, name: str) -> bool:
        return {
            "all_filled": self.required <= self.filled,
            "none_filled": not self.filled,
            "all_confirmed": self.required <= self.filled & self.confirmed,
            "placed": self.placed,
        }[name]

    def slots(self, name: str) -> frozenset[str]:
        return {
            "slot_missing": self.required - self.filled,
            "slot_filled": self.filled,
            "slot_confirmed": self.filled & self.confirmed,
            "slot_unconfirmed": self.filled - self.confirmed,
        }[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What a matching step is worth when every condition holds."""

    when: Mapping[str, Any]
    score: float
    rationale: str

    def holds(self, state: State, named: frozenset[str], *, last: bool) -> bool:
        when = dict(self.when)
        if when.pop(LAST_STEP, last) is not last:
            return False
        if not when:
            return True
        slots = _Slots.of(state)
        return all(self._one(name, wanted, slots, named) for name, wanted in when.items())

    @staticmethod
    def _one(name: str, wanted: Any, slots: _Slots, named: frozenset[str]) -> bool:
        if name == "slot_named":
            return bool(named) is wanted
        if name == "missing_named":
            return (slots.slots("slot_missing") <= named) is wanted
        if name in FLAG_CONDITIONS:
            return slots.flag(name) is wanted
        asked = named if wanted == NAMED_SLOTS else frozenset([wanted] if isinstance(wanted, str) else wanted)
        if name == "slot_unneeded":
            return bool(asked) and not asked & (slots.required | slots.filled)
        return bool(asked) and asked <= slots.slots(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    name: str
    kinds: frozenset[str]
    regexes: tuple[re.Pattern[str], ...]
    call: str | None
    cases: tuple[_Case, ...]

    def find(self, text: str, aliases: Mapping[str, re.Pattern[str]]) -> frozenset[str] | None:
        """The slots that the matching parts of the text name; None when nothing matches."""
        if self.call is not None and _called(text) != self.call:
            return None
        if not self.regexes:
            return frozenset()
        matches = [match for regex in self.regexes for match in regex.finditer(text)]
        if not matches:
            return None
        parts = [match["slot"] if "slot" in match.re.groupindex else match[0] for match in matches]
        return frozenset(slot for slot, alias in aliases.items() if any(alias.search(part or "") for part in parts))


class KnowledgeBase:
    """The first pattern of the file that matches a step, and in it the first case whose conditions hold, decides.

    A pattern applies to some kinds of step and matches by a regular expression of any language or by the tool that is
    called; one with neither matches every step of its kinds. Its cases look at the state before the turn, so that
    the same question is worth a reward while its slot is missing and a penalty once it is filled. A step whose state
    lacks what a condition needs is not scored and says so; docs/steps-and-scores.md describes the file.
    """

    name: ClassVar[str] = "knowledge_base"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        file: str = "knowledge/order.yaml"
        """A file of data/, or the path of a file of your own."""
        unmatched: Literal["neutral", "unscored"] = "neutral"
        """A step that no pattern matches gets `default` with the rationale "no pattern", or no score at all."""
        default: float = 0.0
        """In [-1, 1]."""

        def __post_init__(self) -> None:
            if not (math.isfinite(self.default) and abs(self.default) <= 1):
                raise ConfigError(f"default {self.default} is not in [-1, 1]")
            if self.unmatched not in ("neutral", "unscored"):
                raise ConfigError(f"unmatched {self.unmatched!r} is not one of neutral, unscored")

    def __init__(self, config: Config) -> None:
        """Read the file. Raises ConfigError that names the pattern and the fault."""
        self.config = config
        path = Path(config.file) if Path(config.file).is_file() else assets.find("data", config.file)
        content = path.read_bytes()
        self._aliases, self._patterns = _read(config.file, content)
        settings = json.dumps(dataclasses.asdict(config), sort_keys=True).encode()
        self._version = hashlib.sha256(content + settings).hexdigest()[:16]

    @property
    def version(self) -> str:
        """Changes when the file or the settings do."""
        return self._version

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A word on every leaf step, each score in [-1, 1]; `parts` names the pattern that decided."""
        states = {turn.index: turn.state_before for turn in trajectory.turns}
        leaves = leaf_steps(steps)
        last = {step.turn: step for step in leaves}
        return tuple(self._judge(step, states[step.turn], last=last[step.turn] is step) for step in leaves)

    def _judge(self, step: Step, state: State, *, last: bool) -> ScoredStep:
        text = " ".join(unicodedata.normalize("NFKC", _TAG.sub(" ", step.text)).split())
        try:
            for pattern in self._patterns:
                if step.kind not in pattern.kinds:
                    continue
                named = pattern.find(text, self._aliases)
                if named is None:
                    continue
                case = next((case for case in pattern.cases if case.holds(state, named, last=last)), None)
                if case is not None:
                    words = case.rationale.replace(NAMED_SLOTS, ", ".join(sorted(named)))
                    return self._word(step, score=case.score, rationale=words, parts={pattern.name: case.score})
        except _NoStateError as error:
            return self._word(step, reason=str(error))
        if self.config.unmatched == "unscored":
            return self._word(step, reason="no pattern")
        return self._word(step, score=self.config.default, rationale="no pattern")

    def _word(
        self,
        step: Step,
        *,
        score: float | None = None,
        reason: str | None = None,
        rationale: str = "",
        parts: Mapping[str, float] | None = None,
    ) -> ScoredStep:
        return ScoredStep(
            turn=step.turn,
            step=step.index,
            evaluator=self.name,
            version=self._version,
            score=score,
            reason=reason,
            rationale=rationale,
            parts=parts or {},
        )


def _called(text: str) -> str | None:
    """Name of the tool that a call block calls, None when it is not a call in JSON."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    return name if isinstance(name, str) else None


def _read(source: str, content: bytes) -> tuple[dict[str, re.Pattern[str]], tuple[_Pattern, ...]]:
    try:
        document = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"knowledge file {source} is not YAML: {error}") from error
    _check_keys(source, document, required=("slots", "patterns"), optional=("description",))
    aliases = {
        str(slot): _compile(f"{source}: slot {slot!r}", "|".join(_by_language(f"{source}: slot {slot!r}", table)))
        for slot, table in document["slots"].items()
    }
    patterns = tuple(_pattern(source, entry, aliases) for entry in document["patterns"])
    names = [pattern.name for pattern in patterns]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{source}: patterns named more than once: {', '.join(repeated)}")
    return aliases, patterns


def _pattern(source: str, entry: Any, aliases: Mapping[str, Any]) -> _Pattern:
    place = f"{source}: pattern {entry.get('name') if isinstance(entry, dict) else entry!r}"
    _check_keys(place, entry, required=("name", "kinds", "cases"), optional=("regex", "call"))
    if unknown := sorted(set(entry["kinds"]) - set(STEP_KINDS)):
        raise ConfigError(f"{place}: kind {unknown[0]!r} is not one of {', '.join(STEP_KINDS)}")
    return _Pattern(
        name=entry["name"],
        kinds=frozenset(entry["kinds"]),
        regexes=tuple(_compile(place, text) for text in _by_language(place, entry.get("regex", {}))),
        call=entry.get("call"),
        cases=tuple(_case(place, case, aliases) for case in entry["cases"]),
    )


def _case(place: str, entry: Any, aliases: Mapping[str, Any]) -> _Case:
    _check_keys(place, entry, required=("score", "rationale"), optional=("when",))
    score = entry["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not -1 <= score <= 1:
        raise ConfigError(f"{place}: score {score!r} is not a number in [-1, 1]")
    when = entry.get("when", {})
    _check_keys(f"{place}, when", when, optional=CONDITIONS)
    for name, wanted in when.items():
        if name in FLAG_CONDITIONS or name == LAST_STEP:
            if not isinstance(wanted, bool):
                raise ConfigError(f"{place}: condition {name} takes true or false, not {wanted!r}")
            continue
        slots = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(slots, list) or not slots or not set(slots) <= {NAMED_SLOTS, *aliases}:
            known = ", ".join((NAMED_SLOTS, *aliases))
            raise ConfigError(f"{place}: condition {name} takes {known}, not {wanted!r}")
    return _Case(when=when, score=float(score), rationale=str(entry["rationale"]))


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
