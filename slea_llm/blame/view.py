"""A dialogue as a referee reads it: who said what in which turn, what was wanted, how it ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal

import yaml

from slea_llm import assets
from slea_llm.blame.facts import PROSE, Wanted, normal, wanted
from slea_llm.models.thoughts import without_thoughts
from slea_llm.types import Trajectory
from slea_llm.users import speech

Side = Literal["user", "agent", "tool"]
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One utterance. `turn` is the agent's reply that it is, or that it stands before.

    `calls`: a reply of the agent that called tools, which its text does not show.
    """

    turn: int
    side: Side
    text: str
    calls: bool = False

    @property
    def blank(self) -> bool:
        """Whether nothing was said and nothing done."""
        return not self.calls and not re.search(r"\w", self.text)

    @property
    def plain(self) -> str:
        return normal(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A dialogue to be judged.

    `left`: the user ended it. `vague` names the slots that the task lets its user be vague about. `pinned` is what the
    record says of the user.
    """

    trajectory: Trajectory
    lines: tuple[Line, ...]
    wanted: tuple[Wanted, ...]
    vague: frozenset[str]
    goal_text: str
    language: str
    left: bool
    pinned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        return self.trajectory.success

    @property
    def user_lines(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.side == "user")

    def pairs(self) -> Iterator[tuple[Line | None, Line]]:
        """Each line of the user with what the agent said just before it; None before the first."""
        agent: Line | None = None
        for line in self.lines:
            if line.side == "agent":
                agent = line
            elif line.side == "user":
                yield agent, line
                agent = None

    def before(self, line: Line, *sides: Side) -> list[Line]:
        """What these sides said before a line."""
        place = next(number for number, one in enumerate(self.lines) if one is line)
        return [one for one in self.lines[:place] if one.side in sides]

    def after(self, line: Line, *sides: Side) -> list[Line]:
        """What these sides said after a line."""
        place = next(number for number, one in enumerate(self.lines) if one is line)
        return [one for one in self.lines[place + 1 :] if one.side in sides]

    def told(self, slot: Wanted, lines: tuple[Line, ...] | None = None) -> bool:
        """Whether the user ever names the value of a slot, or the wrong one that the task allows."""
        return any(slot.told_in(line.text) for line in (self.user_lines if lines is None else lines))


@cache
def _words() -> Mapping[str, Any]:
    """`data/referee/words.yaml`."""
    words: Mapping[str, Any] = yaml.safe_load(assets.find("data", "referee/words.yaml").read_text(encoding="utf-8"))
    return words


@cache
def common_words() -> Mapping[str, frozenset[str]]:
    """Language -> its most common words, to tell languages of one script apart."""
    return {code: frozenset(words.split()) for code, words in _words()["languages"].items()}


@lru_cache(maxsize=4096)
def content(text: str) -> frozenset[str]:
    """The words of a text that are not among the most common ones of their language."""
    small = common_words()["en"] | frozenset("我你您的了是要不吗呢啊吧请在就给把和有这那")
    return frozenset(
        word for word in speech.words_of(normal(text)) if word not in small and (len(word) > 1 or not word.isascii())
    )


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{one})" for one in _words()[name]), re.MULTILINE)


def cue(name: str, text: str) -> str:
    """The first words of a text that match a list of `words.yaml`; empty when none do."""
    return next(cues(name, text), "")


def cues(name: str, text: str) -> Iterator[str]:
    """All words of a text that match a list of `words.yaml`, in order."""
    return (found[0].strip() for found in _pattern(name).finditer(text))


@cache
def _slot_pattern(slot: str) -> re.Pattern[str]:
    plain = normal(slot).replace("_", " ").replace("-", " ")
    words = [word for word in plain.split() if word not in ("book", "the", "of")]
    known: Mapping[str, str] = _words()["slots"]
    parts = [rf"\b{re.escape(word)}s?\b" if word.isascii() else re.escape(word) for word in words]
    parts += [known[word] for word in words if word in known]
    return re.compile("|".join(parts) or r"(?!)")


def asks_about(line: Line, slots: tuple[Wanted, ...]) -> tuple[Wanted, ...]:
    """The slots that a line of the agent asks for; sentences that ask nothing do not count."""
    asking = " ".join(part for part in re.findall(r"[^.!?。！？\n]+[.!?。！？\n]*", line.plain) if cue("asks", part))
    return tuple(slot for slot in slots if asking and _slot_pattern(slot.slot).search(asking))


def names_slot(text: str, slot: Wanted) -> bool:
    """Whether a text names a slot, by its name or by a word for it."""
    return _slot_pattern(slot.slot).search(text) is not None


def asks_own(text: str, slots: tuple[Wanted, ...]) -> str:
    """The words in which a user asks for what only it can know."""
    names = "|".join(
        sorted({re.escape(normal(slot.slot).replace("_", " ")) for slot in slots} or {"(?!)"}, key=len, reverse=True)
    )
    for pattern in _words()["asks_own"]:
        found = re.search(pattern.replace("{slot}", f"(?:{names})"), text)
        if found:
            return found[0].strip()
    return ""


def view(trajectory: Trajectory) -> View:
    """A dialogue as it was heard: thoughts and calls taken out, placeholders filled where the record says how."""
    goal = trajectory.task.get("goal", trajectory.task)
    goal = goal if isinstance(goal, Mapping) else {"goal": goal}
    user = goal.get("user")
    return View(
        trajectory=trajectory,
        lines=tuple(_lines(trajectory)),
        wanted=wanted(goal),
        vague=frozenset(user.get("vague", ())) if isinstance(user, Mapping) else frozenset(),
        goal_text=_goal_text(goal),
        language=str(trajectory.task.get("language", "")),
        left=trajectory.termination == "user_left",
        pinned=trajectory.provenance.get("user") or {},
    )


def _lines(trajectory: Trajectory) -> Iterator[Line]:
    changed = trajectory.provenance.get("heard", {})
    for turn in trajectory.turns:
        yield from _context(turn.index, turn.context)
        text = str(changed.get(str(turn.index), without_thoughts(turn.text)))
        spoken = _CALL.sub("", text)
        yield Line(turn=turn.index, side="agent", text=spoken.strip(), calls=spoken != text)
    after = len(trajectory.turns)
    yield from _context(after, trajectory.closing)
    last = () if trajectory.closing else trajectory.provenance.get("last_messages", ())
    for message in last if isinstance(last, list | tuple) else ():
        if message.get("role") in ("user", "tool") and not (
            trajectory.termination == "user_left" and not message.get("content")
        ):
            yield Line(turn=after, side=message["role"], text=str(message.get("content", "")))


def _context(turn: int, messages: Any) -> Iterator[Line]:
    for message in messages:
        if message.role in ("user", "tool"):
            yield Line(turn=turn, side=message.role, text=message.content)


def _goal_text(goal: Mapping[str, Any]) -> str:
    """Instructions that the goal holds as prose."""
    user = goal.get("user")
    places = (goal, user) if isinstance(user, Mapping) else (goal,)
    texts = [place.get(key) for place in places for key in PROSE]
    return "\n".join(re.sub(r"<[^>]+>", "", text) for text in texts if isinstance(text, str))
