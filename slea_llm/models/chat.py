"""Chat messages to ids and back, by appending: what was sampled is never decoded and encoded again.

The chat template is rendered with placeholders for the contents, once for every shape of dialogue; what lies between
the placeholders is the template's own text. A later prompt is what was sampled, the template's text after a reply, the
new messages and the template's opening of the next reply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jinja2.exceptions import TemplateError as JinjaError

from slea_llm.errors import TemplateError
from slea_llm.models.thoughts import CLOSE, OPEN, trimmed, visible_spans, without_thoughts
from slea_llm.models.token_codec import Control, Part, Position, TokenCodec
from slea_llm.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Thoughts = Literal["keep", "strip", "split"]

_LEADING_THOUGHT = re.compile(f"\\A{OPEN}(.*?){CLOSE}", re.DOTALL)
_OPENED_THOUGHT = re.compile(f"\\A(?:{OPEN})?(.*?){CLOSE}", re.DOTALL)
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
_PAD_LEFT, _PAD_RIGHT = "\n", "\n\n"  # of unequal length: what the template trims is read off the length that is left
_PROBE_REPLY = Message(role="assistant", content="ok")


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a piece of content in a rendered template; the template may trim it."""

    piece: int
    trim_left: bool = False
    trim_right: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """All of a message that the template may look at except its content. `thought`: its content is two pieces."""

    role: str
    name: str | None = None
    tool_call_id: str | None = None
    thought: bool = False


