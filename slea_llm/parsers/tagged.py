"""Cut a reply into thought, reply and tool-call steps by its tags."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

from slea_llm.errors import ConfigError
from slea_llm.types import Span, Step, StepKind, TokenSpan, Turn

_NAME = re.compile(r"[^\W\d][\w.-]*")


class _Tag(NamedTuple):
    name: str
    closing: bool
    tool: bool
    start: int
    end: int


class _Segment(NamedTuple):
    kind: StepKind
    start: int
    end: int
    label: str | None


class TaggedParser:
    """Leaf steps of a turn by think tags and tool-call blocks; together they are the text, character for character.

    A tag belongs to the step that it opens or closes; white space between two steps belongs to the earlier one. What is
    broken is read as follows:

    - a thought that is never closed reaches to the end, so that unfinished reasoning is never taken for the reply, and
      no call in it for one that was made;
    - a first tag that only closes means that the thought was opened in the prompt: it begins with the text;
    - nested tags are one thought; with more opening than closing tags it ends at the last closing one, unless the reply
      was cut by its length, and then it is all thought;
    - a later stray closing tag, and a tag cut in half, are plain text of the step that they stand in.
    """

    name: ClassVar[str] = "tagged"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        thought_tags: tuple[str, ...] = ("think", "thinking", "thought", "thoughts", "reasoning", "reflection")
        """Names of the tags around thoughts, in any case; any of them closes any other."""
        tool_tags: tuple[str, ...] = ("tool_call",)
        """Names of the tags around tool calls."""
        split_thoughts: bool = False
        """Make every sentence or line of a thought a step of its own; code, JSON, URLs and numbers stay whole."""

        def __post_init__(self) -> None:
            for name in (*self.thought_tags, *self.tool_tags):
                if not _NAME.fullmatch(name):
                    raise ConfigError(
                        f"tag name {name!r} is not a word; write it without angle brackets, as in 'think'"
                    )
            if both := {tag.lower() for tag in self.thought_tags} & {tag.lower() for tag in self.tool_tags}:
                raise ConfigError(f"tags {sorted(both)} stand under thought_tags and under tool_tags; choose one")

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tools = frozenset(name.lower() for name in config.tool_tags)
        names = "|".join(re.escape(name) for name in (*config.thought_tags, *config.tool_tags))
        # At most two blanks beside the name: without a bound, `<` and a long run of blanks would cost quadratic time.
        self._tags = re.compile(rf"<(/?)[ \t]{{0,2}}({names})[ \t]{{0,2}}>", re.IGNORECASE) if names else None

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn, none the parent of another.

        `starts` (n,): the character at which each sampled token of `turn.span` starts; the end-of-turn token starts at
        `len(turn.text)`. Raises ValueError when they do not fit the turn.
        """
        segments = self._segments(turn)
        cuts = [segment.start for segment in segments] + [len(turn.text)]
        tokens = _token_spans(turn, cuts, starts)
        return tuple(
            Step(
                trajectory_id=trajectory_id,
                turn=turn.index,
                index=index,
                kind=segment.kind,
                text=turn.text[segment.start : segment.end],
                span=Span(segment.start, segment.end),
                tokens=span,
                label=segment.label,
            )
            for index, (segment, span) in enumerate(zip(segments, tokens, strict=True))
        )

    def _segments(self, turn: Turn) -> list[_Segment]:
        raw = list(self._cut(turn.text, cut_short=turn.finish_reason == "length"))
        merged = _without_blanks(turn.text, raw)
        if not self.config.split_thoughts:
            return merged
        return [piece for segment in merged for piece in self._split(turn.text, segment)]

    def _cut(self, text: str, *, cut_short: bool) -> Iterator[_Segment]:
        """Segments without gap, blank ones and blank edges included."""
        tags = self._find_tags(text)
        last_close = max((i for i, tag in enumerate(tags) if tag.closing and not tag.tool), default=-1)
        position, index = 0, 0
        if first := self._closes_only(tags):
            yield _Segment("thought", 0, tags[first - 1].end, None)
            position, index = tags[first - 1].end, first
        while index < len(tags):
            tag = tags[index]
            if tag.closing:
                index += 1
                continue
            if position < tag.start:
                yield _Segment("reply", position, tag.start, None)
            if tag.tool:
                end, index = self._tool_end(tags, index, len(text))
            else:
                end, index = self._thought_end(tags, index, len(text), last_close, cut_short=cut_short)
            yield _Segment("tool_call" if tag.tool else "thought", tag.start, end, tag.name)
            position = end
        if position < len(text):
            yield _Segment("reply", position, len(text), None)

    def _find_tags(self, text: str) -> list[_Tag]:
        if self._tags is None:
            return []
        return [
            _Tag(name, bool(match[1]), name in self._tools, match.start(), match.end())
            for match in self._tags.finditer(text)
            if (name := match[2].lower())
        ]

    @staticmethod
    def _closes_only(tags: Sequence[_Tag]) -> int:
        """Number of tags up to and with a first think tag that closes; 0 when there is none, or the first one opens."""
        in_call = False
        for index, tag in enumerate(tags):
            if tag.tool:
                in_call = not tag.closing
            elif not in_call:
                return index + 1 if tag.closing else 0
        return 0

    @staticmethod
    def _tool_end(tags: Sequence[_Tag], index: int, length: int) -> tuple[int, int]:
        """Where the call opened by tag `index` ends, and the first tag after it. Think tags in a call are its text."""
        for later in range(index + 1, len(tags)):
            if tags[later].tool and tags[later].closing:
                return tags[later].end, later + 1
        return length, len(tags)

    @staticmethod
    def _thought_end(
        tags: Sequence[_Tag], index: int, length: int, last_close: int, *, cut_short: bool
    ) -> tuple[int, int]:
        """Where the thought opened by tag `index` ends, and the first tag after it.

        `last_close` is the index of the text's last closing think tag: looking no further keeps the whole linear.
        """
        depth = 0
        for later in range(index, last_close + 1):
            if not tags[later].tool:
                depth += -1 if tags[later].closing else 1
            if depth == 0:
                return tags[later].end, later + 1
        if cut_short or last_close < index:
            return length, len(tags)
        return tags[last_close].end, last_close + 1

    def _split(self, text: str, segment: _Segment) -> list[_Segment]:
        if segment.kind != "thought":
            return [segment]
        whole = text[segment.start : segment.end]
        tags = self._find_tags(whole)
        start = tags[0].end if tags and not tags[0].closing else 0
        end = tags[-1].start if len(tags) > 1 and tags[-1].closing else len(whole)
        cuts = [segment.start, *(segment.start + cut for cut in sentence_cuts(whole, start, end)), segment.end]
        return [_Segment("thought", left, right, segment.label) for left, right in pairwise(cuts)]


