"""Cut a reply into thought, reply and tool-call steps by its tags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar, NamedTuple

from slea_llm.errors import ConfigError
from slea_llm.parsers.harmony import HEADER, Message, messages
from slea_llm.parsers.pieces import Piece, cut_up, steps_of
from slea_llm.parsers.sentences import border, sentence_cuts
from slea_llm.types import Step, Turn

_NAME = re.compile(r"[^\W\d][\w.-]*")
_EMPTY = re.compile(
    r"(?:\s|<\|(?:im_end|endoftext|eot_id|eom_id|end|return|call)\|>|<\|start\|>\w{0,20}|</s>|<eo[aemst]>|<end_of_turn>)*+"
)
"""White space, and marks that a model writes where it ends."""


class _Tag(NamedTuple):
    name: str
    closing: bool
    tool: bool
    start: int
    end: int


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
        reply_tags: tuple[str, ...] = ()
        """Names of the tags that cut a reply into parts, such as `answer`."""
        split_thoughts: bool = False
        """Make every sentence or line of a thought a step of its own; code, JSON, URLs and numbers stay whole."""

        def __post_init__(self) -> None:
            for name in (*self.thought_tags, *self.tool_tags, *self.reply_tags):
                if not _NAME.fullmatch(name):
                    raise ConfigError(
                        f"tag name {name!r} is not a word; write it without angle brackets, as in 'think'"
                    )
            groups = {"thought_tags": self.thought_tags, "tool_tags": self.tool_tags, "reply_tags": self.reply_tags}
            for (one, ours), (other, theirs) in combinations(groups.items(), 2):
                if both := {tag.lower() for tag in ours} & {tag.lower() for tag in theirs}:
                    raise ConfigError(f"tags {sorted(both)} stand under {one} and under {other}; choose one")

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tools = frozenset(name.lower() for name in config.tool_tags)
        # At most two blanks beside the name: without a bound, `<` and a long run of blanks would cost quadratic time.
        self._tags = _tag_pattern((*config.thought_tags, *config.tool_tags))
        self._reply_tags = _tag_pattern(config.reply_tags)

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn, none the parent of another.

        `starts` (n,): the character at which each sampled token of `turn.span` starts; the end-of-turn token starts at
        `len(turn.text)`. Raises ValueError when they do not fit the turn.
        """
        pieces = self.pieces(turn)
        if self.config.split_thoughts:
            pieces = [part for piece in pieces for part in self._split(turn.text, piece)]
        return steps_of(turn, trajectory_id, pieces, starts)

    def pieces(self, turn: Turn) -> list[Piece]:
        """Thoughts, replies and calls of a turn, thoughts whole; they cover its text."""
        text, cut_short = turn.text, turn.finish_reason == "length"
        cut: list[Piece] = []
        position = 0
        for message in messages(text):
            if position < message.start:
                cut += self._cut(text, position, message.start, cut_short=False)
            cut += self._message(text, message, cut_short=cut_short and message.end == len(text))
            position = message.end
        if position < len(text):
            cut += self._cut(text, position, len(text), cut_short=cut_short)
        return _without_blanks(text, [part for piece in cut for part in self._cut_reply(text, piece)])

    def inside(self, text: str, piece: Piece) -> tuple[int, int]:
        """The characters of a piece between its opening tag or header, where it has one, and its closing one."""
        start = piece.start + len(text[piece.start : piece.end]) - len(text[piece.start : piece.end].lstrip())
        header = HEADER.match(text, start, piece.end)
        start = header.end() if header else piece.start
        if self._reply_tags and (opening := self._reply_tags.match(text, start, piece.end)):
            start = opening.end()
        tags = [tag for tag in self._find_tags(text, start, piece.end) if not tag.tool]
        if tags and not tags[0].closing and not text[start : tags[0].start].strip():
            start = tags[0].end
        end = tags[-1].start if tags and tags[-1].closing and tags[-1].start >= start else piece.end
        return start, end

    def _message(self, text: str, message: Message, *, cut_short: bool) -> list[Piece]:
        """A harmony message, cut by the tags in it; what its tags do not claim is of the message's own kind."""
        whole = Piece(kind=message.kind, start=message.start, end=message.end, label=message.label)
        if message.kind == "tool_call" or message.body == message.body_end:
            return [whole]
        parts = [
            replace(part, kind=message.kind, label=message.label) if part.label is None else part
            for part in self._cut(text, message.body, message.body_end, cut_short=cut_short)
        ]
        parts[0] = replace(parts[0], start=message.start)
        parts[-1] = replace(parts[-1], end=message.end)
        return parts

    def _cut(self, text: str, start: int, end: int, *, cut_short: bool) -> Iterator[Piece]:
        """Pieces of `text[start:end]` without gap, blank ones and blank edges included."""
        tags = self._find_tags(text, start, end)
        last_close = max((i for i, tag in enumerate(tags) if tag.closing and not tag.tool), default=-1)
        position, index = start, 0
        if first := self._closes_only(tags):
            yield Piece(kind="thought", start=start, end=tags[first - 1].end, label=tags[first - 1].name)
            position, index = tags[first - 1].end, first
        while index < len(tags):
            tag = tags[index]
            if tag.closing:
                index += 1
                continue
            if position < tag.start:
                yield Piece(kind="reply", start=position, end=tag.start)
            if tag.tool:
                stop, index = self._tool_end(tags, index, end)
            else:
                stop, index = self._thought_end(tags, index, end, last_close, cut_short=cut_short)
            yield Piece(kind="tool_call" if tag.tool else "thought", start=tag.start, end=stop, label=tag.name)
            position = stop
        if position < end:
            yield Piece(kind="reply", start=position, end=end)

    def _cut_reply(self, text: str, piece: Piece) -> list[Piece]:
        """A reply cut where a reply tag opens and behind where it closes."""
        if piece.kind != "reply" or self._reply_tags is None:
            return [piece]
        parts: list[Piece] = []
        position, name = piece.start, piece.label
        for match in self._reply_tags.finditer(text, piece.start, piece.end):
            cut = match.end() if match[1] else match.start()
            if position < cut:
                parts.append(Piece(kind="reply", start=position, end=cut, label=name))
            position, name = cut, piece.label if match[1] else match[2].lower()
        if position < piece.end:
            parts.append(Piece(kind="reply", start=position, end=piece.end, label=name))
        return parts

    def _find_tags(self, text: str, start: int, end: int) -> list[_Tag]:
        if self._tags is None:
            return []
        return [
            _Tag(name, bool(match[1]), name in self._tools, match.start(), match.end())
            for match in self._tags.finditer(text, start, end)
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

    def _split(self, text: str, piece: Piece) -> list[Piece]:
        if piece.kind != "thought":
            return [piece]
        return cut_up(piece, sentence_cuts(text, *self.inside(text, piece)))


def _tag_pattern(names: Sequence[str]) -> re.Pattern[str] | None:
    choice = "|".join(re.escape(name) for name in names)
    return re.compile(rf"<(/?)[ \t]{{0,2}}({choice})[ \t]{{0,2}}>", re.IGNORECASE) if names else None


def _without_blanks(text: str, pieces: Sequence[Piece]) -> list[Piece]:
    """Give blank pieces, marks of an end and leading lines to the piece before; at the text's start to the next."""
    merged: list[Piece] = []
    start = 0
    for piece in pieces:
        if _EMPTY.fullmatch(text, piece.start, piece.end):
            continue
        begin = border(text, piece.start) if merged else start
        if merged:
            merged[-1] = replace(merged[-1], end=begin)
        merged.append(replace(piece, start=begin))
    if not merged:
        return [Piece(kind="reply", start=0, end=len(text))]
    merged[-1] = replace(merged[-1], end=len(text))
    return merged
