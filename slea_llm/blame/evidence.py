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
        """Asked slots that the user neither told before nor tells now; a question stays open until another is asked."""
        return tuple(
            slot for slot in self.asked or self.left_open if not any(tells(slot, one.text) for one in (*self.before, self.line))
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
    def news(self) -> frozenset[str]:
        """Pieces of the agent's line that neither the goal nor anybody before has."""
        known = _goal(self.seen)
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
    def agent_errs(self) -> bool:
        """Whether the agent gave a reason to object."""
        plain = self.agent.plain
        return (
            bool(self.lost and self.news)
            or self.asks_told
            or self.repeated
            or not re.search(r"\w", plain)
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
    for part in _SENTENCE.findall(agent.plain):
        if not (cue("asks", part) or cue("needs", part)):
            continue
        if names_slot(part, slot) or _shares_name(part, slot) or tells(slot, part):
            return True
    return False


def _shares_name(part: str, slot: Wanted) -> bool:
    return bool(pieces(slot.slot.replace("_", " ")) & pieces(part))


def _goal(seen: View) -> frozenset[str]:
    known: set[str] = set()
    for slot in seen.wanted:
        known |= pieces(slot.slot.replace("_", " "))
        for text in slot.texts:
            known |= pieces(text)
    return frozenset(known)


def evidence(seen: View) -> list[Evidence]:
    """All that is seen in a dialogue."""
    turns = exchanges(seen)
    found = list(_of_agent(seen, turns))
    if turns:
        found += [*_of_answers(turns), *_of_attitude(turns), *_of_flips(turns), *_of_news(turns)]
    if seen.wanted:
        found += [*_of_told(seen, turns), *_of_summaries(turns)]
    return found


def _of_answers(turns: list[Exchange]) -> Iterator[Evidence]:
    """Questions without an answer."""
    goal = _goal(turns[0].seen)
    for turn in turns:
        plain = turn.line.plain
        mine, theirs = pieces(turn.line.text), pieces(turn.agent.text)
        if turn.open:
            note = f"asked for {turn.open[0].slot}"
            yield Evidence(name="unanswered", line=turn.line, kind="withholds", note=note)
            if not turn.says_new:
                yield Evidence(name="tells_nothing", line=turn.line, kind="withholds", note=note)
            if turn.again:
                yield Evidence(name="tells_other", line=turn.line, kind="withholds", note=note)
            if cue("refuses", plain) or turn.objects:
                yield Evidence(name="objects_open", line=turn.line, kind="refuses", note=note)
            if cue("false_reference", plain) or cue("already", plain):
                yield Evidence(name="already_open", line=turn.line, kind="false_reference", note=note)
        elif turn.asks and not turn.asked and cue("refuses", plain):
            yield Evidence(name="refuses_else", line=turn.line)
        if not turn.asks or turn.agent_errs:
            continue
        note = f"asked: {turn.agent.text[:120]}"
        if len(mine) >= 2 and not mine & (theirs | goal) and not turn.accepts and "?" not in plain:
            yield Evidence(name="evades", line=turn.line, kind="withholds", note=note)
        if any(overlap(turn.line.text, one.text) >= 0.5 for one in turn.before if len(pieces(one.text)) >= 2):
            yield Evidence(name="says_again", line=turn.line, kind="repeats", note=note)
        if cue("thanks", plain) and not cue("confirms", turn.agent.plain) and not turn.says_new:
            yield Evidence(name="thanks_for_question", line=turn.line, kind="claims_success", note=note)
        if speech.is_farewell(turn.line.text) and not turn.says_new:
            yield Evidence(name="farewell_to_question", line=turn.line, kind="stops_early", note=note)
        if not turn.says_new and any(overlap(turn.line.text, part) >= 0.6 for part in _SENTENCE.findall(turn.agent.text)):
            yield Evidence(name="gives_back", line=turn.line, kind="echoes", note=note)


def is_specific(slot: Wanted) -> bool:
    """Whether a value has no other words: a number, a name, a time."""
    return bool(slot.facts) or any(re.search(r"\d|\b[A-Z]", text) for text in slot.texts)


def _of_told(seen: View, turns: list[Exchange]) -> Iterator[Evidence]:
    """Values of the goal that were never told."""
    last = seen.user_lines[-1] if seen.user_lines else None
    values = [slot for slot in seen.wanted if slot.wants is None]
    if last is None or not values:
        return
    taken = [turn.agent.text for turn in turns if turn.accepts]
    whole = " ".join(one.text for one in seen.user_lines)
    untold = [
        slot
        for slot in values
        if not any(tells(slot, one.text) for one in seen.user_lines)
        and not any(tells(slot, text) for text in taken)
        and holds(slot, whole) < 0.75
    ]
    if not untold:
        return
    note = f"never told {', '.join(slot.slot for slot in untold)}"
    yield Evidence(name="untold_share", line=last, strength=len(untold) / len(values), kind="withholds", note=note)
    sure = [slot for slot in untold if is_specific(slot)]
    if sure:
        yield Evidence(name="untold_specific", line=last, kind="withholds", note=note)
    if len(sure) < len(untold):
        yield Evidence(name="untold_vague", line=last, kind="withholds", note=note)
    asked = [slot for slot in untold if any(slot in turn.asked for turn in turns)]
    if asked:
        first = next(turn for turn in turns if asked[0] in turn.asked)
        note = f"asked for {asked[0].slot}, never told"
        yield Evidence(name="untold_asked", line=first.line, kind="withholds", note=note)
        if is_specific(asked[0]):
            yield Evidence(name="untold_asked_specific", line=first.line, kind="withholds", note=note)


def _of_summaries(turns: list[Exchange]) -> Iterator[Evidence]:
    """What the agent says is ordered, against what was told."""
    for turn in turns:
        here = turn.agent.text
        values = [slot for slot in turn.seen.wanted if slot.wants is None]
        asks = bool(cue("confirms", turn.agent.plain))
        if not (asks or cue("reports_done", turn.agent.plain)):
            continue
        named = [slot for slot in values if tells(slot, here)]
        missing = [slot for slot in values if not tells(slot, here)]
        numbers = {piece for piece in turn.news if piece.isdigit() and len(piece) <= 6}
        mended = any(tells(slot, turn.line.text) for slot in missing)
        note = f"the agent said: {here[:120]}"
        if missing and turn.news and turn.accepts and not mended:
            words = {piece for piece in turn.news if not piece.isdigit() and not cue("plain_words", piece)}
            rival = bool(numbers) and any(re.search(r"\d", spelled(text)) for slot in missing for text in slot.texts)
            for name, holds_here in (
                ("accepts_other", asks),
                ("accepts_report", not asks),
                ("accepts_rival_number", asks and rival),
                ("accepts_number", asks and bool(numbers)),
                ("accepts_lost", asks and bool(turn.lost)),
                ("accepts_lost_words", asks and bool(turn.lost) and bool(words) and len(named) >= len(missing)),
                ("accepts_lost_report", not asks and bool(turn.lost)),
                ("accepts_missing_words", asks and len(named) >= max(2, len(missing)) and bool(words)),
            ):
                if holds_here:
                    yield Evidence(name=name, line=turn.line, kind="wrong_agreement", note=note)
        if turn.lost and turn.news and not turn.accepts:
            yield Evidence(name="agent_deviates", line=turn.agent)
        if turn.lost and mended:
            yield Evidence(name="user_mends", line=turn.line)


def _of_attitude(turns: list[Exchange]) -> Iterator[Evidence]:
    """Whether the user objects, with or without a reason, or is content."""
    for turn in turns:
        if turn.objects and turn.agent_errs:
            yield Evidence(name="objects_rightly", line=turn.line)
        elif turn.objects:
            yield Evidence(name="objects_idly", line=turn.line, kind="wrong_denial")
        if turn.again and not turn.open and not all(tells(slot, turn.agent.text) for slot in turn.again):
            yield Evidence(name="retells", line=turn.line)
    last = turns[-1]
    if last.accepts:
        yield Evidence(name="content_at_end", line=last.line, kind="contradicts_goal")
    if not any(turn.objects for turn in turns):
        yield Evidence(name="never_objects", line=last.line, kind="contradicts_goal")


_NOT = re.compile(r"\b(?:not|instead of|rather than|than|no longer)(?: an?| the| to)? \w+|(?:不是|不要|而不是)[\w]{1,6}")


def _of_flips(turns: list[Exchange]) -> Iterator[Evidence]:
    """Values that the user drops and takes up again although the agent had followed."""
    for turn in turns:
        if not turn.before:
            continue
        now, heard, last = pieces(turn.line.text), pieces(turn.agent.text), pieces(turn.before[-1].text)
        earlier: set[str] = set()
        for one in turn.before[:-1]:
            earlier |= pieces(one.text)
        followed = bool(last & heard) and not (last - heard) & now
        note = f"the agent had followed: {turn.agent.text[:120]}"
        if (now - heard - last) & earlier and followed:
            yield Evidence(name="turns_back", line=turn.line, kind="changes_goal", note=note)
        if followed and not turn.open and turn.seen.wanted and cue("confirms", turn.agent.plain):
            if now - heard - last - earlier:
                yield Evidence(name="turns_away", line=turn.line, kind="changes_goal", note=note)
    count, line, pair = _switches(turns)
    if count >= 2 and line is not None:
        note = f"now {pair[0]}, now {pair[1]}"
        yield Evidence(name="switches_twice", line=line, kind="changes_goal", note=note)
        if count >= 3:
            yield Evidence(name="switches_often", line=line, kind="changes_goal", note=note)


def _switches(turns: list[Exchange]) -> tuple[int, Line | None, tuple[str, str]]:
    """How often at most the user goes from one thing to another and back, and the last line where it does.

    A mention counts where the agent took it up: it says it too, or does not say the other. What the agent asks for
    although it was told is no change of the user's.
    """
    first = turns[0].before
    lines = [*first, *(turn.line for turn in turns)]
    asked = [False] * len(first) + [turn.asks_told or turn.repeated or bool(turn.open) for turn in turns]
    next_heard = [pieces(turn.agent.text) for turn in turns][-len(lines) + 1 :] if len(lines) > 1 else []
    while len(next_heard) < len(lines):
        next_heard.append(frozenset())
    said = [frozenset() if "?" in line.plain else pieces(_NOT.sub(" ", spelled(line.text))) for line in lines]
    counted: dict[str, int] = {}
    for one in said:
        for piece in one:
            counted[piece] = counted.get(piece, 0) + 1
    often = [piece for piece, number in counted.items() if number >= 2]
    values = {piece for slot in turns[0].seen.wanted for text in slot.texts for piece in pieces(text)}
    best: tuple[int, Line | None, tuple[str, str]] = (0, None, ("", ""))
    for one in often:
        for other in often if one in values else ():
            if other in values:
                continue
            found = _switches_of((one, other), lines, said, next_heard, asked)
            if found[0] > best[0]:
                best = (*found, (one, other))
    return best


def _switches_of(
    pair: tuple[str, str],
    lines: list[Line],
    said: list[frozenset[str]],
    heard: list[frozenset[str]],
    asked: list[bool],
) -> tuple[int, Line | None]:
    state, count, last = "", 0, None
    taken_up: set[str] = set()
    for line, words, next_words, was_asked in zip(lines, said, heard, asked, strict=True):
        here = [one for one in pair if one in words]
        if not here or was_asked:
            continue
        if len(here) == 2:
            if count:
                count, last = count + 1, line
                state = pair[1] if state == pair[0] else pair[0]
            continue
        other = pair[1] if here[0] == pair[0] else pair[0]
        if other in next_words and here[0] not in next_words:
            continue
        if here[0] in next_words and other not in next_words:
            taken_up.add(here[0])
        if state and state != here[0]:
            count, last = count + 1, line
        state = here[0]
    return (count, last) if len(taken_up) == 2 else (0, None)


def _of_news(turns: list[Exchange]) -> Iterator[Evidence]:
    """What the user brings in that neither its goal nor the agent has."""
    goal = _goal(turns[0].seen)
    brought: set[str] = set()
    for turn in turns:
        heard = set(pieces(turn.agent.text))
        for one in (*turn.heard, *turn.before):
            heard |= pieces(one.text)
        mine, theirs = pieces(turn.line.text), pieces(turn.agent.text)
        no = bool(cue("not_done", turn.agent.plain) or cue("cannot", turn.agent.plain))
        note = f"the agent had said: {turn.agent.text[:120]}"
        if theirs & brought and no:
            yield Evidence(name="asked_impossible", line=turn.line, kind="invents", note=note)
            if turn.objects or mine & brought:
                yield Evidence(name="insists", line=turn.line, kind="invents", note=note)
        if mine & brought and turn.asks and not turn.agent_errs:
            yield Evidence(name="insists_again", line=turn.line, kind="invents", note=note)
        recurring = frozenset() if "?" in turn.line.plain else mine & brought
        if recurring and (theirs & brought or no) and not turn.asks_told and not turn.repeated:
            yield Evidence(name="demands_again", line=turn.line, kind="invents", note=note)
            if len(recurring) >= 2:
                yield Evidence(name="demands_same_again", line=turn.line, kind="invents", note=note)
        new = {piece for piece in mine - goal - heard if not cue("plain_words", piece)}
        if len(new) >= 2:
            yield Evidence(name="news", line=turn.line, kind="invents")
            if not turn.agent_errs and not turn.open:
                yield Evidence(name="news_unasked", line=turn.line, kind="invents")
            brought |= new


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
        if turn.asks_told:
            yield Evidence(name="agent_asks_told", line=turn.agent)
        mine = pieces(turn.before[-1].text) if turn.before else frozenset()
        if not turn.asks and not turn.left_open and not cue("reports_done", turn.agent.plain):
            if not mine & pieces(turn.agent.text):
                yield Evidence(name="agent_besides", line=turn.agent)
            elif not turn.accepts:
                yield Evidence(name="agent_neither", line=turn.agent)
        if cue("cannot", turn.agent.plain) and not turn.asks:
            yield Evidence(name="agent_refuses", line=turn.agent)
    if any(turn.agent_errs for turn in turns):
        yield Evidence(name="agent_errs", line=next(turn.agent for turn in turns if turn.agent_errs))
    if agent and turns:
        last = agent[-1]
        if not cue("asks", last.plain) and turns[-1].objects:
            yield Evidence(name="agent_closes_on_objection", line=last)