def _without_blanks(text: str, segments: Sequence[_Segment]) -> list[_Segment]:
    """Give blank segments and leading lines to the segment before; at the start of the text to the one after."""
    merged: list[_Segment] = []
    start = 0
    for segment in segments:
        content = text[segment.start : segment.end]
        if not content.strip():
            continue
        begin = segment.start + _border(content, 0) if merged else start
        if merged:
            merged[-1] = merged[-1]._replace(end=begin)
        merged.append(_Segment(segment.kind, begin, segment.end, segment.label))
    if not merged:
        return [_Segment("reply", 0, len(text), None)]
    merged[-1] = merged[-1]._replace(end=len(text))
    return merged


def _border(text: str, position: int) -> int:
    """Where the next step begins, given that white space begins at `position`.

    Line ends stay with the step before. Blanks in front of a word go with the word, as tokenizers glue them to it: the
    token that opens a step would else be counted, and credited, to the step before.
    """
    blank = _BLANK.match(text, position)
    end = blank.end() if blank else position
    return text.rfind("\n", position, end) + 1 or position


def _token_spans(turn: Turn, cuts: Sequence[int], starts: Sequence[int] | None) -> list[TokenSpan | None]:
    """A token span for each pair of neighbouring cuts; a token goes where its first character starts."""
    if starts is None:
        return [None] * (len(cuts) - 1)
    if turn.span is None:
        raise ValueError(f"turn {turn.index} has token starts but no token span")
    if len(starts) != len(turn.span):
        raise ValueError(f"turn {turn.index} has {len(starts)} token starts for {len(turn.span)} sampled tokens")
    if any(left > right for left, right in pairwise([0, *starts, len(turn.text)])):
        raise ValueError(f"turn {turn.index}: token starts {list(starts)} do not rise from 0 to {len(turn.text)}")
    borders = [0, *(bisect_left(starts, cut) for cut in cuts[1:-1]), len(starts)]
    first = turn.span.start
    return [TokenSpan(turn.span.row, first + left, first + right) for left, right in pairwise(borders)]


