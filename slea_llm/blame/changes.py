"""Evidence of a user that wants one thing and then another, or more than its goal holds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slea_llm.blame.exchanges import Evidence, Exchange, goal_pieces
from slea_llm.blame.likeness import pieces, spelled
from slea_llm.blame.view import Line, cue

_NOT = re.compile(
    r"\b(?:not|instead of|rather than|than|no longer)(?: an?| the| to)? \w+|(?:不是|不要|而不是)[\w]{1,6}"
)


def of_flips(turns: list[Exchange]) -> Iterator[Evidence]:
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
        new = {piece for piece in now - heard - last - earlier if not cue("plain_words", piece)}
        summed_up = followed and not turn.open and bool(turn.seen.wanted and cue("confirms", turn.agent.plain))
        if new and summed_up and not cue("thanks", turn.line.plain):
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
    for words in said:
        for piece in words:
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


def of_news(turns: list[Exchange]) -> Iterator[Evidence]:
    """What the user brings in that neither its goal nor the agent has."""
    goal = goal_pieces(turns[0].seen)
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
