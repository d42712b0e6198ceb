"""What all parsers share: pieces of a text as a tree, and the steps that they become."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slea_llm.types import Span, Step, StepKind, TokenSpan, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch `[start, end)` of a reply. `parts`, when there are any, cover it without gap."""

    kind: StepKind
    start: int
    end: int
    label: str | None = None
    parts: tuple[Piece, ...] = field(default=())

    def leaves(self) -> tuple[Piece, ...]:
        if not self.parts:
            return (self,)
        return tuple(leaf for part in self.parts for leaf in part.leaves())


def steps_of(turn: Turn, trajectory_id: str, pieces: Sequence[Piece], starts: Sequence[int] | None) -> tuple[Step, ...]:
    """The steps of pieces that cover the turn's text in order; a parent stands before its parts.

    `starts` (n,): the character at which each sampled token of `turn.span` starts; the end-of-turn token starts at
    `len(turn.text)`. Raises ValueError when they do not fit the turn.
    """
    leaves = [leaf for piece in pieces for leaf in piece.leaves()]
    spans = _token_spans(turn, [leaf.start for leaf in leaves] + [len(turn.text)], starts)
    tokens = {leaf.start: span for leaf, span in zip(leaves, spans, strict=True)}
    steps: list[Step] = []
    for piece in pieces:
        _add(turn, trajectory_id, piece, None, tokens, steps)
    return tuple(steps)


def _add(
    turn: Turn,
    trajectory_id: str,
    piece: Piece,
    parent: int | None,
    tokens: dict[int, TokenSpan | None],
    steps: list[Step],
) -> None:
    """Append a piece and its parts. The tree is as deep as its headings and lists: a few levels."""
    leaves = piece.leaves()
    first, last = tokens[leaves[0].start], tokens[leaves[-1].start]
    index = len(steps)
    steps.append(
        Step(
            trajectory_id=trajectory_id,
            turn=turn.index,
            index=index,
            kind=piece.kind,
            text=turn.text[piece.start : piece.end],
            span=Span(piece.start, piece.end),
            tokens=TokenSpan(first.row, first.start, last.end) if first is not None and last is not None else None,
            parent=parent,
            label=piece.label,
        )
    )
    for part in piece.parts:
        _add(turn, trajectory_id, part, index, tokens, steps)


def cut_up(piece: Piece, cuts: Iterable[int]) -> list[Piece]:
    """A piece cut at characters inside it; the results have its kind and label."""
    borders = [piece.start, *cuts, piece.end]
    return [Piece(kind=piece.kind, start=a, end=b, label=piece.label) for a, b in pairwise(borders)]


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
