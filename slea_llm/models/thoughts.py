"""Where the thoughts of a reply are, and what is left without them."""

from __future__ import annotations

import re
from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(f"{OPEN}.*?(?:{CLOSE}|\\Z)", re.DOTALL)


def visible_spans(text: str, *, opened: bool = False) -> list[tuple[int, int]]:
    """The character ranges of a reply that are not thought. `opened`: the reply begins inside its thought."""
    at, spans = 0, []
    close = text.find(CLOSE)
    if (opened and not text.startswith(OPEN)) or 0 <= close < text.find(OPEN) or (close >= 0 and OPEN not in text):
        at = close + len(CLOSE) if close >= 0 else len(text)
    for thought in _THOUGHT.finditer(text, at):
        spans.append((at, thought.start()))
        at = thought.end()
    return [*spans, (at, len(text))]


def without_thoughts(text: str, *, opened: bool = False) -> str:
    """A reply without its thoughts, closed or not, and without space around what is left."""
    return "".join(text[start:end] for start, end in visible_spans(text, opened=opened)).strip()


def trimmed(text: str, spans: Sequence[tuple[int, int]], *, left: bool, right: bool) -> list[tuple[int, int]]:
    """Ranges of a text without the line breaks before the first and behind the last of them."""
    kept = [range(*span) for span in spans if span[0] < span[1]]
    while left and kept and text[kept[0][0]] == "\n":
        kept[:1] = [kept[0][1:]] if len(kept[0]) > 1 else []
    while right and kept and text[kept[-1][-1]] == "\n":
        kept[-1:] = [kept[-1][:-1]] if len(kept[-1]) > 1 else []
    return [(span.start, span.stop) for span in kept]
