"""What the reward model sees of a step: sentence vectors of its surroundings, and evidence that can be counted.

A trajectory of K leaf steps becomes K + 1 positions: position 0 is what stands before the first step, position k + 1
is the prefix that ends with step k. Nothing of a later step, of a later state or of the outcome is in any of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slea_llm.encoders import SentenceEncoder, words
from slea_llm.types import STEP_KINDS, Message, Step, Trajectory, Turn, leaf_steps

Encoding = Literal["apart", "joint"]

SEGMENTS: Mapping[Encoding, tuple[str, ...]] = {
    "apart": ("state", "message", "history", "action", "step"),
    "joint": ("joint", "history"),
}
"""Sentence vectors of one position. `message` is what was said since the last reply, `history` the mean of all that was
said before, `action` the reply up to the end of the step. `joint` encodes state, message, action and step as one text.
"""

EVIDENCE = (
    "log_length",
    "turn",
    "step_of_turn",
    "log_distinct_words",
    "repeated_words",
    "new_words",
    "words_in_user",
    "words_in_message",
    "words_in_all",
    "pieces_in_user",
    "pieces_in_message",
    "pieces_in_all",
    "message_words_told",
    "message_pieces_told",
    "all_pieces_told",
    "alike_to_all",
    "said_before",
    "alike_to_own",
    "asks",
    "digits",
    "words_in_tool",
    "pieces_in_tool",
    "words_in_state",
    "pieces_in_state",
    *(f"kind_{kind}" for kind in STEP_KINDS),
)
"""Countable evidence of one position; shares are in [0, 1], position 0 has all zeros."""

MAX_CHARACTERS = 2000
"""Texts are cut here for the encoder: the end is kept, where a reply asks and a message answers."""

_TAG = re.compile(r"</?[^\W\d][\w.-]*[ \t]*>")
_PIECE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """The positions of one trajectory: `vectors` (K + 1, segments, dimension) and `evidence` (K + 1, len(EVIDENCE)).

    `texts`, `types`, `states` and `contexts` name what each position ends with: the step in plain words, its kind, the
    structure of the state before the turn, and a digest of all that stands before it. They are empty at position 0.
    """

    vectors: NDArray[np.float32]
    evidence: NDArray[np.float32]
    texts: tuple[str, ...]
    types: tuple[str, ...]
    states: tuple[str, ...]
    contexts: tuple[str, ...]

    def with_evidence(self, evidence: NDArray[np.float32]) -> Prefixes:
        return dataclasses.replace(self, evidence=evidence)

    def __len__(self) -> int:
        return len(self.evidence)


@dataclass(frozen=True, slots=True)
class _Said:
    """A text with its words and character pieces, made once."""

    text: str
    words: frozenset[str]
    pieces: frozenset[str]

    @classmethod
    def of(cls, text: str) -> _Said:
        found = words(text)
        line = " ".join(found)
        pieces = (
            frozenset(line[at : at + _PIECE] for at in range(max(1, len(line) - _PIECE + 1))) if line else frozenset()
        )
        return cls(text, frozenset(found), pieces)

    def joined(self, other: _Said) -> _Said:
        return _Said("", self.words | other.words, self.pieces | other.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    texts: Mapping[str, str]
    before: int
    evidence: tuple[float, ...]
    text: str = ""
    type: str = ""
    state: str = ""
    context: str = ""


_NOTHING = _Said("", frozenset(), frozenset())


def prefixes(
    trajectories: Sequence[tuple[Trajectory, Sequence[Step]]], encoder: SentenceEncoder, encoding: Encoding
) -> list[Prefixes]:
    """Positions of several trajectories, all their texts encoded in one call."""
    read = [_read(trajectory, leaf_steps(steps)) for trajectory, steps in trajectories]
    texts = dict.fromkeys(
        text
        for messages, positions in read
        for text in (*messages, *(text for position in positions for text in _encoded(position, encoding)))
    )
    rows = encoder.encode(list(texts))
    vectors = dict(zip(texts, rows, strict=True))
    return [_assemble(messages, positions, vectors, encoding, encoder.dimension) for messages, positions in read]


def plain(text: str) -> str:
    """A text without tags; a call or state in JSON as its words."""
    bare = " ".join(_TAG.sub(" ", text).split())
    if bare[:1] in "{[":
        try:
            bare = _flat(json.loads(bare))
        except (ValueError, RecursionError):
            return bare
    return bare


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_flat(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_flat(one) for one in value)
    return str(value)


def message_text(message: Message) -> str:
    """What a message says, its calls included."""
    calls = " ".join(f"{call.name} {plain(call.arguments)}" for call in message.tool_calls)
    return f"{plain(message.content)} {calls}".strip()


def _encoded(position: _Position, encoding: Encoding) -> list[str]:
    return [position.texts[name] for name in SEGMENTS[encoding] if name != "history"]


def _read(trajectory: Trajectory, leaves: Sequence[Step]) -> tuple[list[str], list[_Position]]:
    """Every message said so far in order, and the positions, each with the number of messages before it."""
    by_turn: dict[int, list[Step]] = {}
    for step in leaves:
        by_turn.setdefault(step.turn, []).append(step)
    messages: list[str] = []
    heard = _Heard()
    digest = hashlib.sha256()
    positions: list[_Position] = []
    for turn in trajectory.turns:
        for message in turn.context:
            if message.role == "system":
                continue
            text = message_text(message)[-MAX_CHARACTERS:]
            messages.append(text)
            heard.hear(message.role, text)
            digest.update(f"{message.role}\0{text}\1".encode("utf-8", "replace"))
        since = _said_since(turn)
        state = _flat(turn.state_before)[-MAX_CHARACTERS:]
        structure = state_structure(turn.state_before)
        if not positions:
            texts = {"state": state, "message": since, "action": "", "step": "", "joint": f"{state} | {since}"}
            positions.append(_Position(texts=texts, before=len(messages), evidence=(0.0,) * len(EVIDENCE)))
        for number, step in enumerate(by_turn.get(turn.index, ())):
            action = plain(turn.text[: step.span.end])[-MAX_CHARACTERS:]
            text = plain(step.text)[-MAX_CHARACTERS:]
            joint = " | ".join((state, since, action, text))[-2 * MAX_CHARACTERS :]
            texts = {"state": state, "message": since, "action": action, "step": text, "joint": joint}
            counted = heard.evidence(step, text, since, state, turn=turn.index, number=number)
            positions.append(
                _Position(
                    texts=texts,
                    before=len(messages),
                    evidence=counted,
                    text=" ".join(text.lower().split()),
                    type=type_of(step),
                    state=structure,
                    context=digest.hexdigest(),
                )
            )
            digest.update(f"step\0{text}\1".encode("utf-8", "replace"))
        # A later position may look back on the reply, its own may not: it would hold what comes after the step.
        messages.append(plain(turn.text)[-MAX_CHARACTERS:])
        heard.hear("assistant", messages[-1])
    return messages, positions


def _said_since(turn: Turn) -> str:
    spoken = [message_text(message) for message in turn.context if message.role != "system"]
    return " ".join(spoken)[-MAX_CHARACTERS:]


class _Heard:
    """What was said before a step, by whom."""

    def __init__(self) -> None:
        self._by = {"user": _NOTHING, "tool": _NOTHING, "assistant": _NOTHING}
        self._own: list[_Said] = []
        self._known: dict[str, _Said] = {}

    def said(self, text: str) -> _Said:
        """The text's words and pieces; a dialogue says many texts more than once."""
        if text not in self._known:
            self._known[text] = _Said.of(text)
        return self._known[text]

    def hear(self, role: str, text: str) -> None:
        said = self.said(text)
        self._by[role] = self._by[role].joined(said)
        if role == "assistant":
            self._own.append(said)

    def evidence(self, step: Step, text: str, message: str, state: str, *, turn: int, number: int) -> tuple[float, ...]:
        said, last, known = self.said(text), self.said(message), self.said(state)
        user, tool = self._by["user"], self._by["tool"]
        everything = user.joined(tool).joined(self._by["assistant"])
        count = len(words(said.text))
        own = self._own
        counted = (
            math.log1p(len(said.text)) / 5.0,
            turn / 10.0,
            number / 10.0,
            math.log1p(len(said.words)) / 3.0,
            1.0 - len(said.words) / count if count else 0.0,
            math.log1p(len(said.words - everything.words)),
            _share(said.words, user.words),
            _share(said.words, last.words),
            _share(said.words, everything.words),
            _share(said.pieces, user.pieces),
            _share(said.pieces, last.pieces),
            _share(said.pieces, everything.pieces),
            _share(last.words, said.words),
            _share(last.pieces, said.pieces),
            _share(everything.pieces, said.pieces),
            _alike(said.words, everything.words),
            float(any(said.text == one.text for one in own)),
            max((_alike(said.words, one.words) for one in own), default=0.0),
            float("?" in said.text or "？" in said.text),
            sum(character.isdigit() for character in said.text) / max(1, len(said.text)),
            _share(said.words, tool.words),
            _share(said.pieces, tool.pieces),
            _share(said.words, known.words),
            _share(said.pieces, known.pieces),
            *(float(step.kind == kind) for kind in STEP_KINDS),
        )
        self._own.append(said)
        return counted


