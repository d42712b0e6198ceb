"""What speaks for and against the user of a failed dialogue, in numbers, each with the words that show it.

None of these alone decides; `weighing` puts them together. They need a goal of slots, but no particular words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from slea_llm.blame.changes import of_flips, of_news
from slea_llm.blame.exchanges import ALIKE, SENTENCE, Evidence, Exchange, exchanges, goal_pieces
from slea_llm.blame.facts import Wanted
from slea_llm.blame.likeness import holds, overlap, pieces, tells
from slea_llm.blame.summaries import of_ruled_out, of_summaries
from slea_llm.blame.view import Line, View, cue, names_slot
from slea_llm.users import speech


def evidence(seen: View) -> list[Evidence]:
    """All that is seen in a dialogue."""
    turns = exchanges(seen)
    found = list(_of_agent(seen, turns))
    if turns:
        found += [*_of_answers(turns), *_of_attitude(turns), *of_flips(turns), *of_news(turns)]
    if seen.wanted:
        found += [*_of_told(seen, turns), *of_summaries(turns)]
    if turns and seen.wanted:
        found += [*_of_choices(turns), *of_ruled_out(turns)]
    return found


def _of_answers(turns: list[Exchange]) -> Iterator[Evidence]:
    """Questions without an answer."""
    for number, turn in enumerate(turns):
        if turn.open and all(any(tells(slot, one.line.text) for one in turns[number + 1 :]) for slot in turn.open):
            yield Evidence(name="answers_late", line=turn.line, kind="withholds", note=f"asked for {turn.open[0].slot}")
        elif turn.open:
            yield from _of_open(turn)
        elif turn.asks and not turn.asked and cue("refuses", turn.line.plain):
            yield Evidence(name="refuses_else", line=turn.line)
        if turn.asks and not turn.agent_errs:
            yield from _of_question(turn)


def _of_open(turn: Exchange) -> Iterator[Evidence]:
    """What the user says instead of a value of its goal that it never tells."""
    plain = turn.line.plain
    note = f"asked for {turn.open[0].slot}"
    for name, kind, holds_here in (
        ("unanswered", "withholds", True),
        ("tells_nothing", "withholds", not turn.says_new),
        ("tells_other", "withholds", bool(turn.again)),
        ("objects_open", "refuses", bool(cue("refuses", plain) or turn.objects)),
        ("already_open", "false_reference", bool(cue("false_reference", plain) or cue("already", plain))),
    ):
        if holds_here:
            yield Evidence(name=name, line=turn.line, kind=kind, note=note)


def _of_question(turn: Exchange) -> Iterator[Evidence]:
    """How the user takes a question to which nothing is wrong."""
    text, plain = turn.line.text, turn.line.plain
    mine = pieces(text)
    known = pieces(turn.agent.text) | goal_pieces(turn.seen)
    note = f"asked: {turn.agent.text[:120]}"
    if len(mine) >= 2 and not mine & known and not turn.accepts and "?" not in plain:
        yield Evidence(name="evades", line=turn.line, kind="withholds", note=note)
    if len(mine) >= 2 and not mine & known and not turn.accepts:
        yield Evidence(name="elsewhere", line=turn.line, kind="withholds", note=note)
    if any(overlap(text, one.text) >= 0.5 for one in turn.before if len(pieces(one.text)) >= 2):
        yield Evidence(name="says_again", line=turn.line, kind="repeats", note=note)
    if turn.says_new:
        return
    if cue("thanks", plain) and not cue("confirms", turn.agent.plain):
        yield Evidence(name="thanks_for_question", line=turn.line, kind="claims_success", note=note)
    if speech.is_farewell(text):
        yield Evidence(name="farewell_to_question", line=turn.line, kind="stops_early", note=note)
    if any(overlap(text, part) >= 0.6 for part in SENTENCE.findall(turn.agent.text)):
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
        if not any(tells(slot, one.text) or slot.told_in(one.text) for one in seen.user_lines)
        and not any(tells(slot, text) for text in taken)
        and holds(slot, whole) < 0.75
    ]
    if not untold:
        yield Evidence(name="all_told", line=last)
        return
    note = f"never told {', '.join(slot.slot for slot in untold)}"
    yield Evidence(name="untold_share", line=last, strength=len(untold) / len(values), kind="withholds", note=note)
    sure = [slot for slot in untold if is_specific(slot)]
    if sure:
        yield Evidence(name="untold_specific", line=last, kind="withholds", note=note)
    if len(sure) < len(untold):
        yield Evidence(name="untold_vague", line=last, kind="withholds", note=note)
    asked = [slot for slot in untold if sum(slot in turn.asked for turn in turns) > (slot.slot in seen.vague)]
    if asked:
        first = next(turn for turn in turns if asked[0] in turn.asked)
        note = f"asked for {asked[0].slot}, never told"
        yield Evidence(name="untold_asked", line=first.line, kind="withholds", note=note)
        if any(is_specific(slot) for slot in asked):
            yield Evidence(name="untold_asked_specific", line=first.line, kind="withholds", note=note)


_IF = re.compile(r"\b(?:if|otherwise|unless|rather|instead|say)\b|的话|如果|如需|要是|否则")


def _of_choices(turns: list[Exchange]) -> Iterator[Evidence]:
    """A value of the goal that the agent offers, and the user takes another one that is read back to it."""
    for slot in turns[0].seen.wanted:
        if slot.wants is not None or any(tells(slot, one.text) for one in turns[0].seen.user_lines):
            continue
        offered = None
        for turn in turns:
            parts = [part for part in SENTENCE.findall(turn.agent.text) if tells(slot, part)]
            if parts and turn.asks:
                offered = offered or turn.agent
            asserted = any(not _IF.search(part.lower()) for part in parts)
            if offered is not None and turn.accepts and not asserted and cue("confirms", turn.agent.plain):
                note = f"offered: {offered.text[:120]}"
                yield Evidence(name="accepts_other_choice", line=turn.line, kind="wrong_agreement", note=note)


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


def _of_agent(seen: View, turns: list[Exchange]) -> Iterator[Evidence]:
    """What the agent does wrong, whatever the goal."""
    agent = [line for line in seen.lines if line.side == "agent"]
    for number, line in enumerate(agent):
        for name, holds_here in (
            ("agent_empty", line.blank),
            (
                "agent_repeats",
                not speech.is_farewell(line.text)
                and any(overlap(line.text, one.text) >= ALIKE for one in agent[:number] if pieces(one.text)),
            ),
            ("agent_placeholder", cue("placeholder", line.plain)),
            ("agent_at_a_loss", cue("agent_fails_user", line.plain)),
            ("agent_broken", cue("tool_failed", line.plain)),
        ):
            if holds_here:
                yield Evidence(name=name, line=line)
    for turn in turns:
        yield from _of_reply(turn)
    yield from _of_acts(seen, agent)
    erring = next((turn.agent for turn in turns if turn.agent_errs), None)
    if erring is not None:
        yield Evidence(name="agent_errs", line=erring)
    if turns and not cue("asks", agent[-1].plain) and turns[-1].objects:
        yield Evidence(name="agent_closes_on_objection", line=agent[-1])


def _of_acts(seen: View, agent: list[Line]) -> Iterator[Evidence]:
    """A tool called at the end although a value is missing, asked for or not."""
    last = next((line for line in reversed(agent) if line.calls), None)
    if last is None:
        return
    told = [one.text for one in seen.before(last, "user")]
    missing = [slot for slot in seen.wanted if slot.wants is None and not any(tells(slot, text) for text in told)]
    if missing:
        heard = [one.plain for one in seen.before(last, "agent")]
        asked = all(any(names_slot(text, slot) for text in heard) for slot in missing)
        yield Evidence(name="agent_acts_short" if asked else "agent_acts_unasked", line=last)


def _of_reply(turn: Exchange) -> Iterator[Evidence]:
    """Whether the agent takes up what it was told."""
    if turn.asks_told:
        yield Evidence(name="agent_asks_told", line=turn.agent)
    ends = speech.is_farewell(turn.agent.text) or cue("reports_done", turn.agent.plain)
    if not turn.asks and not turn.left_open and not ends:
        last = pieces(turn.before[-1].text) if turn.before else frozenset()
        if not last & pieces(turn.agent.text):
            yield Evidence(name="agent_besides", line=turn.agent)
        elif not turn.accepts:
            yield Evidence(name="agent_neither", line=turn.agent)
    if cue("cannot", turn.agent.plain) and not turn.asks:
        yield Evidence(name="agent_refuses", line=turn.agent)
