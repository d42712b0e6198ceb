"""Each answer of a user to a line of the agent, and what can be read off the two."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from slea_llm.blame.facts import Wanted
from slea_llm.blame.likeness import overlap, pieces, tells
from slea_llm.blame.view import Line, View, cue, names_slot

ALIKE = 0.8
"""Share of pieces in common from which two lines are the same one."""
_AGREES = re.compile(r"没(?:有)?(?:问题|错|不符|不对|意见)|不错")
"""Denials of a fault are no objections."""
SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation. `strength` is a count or a share; `kind` the kind of fault it stands for."""

    name: str
    line: Line
    strength: float = 1.0
    kind: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the agent said, what the user answered, and what was told before."""

    seen: View
    agent: Line
    line: Line
    before: tuple[Line, ...]
    heard: tuple[Line, ...] = field(default=())
    left_open: tuple[Wanted, ...] = ()
    """Slots asked for earlier, in whose place nothing else has been asked since."""

    @cached_property
    def asks(self) -> bool:
        return bool(cue("asks", self.agent.plain) or cue("needs", self.agent.plain))

    @cached_property
    def asked(self) -> tuple[Wanted, ...]:
        """Slots that the agent asks for by name, or by offering their value among others."""
        return tuple(slot for slot in self.seen.wanted if self.asks and _asks_for(self.agent, slot))

    @cached_property
    def open(self) -> tuple[Wanted, ...]:
        """Asked slots that the user neither told before nor tells now; a question stays open until another is asked.

        What the task lets its user be vague about is open from the second question on.
        """
        return tuple(
            slot
            for slot in self.asked or self.left_open
            if not any(tells(slot, one.text) or slot.told_in(one.text) for one in (*self.before, self.line))
            and (slot.slot not in self.seen.vague or any(_asks_for(one, slot) for one in self.heard))
        )

    @cached_property
    def again(self) -> tuple[Wanted, ...]:
        """Slots that the line tells and that were told before."""
        return tuple(
            slot
            for slot in self.seen.wanted
            if tells(slot, self.line.text) and any(tells(slot, one.text) for one in self.before)
        )

    @cached_property
    def objects(self) -> bool:
        plain = _AGREES.sub(" ", self.line.plain)
        return bool(cue("denies", plain) or cue("objects", plain) or cue("complains_of", plain))

    @cached_property
    def news(self) -> frozenset[str]:
        """Pieces of the agent's line that neither the goal nor anybody before has."""
        known = goal_pieces(self.seen)
        for one in (*self.before, *self.heard):
            known |= pieces(one.text)
        return pieces(self.agent.text) - known

    @cached_property
    def lost(self) -> tuple[Wanted, ...]:
        """Slots that the user had told and that are missing where the agent sums up or reports."""
        if not (cue("confirms", self.agent.plain) or cue("reports_done", self.agent.plain)):
            return ()
        return tuple(
            slot
            for slot in self.seen.wanted
            if not tells(slot, self.agent.text) and any(tells(slot, one.text) for one in self.before)
        )

    @cached_property
    def asks_told(self) -> bool:
        """Whether the agent asks for nothing but what it was told."""
        asked = [slot for slot in self.asked if not tells(slot, self.agent.text)]
        return bool(asked) and all(any(tells(slot, one.text) for one in self.before) for slot in asked)

    @cached_property
    def repeated(self) -> bool:
        return any(overlap(self.agent.text, one.text) >= ALIKE for one in self.heard if pieces(one.text))

    @cached_property
    def asks_again(self) -> bool:
        """Whether the agent asks in the same words what it had asked before, and was told something then."""
        questions = {part.strip() for part in SENTENCE.findall(self.agent.plain) if "?" in part or cue("asks", part)}
        for one in self.heard:
            same = questions & {part.strip() for part in SENTENCE.findall(one.plain)}
            answers = [line for line in self.before if line.turn == one.turn + 1]
            if any(len(part) > 6 for part in same) and any(
                tells(slot, line.text) for line in answers for slot in self.seen.wanted
            ):
                return True
        return False

    @cached_property
    def agent_errs(self) -> bool:
        """Whether the agent gave a reason to object."""
        plain = self.agent.plain
        return (
            bool(self.lost and self.news)
            or self.asks_told
            or self.asks_again
            or self.repeated
            or self.agent.blank
            or bool(cue("placeholder", plain))
        )

    @cached_property
    def says_new(self) -> bool:
        """Whether the user tells a slot for the first time."""
        return any(
            tells(slot, self.line.text) and not any(tells(slot, one.text) for one in self.before)
            for slot in self.seen.wanted
        )

    @cached_property
    def tells_any(self) -> bool:
        """Whether the user tells a slot, be it once more."""
        return any(tells(slot, self.line.text) for slot in self.seen.wanted)

    @cached_property
    def accepts(self) -> bool:
        plain = self.line.plain
        return bool(cue("affirms", plain) or cue("accepts", plain)) and not self.objects and "?" not in plain


def exchanges(seen: View) -> list[Exchange]:
    """Every answer of the user to a line of the agent."""
    made: list[Exchange] = []
    for agent, line in seen.pairs():
        if agent is not None:
            made.append(
                Exchange(
                    seen=seen,
                    agent=agent,
                    line=line,
                    before=tuple(seen.before(line, "user")),
                    heard=tuple(seen.before(agent, "agent")),
                    left_open=made[-1].open if made else (),
                )
            )
    return made


def _asks_for(agent: Line, slot: Wanted) -> bool:
    for part in SENTENCE.findall(agent.plain):
        if not (cue("asks", part) or cue("needs", part)):
            continue
        if names_slot(part, slot) or _shares_name(part, slot) or tells(slot, part):
            return True
    return False


def _shares_name(part: str, slot: Wanted) -> bool:
    return bool(pieces(slot.slot.replace("_", " ")) & pieces(part))


def goal_pieces(seen: View) -> frozenset[str]:
    known: set[str] = set(pieces(seen.goal_text))
    for slot in seen.wanted:
        known |= pieces(slot.slot.replace("_", " "))
        for text in slot.texts:
            known |= pieces(text)
    return frozenset(known)
