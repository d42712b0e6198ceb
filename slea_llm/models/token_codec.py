"""Text to ids and back, with two promises: typed control tokens stay text, and every id keeps its place in the text.

Prompts are put together from parts, each of which says what it is: a control token of the chat template (an id), ids
that were sampled, or text. Text goes through a copy of the tokenizer that does not know the control tokens at all, so
no text can forge one. Text between two control tokens is encoded in one piece, as the tokenizer itself would do, so
that a prompt without such text gets exactly the tokenizer's own ids.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tokenizers import Tokenizer

from slea_llm.errors import TemplateError
from slea_llm.models.thoughts import CLOSE, OPEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARKUP: frozenset[str] = frozenset({OPEN, CLOSE, "<tool_call>", "</tool_call>"})

Position: TypeAlias = Literal["start", "control", "inside"]
"""What stands before a text: nothing, a control token, or other text (sampled ids included)."""

_WINDOW = 16  # tokens decoded again for each token where the decoder is not a plain concatenation
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A token of the vocabulary that stands for no text of its own: end of turn, start of a header, `<think>`."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool


Part: TypeAlias = str | Control | tuple[int, ...]
"""Text to be encoded as text, a control token, or ids taken as they are."""


class TokenCodec:
    """Encodes parts and decodes ids of one tokenizer.

    `speakable` controls are those that a reply may hold as tokens: the tokenizer does not call them special, or they
    mark thoughts and tool calls. All other special tokens decode to nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend: Tokenizer = tokenizer.backend_tokenizer
        spec = backend.to_str()
        added: list[dict[str, Any]] = json.loads(spec)["added_tokens"]
        unknown = tokenizer.unk_token
        self.controls: dict[str, Control] = {
            token["content"]: Control(
                id=token["id"],
                content=token["content"],
                special=token["special"],
                lstrip=token["lstrip"],
                rstrip=token["rstrip"],
            )
            for token in added
            if token["content"].strip() and token["content"] != unknown
        }
        self.speakable = frozenset(c.id for c in self.controls.values() if not c.special or c.content in MARKUP)
        self._hidden = frozenset(c.id for c in self.controls.values()) - self.speakable
        self._backend = backend
        self._encoders = _encoders(spec, frozenset(self.controls))
        self._moved = _moved_ids(self._encoders["start"], added)
        self._any = _pattern(self.controls.values())
        self._spoken = _pattern(c for c in self.controls.values() if c.id in self.speakable)
        self._byte_level = _is_byte_level(json.loads(spec)["decoder"])
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}

    def split(self, text: str, *, speakable_only: bool = False) -> list[Part]:
        """Text of the template (or, with `speakable_only`, of a reply) with its control tokens taken out as such."""
        pattern = self._spoken if speakable_only else self._any
        if pattern is None:
            return [text]
        return [self.controls.get(piece, piece) if i % 2 else piece for i, piece in enumerate(pattern.split(text))]

    def encode(self, parts: Iterable[Part], *, after: Position) -> list[int]:
        """The ids of the parts, one after another. Text never yields the id of a control token."""
        ids: list[int] = []
        text, position, strip_next = "", after, False
        for part in parts:
            if isinstance(part, str):
                text += part.lstrip() if strip_next and not text else part
                strip_next = strip_next and not text
                continue
            if isinstance(part, Control):
                ids += self._encode_text(text.rstrip() if part.lstrip else text, position)
                ids.append(part.id)
                position, strip_next = "control", part.rstrip
            elif part:
                ids += self._encode_text(text, position)
                ids += part
                position, strip_next = "inside", False
            else:
                continue
            text = ""
        return ids + self._encode_text(text, position)

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids; end-of-turn and other special tokens give nothing."""
        return self._decode([i for i in ids if i not in self._hidden])

    def decode(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The text and, for every id, the character at which it starts.

        An id that starts inside a character (bytes of one character over several ids) starts at that character; an id
        without text starts where the next one does, at the end `len(text)`.
        """
        visible = [i for i in ids if i not in self._hidden]
        text, starts = self._decode_bytes(visible) if self._byte_level else self._decode_pieces(visible)
        if len(visible) == len(ids):
            return text, tuple(starts)
        ends = iter([*starts, len(text)])
        place = next(ends)
        result = []
        for i in ids:
            result.append(place)
            if i not in self._hidden:
                place = next(ends)
        return text, tuple(result)

    def _encode_text(self, text: str, position: Position) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._encoders[position].encode(text, add_special_tokens=False).ids
        return [self._moved.get(i, i) for i in ids] if self._moved else ids

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def _decode_bytes(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Exact for byte-level decoders: the bytes of every id are known, so no id is decoded twice."""
        offsets, joined = [], bytearray()
        for i in ids:
            offsets.append(len(joined))
            known = self._bytes.get(i)
            if known is None:
                known = self._bytes[i] = _token_bytes(self._backend.id_to_token(i) or "")
            joined += known
        if joined.isascii():
            return joined.decode("ascii"), offsets
        borders = _character_borders(bytes(joined))
        text = joined.decode("utf-8", errors="replace")
        return text, [len(text) if at == len(joined) else bisect_right(borders, at) - 1 for at in offsets]

    def _decode_pieces(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """For decoders that join a piece per id; where pieces hang together, a sliding window finds the borders."""
        text = self._decode(ids)
        pieces = [self._piece(ids[0], first=True)] + [self._piece(i) for i in ids[1:]] if ids else []
        if "".join(pieces) == text and _INCOMPLETE not in text:
            starts, at = [], 0
            for piece in pieces:
                starts.append(at)
                at += len(piece)
            return text, starts
        return text, self._starts_by_prefix(ids, text)

    def _piece(self, token: int, *, first: bool = False) -> str:
        """What an id adds to a text: most decoders treat the very first id otherwise, so it is seen behind another."""
        if first:
            return self._decode([token])
        known = self._pieces.get(token)
        if known is None:
            alone = self._decode([token])
            known = self._pieces[token] = self._decode([token, token])[len(alone) :]
        return known

    def _starts_by_prefix(self, ids: Sequence[int], text: str) -> list[int]:
        """Start of id i: how much of the text is settled by the ids before it."""
        for window in (_WINDOW, len(ids) + 1):
            starts, settled = self._starts_in_windows(ids, text, window)
            if settled:
                return starts
        raise TemplateError(f"the tokenizer's decoder gives no stable text: {text[:80]!r} changes while it is decoded")

    def _starts_in_windows(self, ids: Sequence[int], text: str, window: int) -> tuple[list[int], bool]:
        starts: list[int] = []
        at = 0
        # Ids and characters before `base` are settled. The window before it leads, so that no id behind `base` is
        # decoded as the first one and no character is cut.
        lead, base, base_at, lead_length = 0, 0, 0, 0
        for i in range(len(ids) + 1):
            seen = self._decode(ids[lead:i])[lead_length:]
            common = _common_prefix(seen, text, base_at)
            at = max(at, base_at + common)
            starts.append(at)
            if common == len(seen) and i - base >= window:
                lead, base, base_at = base, i, base_at + common
                lead_length = len(self._decode(ids[lead:base]))
        return starts[:-1], at == len(text)


def _pattern(controls: Iterable[Control]) -> re.Pattern[str] | None:
    contents = sorted((c.content for c in controls), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, contents)) + ")") if contents else None


def _common_prefix(seen: str, text: str, at: int) -> int:
    if text.startswith(seen, at):
        return len(seen)
    return next(
        (n for n, (a, b) in enumerate(zip(seen, text[at:], strict=False)) if a != b), min(len(seen), len(text) - at)
    )


def _encoders(spec: str, controls: frozenset[str]) -> dict[Position, Tokenizer]:
    """A copy of the tokenizer without control tokens for each position: some put a space before what comes first."""
    built: dict[str, Tokenizer] = {}
    encoders: dict[Position, Tokenizer] = {}
    positions: tuple[Position, ...] = ("start", "control", "inside")
    for position in positions:
        plain = json.loads(spec)
        plain |= {"post_processor": None, "truncation": None, "padding": None}
        plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] not in controls]
        _forget(plain["model"], controls)
        plain["pre_tokenizer"] = _without_prefix(plain["pre_tokenizer"], position)
        plain["normalizer"] = _without_prefix(plain["normalizer"], position)
        text = json.dumps(plain, ensure_ascii=False)
        if text not in built:
            built[text] = Tokenizer.from_str(text)
        encoders[position] = built[text]
    return encoders


def _forget(model: dict[str, Any], controls: frozenset[str]) -> None:
    """Take the control tokens out of the model's own vocabulary, ids of all others unchanged."""
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: the position is the id, so the entry stays and its text can match nothing
        model["vocab"] = [
            [f"\ufdd0{i}" if entry[0] in controls else entry[0], entry[1]] for i, entry in enumerate(vocab)
        ]
        return
    model["vocab"] = {token: i for token, i in vocab.items() if token not in controls}
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if controls.isdisjoint({*pair, "".join(pair)})]


