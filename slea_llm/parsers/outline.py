"""The outline of a text: where marked steps, list items and paragraphs begin, and what stands inside what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slea_llm.parsers.sentences import Whole, border
from slea_llm.parsers.vocabulary import LineMark, Markers, number_of

PARAGRAPH = "paragraph"
HEADING = "markdown_heading"
CLOSING = "conclude"
"""The name of the opening words that end a list: a line after its last item that begins with one is none of it."""
STRONG = ("section", "step")
RANKS = ("section", "step", "item", "bullet")
MAX_DEPTH = 8
"""Outlines that are deeper are flattened: every reader of steps may recurse over them."""

_LEAD = re.compile(r"[ \t>\u3000]*(?:\\(?=-))?")
_ENDS = ".!?。！？；;:：)]}”\"'*`>|=-…\\"
_FENCES = ("```", "~~~")
_WORD = re.compile(r"\w")


class Entry(NamedTuple):
    """Something that begins at a character of the text."""

    start: int
    level: str
    name: str
    number: int | None
    indent: int
    loose: bool
    """Whether a blank line stands before it."""


class Node(NamedTuple):
    """An entry at its depth in the outline."""

    start: int
    depth: int
    name: str
    level: str


def outline(text: str, start: int, end: int, markers: Markers, whole: Whole) -> list[Node]:
    """Where the parts of `text[start:end]` begin, in order; each is inside the last one before it that is less deep."""
    entries = _without_lone_numbers(list(_entries(text, start, end, markers, whole)))
    nodes: list[Node] = []
    opened: list[_Open] = []
    for index, (entry, until) in enumerate(zip(entries, _goes_on_until(entries), strict=True)):
        while opened and (len(opened) >= MAX_DEPTH or not _inside(opened, entry, index)):
            opened.pop()
        nodes.append(Node(entry.start, len(opened), entry.name, entry.level))
        opened.append(_Open(entry, until))
    return nodes


class _Open(NamedTuple):
    """An entry that what follows may stand inside of, with the place of the next number of its list."""

    entry: Entry
    until: int


def _inside(opened: Sequence[_Open], entry: Entry, index: int) -> bool:
    above, until = opened[-1]
    if above.level == PARAGRAPH:
        return above.name != PARAGRAPH == entry.name and not entry.loose
    if entry.level == PARAGRAPH:
        return above.level in STRONG or index < until or entry.indent > above.indent or not entry.loose
    if entry.level in STRONG:
        if above.level == "section" and entry.level == "section":
            return above.name == entry.name == HEADING and entry.indent > above.indent
        return above.level == "section"
    if above.level in STRONG:
        return True
    if any(other.entry.name == entry.name and other.entry.indent >= entry.indent for other in opened[:-1]):
        return False
    if above.name == entry.name:
        return entry.indent > above.indent
    return entry.indent >= above.indent and (RANKS.index(entry.level) > RANKS.index(above.level) or entry.number == 1)


def _without_lone_numbers(entries: Sequence[Entry]) -> list[Entry]:
    """A number that is the only one of its form makes no list: its line is a paragraph."""
    counts = Counter(entry.name for entry in entries)
    return [
        entry._replace(level=PARAGRAPH, loose=True)
        if entry.level == "item" and entry.number is not None and counts[entry.name] == 1
        else entry
        for entry in entries
    ]


def _goes_on_until(entries: Sequence[Entry]) -> list[int]:
    """For each entry, where the next number of its list stands before the next section or step; 0 without one."""
    places: dict[tuple[str, int], int] = {}
    found: list[int] = []
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        found.append(0 if entry.number is None else places.get((entry.name, entry.number + 1), 0))
        if entry.level in STRONG:
            places = {}
        elif entry.number is not None:
            places[entry.name, entry.number] = index
    return found[::-1]


def _entries(text: str, start: int, end: int, markers: Markers, whole: Whole) -> Iterator[Entry]:
    blank_before, previous_end = True, ""
    position = start
    while position < end:
        stop = min(end, text.find("\n", position) + 1 or end)
        line = text[position:stop]
        if not line.strip():
            blank_before = True
        elif not whole.holds(position) or position == start:
            yield from _line(text, position, stop, markers, whole, (blank_before, previous_end))
            blank_before, previous_end = False, line
        else:
            blank_before, previous_end = False, line
        position = stop


def _line(text: str, start: int, end: int, markers: Markers, whole: Whole, before: tuple[bool, str]) -> Iterator[Entry]:
    loose, previous = before
    lead = _LEAD.match(text, start, end)
    first = lead.end() if lead else start
    indent = first - start
    entry: Entry | None = None
    for mark in markers.lines:
        if found := mark.regex.match(text, first, end):
            entry = _entry(mark, found, start, indent, loose=loose)
            break
    if entry is None and (loose or _breaks(previous, text[first:end])) and _WORD.search(text, first, end):
        concludes = any(mark.name == CLOSING and mark.regex.match(text, first, end) for mark in markers.sentences)
        entry = Entry(start, PARAGRAPH, PARAGRAPH, None, indent, loose or concludes)
    if entry is not None:
        yield entry
    yield from _inline(text, first + 1, end, markers, whole)


def _inline(text: str, start: int, end: int, markers: Markers, whole: Whole) -> Iterator[Entry]:
    """Markers inside a line, in order, the strongest at each place; `in step 2: ...` is none."""
    found: dict[int, Entry] = {}
    for mark in markers.lines:
        if mark.inline is None:
            continue
        for match in mark.inline.finditer(text, start, end):
            written = match[0].lstrip("*_")[:1]
            if written.islower() or not _WORD.search(text, start, match.start()):
                continue
            blank = match.start()
            while blank > start and text[blank - 1].isspace():
                blank -= 1
            cut = border(text, blank)
            if not whole.holds(cut) and not whole.holds(match.start()):
                found.setdefault(cut, _entry(mark, match, cut, 0, loose=False))
    yield from (found[cut] for cut in sorted(found))


def _entry(mark: LineMark, match: re.Match[str], start: int, indent: int, *, loose: bool) -> Entry:
    if mark.name == HEADING:
        indent = len(match[0]) - len(match[0].lstrip("#"))
    number = number_of(match["n"]) if "n" in mark.regex.groupindex else None
    return Entry(start, mark.level, mark.name, number, indent, loose or mark.level == PARAGRAPH)


def _breaks(previous: str, line: str) -> bool:
    """Whether a line end divides: not where a sentence was only wrapped."""
    if line.startswith(_FENCES):  # code belongs to the line that leads up to it
        return False
    return previous.rstrip()[-1:] in _ENDS or not line[:1].islower()
