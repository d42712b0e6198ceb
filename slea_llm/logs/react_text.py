"""The turns of a ReAct text: what the agent wrote, and the observations between."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slea_llm.logs.transcript import Transcript

GRADED = re.compile(r"\s*(?:Answer is (?:CORRECT|INCORRECT)|Correct answer:)", re.IGNORECASE)
"""What the grader wrote into a text."""

_WORD = re.compile(
    r"^[ \t]*(?P<word>Thought|Action Input|Action|Observation|Final Answer|Reflection|Question)[ \t]*\d*[ \t]*:[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_PROMPT = re.compile(r"^>[ \t]*\S", re.MULTILINE)
_AGENT = frozenset({"thought", "action", "action input", "final answer", "reflection"})


def is_react(text: str) -> bool:
    """Whether a text has an action or two thoughts at the beginning of lines, or lines that begin with `> `."""
    words = [match["word"].lower() for match in _WORD.finditer(text)]
    return "action" in words or words.count("thought") > 1 or len(_PROMPT.findall(text)) > 1


def add_react(transcript: Transcript, text: str) -> bool:
    """Say the text's turns; False when it has none. A reply is all between two observations, as written."""
    if any(match["word"].lower() in _AGENT for match in _WORD.finditer(text)):
        pieces = _by_words(text)
    elif _PROMPT.search(text):
        pieces = _by_prompts(text)
    else:
        return False
    reply: list[str] = []
    for agents, piece in pieces:
        if agents:
            reply.append(piece)
            continue
        if reply:
            transcript.reply(("text", "\n".join(reply)))
            reply = []
        graded = GRADED.match(piece) is not None
        observed = transcript.replies > 0
        transcript.say("tool" if observed else "user", piece, name="grader" if graded else None)
        if graded:
            transcript.flags.append("what the grader wrote into the text is marked with the name grader")
    if reply:
        transcript.reply(("text", "\n".join(reply)))
    return True


def _by_words(text: str) -> Iterator[tuple[bool, str]]:
    """Whether the agent wrote it, and the text: words of the agent are kept with their text, `Observation:` is not."""
    marks = list(_WORD.finditer(text))
    before = text[: marks[0].start()].strip("\n")
    if before.strip():
        yield False, before
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        end = following.start() if following else len(text)
        word = mark["word"].lower()
        if word in _AGENT:
            yield True, text[mark.start() : end].strip("\n")
        elif word == "question":
            yield False, text[mark.start() : end].strip("\n")
        else:
            yield from _observed(text[mark.end() : end].strip("\n"))


def _observed(text: str) -> Iterator[tuple[bool, str]]:
    """An observation, and apart from it what the grader added on lines of its own."""
    lines = text.split("\n")
    place = next((index for index, line in enumerate(lines) if index and GRADED.match(line)), len(lines))
    yield False, "\n".join(lines[:place]).strip("\n")
    if place < len(lines):
        yield False, "\n".join(lines[place:]).strip("\n")


def _by_prompts(text: str) -> Iterator[tuple[bool, str]]:
    """Lines that begin with `>` are the agent's, those between are the world's."""
    held: list[str] = []
    for line in text.split("\n"):
        if _PROMPT.match(line):
            if "\n".join(held).strip():
                yield False, "\n".join(held).strip("\n")
            held = []
            yield True, line
        else:
            held.append(line)
    if "\n".join(held).strip():
        yield False, "\n".join(held).strip("\n")
