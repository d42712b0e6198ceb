"""Cut a turn into steps by asking a language model, whose answer must be found again in the text."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

from slea_llm import prompts
from slea_llm.endpoints import Endpoint, chat_model_of, whole_characters
from slea_llm.errors import ConfigError
from slea_llm.parsers.pieces import Piece, steps_of
from slea_llm.parsers.sentences import Whole, border
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.parsers.vocabulary import Kinds
from slea_llm.questions import Answer, ChatModel, Question, Usage
from slea_llm.types import Message, Step, Turn

FIELDS = frozenset({"kind", "text", "kinds"})
MOST_STEPS = 64
"""Steps that one piece of text may be cut into."""
LONGEST_QUOTE = 120
"""Characters of the first words of a step."""
REFUSED = "refused"
"""What a step is said to do that was left whole because there was no usable answer."""


class LlmParser:
    """Steps of a turn as a chat model sees them, aligned back to the text or refused.

    The turn is first cut by its tags as `tagged` does; calls stay whole. Of every thought and reply the model names the
    first words of each step and what it does. These words are looked for in the text, in order, letter by letter, then
    with white space, letter case and full-width forms made equal; a step ends where the next one begins. An answer is
    refused, and the model told why and asked again, when words are not found in their order, when the first step
    leaves out text, or when a cut would fall into a word, code, JSON, a table or a URL. A piece without a usable answer
    stays one step that is labelled `.../refused`; `refusals` counts the reasons. The label of the others is `llm/` and
    what the step does.
    """

    name: ClassVar[str] = "llm"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        endpoint: Endpoint = field(default_factory=Endpoint)
        """Who is asked, and how long and how often."""
        prompt: str = "parse/steps"
        """Prompt of prompts/ with the fields kind, text and kinds."""
        kinds: str = "steps/kinds.yaml"
        """What steps do: a file of data/, or a path. The model may use these names alone."""
        shortest: int = 40
        """Characters below which a piece is one step and nothing is asked."""
        longest: int = 20_000
        """Characters above which a piece is not sent, and so refused."""
        tags: TaggedParser.Config = field(default_factory=lambda: TaggedParser.Config(reply_tags=("answer",)))
        """How tags are read, as for the parser `tagged`."""

        def __post_init__(self) -> None:
            if not 0 <= self.shortest < self.longest:
                raise ConfigError(f"shortest {self.shortest} is not in [0, longest), where longest is {self.longest}")

    def __init__(self, config: Config, *, chat_model: ChatModel | None = None) -> None:
        """`chat_model` answers instead of an HTTP endpoint; one whose url is `engine` needs it.

        Raises ConfigError for a prompt with other fields and for a key variable that is not set.
        """
        self.config = config
        self._prompt = prompts.load(config.prompt, fields=FIELDS)
        self._tagged = TaggedParser(config.tags)
        vocabulary = Kinds.read(config.kinds)
        self._kinds = {
            kind: [entry.name for entry in vocabulary.kinds if kind in entry.of] for kind in ("thought", "reply")
        }
        self._model = chat_model_of(config.endpoint, chat_model)
        self.refusals: Counter[str] = Counter()

    @property
    def usage(self) -> Usage:
        """What the questions have cost so far."""
        return self._model.usage

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn, none the parent of another. `starts` and errors as for `tagged`."""
        return self.parse_many([(turn, trajectory_id, starts)])[0]

    def parse_many(self, turns: Sequence[tuple[Turn, str, Sequence[int] | None]]) -> list[tuple[Step, ...]]:
        """The same for many turns, whose questions are all in flight together."""
        cut = [self._tagged.pieces(turn) for turn, _, _ in turns]
        asked = [
            (turn.text, piece)
            for (turn, _, _), pieces in zip(turns, cut, strict=True)
            for piece in pieces
            if _is_text(piece)
        ]
        parts = iter(self._cut(asked))
        return [
            steps_of(turn, trajectory_id, [part for piece in pieces for part in self._parts(piece, parts)], starts)
            for (turn, trajectory_id, starts), pieces in zip(turns, cut, strict=True)
        ]

    @staticmethod
    def _parts(piece: Piece, parts: Iterator[list[Piece]]) -> list[Piece]:
        return next(parts) if _is_text(piece) else [piece]

    def _cut(self, asked: Sequence[tuple[str, Piece]]) -> list[list[Piece]]:
        """The pieces that each thought or reply becomes."""
        inner = [self._tagged.inside(text, piece) for text, piece in asked]
        sizes = [len(text[start:end].strip()) for (text, _), (start, end) in zip(asked, inner, strict=True)]
        sent = [index for index, size in enumerate(sizes) if self.config.shortest <= size <= self.config.longest]
        answers = self._model.ask([self._question(*asked[index], *inner[index]) for index in sent])
        made = [[piece] for _, piece in asked]
        for index, answer in zip(sent, answers, strict=True):
            made[index] = self._aligned(asked[index][1], answer)
        for index, size in enumerate(sizes):
            if size > self.config.longest:
                reason = f"a piece is longer than {self.config.longest} characters (longest)"
                made[index] = self._aligned(asked[index][1], Answer(reason=reason))
        return made

    def _question(self, text: str, piece: Piece, start: int, end: int) -> Question:
        kinds = self._kinds[piece.kind]
        content = self._prompt.render(
            kind="reasoning" if piece.kind == "thought" else "reply",
            text=whole_characters(json.dumps(text[start:end].strip(), ensure_ascii=False)),
            kinds=", ".join(kinds),
        )
        return Question(
            name="steps",
            messages=(Message(role="user", content=content),),
            schema=schema(kinds),
            read=lambda answer: align(text, start, end, read_steps(answer, kinds)),
        )

    def _aligned(self, piece: Piece, answer: Answer) -> list[Piece]:
        if answer.reason is not None:
            self.refusals[answer.reason] += 1
            return [replace(piece, label=f"{piece.kind}/{REFUSED}")]
        cuts, acts = answer.value
        borders = [piece.start, *cuts, piece.end]
        return [
            replace(piece, start=begin, end=stop, label=f"llm/{act}")
            for (begin, stop), act in zip(pairwise(borders), acts, strict=True)
        ]


