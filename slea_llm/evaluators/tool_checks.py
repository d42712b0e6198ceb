"""Calls of a dialogue and what can be checked about them in any domain: what they change, and what that rests on.

Nothing here knows a task: whether a tool changes something is read off its name, whether a value was said off the words
of user and tools, whether the user agreed off its last message.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import yaml

from slea_llm import assets
from slea_llm.errors import ConfigError
from slea_llm.evaluators.tool_results import answers, error_in
from slea_llm.types import Message, Step, Trajectory, leaf_steps

SOURCE = "knowledge/tool_use.yaml"
Effect: TypeAlias = Literal["changes", "reads", "unknown"]
Consent: TypeAlias = Literal["agrees", "declines", "neither", "unasked", "open"]

LONGEST_VALUE = 60
"""Characters of an argument above which it is a text of the agent's own and need not have been said."""
MOST_WORDS = 4
"""Words of one."""
SMALL = 10
"""Numbers up to which they may be a count that nobody has said."""
EFFORT = 20_000_000
"""Characters that are searched for words side by side, in one dialogue."""
MOST_VALUES = 50
"""Arguments of one call that are looked for."""

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAME_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_FORMULA = re.compile(r"(?=.*[-+*/()=%^])[\d\s.,()+*/=%^-]+")
_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_WORD = re.compile(r"[a-z0-9]+|[^\W_a-z0-9]+")
"""Chinese beside Latin letters or digits is another word: no blank stands between them."""
_FACT = re.compile(r"[\dA-Z]|[^\x00-\x7f]")
"""What a value has that names something: a word in small letters alone is a choice of the tool's, such as `economy`."""
_CHOOSING = ("command", "action", "operation", "method", "mode")
"""Arguments that say what a tool does where it does several things."""


