"""Four features of a step, read off the dialogue by words alone: specific, ignores feedback, repeats, coherent.

They need no state of an environment and no model, so that they can be had for any log; docs/evaluators.md says how far
they can be trusted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from slea_llm.types import Trajectory, Turn

FEATURES = ("specific", "ignores_feedback", "repeats", "coherent")
REPEAT_OVERLAP = 0.6
"""Share of common content words (Jaccard) from which a step counts as said before."""
SHORTEST_SENTENCE = 6
"""Letters of a sentence that counts as said twice: "Yes. Yes." is no repetition."""
MARKS: TypeAlias = Mapping[str, re.Pattern[str]]
"""Slot -> how a text names it."""

_TAG = re.compile(r"</?[^\W\d][\w.-]*[ \t]*>")
_SENTENCE = re.compile(r"[.!?;\n。！？；]+(?=\s|$|[^\x00-\x7f])|\b(?:but|however|yet)\b|(?:但是?|不过|然而)")
_STOP = re.compile(r"[.!?;\n。！？；]+")
_CLAUSE = re.compile(r"[,:，：、]+\s|\b(?:and|so)\b|(?:而且|所以)|[，、]")
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]+|[^\W_぀-ヿ㐀-鿿가-힯]+")
_VALUE = re.compile(r"\d|[\"'“”`]")


@dataclass(frozen=True, slots=True)
class Words:
    """What of a language the features need to know; read from data/knowledge/words.yaml."""

    empty: frozenset[str]
    settled: re.Pattern[str]
    question: re.Pattern[str]

    def content(self, text: str) -> frozenset[str]:
        """Words that carry content, cut to their first six letters; pairs of neighbouring characters in Chinese."""
        found: set[str] = set()
        for word in set(_WORD.findall(text.lower())):
            if ord(word[0]) >= 0x3040:
                kept = "".join(character for character in word if character not in self.empty)
                found.update(kept[at : at + 2] for at in range(max(len(kept) - 1, 1)) if kept)
            elif word not in self.empty and len(word) > 1:
                found.add(word[:6])
        return frozenset(found)


@dataclass(frozen=True)
class Told:
    """One normalised message of the user or of a tool; read once, however many steps come after it."""

    text: str
    words: Words
    marks: MARKS = field(default_factory=dict)

    @cached_property
    def content(self) -> frozenset[str]:
        return self.words.content(self.text)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        return tuple(part for part in _SENTENCE.split(self.text) if part.strip())

    @cached_property
    def settled(self) -> frozenset[str]:
        """The content words of its sentences that say that something is settled."""
        return frozenset().union(
            *(self.words.content(sentence) for sentence in self.sentences if self.words.settled.search(sentence))
        )

    @cached_property
    def slots(self) -> frozenset[str]:
        """The slots that it names."""
        return frozenset(slot for slot, mark in self.marks.items() if mark.search(self.text))


@dataclass(frozen=True)
class Past:
    """What was said before a turn: all that user and tools told, the newest of it, and the steps of the agent."""

    told: tuple[Told, ...] = ()
    now: tuple[Told, ...] = ()
    said: tuple[tuple[str, frozenset[str]], ...] = ()
    """Each earlier step of the agent, normalised, and its content words."""
    answered: bool = False
    """Whether the newest came in answer to a reply of the agent."""

    @cached_property
    def slots(self) -> frozenset[str]:
        """The slots that user and tools have named so far."""
        return frozenset().union(*(one.slots for one in self.told))

    @cached_property
    def slots_now(self) -> frozenset[str]:
        """Those that they have named since the last reply."""
        return frozenset().union(*(one.slots for one in self.now))

    @cached_property
    def content(self) -> frozenset[str]:
        """The content words of all that was told."""
        return frozenset().union(*(one.content for one in self.told))

    @cached_property
    def content_now(self) -> frozenset[str]:
        return frozenset().union(*(one.content for one in self.now))

    @cached_property
    def sentences_now(self) -> tuple[str, ...]:
        return tuple(sentence for one in self.now for sentence in one.sentences)

    @cached_property
    def settled_now(self) -> frozenset[str]:
        """The content words of what has been settled since the last reply."""
        return frozenset().union(*(one.settled for one in self.now))


@dataclass(frozen=True)
class Scene:
    """One leaf step in its dialogue. `marks` name the slots of a domain: what a specific step speaks of."""

    text: str
    past: Past
    words: Words
    marks: MARKS = field(default_factory=dict)

    @cached_property
    def content(self) -> frozenset[str]:
        return self.words.content(self.text)

    @cached_property
    def features(self) -> Mapping[str, bool]:
        """The four features.

        - specific: the step names something that the domain lists as concrete.
        - ignores_feedback: the agent was answered, and the step asks for what that answer has just told with a value;
          or it names nothing concrete and either speaks of what the answer has settled, or takes up no word of it.
        - repeats: it has at least 0.6 of its content words in common with a step of an earlier turn, or asks only for
          what the agent has asked for before; a call repeats only the same call.
        - coherent: it names something concrete, or shares a content word with what user and tools said so far.
        """
        named, own = self.named(self.text), self.content
        return {
            "specific": bool(named),
            "ignores_feedback": self._ignores(named, own),
            "repeats": self.repeats,
            "coherent": bool(named) or not own or bool(own & self.past.content),
        }

    @cached_property
    def repeats(self) -> bool:
        """The feature of that name alone, for those who need no other."""
        own = self.content
        if not own:
            return False
        if self.text.startswith("{"):  # a call: like names and values are another call, only the same one is a repeat
            return any(earlier == self.text for earlier, _ in self.past.said)
        for _, other in self.past.said:
            shared = len(own & other)
            if shared >= REPEAT_OVERLAP * (len(own) + len(other) - shared):
                return True
        named = self.named(self.text)
        if not named or not self.asks:
            return False
        asked = (self.named(earlier) for earlier, _ in self.past.said if self.words.question.search(earlier))
        return named <= frozenset().union(*asked)

    @property
    def asks(self) -> bool:
        return bool(self.words.question.search(self.text))

    def named(self, text: str) -> frozenset[str]:
        """The slots that a text names."""
        return frozenset(slot for slot, mark in self.marks.items() if mark.search(text))

    def _ignores(self, named: frozenset[str], own: frozenset[str]) -> bool:
        if not self.past.answered or not own:
            return False
        if named:
            clauses = [clause for sentence in self.past.sentences_now for clause in _CLAUSE.split(sentence)]
            told = frozenset().union(*(self.named(clause) for clause in clauses if _VALUE.search(clause)))
            return self.asks and named <= told
        return bool(own & self.past.settled_now) or not own & self.past.content_now


def normalised(text: str, longest: int | None = None) -> str:
    """The text without tags, NFKC-normalised, its white space single blanks; above `longest` its two ends alone."""
    plain = _TAG.sub(" ", text)
    whole = " ".join((plain if plain.isascii() else unicodedata.normalize("NFKC", plain)).split())
    if longest is None or len(whole) <= longest:
        return whole
    return f"{whole[: longest // 2]} \u2026 {whole[-(longest // 2) :]}"


def said_twice(texts: Sequence[tuple[Hashable, str]]) -> list[bool]:
    """Whether each step says a sentence that it, or an earlier step of the same place, had said already.

    `texts`: `(place, normalised text)` of every leaf step. Shorter sentences than six letters do not count.
    """
    said: dict[Hashable, set[str]] = {}
    found = []
    for place, text in texts:
        before = said.setdefault(place, set())
        sentences = [part.strip().casefold() for part in _STOP.split(text)]
        own = [part for part in sentences if sum(map(str.isalpha, part)) >= SHORTEST_SENTENCE]
        found.append(len(own) > len(set(own) - before))
        before.update(own)
    return found


def pasts(
    trajectory: Trajectory, texts: Sequence[tuple[int, str]], words: Words, marks: MARKS
) -> Callable[[int], Past]:
    """Turn index -> what was said before it.

    `texts`: `(turn, normalised text)` of every leaf step. `marks`: how user and tools name a slot.
    """
    by_turn: dict[int, list[tuple[str, frozenset[str]]]] = {}
    for turn_index, text in texts:
        by_turn.setdefault(turn_index, []).append((text, words.content(text)))
    made: dict[int, Past] = {}
    told: list[Told] = []
    said: list[tuple[str, frozenset[str]]] = []
    for place, turn in enumerate(trajectory.turns):
        now = [Told(text, words, marks) for text in _heard(turn)]
        told += now
        made[turn.index] = Past(tuple(told), tuple(now), tuple(said), place > 0 and bool(now))
        said += by_turn.get(turn.index, [])
    return made.__getitem__


def _heard(turn: Turn) -> list[str]:
    return [normalised(message.content) for message in turn.context if message.role in ("user", "tool")]