_NO_END = re.compile(r"(?:^|[\s(])(?:e\.g|i\.e|vs|cf|approx|mr|mrs|ms|dr|prof)$", re.IGNORECASE)
_LIST_MARK = re.compile(r"\s*[(]?(?:\d{1,3}|[A-Za-z])")
_BLANK = re.compile(r"\s*")
_END = re.compile(r"(?:\n|(?:[.!?]+[\"'”’)\]]*|…+)(?=\s)|[。！？；]+[”’」』）》]*)(\s*)")
_WHOLE = re.compile(
    r"```[\s\S]*?(?:```|\Z)"  # fenced code
    r"|`[^`\n]+`"  # code in a line
    r"|://[^\s。！？；，]*[^\s。！？；，.!?]"  # a URL after its scheme
)
_BRACES = re.compile(r'"(?:\\.|[^"\\\n])*"|[{}\[\]]')


def sentence_cuts(text: str, start: int = 0, end: int | None = None) -> list[int]:
    """Where sentences and lines of `text[start:end]` begin, the first one left out; line ends stay with the left.

    Code blocks, code in a line, URLs and bracketed JSON are never cut; nor is a point without white space after it
    (3.14, v1.2.3, a.b@c.de, /etc/x.conf), nor one after a list number or a usual abbreviation.
    """
    end = len(text) if end is None else end
    whole = _kept_whole(text)
    cuts: list[int] = []
    last, upcoming = start, 0
    for match in _END.finditer(text, start, end):
        cut = _border(text, match.start(1) - (text[match.start()] == "\n"))
        while upcoming < len(whole) and whole[upcoming][1] <= match.start():
            upcoming += 1
        if upcoming < len(whole) and whole[upcoming][0] < cut and match.start() < whole[upcoming][1]:
            continue
        if text[match.start()] == "." and _is_no_end(text, last, match.start()):
            continue
        if text[last:cut].strip() and text[cut:end].strip():
            cuts.append(cut)
            last = cut
    return cuts


def _is_no_end(text: str, start: int, point: int) -> bool:
    return bool(_LIST_MARK.fullmatch(text, start, point) or _NO_END.search(text, max(0, point - 8), point))


def _kept_whole(text: str) -> list[tuple[int, int]]:
    """Disjoint, sorted ranges of text that are never cut."""
    ranges = [match.span() for match in _WHOLE.finditer(text)]
    opened: list[int] = []
    for match in _BRACES.finditer(text):
        if match[0] in "{[":
            opened.append(match.start())
        elif match[0] in "}]" and opened:
            ranges.append((opened.pop(), match.end()))
    joined: list[tuple[int, int]] = []
    for left, right in sorted(ranges):
        if joined and left < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(right, joined[-1][1]))
        else:
            joined.append((left, right))
    return joined
