"""What speaks for and against the user of a failed dialogue, in numbers, each with the words that show it.

None of these alone decides; `weighing` puts them together. They need a goal of slots, but no particular words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from slea_llm.blame.facts import Wanted
from slea_llm.blame.likeness import holds, overlap, pieces, spelled, tells
from slea_llm.blame.view import Line, View, cue, names_slot
from slea_llm.users import speech

ALIKE = 0.8
"""Share of pieces in common from which two lines are the same one."""
_SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？\n]*")


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

    @cached_property
    def asks(self) -> bool:
        return bool(cue("asks", self.agent.plain) or cue("needs", self.agent.plain))

    @cached_property
    def asked(self) -> tuple[Wanted, ...]:
        """Slots that the agent asks for by name, or by offering their value among others."""
        return tuple(slot for slot in self.seen.wanted if self.asks and _asks_for(self.agent, slot))

    @cached_property
    def open(self) -> tuple[Wanted, ...]:
        """Asked slots that the user neither told before nor tells now."""
        return tuple(
            slot for slot in self.asked if not any(tells(slot, one.text) for one in (*self.before, self.line))
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
        plain = self.line.plain
        return bool(cue("denies", plain) or cue("objects", plain) or cue("complains_of", plain))

    @cached_property
    def accepts(self) -> bool:
        plain = self.line.plain
        return bool(cue("affirms", plain) or cue("accepts", plain)) and not self.objects and "?" not in plain


def exchanges(seen: View) -> list[Exchange]:
    """Every answer of the user to a line of the agent."""
    made = []
    for agent, line in seen.pairs():
        if agent is not None:
            before = tuple(seen.before(line, "user"))
            made.append(
                Exchange(seen=seen, agent=agent, line=line, before=before, heard=tuple(seen.before(agent, "agent")))
            )
    return made


def _asks_for(agent: Line, slot: Wanted) -> bool:
    for part in _SENTENCE.findall(agent.plain):
        if not (cue("asks", part) or cue("needs", part)):
            continue
        if names_slot(part, slot) or _shares_name(part, slot) or tells(slot, part):
            return True
    return False


def _shares_name(part: str, slot: Wanted) -> bool:
    return bool(pieces(slot.slot.replace("_", " ")) & pieces(part))


def evidence(seen: View) -> list[Evidence]:
    """All that is seen in a dialogue with a goal."""
    turns = exchanges(seen)
    found = list(_of_agent(seen, turns))
    if turns:
        found += [*_of_answers(turns), *_of_attitude(turns), *_of_flips(turns), *_of_news(turns)]
    if seen.wanted:
        found += [*_of_told(seen, turns), *_of_summaries(turns)]
    return found


def _of_answers(turns: list[Exchange]) -> Iterator[Evidence]:
    """Questions without an answer."""
    for turn in turns:
        if turn.open:
            yield Evidence(name="unanswered", line=turn.line, kind="withholds", note=f"asked for {turn.open[0].slot}")
            if turn.again:
                yield Evidence(name="tells_other", line=turn.line, kind="withholds")
            if cue("refuses", turn.line.plain) or cue("denies", turn.line.plain):
                yield Evidence(name="no_to_open", line=turn.line, kind="refuses")
        elif turn.asks and not turn.asked and cue("refuses", turn.line.plain):
            yield Evidence(name="refuses_else", line=turn.line)


def _of_told(seen: View, turns: list[Exchange]) -> Iterator[Evidence]:
    """Values of the goal that were never told."""
    last = seen.user_lines[-1] if seen.user_lines else None
    values = [slot for slot in seen.wanted if slot.wants is None]
    if last is None or not values:
        return
    taken = [turn.agent.text for turn in turns if turn.accepts]
    untold = [
        slot
        for slot in values
        if not any(tells(slot, one.text) for one in seen.user_lines)
        and not any(tells(slot, text) for text in taken)
        and not _in_pieces(slot, seen)
    ]
    if untold:
        note = f"never told {', '.join(slot.slot for slot in untold)}"
        yield Evidence(name="untold_share", line=last, strength=len(untold) / len(values), kind="withholds", note=note)
        yield Evidence(name="untold", line=last, kind="withholds", note=note)
        asked = [slot for slot in untold if any(slot in turn.asked for turn in turns)]
        if asked:
            first = next(turn for turn in turns if asked[0] in turn.asked)
            yield Evidence(
                name="untold_asked",
                line=first.line,
                strength=min(len(asked), 2),
                kind="withholds",
                note=f"asked for {asked[0].slot}, never told",
            )
        if turns and turns[-1].accepts or (not turns or seen.user_lines[-1] is not turns[-1].line):
            yield Evidence(name="untold_content", line=last, kind="contradicts_goal", note=note)


def _in_pieces(slot: Wanted, seen: View) -> bool:
    text = " ".join(one.text for one in seen.user_lines)
    return holds(slot, text) >= 0.75


def _of_summaries(turns: list[Exchange]) -> Iterator[Evidence]:
    """What the agent says is ordered, against what was told."""
    for turn in turns:
        told = [slot for slot in turn.seen.wanted if slot.wants is None]
        here = turn.agent.text
        named = [slot for slot in told if tells(slot, here)]
        missing = [slot for slot in told if not tells(slot, here)]
        known = set().union(*(pieces(text) for slot in told for text in slot.texts)) if told else set()
        for one in (*turn.before, *turn.heard):
            known |= pieces(one.text)
        new = pieces(here) - known
        numbers = {piece for piece in new if piece.isdigit() and len(piece) <= 6}
        sums = bool(cue("confirms", turn.agent.plain)) or cue("reports_done", turn.agent.plain)
        if not sums:
            continue
        was_told = [slot for slot in missing if any(tells(slot, one.text) for one in turn.before)]
        mended = any(tells(slot, turn.line.text) for slot in missing)
        if named and missing and new:
            if turn.accepts and not mended:
                yield Evidence(name="accepts_other", line=turn.line, kind="wrong_agreement", note=here[:120])
                if numbers:
                    yield Evidence(name="accepts_number", line=turn.line, kind="wrong_agreement", note=here[:120])
                if was_told and len(named) >= len(missing):
                    yield Evidence(name="accepts_against_told", line=turn.line, kind="wrong_agreement", note=here[:120])
        if was_told and new and not turn.accepts:
            yield Evidence(name="agent_deviates", line=turn.agent)
        if was_told and mended:
            yield Evidence(name="user_mends", line=turn.line)


def _of_attitude(turns: list[Exchange]) -> Iterator[Evidence]:
    """Whether the user objects or is content."""
    for turn in turns:
        if turn.objects:
            yield Evidence(name="objects", line=turn.line)
            if turn.again and not turn.open:
                yield Evidence(name="objects_retelling", line=turn.line)
        if turn.again and not turn.open and not all(tells(slot, turn.agent.text) for slot in turn.again):
            yield Evidence(name="retells", line=turn.line)
    last = turns[-1]
    if last.accepts:
        yield Evidence(name="content_at_end", line=last.line)
    if not any(turn.objects for turn in turns):
        yield Evidence(name="never_objects", line=last.line)
    if last.objects:
        yield Evidence(name="objects_at_end", line=last.line)


def _of_flips(turns: list[Exchange]) -> Iterator[Evidence]:
    """Values that the user drops and takes up again although the agent had followed."""
    said = [pieces(turn.before[-1].text) if turn.before else frozenset() for turn in turns]
    for number, turn in enumerate(turns):
        now, heard, last = pieces(turn.line.text), pieces(turn.agent.text), said[number]
        earlier: set[str] = set()
        for one in turn.before[:-1]:
            earlier |= pieces(one.text)
        for one in turn.heard:
            earlier |= pieces(one.text)
        back = (now - heard - last) & earlier
        if back and last & heard:
            yield Evidence(
                name="turns_back", line=turn.line, kind="changes_goal", note=f"the agent had followed: {turn.agent.text[:80]}"
            )
        fresh = now - heard - last - earlier
        if fresh and last & heard and not turn.open and turn.seen.wanted and cue("confirms", turn.agent.plain):
            yield Evidence(name="turns_away", line=turn.line, kind="changes_goal")


def _of_news(turns: list[Exchange]) -> Iterator[Evidence]:
    """What the user brings in that neither its goal nor the agent has."""
    goal: set[str] = set()
    for slot in turns[0].seen.wanted:
        goal |= pieces(slot.slot)
        for text in slot.texts:
            goal |= pieces(text)
    brought: set[str] = set()
    for number, turn in enumerate(turns):
        heard: set[str] = set()
        for one in (turn.agent, *turn.heard, *turn.before):
            heard |= pieces(one.text)
        refused = pieces(turn.agent.text) & brought
        no = bool(cue("not_done", turn.agent.plain) or cue("cannot", turn.agent.plain))
        if refused and no:
            yield Evidence(name="asked_impossible", line=turn.line, kind="invents", note=turn.agent.text[:120])
            if turn.objects or pieces(turn.line.text) & brought:
                yield Evidence(name="insists", line=turn.line, kind="invents", note=turn.agent.text[:120])
        new = {piece for piece in pieces(turn.line.text) - goal - heard if not cue("plain_words", piece)}
        if len(new) >= 2:
            yield Evidence(name="news", line=turn.line, kind="invents", strength=1.0)
            brought |= new
            if turn.open and not pieces(turn.line.text) & (goal | pieces(turn.agent.text)):
                yield Evidence(name="off_topic", line=turn.line, kind="withholds", note=f"asked: {turn.agent.text[:120]}")


def _of_agent(seen: View, turns: list[Exchange]) -> Iterator[Evidence]:
    """What the agent does wrong, whatever the goal."""
    agent = [line for line in seen.lines if line.side == "agent"]
    for number, line in enumerate(agent):
        if not re.search(r"\w", line.text):
            yield Evidence(name="agent_empty", line=line)
        if any(overlap(line.text, one.text) >= ALIKE for one in agent[:number] if pieces(one.text)):
            yield Evidence(name="agent_repeats", line=line)
        if cue("placeholder", line.plain):
            yield Evidence(name="agent_placeholder", line=line)
        if cue("agent_fails_user", line.plain):
            yield Evidence(name="agent_at_a_loss", line=line)
        if cue("tool_failed", line.plain):
            yield Evidence(name="agent_broken", line=line)
    for turn in turns:
        asked = [slot for slot in turn.asked if not tells(slot, turn.agent.text)]
        if asked and all(any(tells(slot, one.text) for one in turn.before) for slot in asked):
            yield Evidence(name="agent_asks_told", line=turn.agent)
    if agent and turns:
        last = agent[-1]
        if not cue("asks", last.plain) and turns[-1].objects:
            yield Evidence(name="agent_closes_on_objection", line=last)
        if cue("reports_done", last.plain) and not cue("not_done", last.plain):
            yield Evidence(name="agent_ends_done", line=last)
        if last is seen.lines[-1]:
            yield Evidence(name="agent_has_last_word", line=last)


def is_farewell(text: str) -> bool:
    """Whether a text only takes leave."""
    return speech.is_farewell(text)


def spelled_of(text: str) -> str:
    """The text by which lines are compared."""
    return spelled(text)
