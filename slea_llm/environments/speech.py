"""What environments share in hearing an agent: thoughts, calls, and a data file of values, questions and acts.

A language of an environment is one file, `data/<environment>/<code>.yaml`; docs/environments.md lists its keys.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from slea_llm import assets, strict_yaml
from slea_llm.errors import ConfigError
from slea_llm.wording import fragments

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# A dot inside a number (5.7, 3.50) ends no sentence. Nobody says 600 characters in a breath: what goes on for longer is
# cut, so that patterns which look ahead to the end of a sentence take a time that grows with the reply alone.
_SENTENCE = re.compile(r"(?:[^.!?。;\n]|(?<=\d)\.(?=\d)){1,600}[.!?。;\n]*")
_NOTES = "notes"
_NEGATION = 60
"""Characters before a word in which a negation of it is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call found in a reply; `arguments` is None when the call is not valid JSON of the agreed shape."""

    name: str
    arguments: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a spoken reply does.

    `text` is what the user hears. `asks`: slots that it asks for; `reads_back`: the values that the user hears, by
    slot; `does`: its other acts, in the order of the data file.
    """

    text: str
    asks: tuple[str, ...] = ()
    reads_back: Mapping[str, str]
    does: tuple[str, ...] = ()


def normal(text: str) -> str:
    """The text as patterns see it: full-width forms folded, typographic apostrophes made plain, lower case."""
    return unicodedata.normalize("NFKC", text).replace("’", "'").lower()


def spoken(text: str) -> str:
    """A reply without its thought; a thought that was cut before its closing tag leaves nothing to say.

    A closing tag without an opening one (the template wrote it into the prompt) ends a thought too.
    """
    head, closing, tail = text.partition("</think>")
    if closing and "<think>" not in head:
        text = tail
    return _THOUGHT.sub("", text).strip()


def calls(reply: str) -> tuple[Call, ...]:
    """The structured calls in a reply whose thought is removed."""
    return tuple(_call(match.group(1)) for match in _CALL.finditer(reply))


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as an agent writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': dict(arguments)}, ensure_ascii=False)}</tool_call>"


def sentences(text: str) -> tuple[str, ...]:
    return tuple(_SENTENCE.findall(text))


def _call(source: str) -> Call:
    try:
        document = json.loads(source)
    except (ValueError, RecursionError):  # ValueError: also a number of too many digits
        return Call(name="", arguments=None)
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return Call(name="", arguments=None)
    arguments = document.get("arguments", {})
    return Call(name=document["name"], arguments=arguments if isinstance(arguments, dict) else None)


