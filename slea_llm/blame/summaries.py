"""Evidence in what the agent reads back or reports, held against what was told and what the goal rules out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slea_llm.blame.exchanges import Evidence, Exchange
from slea_llm.blame.facts import Wanted, normal
from slea_llm.blame.likeness import TOLD, holds, spelled, tells
from slea_llm.blame.read_backs import read_back
from slea_llm.blame.view import cue

_NO = re.compile(r"\b(?:no|not|non|none|without|never|don't|free)\b|不|无|免|别|没|去")
_NO_VALUE = re.compile(r"\A\W*(?:no|without|not|不要|不加|无|免|去)\s*(?=\w)")


def of_summaries(turns: list[Exchange]) -> Iterator[Evidence]:
    """What the agent says is ordered, and how the user takes it."""
    for turn in turns:
        asks = bool(cue("confirms", turn.agent.plain))
        if not (asks or cue("reports_done", turn.agent.plain)):
            continue
        note = f"the agent said: {turn.agent.text[:120]}"
        if asks:
            for name in _of_question(turn, turns):
                kind = "wrong_denial" if name == "denies_right" else "wrong_agreement"
                yield Evidence(name=name, line=turn.line, kind=kind, note=note)
        for name in _of_news(turn, asks=asks):
            yield Evidence(name=name, line=turn.line, kind="wrong_agreement", note=note)
        if turn.lost and turn.news and not turn.accepts:
            yield Evidence(name="agent_deviates", line=turn.agent)
        if turn.lost and _mended(turn):
            yield Evidence(name="user_mends", line=turn.line)


def of_ruled_out(turns: list[Exchange]) -> Iterator[Evidence]:
    """What the goal rules out and the user asks for."""
    for turn in turns:
        if turn.objects or "?" in turn.line.plain:
            continue
        for slot in turn.seen.wanted:
            if any(_flips(slot, part) for part in _clauses(turn.line.text)):
                note = f"the goal says {slot.slot}: {slot.texts[0]}"
                yield Evidence(name="wants_ruled_out", line=turn.line, kind="contradicts_goal", note=note)


def _values(turn: Exchange) -> list[Wanted]:
    return [slot for slot in turn.seen.wanted if slot.wants is None]


def _missing(turn: Exchange) -> list[Wanted]:
    """Values of the goal that the agent does not say."""
    return [slot for slot in _values(turn) if not tells(slot, turn.agent.text)]


def _mended(turn: Exchange) -> bool:
    return any(tells(slot, turn.line.text) for slot in _missing(turn))


def _words(turn: Exchange) -> set[str]:
    """New words of the agent that are more than words of every day."""
    return {piece for piece in turn.news if not piece.isdigit() and not cue("plain_words", piece)}


def _of_question(turn: Exchange, turns: list[Exchange]) -> Iterator[str]:
    """How a question whether all is right is answered, whatever is new in it."""
    here, values, missing = turn.agent.text, _values(turn), _missing(turn)
    if turn.accepts:
        part = read_back(turn.agent)
        before = [one.text for one in (*turn.before, turn.line)]
        passed_over = [
            slot
            for slot in values
            if not tells(slot, part)
            and any(tells(slot, text) for text in (here, *(one.text for one in turn.heard)))
            and not any(tells(slot, text) for text in before)
        ]
        if passed_over and sum(tells(slot, part) for slot in values) >= 2:
            yield "accepts_passed_over"
        if any(_flips(slot, part) for slot in turn.seen.wanted for part in _clauses(here)):
            yield "accepts_flip"
        if missing and not _mended(turn) and len(values) - len(missing) >= max(2, len(missing)):
            yield "accepts_short"
            if any(slot in earlier.asked for slot in missing for earlier in turns):
                yield "accepts_short_asked"
        if _words(turn) and any(TOLD <= holds(slot, here) < 1.0 for slot in values):
            yield "accepts_part"
    told = [slot for slot in values if any(tells(slot, one.text) for one in turn.before)]
    whole = len(told) >= max(2, len(values) - 1) and all(tells(slot, here) for slot in told)
    if whole and (turn.objects or cue("denies", turn.line.plain)) and not turn.tells_any:
        yield "denies_right"


def _of_news(turn: Exchange, *, asks: bool) -> Iterator[str]:
    """What the user agrees to although a value is missing and something else is there."""
    missing = _missing(turn)
    if not (missing and turn.news and turn.accepts) or _mended(turn):
        return
    named = len(_values(turn)) - len(missing)
    numbers = {piece for piece in turn.news if piece.isdigit() and len(piece) <= 6}
    words = bool(_words(turn))
    rival = bool(numbers) and any(re.search(r"\d", spelled(text)) for slot in missing for text in slot.texts)
    lost = bool(turn.lost)
    for name, holds_here in (
        ("accepts_other", asks),
        ("accepts_report", not asks),
        ("accepts_rival_number", asks and rival),
        ("accepts_number", asks and bool(numbers)),
        ("accepts_lost", asks and lost),
        ("accepts_lost_words", asks and lost and words and named >= len(missing)),
        ("accepts_lost_report", not asks and lost),
        ("accepts_missing_words", asks and words and named >= max(2, len(missing))),
    ):
        if holds_here:
            yield name


def _clauses(text: str) -> list[str]:
    """The parts of a text between commas and stops, folded."""
    return [part for part in re.split(r"[,;:.!?，、；：。！？\n]+", normal(text)) if part.strip()]


def _flips(slot: Wanted, part: str) -> bool:
    """Whether a clause has what the goal rules out, and no word that rules it out."""
    names = [normal(slot.slot).replace("_", " ")] if slot.wants is False else []
    if not slot.wants:
        names += [_NO_VALUE.sub("", normal(text)) for text in slot.texts if _NO_VALUE.match(normal(text))]
    return any(len(name) >= 2 and name in part for name in names) and not _NO.search(part)