def schema(kinds: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of an answer."""
    step = {
        "type": "object",
        "properties": {
            "begins": {"type": "string", "minLength": 1, "maxLength": LONGEST_QUOTE},
            "does": {"type": "string", "enum": list(kinds)},
        },
        "required": ["begins", "does"],
        "additionalProperties": False,
    }
    steps = {"type": "array", "items": step, "minItems": 1, "maxItems": MOST_STEPS}
    return {"type": "object", "properties": {"steps": steps}, "required": ["steps"], "additionalProperties": False}


def read_steps(answer: Mapping[str, Any], kinds: Sequence[str]) -> list[tuple[str, str]]:
    """`(first words, what it does)` of every step; raises ValueError that names the fault."""
    steps = answer.get("steps")
    if not isinstance(steps, list) or not 1 <= len(steps) <= MOST_STEPS:
        raise ValueError(f"'steps' is not a list of 1 to {MOST_STEPS} steps")
    read = []
    for number, step in enumerate(steps, start=1):
        begins, does = (step.get("begins"), step.get("does")) if isinstance(step, dict) else (None, None)
        if not isinstance(begins, str) or not begins.strip():
            raise ValueError(f"step {number} does not say how it begins")
        if not isinstance(does, str) or does not in kinds:
            raise ValueError(f"step {number} does {does!r}, which is not one of {', '.join(kinds)}")
        read.append((begins.strip(), does))
    return read


def align(text: str, start: int, end: int, steps: Sequence[tuple[str, str]]) -> tuple[list[int], list[str]]:
    """Where the second and later steps begin in `text[start:end]`, and what all of them do.

    Raises ValueError, with the number of the step, when its words are not found after those of the step before, or a
    cut there is not allowed.
    """
    whole = Whole(text)
    folded = _Folded(text, start, end)
    cuts: list[int] = []
    position = start
    for number, (begins, _) in enumerate(steps, start=1):
        found = list(folded.find(begins, position))
        if not found:
            raise ValueError(f"the words {begins[:60]!r} of step {number} are not in the text after the step before")
        if number == 1:
            if any(character.isalnum() for character in text[start : found[0][0]]):
                raise ValueError(f"step 1 begins with {begins[:60]!r}, which leaves out the beginning of the text")
            position = found[0][0] + 1
            continue
        allowed = [place for place, _ in found if not whole.holds(place) and not _in_word(text, place)]
        if not allowed:
            raise ValueError(f"step {number} would begin inside a word, code, JSON, a table or a URL: {begins[:60]!r}")
        cuts.append(_with_blanks(text, allowed[0], position))
        position = allowed[0] + 1
    return cuts, [does for _, does in steps]


class _Folded:
    """A stretch of text in which words are found whatever their white space, letter case and full-width forms."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self._text, self._start, self._end = text, start, end
        folded: list[str] = []
        self._places: list[int] = []
        for place in range(start, end):
            for character in _fold(text[place]):
                if character != " " or not folded or folded[-1] != " ":
                    folded.append(character)
                    self._places.append(place)
        self._folded = "".join(folded)

    def find(self, words: str, position: int) -> Iterator[tuple[int, int]]:
        """`(place, kind)` of every occurrence that begins at `position` or later; exact ones when there are any."""
        place = self._text.find(words, position, self._end)
        if place >= 0:
            while place >= 0:
                yield place, 0
                place = self._text.find(words, place + 1, self._end)
            return
        wanted = " ".join("".join(_fold(character) for character in words).split())
        at = self._folded.find(wanted) if wanted else -1
        while at >= 0:
            if self._places[at] >= position:
                yield self._places[at], 1
            at = self._folded.find(wanted, at + 1)


def _fold(character: str) -> str:
    return " " if character.isspace() else unicodedata.normalize("NFKC", character).casefold()


def _is_text(piece: Piece) -> bool:
    return piece.kind != "tool_call"


def _in_word(text: str, place: int) -> bool:
    """Whether a cut would part two letters or digits of one word; scripts without spaces have no such words."""
    left, right = text[place - 1 : place], text[place : place + 1]
    return left.isalnum() and right.isalnum() and not (_is_unspaced(left) or _is_unspaced(right))


def _is_unspaced(character: str) -> bool:
    return "\u3040" <= character <= "\u9fff" or "\uac00" <= character <= "\ud7af" or "\u0e00" <= character <= "\u0eff"


def _with_blanks(text: str, place: int, lowest: int) -> int:
    """The cut in front of the blanks that lead to a step; line ends stay with the step before, as in every parser."""
    begin = place
    while begin > lowest and text[begin - 1].isspace():
        begin -= 1
    return border(text, begin) if begin < place else place