class Speech:
    """One language of one environment, read from its data file.

    Raises ConfigError for a file whose `values`, `understanding` and `slot_names` do not fit its `slots`.
    """

    def __init__(self, environment: str, code: str) -> None:
        source = f"{environment}/{code}.yaml"
        self._read(strict_yaml.load(assets.find("data", source).read_text(encoding="utf-8")), code, source)

    @classmethod
    def of(cls, data: Mapping[str, Any], *, code: str, source: str) -> Self:
        """A language whose data stand in a program; `source` is what errors call them."""
        made = cls.__new__(cls)
        made._read(data, code, source)
        return made

    def _read(self, data: Mapping[str, Any], code: str, source: str) -> None:
        self.code, self.source = code, source
        self.data = data
        self.slots: tuple[str, ...] = tuple(self.data["slots"])
        self.agents: Mapping[str, Any] = self.data["agents"]
        self.tool_errors: Mapping[str, str] = self.data.get("tool_errors", {})
        self._check()
        self._read_back = {slots: (form,) for slots, form in self.data.get("read_back", {}).items()}
        # Without forms to read back there are no placeholders: what looks like one is what it says.
        names = (_NOTES, *self.slots) if self._read_back else ()
        self._placeholder = re.compile(r"\{(" + "|".join(names) + r")\}" if names else r"(?!)")
        self._values = {slot: _Value(self.source, slot, entry) for slot, entry in self.data["values"].items()}
        understanding = self.data["understanding"]
        self._ask = {slot: _pattern(self.source, texts) for slot, texts in understanding["ask"].items()}
        self._acts = {name: _pattern(self.source, texts) for name, texts in understanding.get("acts", {}).items()}
        self._cue = {
            name: _pattern(self.source, understanding[name])
            for name in ("request", "confirm", "affirm", "deny", "negation")
        }
        self._either = _pattern(self.source, understanding.get("either", r"(?!)"))

    def _check(self) -> None:
        known = set(self.slots)
        for place, names in (
            ("values", self.data["values"]),
            ("slot_names", self.data["slot_names"]),
            ("understanding.ask", self.data["understanding"]["ask"]),
        ):
            if unknown := sorted(set(names) ^ known):
                raise ConfigError(f"data file {self.source}: {place} and slots differ in {', '.join(unknown)}")
        forms = self.data.get("read_back", {})
        if unknown := sorted({slot for key in forms for slot in str(key).split("+")} - known):
            raise ConfigError(f"data file {self.source}: read_back names {', '.join(unknown)}, no slot of it")
        if forms and (missing := sorted(known - forms.keys())):
            raise ConfigError(f"data file {self.source}: read_back has no form for {', '.join(missing)}")

    def slot_list(self, slots: Iterable[str]) -> str:
        """The names of slots as one says them in a row."""
        return str(self.data["separator"]).join(self.data["slot_names"][slot] for slot in slots)

    def choices(self, slot: str) -> tuple[str, ...]:
        """The values that a slot of named choices can take."""
        return tuple(self.data["values"][slot]["choices"])

    def values(self, text: str) -> dict[str, str]:
        """Slot -> value for each slot of which the text names exactly one value ("two or three" names none)."""
        found = {slot: value.find(normal(text), self._cue["negation"]) for slot, value in self._values.items()}
        return {slot: next(iter(values)) for slot, values in found.items() if len(values) == 1}

    def describe(self, filled: Mapping[str, str]) -> str:
        """The noted values in words, as the user hears them in place of `{notes}`."""
        values = {slot: filled[slot] for slot in self.slots if slot in filled}
        said = fragments(self._read_back, values, lambda forms: forms[0])
        return str(self.data["separator"]).join(said) or str(self.data["nothing"])

    def understand(self, reply: str, *, filled: Mapping[str, str]) -> Heard:
        """The acts of a reply whose thought is removed, given what the tracker has noted down."""
        named: dict[str, str] = {}

        def fill(match: re.Match[str]) -> str:
            slots = filled if match[1] == _NOTES else [slot for slot in (match[1],) if slot in filled]
            named.update({slot: filled[slot] for slot in slots})
            return self.describe(filled) if match[1] == _NOTES else filled.get(match[1], "...")

        heard = self._placeholder.sub(fill, reply)
        plain = self._placeholder.sub("\1", reply)
        parts = sentences(normal(plain))
        asks: set[str] = set()
        stated: list[str] = []
        for part in parts:
            asked, left = self._question(part) if self.requests(part) else (set(), part)
            asks |= asked
            stated.append(left)
        reads_back = {**self.values("".join(stated)), **named}
        return Heard(
            text=heard,
            asks=tuple(slot for slot in self.slots if slot in asks and slot not in reads_back),
            reads_back={slot: reads_back[slot] for slot in self.slots if slot in reads_back},
            does=self.acts(parts),
        )

    def _question(self, sentence: str) -> tuple[set[str], str]:
        """The slots that a normalised question asks for, and what is left of it without the values that it offers.

        What touches a match of `either` ("CSV or JSON?") is offered and not read back; values of several slots there
        are no alternatives to each other. A group in the pattern marks the place, else it is the whole match.
        """
        asked = self.asked(sentence)
        spans = [match.span(match.lastindex or 0) for match in self._either.finditer(sentence)]
        if not spans:
            return asked, sentence
        places = {slot: value.places(sentence, self._cue["negation"]) for slot, value in self._values.items()}
        left = [*sentence]
        for start, end in spans:
            touched = [slot for slot, found in places.items() if any(a <= end and start <= b for a, b in found)]
            if len(touched) == 1:
                asked.update(touched)
                for a, b in places[touched[0]]:
                    left[a:b] = "\1" * (b - a)
        return asked, "".join(left)

    def requests(self, sentence: str) -> bool:
        """Whether a normalised sentence asks for something."""
        return bool(self._cue["request"].search(sentence))

    def asked(self, sentence: str) -> set[str]:
        """The slots that a normalised sentence speaks of as one does in a question."""
        return {slot for slot, pattern in self._ask.items() if pattern.search(sentence)}

    def acts(self, parts: Sequence[str]) -> tuple[str, ...]:
        """The named acts in normalised sentences, those negated left out."""
        return tuple(
            name for name, pattern in self._acts.items() if any(self.affirmed(pattern, part) for part in parts)
        )

    def affirmed(self, pattern: re.Pattern[str], sentence: str) -> bool:
        """Whether a pattern matches a normalised sentence where no negation stands right before it."""
        return any(not self.negates(sentence[: match.start()]) for match in pattern.finditer(sentence))

    def negates(self, before: str) -> bool:
        """Whether what stands before a word in a normalised sentence takes that word back."""
        return _negated(self._cue["negation"], before)

    def confirms(self, sentence: str) -> bool:
        return bool(self._cue["confirm"].search(sentence))

    def verdict(self, text: str) -> bool | None:
        """True for a yes, False for a no (the first of both counts), None for neither."""
        plain = normal(text)
        yes, no = self._cue["affirm"].search(plain), self._cue["deny"].search(plain)
        if no and (not yes or no.start() <= yes.start()):
            return False
        return True if yes else None

    def patterns(self, key: str) -> dict[str, re.Pattern[str]]:
        """The patterns of another table of the data file's `understanding`."""
        return {name: _pattern(self.source, texts) for name, texts in self.data["understanding"][key].items()}