def _without_prefix(stage: dict[str, Any] | None, position: Position) -> dict[str, Any] | None:
    """The pre-tokenizer or normalizer without the space that it puts before a text which is not at that position."""
    if stage is None or position == "start":
        return stage
    kind = stage["type"]
    if kind == "Sequence":
        key = "pretokenizers" if "pretokenizers" in stage else "normalizers"
        kept = [part for part in (_without_prefix(part, position) for part in stage[key]) if part is not None]
        return {**stage, key: kept}
    if kind == "Metaspace" and (position == "inside" or stage["prepend_scheme"] == "first"):
        return {**stage, "prepend_scheme": "never"}
    if kind == "ByteLevel" and position == "inside":
        return {**stage, "add_prefix_space": False}
    return None if kind == "Prepend" and position == "inside" else stage


def _moved_ids(plain: Tokenizer, added: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Added tokens that are kept as text (runs of spaces) may get other ids in the copy: back to their own."""
    pairs = ((plain.token_to_id(token["content"]), token["id"]) for token in added)
    return {copy: own for copy, own in pairs if copy is not None and copy != own}


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for every byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if chr(byte) not in table)
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF: Mapping[str, int] = MappingProxyType(_byte_alphabet())


def _token_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token outside the alphabet is its own UTF-8 text, as in the tokenizer's decoder
        return token.encode()


def _character_borders(data: bytes) -> list[int]:
    """Byte offset of every character of `data.decode(errors="replace")`; a broken sequence is one character."""
    borders: list[int] = []
    at = 0
    while at < len(data):
        try:
            good, bad_start, bad_end = data[at:].decode(), len(data) - at, len(data) - at
        except UnicodeDecodeError as error:
            good, bad_start, bad_end = data[at : at + error.start].decode(), error.start, error.end
        offset = at
        for character in good:
            borders.append(offset)
            offset += len(character.encode())
        if bad_end > bad_start:
            borders.append(at + bad_start)
        at += bad_end
    return borders