def _share(part: frozenset[str], whole: frozenset[str]) -> float:
    return len(part & whole) / len(part) if part else 0.0


def _alike(left: frozenset[str], right: frozenset[str]) -> float:
    """Jaccard similarity."""
    union = len(left | right)
    return len(left & right) / union if union else 0.0


def _assemble(
    messages: Sequence[str],
    positions: Sequence[_Position],
    vectors: Mapping[str, NDArray[np.float32]],
    encoding: Encoding,
    dimension: int,
) -> Prefixes:
    names = SEGMENTS[encoding]
    rows = np.zeros((len(positions), len(names), dimension), np.float32)
    said = np.cumsum([np.zeros(dimension, np.float32), *(vectors[text] for text in messages)], axis=0)
    for row, position in zip(rows, positions, strict=True):
        for place, name in enumerate(names):
            if name == "history":
                row[place] = said[position.before] / max(1, position.before)
            else:
                row[place] = vectors[position.texts[name]]
    evidence = np.array([position.evidence for position in positions], np.float32).reshape(
        len(positions), len(EVIDENCE)
    )
    return Prefixes(
        vectors=rows,
        evidence=evidence,
        texts=tuple(position.text for position in positions),
        types=tuple(position.type for position in positions),
        states=tuple(position.state for position in positions),
        contexts=tuple(position.context for position in positions),
    )


def type_of(step: Step) -> str:
    """Step kind, with the name of the tool that is called, or whether something is asked."""
    if step.kind == "tool_call":
        said = plain(step.text).split()
        return f"tool_call {said[1] if said[:1] == ['name'] and len(said) > 1 else ''}"
    return f"{step.kind} {'asks' if '?' in step.text or '？' in step.text else 'tells'}"


def state_structure(value: Any) -> str:
    """What a state holds, without the values: names of its entries, members of its lists, truth values.

    Dialogues about other things in the same situation share it: which slots are filled, not with what.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{state_structure(one)}" for key, one in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(one if isinstance(one, str) else state_structure(one) for one in value) + "]"
    return str(value) if isinstance(value, bool) or value is None else ""
