"""Where sentences begin, and what is never cut: code, JSON, tables, formulas, URLs, numbers, abbreviations."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator

_BLANK = re.compile(r"\s*")
# Points in a row, with or without white space after them, end a sentence; a single point needs the white space.
_END = re.compile(
    r"(?:\n"
    r"|(?:(?<![.!?])[.!?]++[\"'”’)\]*]*+|(?<!…)…++)(?=\s)"
    r"|(?:(?<![.!?])\.{2,}+|(?<!…)…++)(?=[^\W\d_a-z])"
    r"|[。！？；]+[”’」』）》]*)(\s*)"
)
_WORD = re.compile(r"[^\s.!?。！？；…,，]")
_LIST_MARK = re.compile(r"[(]?(?:\d{1,3}|[A-Za-z])")
_NO_END = re.compile(
    r"(?:^|[\s(\[\"'“])"
    r"(?:e\.g|i\.e|vs|cf|approx|resp|mr|mrs|ms|dr|prof|st|jr|sr|gen|capt|inc|ltd|corp|dept|et al|viz)$",
    re.IGNORECASE,
)
_BEFORE_NUMBER = re.compile(
    r"(?:^|[\s(\[])(?:figs?|eqn?s?|sec|ch|vol|nos?|pp?|ed|ca|min|max|art|ver|v|est)$", re.IGNORECASE
)
_INITIAL = re.compile(r"(?:^|[\s(.])[A-Z]$")
_INITIALS = re.compile(r"[A-Z]\.\s?[A-Z]$")
_OPERATOR = re.compile(r"\s*[=×÷+*/<>^≈≤≥±]")
_WHOLE = re.compile(
    r"```[\s\S]*?(?:```(?!\w)|\Z)|~~~[\s\S]*?(?:~~~(?!\w)|\Z)"  # fenced code; ```python opens and never closes
    r"|`[^`\n]+`"  # code in a line
    r"|\$\$[\s\S]*?\$\$|\\\[(?:(?!\\\[)[\s\S])*?\\\]|\\\((?:(?!\\\()[\s\S])*?\\\)"  # displayed and inline formulas
    r"|\\begin\{(\w+\*?)\}(?:(?!\\begin\{)[\s\S])*?\\end\{\1\}"
    r"|<<[^<>\n]*>>"  # a calculator note
    r"|(?:^[ \t]*\|[^\n]*(?:\n|\Z)){2,}"  # the rows of a table
    r"|://[^\s。！？；，]*[^\s。！？；，.!?]",  # a URL after its scheme
    re.MULTILINE,
)
_BRACES = re.compile(r'"(?:\\.|[^"\\\n])*"|[{}\[\]]')
_OPEN = re.compile(r"[{\[]")
JSON_EFFORT = 4
"""How often the length of a text is read again at most while it is searched for JSON values."""


class Whole:
    """The ranges of one text that no cut may fall into."""

    def __init__(self, text: str) -> None:
        ranges = _joined([*(match.span() for match in _WHOLE.finditer(text)), *_bracketed(text), *json_values(text)])
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def holds(self, position: int) -> bool:
        """Whether a cut at that character would fall into one."""
        index = bisect_right(self._starts, position) - 1
        return index >= 0 and self._starts[index] < position < self._ends[index]

    def touches(self, start: int, end: int) -> bool:
        """Whether one of them overlaps `[start, end)`."""
        index = bisect_right(self._starts, end - 1) - 1
        return index >= 0 and self._ends[index] > start


def sentence_cuts(text: str, start: int = 0, end: int | None = None, whole: Whole | None = None) -> list[int]:
    """Where sentences and lines of `text[start:end]` begin, the first one left out; line ends stay with the left.

    Code, formulas, tables, URLs and bracketed JSON are never cut; nor is a point without white space after it
    (3.14, v1.2.3, a.b@c.de, /etc/x.conf), one after a list number, an initial or a usual abbreviation, nor a sign that
    an operator follows (5! = 120). A run of points ends a sentence even where no white space follows it.
    """
    end = len(text) if end is None else end
    whole = whole or Whole(text)
    cuts: list[int] = []
    word, last_word = _next_word(text, start, end), _last_word(text, start, end)
    for match in _END.finditer(text, start, end):
        cut = border(text, match.start(1) - (text[match.start()] == "\n"))
        if cut <= word or cut > last_word or whole.holds(cut) or whole.touches(match.start(), match.start() + 1):
            continue
        if _is_no_end(text, word, match):
            continue
        cuts.append(cut)
        word = _next_word(text, cut, end)
    return cuts


def _next_word(text: str, start: int, end: int) -> int:
    """The first character that is neither blank nor a sign; `end` when there is none."""
    found = _WORD.search(text, start, end)
    return found.start() if found else end


def _last_word(text: str, start: int, end: int) -> int:
    """The last such character; -1 when there is none."""
    return next((i for i in range(end - 1, start - 1, -1) if _WORD.match(text[i])), -1)


def border(text: str, position: int) -> int:
    """Where the next step begins, given that white space begins at `position`.

    Line ends stay with the step before. Blanks in front of a word go with the word, as tokenizers glue them to it: the
    token that opens a step would else be counted, and credited, to the step before.
    """
    blank = _BLANK.match(text, position)
    end = blank.end() if blank else position
    return text.rfind("\n", position, end) + 1 or position


def json_values(text: str) -> Iterator[tuple[int, int]]:
    """Ranges of the JSON objects and lists in a text, the outermost only, in order."""
    decoder = json.JSONDecoder()
    effort = JSON_EFFORT * len(text) + 1000
    position = 0
    while effort > 0 and (match := _OPEN.search(text, position)):
        position = match.start()
        try:
            _, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            effort -= error.pos - position + 1
            position += 1
        except (RecursionError, ValueError):  # nested too deep, or a number of too many digits
            effort -= len(text)
            position += 1
        else:
            yield position, end
            position = end


def _is_no_end(text: str, word: int, match: re.Match[str]) -> bool:
    """Whether the sign that was matched belongs to a number, a name or a formula; `word` begins the sentence."""
    position = match.start()
    sign = text[position]
    if sign in ".!?" and _OPERATOR.match(text, match.end()) and match.end() - position <= 2:
        return True
    if sign != "." or text.startswith("..", position):
        return False
    if _LIST_MARK.fullmatch(text, word, position) or _NO_END.search(text, max(0, position - 8), position):
        return True
    if text[match.end() : match.end() + 1].isdigit() and _BEFORE_NUMBER.search(text, max(0, position - 8), position):
        return True
    if not _INITIAL.search(text, max(0, position - 2), position):
        return False
    return bool(_INITIALS.search(text, max(0, position - 4), position)) or _next_is_initial(text, match.end())


def _next_is_initial(text: str, position: int) -> bool:
    return text[position : position + 1].isupper() and text[position + 1 : position + 2] == "."


def _bracketed(text: str) -> Iterator[tuple[int, int]]:
    """Ranges between matching brackets and braces; brackets in strings do not count."""
    opened: list[int] = []
    for match in _BRACES.finditer(text):
        if match[0] in "{[":
            opened.append(match.start())
        elif match[0] in "}]" and opened:
            yield opened.pop(), match.end()


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint and sorted."""
    joined: list[tuple[int, int]] = []
    for left, right in sorted(ranges):
        if joined and left < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(right, joined[-1][1]))
        else:
            joined.append((left, right))
    return joined
