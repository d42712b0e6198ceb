"""The words that parsers know, read from data/: what marks a step, and what a step does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slea_llm import assets, strict_yaml
from slea_llm.errors import ConfigError, nearest
from slea_llm.types import STEP_KINDS, StepKind

LEVELS: tuple[str, ...] = ("section", "step", "item", "bullet", "paragraph")
OTHER = "other"
"""What a step does of which the vocabulary knows nothing."""
_CHINESE = "零一二三四五六七八九"
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_CIRCLED: Mapping[str, int] = {"①": 20, "❶": 10, "➀": 10, "➊": 10}
_ROMAN: Mapping[str, int] = {"i": 1, "v": 5, "x": 10}


class LineMark(NamedTuple):
    """A pattern for the beginning of a line."""

    name: str
    level: str
    regex: re.Pattern[str]
    inline: re.Pattern[str] | None


class SentenceMark(NamedTuple):
    """A pattern for the beginning of a sentence."""

    name: str
    regex: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Markers:
    """What marks the steps of a text."""

    lines: tuple[LineMark, ...]
    sentences: tuple[SentenceMark, ...]

    @classmethod
    def read(cls, name: str) -> Markers:
        """From a file of data/, or from a path. Raises ConfigError, naming file and entry, for what is unknown."""
        data = _read(name, ("lines", "sentences"))
        lines = []
        for entry in data["lines"]:
            _check_keys(name, entry, ("name", "level", "regex", "inline"))
            if entry.get("level") not in LEVELS:
                level = str(entry.get("level"))
                raise ConfigError(f"{name}: level {level!r} is not one of {', '.join(LEVELS)}{nearest(level, LEVELS)}")
            regex = str(entry.get("regex", ""))
            inline = _compile(name, rf"(?<=[\s。！？；：，;.!?])(?:{regex})") if entry.get("inline") else None
            lines.append(LineMark(str(entry["name"]), entry["level"], _compile(name, regex), inline))
        sentences = []
        for entry in data["sentences"]:
            _check_keys(name, entry, ("name", "regex"))
            sentences.append(SentenceMark(str(entry["name"]), _compile(name, _joined(name, entry["regex"]))))
        return cls(tuple(lines), tuple(sentences))


class _Kind(NamedTuple):
    name: str
    of: tuple[str, ...]
    names: bool
    regex: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Kinds:
    """What steps do, and the things that they speak of."""

    kinds: tuple[_Kind, ...]
    objects: tuple[tuple[str, re.Pattern[str]], ...]

    @classmethod
    def read(cls, name: str) -> Kinds:
        """From a file of data/, or from a path. Raises ConfigError, naming file and entry, for what is unknown."""
        data = _read(name, ("kinds", "objects"))
        kinds = []
        for entry in data["kinds"]:
            _check_keys(name, entry, ("name", "of", "names", "regex"))
            of = tuple(entry.get("of") or STEP_KINDS)
            for kind in of:
                if kind not in STEP_KINDS:
                    raise ConfigError(f"{name}: {kind!r} under `of` is not one of {', '.join(STEP_KINDS)}")
            regex = _compile(name, _joined(name, entry["regex"]))
            kinds.append(_Kind(str(entry["name"]), of, bool(entry.get("names")), regex))
        objects = tuple((str(key), _compile(name, _joined(name, value))) for key, value in data["objects"].items())
        return cls(tuple(kinds), objects)

    def label(self, text: str, kind: StepKind) -> str:
        """What a step does and, where its kind asks for it, what it speaks of: `asks_information(budget, date)`."""
        for entry in self.kinds:
            if kind in entry.of and entry.regex.search(text):
                return f"{entry.name}({things})" if entry.names and (things := self.things(text)) else entry.name
        return OTHER

    def act(self, text: str, kind: StepKind) -> str:
        """What a step does alone: `asks_information`."""
        return next((entry.name for entry in self.kinds if kind in entry.of and entry.regex.search(text)), OTHER)

    def named(self, name: str, text: str) -> str:
        """A kind that was found by other means, with what the text speaks of where that kind asks for it."""
        names = any(entry.name == name and entry.names for entry in self.kinds)
        return f"{name}({things})" if names and (things := self.things(text)) else name

    def things(self, text: str) -> str:
        return ", ".join(sorted(name for name, regex in self.objects if regex.search(text)))


def number_of(text: str | None) -> int | None:
    """The value of a list number: 12, 十二, ⑫, XII, twelve, b. None for what is none of these."""
    if not text:
        return None
    if text.isdecimal():
        return int(text)
    low = text.lower()
    if low in _WORDS:
        return _WORDS.index(low)
    for first, count in _CIRCLED.items():
        if ord(first) <= ord(text[0]) < ord(first) + count:
            return ord(text[0]) - ord(first) + 1
    if all(c in _CHINESE + "十百" for c in text):
        return _chinese(text)
    if len(low) > 1 and all(c in _ROMAN for c in low):
        values = [_ROMAN[c] for c in low]
        return sum(-v if any(w > v for w in values[i + 1 :]) else v for i, v in enumerate(values))
    return ord(low) - ord("a") + 1 if len(low) == 1 and "a" <= low <= "z" else None


def _chinese(text: str) -> int:
    total, digit = 0, 0
    for character in text:
        if character in "十百":
            total += (digit or 1) * (10 if character == "十" else 100)
            digit = 0
        else:
            digit = _CHINESE.index(character)
    return total + digit


def _read(name: str, keys: Iterable[str]) -> dict[str, Any]:
    path = Path(name) if Path(name).is_file() else assets.find("data", name)
    try:
        data = strict_yaml.load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__} where keys {', '.join(keys)} are needed")
    _check_keys(name, data, keys)
    for key in keys:
        if not data.get(key):
            raise ConfigError(f"{path} has no {key!r}")
    return data


def _check_keys(name: str, entry: Any, known: Iterable[str]) -> None:
    known = tuple(known)
    if not isinstance(entry, dict):
        raise ConfigError(f"{name}: {entry!r} has no keys; it needs {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise ConfigError(f"{name}: unknown key {key!r}; one of {', '.join(known)}{nearest(str(key), known)}")


def _joined(name: str, regex: Any) -> str:
    if not isinstance(regex, dict):
        raise ConfigError(f"{name}: regex {regex!r} is not a list of patterns by language, as in {{en: [...]}}")
    return "|".join(f"(?:{pattern})" for patterns in regex.values() for pattern in patterns)


def _compile(name: str, regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex, re.IGNORECASE | re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"{name}: {regex!r} is no regular expression: {error}") from error
