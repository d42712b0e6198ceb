"""Pick a parser for each turn by what its text looks like, and say which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from slea_llm.parsers.markers import MarkersParser
from slea_llm.parsers.pieces import Piece, steps_of
from slea_llm.parsers.react import ReactParser
from slea_llm.parsers.reply import ReplyParser
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.types import Step, Turn


class AutoParser:
    """Steps of a turn by the parser that fits it; every label begins with its name and a colon.

    `react` where lines begin with `Action:` and another of its words, or two with `Thought:`; else `markers` where the
    turn holds a thought or a marked list; else `reply`, which names what a plain reply does; `tagged` where there is
    nothing but calls.
    """

    name: ClassVar[str] = "auto"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        react: ReactParser.Config = field(default_factory=ReactParser.Config)
        markers: MarkersParser.Config = field(default_factory=MarkersParser.Config)
        reply: ReplyParser.Config = field(default_factory=ReplyParser.Config)
        tagged: TaggedParser.Config = field(default_factory=lambda: TaggedParser.Config(reply_tags=("answer",)))

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tagged = TaggedParser(config.tagged)
        self._react = ReactParser(config.react)
        self._markers = MarkersParser(config.markers)
        self._reply = ReplyParser(config.reply)

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn, parents before their sub-steps. `starts` and errors as for `tagged`."""
        picked, pieces = self._pick(turn)
        return steps_of(turn, trajectory_id, [_named(picked, piece) for piece in pieces], starts)

    def _pick(self, turn: Turn) -> tuple[str, list[Piece]]:
        words = self._react.words(turn)
        acts = "action" in words and (len(words) > 1 or bool(self._react.call(turn.text).arguments))
        if acts or words.count("thought") > 1 or {"thought", "answer"} <= set(words):
            return self._react.name, self._react.pieces(turn)
        tagged = self._tagged.pieces(turn)
        pieces = self._markers.unlabelled(turn)
        marked = sum(not _is_plain(leaf) for piece in pieces for leaf in piece.leaves())
        thinks = any(piece.kind == "thought" for piece in tagged)
        if (len(pieces) > 1 or pieces[0].parts) and (marked > 1 or thinks):
            return self._markers.name, self._markers.labelled(turn, pieces)
        plain = self._reply.pieces(turn)
        if len(plain) >= len(tagged) and any(piece.kind == "reply" for piece in tagged):
            return self._reply.name, plain
        return self._tagged.name, tagged


def _is_plain(piece: Piece) -> bool:
    """Whether nothing but its place on a line of its own, or its first word, made it a step."""
    return (piece.label or piece.kind) in (
        "paragraph",
        "sentence",
        "also",
        "turn",
        "conclude",
        "plan",
        "option",
        "given",
        piece.kind,
    )


def _named(parser: str, piece: Piece) -> Piece:
    parts = tuple(_named(parser, part) for part in piece.parts)
    return replace(piece, label=f"{parser}:{piece.label or piece.kind}", parts=parts)