Compiled: TypeAlias = tuple[str | Control | Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What `ChatTokenizer.check` found. `reply_tokens`: tokens of a probe reply that would be trained, above 0."""

    appends: bool
    strips_thoughts: bool
    end_of_turn: str
    reply_tokens: int

    def line(self, thoughts: Thoughts) -> str:
        """The report in one line, with the declared fate of earlier thoughts."""
        grows = "only appends" if self.appends else "rewrites earlier messages, so every turn has its own row"
        return (
            f"template: {grows}; earlier thoughts: {thoughts}; a reply ends with {self.end_of_turn!r}; "
            f"{self.reply_tokens} tokens of a probe reply are trained"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt and the number of sampled tokens in it that had to be encoded anew (0 when thoughts are kept)."""

    ids: tuple[int, ...]
    retokenised: int


class ChatTokenizer:
    """A tokenizer with a chat template, and the declared fate of earlier thoughts in later prompts.

    `keep`: earlier replies stay as sampled, thought included, and the row only grows. `strip`: thoughts are taken out
    of earlier replies. `split`: earlier replies are shown as the template renders them. With the last two every turn
    has its own row. `stop_ids` adds ids that end a reply (those of the model's generation config) to the tokenizer's
    end of sequence and the template's end of turn. `opens_thought`: the template itself writes the `<think>` of every
    reply, so that a sampled reply begins inside its thought.

    Raises TemplateError when there is no chat template, or when it closes a reply without a token of its own.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, thoughts: Thoughts = "keep", stop_ids: Iterable[int] = ()
    ) -> None:
        if not tokenizer.chat_template:
            raise TemplateError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned base, or "
                "put a chat_template.jinja beside its tokenizer"
            )
        self.thoughts = thoughts
        self._tokenizer = tokenizer
        self._codec = TokenCodec(tokenizer)
        self._compiled = lru_cache(maxsize=1024)(self._compile)
        self._tail = lru_cache(maxsize=1024)(self._compile_tail)
        self.end_of_turn = self._find_end_of_turn()
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset({self.end_of_turn.id, *stop_ids, *([] if eos is None else [eos])})
        opening = self._compiled((Shape("user"),), opened=True)
        written = _written(opening)
        self.opens_thought = written.rfind(OPEN) > written.rfind(CLOSE)
        self._reply_position: Position = "control" if isinstance(opening[-1], Control) else "inside"

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of a dialogue up to and including the opening of the agent's reply."""
        return self.rerender(messages, ()).ids

    def extend(self, ids_so_far: Sequence[int], new_messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids to append after a sampled reply, so that the agent can answer `new_messages`.

        They close the turn, where the reply did not do it itself, add the messages and open the next reply. Raises
        TemplateError when the template cannot render these roles.
        """
        parts = self._tail(tuple(self._shape(message) for message in new_messages))
        closing = self._closing(parts) if ids_so_far and ids_so_far[-1] == self.end_of_turn.id else None
        filled = self._fill(parts[closing:], [[message.content] for message in new_messages])
        added = self._codec.encode(filled, after="inside")
        return tuple(added if closing is None else added[1:])

    def rerender(self, messages: Sequence[Message], replies: Sequence[Sequence[int]]) -> Rendered:
        """The prompt of a dialogue with earlier replies, for the policies that do not only append.

        `replies` are the sampled ids of the last assistant messages, whose content is their text; ids are cut out of
        them and never encoded anew unless a cut falls inside a token. Assistant messages before those are encoded.
        """
        spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
        sampled = dict(zip(spoken[len(spoken) - len(replies) :], replies, strict=True))
        spans = {i: self._shown_spans(messages[i].content) for i in sampled}
        shapes = tuple(self._shape(message, thought=len(spans.get(i, ())) == 2) for i, message in enumerate(messages))
        compiled = self._compiled(shapes, opened=True)
        slots = {part.piece: part for part in compiled if isinstance(part, Slot)}
        pieces: list[list[Part]] = []
        retokenised = 0
        for i, message in enumerate(messages):
            if i in sampled:
                own = [slots.get(len(pieces) + n) for n in range(len(spans[i]))]
                for parts, fresh in self._sampled_pieces(message.content, sampled[i], spans[i], own):
                    pieces.append(parts)
                    retokenised += fresh
            else:
                pieces.append(self.reply_parts(message.content) if message.role == "assistant" else [message.content])
        ids = self._codec.encode(self._fill(compiled, pieces), after="start")
        return Rendered(ids=tuple(ids), retokenised=retokenised)

    def reply_parts(self, text: str) -> list[Part]:
        """A written reply in parts: only markup such as `<think>` becomes tokens, and takes no space along."""
        parts = self._codec.split(text, speakable_only=True)
        return [(part.id,) if isinstance(part, Control) else part for part in parts]

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """The ids of a written reply behind the template's opening, closed by the end-of-turn token."""
        return (*self.encode_pieces([text])[0], self.end_of_turn.id)

    def encode_pieces(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids of the consecutive pieces of a written reply, each encoded alone: no token crosses a border."""
        found: list[tuple[int, ...]] = []
        position = self._reply_position
        for text in texts:
            found.append(tuple(self._codec.encode(self.reply_parts(text), after=position)))
            position = "inside" if found[-1] else position
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids. The end of turn and other special tokens give nothing, `<think>` stays."""
        return self._codec.text(ids)

    def decode(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The text of sampled ids and the character at which each id starts (`len(text)` for the end of turn)."""
        return self._codec.decode(ids)

    def encode_rows(self, messages: Sequence[Message]) -> tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]:
        """The rows that a rollout with these texts would hold, as `(ids, assistant mask)`: one, or one a turn.

        The mask is true on what the assistant says and on its end-of-turn token, also where padding has the same id.
        Messages after the last reply are left out. Raises TemplateError when no token would be trained.
        """
        spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not spoken:
            raise TemplateError("a dialogue without an assistant message has 0 tokens to train")
        replies = [self.encode_reply(messages[i].content) for i in spoken]
        if self.thoughts != "keep":
            texts = dict(zip(spoken, map(self.text, replies), strict=True))
            heard = [replace(message, content=texts.get(i, message.content)) for i, message in enumerate(messages)]
            rows = [(self.rerender(heard[:at], replies[:n]).ids, replies[n]) for n, at in enumerate(spoken)]
            return tuple((p + r, (False,) * len(p) + (True,) * len(r)) for p, r in rows)
        ids = list(self.prompt(messages[: spoken[0]]))
        mask = [False] * len(ids)
        for n, reply in enumerate(replies):
            if n:
                added = self.extend(ids, messages[spoken[n - 1] + 1 : spoken[n]])
                ids += added
                mask += [False] * len(added)
            ids += reply
            mask += [True] * len(reply)
        return ((tuple(ids), tuple(mask)),)

    def heard(self, text: str) -> str:
        """What the other side hears of a reply: its thoughts are taken out, unclosed ones too."""
        return without_thoughts(text, opened=self.opens_thought)

    def check(self, *, system: bool = True, tools: bool = False) -> TemplateReport:
        """Try the template on a small dialogue, before any model is loaded.

        The appended form must be what the template renders for replies without a thought, user turns included, unless
        every turn gets its own row; the ids must be the tokenizer's own. Raises TemplateError, naming the setting.
        """
        user, reply = Shape("user"), Shape("assistant")
        head = (Shape("system"), user) if system else (user,)
        rounds = [(Shape("tool"),), (user,)] if tools else [(user,), (user,)]
        whole = self._compiled(sum(((reply, *new) for new in rounds), head), opened=True)
        grown = list(self._compiled(head, opened=True))
        for new in rounds:
            grown += [Slot(-1), *self._tail(new)]
        appends = _structure(whole) == _structure(grown, thoughts_shut=True)
        if not appends and self.thoughts == "keep":
            raise TemplateError(
                "the chat template rewrites earlier messages when later ones come, so a dialogue cannot be one growing "
                "row; set rollout.thoughts to split (a row a turn, as the template renders)"
            )
        self._check_ids(system=system)
        thinking = self._compiled((*head, Shape("assistant", thought=True), user), opened=True)
        return TemplateReport(
            appends=appends,
            strips_thoughts=Slot(len(head)) not in [Slot(p.piece) for p in thinking if isinstance(p, Slot)],
            end_of_turn=self.end_of_turn.content,
            reply_tokens=sum(self.encode_rows([Message(role="user", content="a"), _PROBE_REPLY])[0][1]),
        )

    def _check_ids(self, *, system: bool) -> None:
        messages = [Message(role="user", content="Is it 12 o'clock? Yes, it is.")]
        if system:
            messages.insert(0, Message(role="system", content="You answer in few words."))
        text = self._render([{"role": m.role, "content": m.content} for m in messages], opened=True)
        own = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        ours = self.prompt(messages)
        if own != ours:
            at = next((i for i, (a, b) in enumerate(zip(own, ours, strict=False)) if a != b), min(len(own), len(ours)))
            raise TemplateError(
                f"a prompt put together from its parts differs from the tokenizer's own at token {at}: "
                f"{self._tokenizer.convert_ids_to_tokens(list(ours[at : at + 3]))} in place of "
                f"{self._tokenizer.convert_ids_to_tokens(list(own[at : at + 3]))}; this tokenizer is not supported"
            )

    def _shown_spans(self, text: str) -> list[list[tuple[int, int]]]:
        """The character ranges of an earlier reply that a later prompt may show, for each of its pieces."""
        thought = (_OPENED_THOUGHT if self.opens_thought else _LEADING_THOUGHT).match(text)
        if self.thoughts == "strip":
            return [visible_spans(text, opened=self.opens_thought)]
        if self.thoughts == "split" and thought:
            return [[thought.span(1)], [(thought.end(), len(text))]]
        return [[(0, len(text))]]

    def _sampled_pieces(
        self, text: str, ids: Sequence[int], pieces: Sequence[Sequence[tuple[int, int]]], slots: Sequence[Slot | None]
    ) -> Iterator[tuple[list[Part], int]]:
        """The ids of each piece of an earlier reply, empty where the template does not show it."""
        decoded, starts = self._codec.decode(ids)
        if decoded != text:
            raise TemplateError(f"the sampled ids read {decoded!r}, not the text given with them, {text!r}")
        strip = self.thoughts == "strip"
        for spans, slot in zip(pieces, slots, strict=True):
            if slot is None:
                yield [], 0
                continue
            shown = trimmed(text, spans, left=strip or slot.trim_left, right=strip or slot.trim_right)
            slices = [self._slice(text, ids, starts, span) for span in shown]
            yield [part for parts, _ in slices for part in parts], sum(fresh for _, fresh in slices)

    def _slice(
        self, text: str, ids: Sequence[int], starts: Sequence[int], span: tuple[int, int]
    ) -> tuple[list[Part], int]:
        """The ids of `text[start:end]` as sampled, and how many had to be encoded anew: 0 if both ends are borders.

        Space at either end goes with the token that it is part of, as before a word.
        """
        borders = {*starts, len(text)}
        firsts, lasts = ([at, *_around_space(text, at)] for at in span)
        for first, last in product(firsts, lasts):
            if first in borders and last in borders:
                return [tuple(i for i, at in zip(ids, starts, strict=True) if first <= at < last)], 0
        start, end = span
        return self.reply_parts(text[start:end]), sum(start <= at < end for at in starts)

    def _fill(self, parts: Compiled, pieces: Sequence[Sequence[Part]]) -> list[Part]:
        filled: list[Part] = []
        for part in parts:
            if not isinstance(part, Slot):
                filled.append(part)
                continue
            content = list(pieces[part.piece])
            if part.trim_left and content and isinstance(content[0], str):
                content[0] = content[0].lstrip()
            if part.trim_right and content and isinstance(content[-1], str):
                content[-1] = content[-1].rstrip()
            filled += content
        return filled

    def _compile(self, shapes: tuple[Shape, ...], opened: bool) -> Compiled:
        """The template's text around the contents of messages of these shapes, control tokens told from text."""
        between = _PLACEHOLDER.split(self._render(_placeholders(shapes, "", ""), opened=opened))
        padded = _PLACEHOLDER.split(self._render(_placeholders(shapes, _PAD_LEFT, _PAD_RIGHT), opened=opened))
        self._refuse_hidden(shapes, between[1::2], padded[1::2])
        parts: list[str | Control | Slot] = []
        for i, narrow in enumerate(between):
            if i % 2 == 0:
                parts += [part for part in self._codec.split(narrow) if part and not isinstance(part, tuple)]
                continue
            left_over = len(padded[i - 1]) - len(between[i - 1])
            right_over = len(padded[i + 1]) - len(between[i + 1])
            parts.append(Slot(int(narrow), trim_left=not left_over & 1, trim_right=not right_over & 2))
        return tuple(parts)

    def _refuse_hidden(self, shapes: Sequence[Shape], shown: Sequence[str], shown_padded: Sequence[str]) -> None:
        roles = ", ".join(shape.role for shape in shapes)
        if shown != shown_padded:
            raise TemplateError(
                f"the chat template shows other messages ({roles}) when a content begins with a line break"
            )
        piece = -1
        for shape in shapes:
            piece += 1 + shape.thought
            if str(piece) not in shown:
                raise TemplateError(
                    f"in a dialogue of {roles} the chat template leaves out what the {shape.role} says; use a base "
                    "model whose template shows it, or change its chat_template.jinja"
                )

    def _compile_tail(self, shapes: tuple[Shape, ...]) -> Compiled:
        """What follows a reply when messages of these shapes come next; slots count from the first of them."""
        parts = self._compiled((Shape("user"), Shape("assistant"), *shapes), opened=True)
        return tuple(
            Slot(part.piece - 2, part.trim_left, part.trim_right) if isinstance(part, Slot) else part
            for part in _behind(parts, piece=1)
        )

    def _find_end_of_turn(self) -> Control:
        closing = _behind(self._compiled((Shape("user"), Shape("assistant")), opened=False), piece=1)
        for part in closing:
            if isinstance(part, Control):
                return part
            if not isinstance(part, str) or part.strip():
                break
        raise TemplateError(
            f"the chat template closes a reply with {_written(closing)!r}, which does not begin with a token of its "
            "own, so that a reply could never end; change chat_template.jinja to close it with such a token"
        )

    def _closing(self, parts: Compiled) -> int | None:
        """Where the template's end-of-turn token stands in what follows a reply."""
        for i, part in enumerate(parts):
            if isinstance(part, Slot):
                break
            if part == self.end_of_turn:
                return i
        return None

    def _shape(self, message: Message, *, thought: bool = False) -> Shape:
        if message.tool_calls:
            raise TemplateError(
                f"message of role {message.role} holds structured tool calls ({message.tool_calls[0].name!r}); what an "
                "agent samples holds its calls as text, in the content"
            )
        for label in (message.name, message.tool_call_id):
            if label is not None and any(not isinstance(part, str) for part in self._codec.split(label)):
                raise TemplateError(f"name or tool call id {label!r} holds a control token")
        return Shape(message.role, message.name, message.tool_call_id, thought)

    def _render(self, messages: Sequence[dict[str, Any]], *, opened: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
        except JinjaError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"the chat template refuses a dialogue of {roles}: {error}; use a base model whose template takes "
                "these roles in this order, or change its chat_template.jinja"
            ) from error
        return text


def _around_space(text: str, at: int) -> tuple[int, int]:
    """The first and last position of the white space around a position."""
    return len(text[:at].rstrip()), len(text) - len(text[at:].lstrip())


def _placeholders(shapes: Sequence[Shape], left: str, right: str) -> list[dict[str, Any]]:
    messages, piece = [], 0
    for shape in shapes:
        marks = [f"{left}\ue000{piece + n}\ue001{right}" for n in range(1 + shape.thought)]
        piece += len(marks)
        content = f"{OPEN}{marks[0]}{CLOSE}{marks[1]}" if shape.thought else marks[0]
        message = {"role": shape.role, "content": content, "name": shape.name, "tool_call_id": shape.tool_call_id}
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


def _behind(parts: Compiled, *, piece: int) -> Compiled:
    places = [i for i, part in enumerate(parts) if isinstance(part, Slot) and part.piece == piece]
    return parts[places[-1] + 1 :]


def _structure(parts: Iterable[str | Control | Slot], *, thoughts_shut: bool = False) -> str:
    """The parts as one text with every slot alike; `thoughts_shut` leaves out a thought opened before a slot."""
    text = "".join("\ue000" if isinstance(part, Slot) else _written([part]) for part in parts)
    return re.sub(f"{OPEN}\\s*\ue000", "\ue000", text) if thoughts_shut else text


def _written(parts: Iterable[str | Control | Slot]) -> str:
    return "".join(p.content if isinstance(p, Control) else p for p in parts if not isinstance(p, Slot))
