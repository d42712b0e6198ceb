"""Cut thoughts and replies into steps by what marks them: numbers, headings, paragraphs, words such as 首先."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from slea_llm.parsers.outline import PARAGRAPH, Node, outline
from slea_llm.parsers.pieces import Piece, steps_of
from slea_llm.parsers.sentences import Whole, sentence_cuts
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.parsers.vocabulary import Kinds, Markers
from slea_llm.types import Step, StepKind, Turn

MARKED = ("step", "item", "bullet")
"""Levels at which the author of a text says what a step is."""
TITLE_LENGTH = 60
"""Characters of a line that may be a title and then belongs to the step under it."""


class MarkersParser:
    """Steps of a turn by list numbers, `Step N:`, headings, 第一步, 步骤1：, ①, paragraphs and opening words.

    The turn is first cut by its tags as `tagged` does; each thought and each reply is then refined. What is marked, and
    every paragraph, is a top-level step; list items under a heading, paragraphs of a marked step and the moves of a
    paragraph (its sentences that open with `First`, `So`, `首先`, ...) are its sub-steps. A title belongs to the step
    under it. Code, JSON, tables and formulas are never cut. The label is the marker's name in data/steps/markers.yaml
    and, for leaf steps, a slash and what the step does by data/steps/kinds.yaml.
    """

    name: ClassVar[str] = "markers"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        markers: str = "steps/markers.yaml"
        """What marks a step: a file of data/, or a path."""
        kinds: str | None = "steps/kinds.yaml"
        """What steps do: a file of data/, or a path; none leaves it out of the labels."""
        whole_up_to: int = 400
        """Characters up to which a marked step or list item stays as it was written; a longer one gets sub-steps."""
        sentences: bool = False
        """Make every sentence a sub-step, not only those that open with one of the known words."""
        replies: bool = True
        """Refine replies too; else only thoughts."""
        tags: TaggedParser.Config = field(default_factory=lambda: TaggedParser.Config(reply_tags=("answer",)))
        """How tags are read, as for the parser `tagged`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tagged = TaggedParser(config.tags)
        self._markers = Markers.read(config.markers)
        self._kinds = Kinds.read(config.kinds) if config.kinds else None

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn, parents before their sub-steps. `starts` and errors as for `tagged`."""
        return steps_of(turn, trajectory_id, self.pieces(turn), starts)

    def pieces(self, turn: Turn) -> list[Piece]:
        """The same as pieces of the text."""
        return self.labelled(turn, self.unlabelled(turn))

    def unlabelled(self, turn: Turn) -> list[Piece]:
        """The pieces before it is said what they do: their labels are the names of the markers, where there is one."""
        text = turn.text
        whole = Whole(text)
        return [
            part
            for piece in self._tagged.pieces(turn)
            for part in (self._refined(text, piece, whole) if self._open(piece) else [piece])
        ]

    def labelled(self, turn: Turn, pieces: Sequence[Piece]) -> list[Piece]:
        """Pieces of `unlabelled` with what they do."""
        return [self._labelled(turn.text, piece) for piece in pieces]

    def _open(self, piece: Piece) -> bool:
        return piece.kind == "thought" or (piece.kind == "reply" and self.config.replies)

    def _refined(self, text: str, piece: Piece, whole: Whole) -> list[Piece]:
        start, end = self._tagged.inside(text, piece)
        nodes = [node for node in outline(text, start, end, self._markers, whole) if text[node.start : end].strip()]
        if not nodes:
            return [piece]
        # What stands before the first node and behind the last one, the tags, belongs to them.
        nodes[0] = nodes[0]._replace(start=piece.start, depth=0)
        return self._tree(text, piece.kind, nodes, piece.end, (start, end), whole)

    def _tree(
        self, text: str, kind: StepKind, nodes: Sequence[Node], end: int, inner: tuple[int, int], whole: Whole
    ) -> list[Piece]:
        """The pieces of nodes that cover the text up to `end`; `inner` is what may be cut into sentences."""
        pieces: list[Piece] = []
        for first, last in _siblings(nodes):
            node, below = nodes[first], nodes[first + 1 : last]
            stop = nodes[last].start if last < len(nodes) else end
            if self._stays_whole(node, stop):
                pieces.append(Piece(kind=kind, start=node.start, end=stop, label=node.name))
            elif not below:
                pieces.append(self._moves(text, kind, node, stop, inner, whole))
            else:
                parts = self._tree(text, kind, below, stop, inner, whole)
                if _is_title(text, node.start, below[0].start):
                    parts[0] = _grown(parts[0], node.start)
                else:
                    parts.insert(0, self._moves(text, kind, node, below[0].start, inner, whole))
                pieces.append(_parent(Piece(kind=kind, start=node.start, end=stop, label=node.name), parts))
        return pieces

    def _stays_whole(self, node: Node, end: int) -> bool:
        short = end - node.start <= self.config.whole_up_to
        return short and not self.config.sentences and node.level in MARKED

    def _moves(self, text: str, kind: StepKind, node: Node, end: int, inner: tuple[int, int], whole: Whole) -> Piece:
        """The piece of a node without nodes inside, its moves as parts."""
        piece = Piece(kind=kind, start=node.start, end=end, label=node.name)
        low, high = max(node.start, inner[0]), min(end, inner[1])
        if low >= high or (node.level in MARKED and not self.config.sentences):
            return piece
        cuts = [(cut, name) for cut in sentence_cuts(text, low, high, whole) if (name := self._opening(text, cut))]
        if node.name == PARAGRAPH and (name := self._opening(text, low)):
            piece = replace(piece, label=name)
        if not cuts:
            return piece
        borders = [(node.start, piece.label), *cuts]
        ends = [cut for cut, _ in cuts] + [end]
        parts = [Piece(kind=kind, start=a, end=b, label=name) for (a, name), b in zip(borders, ends, strict=True)]
        return replace(piece, label=node.name, parts=tuple(parts))

    def _opening(self, text: str, start: int) -> str | None:
        """The name of the words that open a sentence; with `sentences`, every sentence has one."""
        while start < len(text) and text[start].isspace():
            start += 1
        for mark in self._markers.sentences:
            if mark.regex.match(text, start):
                return mark.name
        return "sentence" if self.config.sentences else None

    def _labelled(self, text: str, piece: Piece) -> Piece:
        if self._kinds is None:
            return piece
        if piece.parts:  # it does what its parts do
            return replace(piece, parts=tuple(self._labelled(text, part) for part in piece.parts))
        what = self._kinds.label(text[piece.start : piece.end], piece.kind)
        return replace(piece, label=f"{piece.label or piece.kind}/{what}")


def _siblings(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Ranges of nodes that begin with one of the least deep; the first node counts as one of these."""
    least = min(node.depth for node in nodes)
    firsts = [index for index, node in enumerate(nodes) if index == 0 or node.depth <= least]
    return list(zip(firsts, [*firsts[1:], len(nodes)], strict=True))


def _is_title(text: str, start: int, end: int) -> bool:
    """Whether a marked line says only what the step under it is about."""
    line = text[start:end].strip()
    return len(line) <= TITLE_LENGTH and "\n" not in line and line[-1:] not in ".!?。！？；>"


def _grown(piece: Piece, start: int) -> Piece:
    """A piece that begins earlier, with its first part."""
    parts = piece.parts
    if parts:
        parts = (_grown(parts[0], start), *parts[1:])
    return replace(piece, start=start, parts=parts)


def _parent(piece: Piece, parts: Sequence[Piece]) -> Piece:
    """The piece with its parts; a single part adds nothing and gives only its own parts."""
    return replace(piece, parts=parts[0].parts if len(parts) == 1 else tuple(parts))