class _Value:
    """How one slot's values are found in a text: named choices with other ways to say them, or a pattern with a form.

    `choices: {value: [pattern, ...]}`; the value itself, escaped, is always one of its patterns unless `exact` is
    false. `pattern` and `form`: the value is `form` filled with the groups of the match; `transform` says what is done
    to it (`upper`). `keep_case` values are matched in lower case and given as `form` says.
    """

    def __init__(self, source: str, slot: str, entry: Mapping[str, Any]) -> None:
        self._form: str | None = entry.get("form")
        self._transform = entry.get("transform")
        self._words: Mapping[str, str] = {normal(str(key)): str(word) for key, word in entry.get("words", {}).items()}
        if self._form is not None:
            self._patterns: list[tuple[re.Pattern[str], str]] = [(_pattern(source, entry["pattern"]), self._form)]
            return
        if "choices" not in entry:
            raise ConfigError(f"data file {source}: values.{slot} needs choices, or pattern and form")
        self._patterns = []
        for value, others in entry["choices"].items():
            own = [_edged(normal(str(value)))] if entry.get("exact", True) else []
            self._patterns.append((_pattern(source, [*own, *others]), str(value)))

    def find(self, text: str, negation: re.Pattern[str]) -> set[str]:
        """Every value that the normalised text names and does not negate."""
        return {value if self._form is None else self._filled(match) for match, value in self._named(text, negation)}

    def places(self, text: str, negation: re.Pattern[str]) -> list[tuple[int, int]]:
        """Where the normalised text names them."""
        return [match.span() for match, _ in self._named(text, negation)]

    def _named(self, text: str, negation: re.Pattern[str]) -> Iterator[tuple[re.Match[str], str]]:
        for pattern, value in self._patterns:
            for match in pattern.finditer(text):
                if not _negated(negation, text[: match.start()]):
                    yield match, value

    def _filled(self, match: re.Match[str]) -> str:
        groups = {name: self._words.get(group or "", group or "") for name, group in match.groupdict().items()}
        value = str(self._form).format(**groups)
        return value.upper() if self._transform == "upper" else value


def _negated(negation: re.Pattern[str], before: str) -> bool:
    # Negations are short: a look at the last words keeps long replies linear.
    return bool(negation.search(before[-_NEGATION:]))


def _edged(text: str) -> str:
    """A literal, with word borders where it begins or ends with a Latin letter or a digit."""
    escaped = re.escape(text)
    before = r"(?<![a-z0-9])" if re.match(r"[a-z0-9]", text) else ""
    after = r"(?![a-z0-9])" if re.search(r"[a-z0-9]$", text) else ""
    return before + escaped + after


def _pattern(source: str, texts: str | Sequence[str]) -> re.Pattern[str]:
    joined = texts if isinstance(texts, str) else "|".join(f"(?:{text})" for text in texts)
    try:
        return re.compile(joined)
    except re.error as error:
        raise ConfigError(f"data file {source}: {joined!r} is not a regular expression: {error}") from error


def speeches(environment: str, language: str) -> dict[str, Speech]:
    """The languages that a setting `en`, `zh` or `mixed` names."""
    return {code: Speech(environment, code) for code in (("en", "zh") if language == "mixed" else (language,))}