@dataclass(frozen=True, slots=True)
class ToolWords:
    """What data/knowledge/tool_use.yaml lists."""

    changes: frozenset[str]
    reads: frozenset[str]
    agrees: re.Pattern[str]
    declines: re.Pattern[str]
    digest: str = ""
    """Of the file, for the versions of evaluators."""

    @classmethod
    def read(cls, source: str = SOURCE) -> ToolWords:
        """Raises ConfigError for a file that is not of this form."""
        content = assets.find("data", source).read_bytes()
        document = yaml.safe_load(content)
        digest = hashlib.sha256(content).hexdigest()[:8]
        try:
            patterns = {
                name: re.compile("|".join(text for texts in document[name].values() for text in texts), re.IGNORECASE)
                for name in ("agrees", "declines")
            }
            return cls(frozenset(document["changes"]), frozenset(document["reads"]), **patterns, digest=digest)
        except (KeyError, TypeError, AttributeError, re.error) as error:
            raise ConfigError(
                f"{source}: {type(error).__name__} {error}; see the file of that name in data/"
            ) from error

    def effect(self, name: str, arguments: Any = None) -> tuple[Effect, str]:
        """What a call does by the first known word of a choosing argument, else of the tool's name; and that word."""
        chosen = [arguments.get(key) for key in _CHOOSING] if isinstance(arguments, Mapping) else []
        for text in (*(one for one in chosen if isinstance(one, str) and len(one) <= LONGEST_VALUE), name):
            for word in map(str.lower, _NAME_WORD.findall(text)):
                if word in self.changes:
                    return "changes", word
                if word in self.reads:
                    return "reads", word
        return "unknown", ""

    def word_of(self, said: str) -> Literal["agrees", "declines", "neither"]:
        """What a message of the user says to a proposal."""
        no, yes = self.declines.search(said), self.agrees.search(said)
        if no and (not yes or no.start() < yes.start()):
            return "declines"
        return "agrees" if yes else "neither"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A leaf step that calls a tool. `unsaid` are values that neither user, tools nor instructions had named.

    `consent` says what the newest message of the user was to a call that changes something: it `agrees` where it says
    yes or asks for it, `unasked` where the agent has said nothing to the user before; `open` where the user speaks only
    once in the dialogue. `again`: the same call was made before without an error. `failed`: the answer is an error.
    """

    name: str
    effect: Effect
    unsaid: tuple[str, ...] = ()
    consent: Consent = "open"
    again: bool = False
    failed: bool = False


def checked_calls(
    trajectory: Trajectory, steps: Sequence[Step], words: ToolWords
) -> dict[tuple[int, int], CheckedCall]:
    """`(turn, step)` of every leaf step that makes a call -> what can be said of its first call."""
    heard = _Heard()
    answered = answers(trajectory, steps)
    by_turn: dict[int, list[Step]] = {}
    for step in leaf_steps(steps):
        by_turn.setdefault(step.turn, []).append(step)
    spoken = sum(any(message.role == "user" for message in turn.context) for turn in trajectory.turns)
    found: dict[tuple[int, int], CheckedCall] = {}
    done: set[str] = set()
    for turn in trajectory.turns:
        heard.hear(turn.context)
        for step in by_turn.get(turn.index, ()):
            call = call_in(step.text) if step.kind == "tool_call" else None
            if call is None:
                heard.talked = heard.talked or step.kind == "reply"
                continue
            place = (step.turn, step.index)
            answer = answered.get(place)
            failed = answer is not None and error_in(answer) is not None
            found[place] = _checked(*call, heard, words, again=step.text in done, failed=failed, dialogue=spoken > 1)
            if not failed:
                done.add(step.text)
    return found


def call_in(text: str) -> tuple[str, Any] | None:
    """Name and arguments of the first call in the text of a step; None when there is none that can be read."""
    block = _BLOCK.search(text)
    try:
        value = json.loads(block[1]) if block else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], value.get("arguments")


def _checked(
    name: str, arguments: Any, heard: _Heard, words: ToolWords, *, again: bool, failed: bool, dialogue: bool
) -> CheckedCall:
    effect, verb = words.effect(name, arguments)
    if effect == "unknown":  # a shell or an interpreter: its text is the agent's own
        return CheckedCall(name=name, effect=effect, again=again, failed=failed)
    values = itertools.islice(_values(arguments), MOST_VALUES)
    unsaid = tuple(dict.fromkeys(text for text in values if not heard.named(text)))
    return CheckedCall(
        name=name,
        effect=effect,
        unsaid=unsaid,
        consent=heard.consent(verb, words) if dialogue and effect == "changes" else "open",
        again=again,
        failed=failed,
    )


def _values(arguments: Any) -> Iterator[str]:
    """The values of a call that somebody must have said: short texts, and numbers that are no small counts."""
    waiting = deque([arguments])
    while waiting:
        value = waiting.popleft()
        if isinstance(value, Mapping):
            waiting += [item for key, item in value.items() if key not in _CHOOSING]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and _FORMULA.fullmatch(value) and not _DATE.search(value):
            waiting += map(_number, _NUMBER.findall(value))
        elif isinstance(value, str) and len(value) <= LONGEST_VALUE and _is_fact(value):
            yield value
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > SMALL:
            yield f"{value:g}" if abs(value) < 1e6 else str(value)


def _is_fact(value: str) -> bool:
    """Whether a text is a value of the matter: no choice of the tool's, no path, no sentence of the agent's own."""
    words = len(value.split()) if value.isascii() else len(value) / 3  # characters of a Chinese word, generously
    return bool(_FACT.search(value)) and "/" not in value and words <= MOST_WORDS


class _Heard:
    """What instructions, user and tools have said so far, and whether the user answered to the agent."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, frozenset[str]]] = []
        self._words: set[str] = set()
        self._numbers: set[float] = set()
        self._wishes: set[str] = set()
        self._effort = EFFORT
        self.user = ""
        self.asked = False
        self.talked = False

    def hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            text = _plain(message.content)
            words = frozenset(text.split())
            self._messages.append((text, words))
            self._words |= words
            self._numbers.update(map(_number, _NUMBER.findall(message.content)))
            if message.role == "user":
                self.user, self.asked = message.content, self.talked
                self._wishes |= words

    def named(self, value: str) -> bool:
        """Whether anybody but the agent named a value: as it is, a number or date in other words, half of a name."""
        plain = _plain(value)
        words = plain.split()
        if all(word in self._words for word in words) and (len(words) < 2 or self._holds(plain)):
            return True
        if _NUMBER.fullmatch(value):
            return _number(value) in self._numbers
        if date := _DATE.fullmatch(value):
            return self._dated(int(date[2]), int(date[3]))
        if not value.isascii():  # there may be no blanks between words, and a date may be written otherwise
            numbers = set(map(_number, _NUMBER.findall(value))) - {0.0}
            return numbers <= self._numbers if numbers else self._holds(plain.strip())
        if re.search(r"\d", value):
            return False
        return 2 * sum(word in self._words for word in words) >= len(words)

    def _holds(self, part: str) -> bool:
        """Whether a message holds these words side by side; after much searching that it has its words is enough."""
        for text, _ in self._messages:
            if part in text:
                return True
            self._effort -= len(text)
            if self._effort < 0:
                return True
        return False

    def _dated(self, month: int, day: int) -> bool:
        """Whether one message names a month, by its name or number, and a day of it."""
        name = _MONTHS[month - 1] if 1 <= month <= 12 else ""
        months = {name, name[:3], name[:4], str(month), f"{month:02}"} - {""}
        days = {str(day), f"{day:02}", *(f"{day}{end}" for end in ("st", "nd", "rd", "th"))}
        return any(words & days and words & months for _, words in self._messages)

    def consent(self, verb: str, words: ToolWords) -> Consent:
        """What the user's newest message says to a change that the tool calls `verb`; a wish for it stays one."""
        said = words.word_of(self.user)
        forms = {verb, *(f"{stem}{end}" for stem in (verb, verb.removesuffix("e")) for end in ("s", "ing", "ed"))}
        if said != "declines" and forms & self._wishes:
            return "agrees"
        return said if self.asked or said == "declines" else "unasked"


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _plain(text: str) -> str:
    """Words and numbers between single blanks, a blank at each end, so that only whole words are found."""
    return f" {' '.join(_WORD.findall(text.casefold()))} "
