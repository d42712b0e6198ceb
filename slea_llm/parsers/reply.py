"""The steps that a plain reply implies: what each of its sentences does, such as asking for date and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from slea_llm.errors import ConfigError
from slea_llm.parsers.pieces import Piece, steps_of
from slea_llm.parsers.sentences import Whole, sentence_cuts
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.parsers.vocabulary import Kinds
from slea_llm.types import Step, Turn

if TYPE_CHECKING:
    from slea_llm.parsers.act_model import ActModel

REMEMBERED = 20_000
"""Sentences whose vectors are kept: dialogues repeat themselves."""
ASKS = "asks_information"
"""The kind of step whose objects an answer can tell."""


class ReplyParser:
    """Steps of a reply without any thought, by rules over the vocabulary of data/steps/kinds.yaml.

    The turn is first cut by its tags as `tagged` does. Each reply is then cut into sentences and lines, each is named
    by what it does, and neighbours that do the same thing are one step: `asks_information(budget, date)`. Thoughts and
    calls stay whole. The label is the tag, or the kind of the step where no tag stands, a slash and that name. Where
    the last question names nothing, the slots that are filled after the turn and were not before it (`filled` of the
    public state) say what it asked for.

    With `model` a light model reads every sentence too: sentence vectors and a regression fitted to `examples` when the
    parser is made. It overrules the rules where another act is `odds` times as likely as theirs.
    """

    name: ClassVar[str] = "reply"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        kinds: str = "steps/kinds.yaml"
        """What steps do: a file of data/, or a path."""
        join: bool = True
        """Make neighbouring sentences that do the same thing one step."""
        tags: TaggedParser.Config = field(default_factory=lambda: TaggedParser.Config(reply_tags=("answer",)))
        """How tags are read, as for the parser `tagged`."""
        model: str = ""
        """Sentence encoder of the light model, such as use-multilingual. Empty: rules alone, nothing is loaded."""
        examples: str = "steps/reply_examples.yaml"
        """What the light model is fitted to: a file of data/, or a path."""
        odds: float = 20.0
        """How many times as likely another act must be for the model to overrule the rules; 1 or more."""

        def __post_init__(self) -> None:
            if not self.odds >= 1.0:
                raise ConfigError(f"odds {self.odds} must be 1 or more")

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for faulty words or examples, MissingDependencyError for an encoder that is not here."""
        self.config = config
        self._tagged = TaggedParser(config.tags)
        self._kinds = Kinds.read(config.kinds)
        self._model: ActModel | None = None
        if config.model:
            from slea_llm.encoders import CachingEncoder, load_encoder
            from slea_llm.parsers.act_model import ActModel

            encoder = CachingEncoder(load_encoder(config.model), size=REMEMBERED)
            names = [entry.name for entry in self._kinds.kinds if "reply" in entry.of]
            self._model = ActModel.read(config.examples, encoder, names)

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn, none the parent of another. `starts` and errors as for `tagged`."""
        return steps_of(turn, trajectory_id, self.pieces(turn), starts)

    def pieces(self, turn: Turn) -> list[Piece]:
        """The same as pieces of the text."""
        text = turn.text
        whole = Whole(text)
        pieces = [
            part
            for piece in self._tagged.pieces(turn)
            for part in (self._acts(text, piece, whole) if piece.kind == "reply" else [self._labelled(text, piece)])
        ]
        return _with_answers(pieces, turn)

    def _acts(self, text: str, piece: Piece, whole: Whole) -> list[Piece]:
        start, end = self._tagged.inside(text, piece)
        cuts = [piece.start, *sentence_cuts(text, start, end, whole), piece.end]
        parts: list[Piece] = []
        acts: list[str] = []
        joined: list[bool] = []
        for (begin, stop), act in zip(pairwise(cuts), self._what([text[a:b] for a, b in pairwise(cuts)]), strict=True):
            if parts and self.config.join and act == acts[-1]:
                parts[-1], joined[-1] = replace(parts[-1], end=stop), True
            else:
                parts.append(replace(piece, start=begin, end=stop))
                acts.append(act)
                joined.append(False)
        return [
            # Together sentences may do, by the rules, what none of them does.
            self._labelled(text, part) if several and self._model is None else self._named(text, part, act)
            for part, act, several in zip(parts, acts, joined, strict=True)
        ]

    def _what(self, sentences: Sequence[str]) -> list[str]:
        """What each sentence does, by the rules and, where there is one, the model."""
        ruled = [self._kinds.act(sentence, "reply") for sentence in sentences]
        return ruled if self._model is None else self._model.overrule(sentences, ruled, odds=self.config.odds)

    def _named(self, text: str, piece: Piece, act: str) -> Piece:
        what = self._kinds.named(act, text[piece.start : piece.end])
        return replace(piece, label=f"{piece.label or piece.kind}/{what}")

    def _labelled(self, text: str, piece: Piece) -> Piece:
        what = self._kinds.label(text[piece.start : piece.end], piece.kind)
        return replace(piece, label=f"{piece.label or piece.kind}/{what}")


def _with_answers(pieces: list[Piece], turn: Turn) -> list[Piece]:
    """The pieces, the last question with what the answer to it filled, if it names nothing itself."""
    before, after = (state.get("filled") for state in (turn.state_before, turn.state_after))
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return pieces
    filled = ", ".join(sorted(str(slot) for slot in after if slot not in before))
    asking = [index for index, piece in enumerate(pieces) if (piece.label or "").partition("/")[2].startswith(ASKS)]
    if filled and asking and "(" not in (pieces[asking[-1]].label or ""):
        last = pieces[asking[-1]]
        pieces[asking[-1]] = replace(last, label=f"{last.label}({filled})")
    return pieces
