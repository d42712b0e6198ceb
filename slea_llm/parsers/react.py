"""Cut a turn into Thought, Action, Action Input, Observation and Final Answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from slea_llm.errors import ConfigError
from slea_llm.parsers.pieces import Piece, cut_up, steps_of
from slea_llm.parsers.sentences import Whole, border, sentence_cuts
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.parsers.vocabulary import Kinds
from slea_llm.types import Step, StepKind, Turn

NO_ACTION = frozenset({"", "none", "n/a", "na", "null", "nil", "no action", "no tool", "无"})
"""What stands after `Action:` when there is no call, in lower case."""
ROLES: Mapping[str, StepKind] = {
    "question": "thought",
    "thought": "thought",
    "action": "tool_call",
    "input": "tool_call",
    "observation": "thought",
    "answer": "reply",
}

_CALL = re.compile(
    r"\s*(?P<name>[\w./-]+(?: [\w./-]+){0,3})\s*(?P<open>[\[(])(?P<arguments>.*)[\])]\s*;?\s*", re.DOTALL
)
_FENCE = re.compile(r"\s*```[\w-]*\n?(?P<body>.*?)(?:```(?!\w)|\Z)", re.DOTALL)
_NAME_KEYS = ("action", "name", "tool", "tool_name", "function")
_INPUT_KEYS = ("action_input", "arguments", "input", "args", "parameters", "tool_input")


class Call(NamedTuple):
    """What an action step calls."""

    name: str | None
    arguments: str
    """As written."""
    value: Any
    """The arguments as a JSON value, where they are one; else the text without blanks around it."""
    malformed: str | None
    """What is wrong with it; None for a call that can be made."""


class _Word(NamedTuple):
    role: str
    start: int
    content: int


class ReactParser:
    """Steps of a turn written as Thought, Action, Action Input, Observation, Final Answer, numbered or not.

    The turn is first cut by its tags as `tagged` does; thoughts and replies that hold one of the words at the beginning
    of a line are then cut at them. An action and its input are one step of kind tool_call; a JSON input ends where its
    value ends, and what follows is reply. `Action: None` is no call: its step is a thought labelled `no_action`.
    Observations that the model itself wrote are thoughts labelled `observation`: no tool gave them. In the form of
    ALFWorld, `> think:` begins a thought and `> ` a call, and what the lines after it say is observation.
    The label is the role, a slash and what the step does by data/steps/kinds.yaml.
    """

    name: ClassVar[str] = "react"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        question: tuple[str, ...] = ("question", "问题")
        thought: tuple[str, ...] = ("thought", "think", "思考", "想法")
        action: tuple[str, ...] = ("action", "act", "动作", "行动", "操作")
        input: tuple[str, ...] = ("action input", "input", "tool input", "动作输入", "行动输入", "输入")
        observation: tuple[str, ...] = ("observation", "obs", "观察", "观察结果")
        answer: tuple[str, ...] = ("final answer", "answer", "response", "最终答案", "答案", "回答")
        kinds: str | None = "steps/kinds.yaml"
        """What steps do: a file of data/, or a path; none leaves it out of the labels."""
        split_thoughts: bool = False
        """Make every sentence or line of a thought a step of its own."""
        tags: TaggedParser.Config = field(default_factory=lambda: TaggedParser.Config(reply_tags=("answer",)))
        """How tags are read, as for the parser `tagged`."""

        def __post_init__(self) -> None:
            for role, words in self.words().items():
                for word in words:
                    if not word.strip() or ":" in word or "\n" in word:
                        raise ConfigError(f"{role} word {word!r} is empty or holds a colon; write it as in 'thought'")

        def words(self) -> dict[str, tuple[str, ...]]:
            """The words of each role."""
            return {
                "question": self.question,
                "thought": self.thought,
                "action": self.action,
                "input": self.input,
                "observation": self.observation,
                "answer": self.answer,
            }

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tagged = TaggedParser(config.tags)
        self._kinds = Kinds.read(config.kinds) if config.kinds else None
        self._roles = {word.lower(): role for role, words in config.words().items() for word in words}
        words = "|".join(re.escape(word) for word in sorted(self._roles, key=len, reverse=True))
        head = rf"(?:\*\*)?(?P<word>{words})[ \t]{{0,2}}(?P<number>\d{{1,3}})?(?:\*\*)?[ \t]{{0,2}}[:：](?:\*\*)?"
        self._line = re.compile(rf"^[ \t]*(?:>[ \t]*)?{head}", re.IGNORECASE | re.MULTILINE)
        # In a line only after the end of a sentence or value, and only as they are usually written.
        self._inline = re.compile(rf"(?<=[.!?。！？\])}}\"'])[ \t]{{1,4}}{head}", re.IGNORECASE)
        self._prompt = re.compile(r"^>[ \t]*(?=\S)", re.MULTILINE)

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn, none the parent of another. `starts` and errors as for `tagged`."""
        return steps_of(turn, trajectory_id, self.pieces(turn), starts)

    def pieces(self, turn: Turn) -> list[Piece]:
        """The same as pieces of the text."""
        text = turn.text
        whole = Whole(text)
        found: list[Piece] = []
        for piece in self._tagged.pieces(turn):
            parts = [piece] if piece.kind == "tool_call" else self._cut(text, piece, whole)
            found += [part for one in parts for part in self._sentences(text, one, whole)]
        return [self._labelled(text, piece) for piece in found]

    def words(self, turn: Turn) -> list[str]:
        """The roles whose words stand in a turn, in order: how far it is written in this form."""
        whole = Whole(turn.text)
        return [
            word.role
            for piece in self._tagged.pieces(turn)
            if piece.kind != "tool_call"
            for word in self._words(turn.text, *self._tagged.inside(turn.text, piece), whole)
        ]

    def _words(self, text: str, start: int, end: int, whole: Whole) -> list[_Word]:
        matches = [*self._line.finditer(text, start, end), *self._inline.finditer(text, start, end)]
        words = {
            border(text, match.start()): _Word(
                self._roles[match["word"].lower()], border(text, match.start()), match.end()
            )
            for match in sorted(matches, key=lambda match: match.start())
            if not whole.holds(match.start("word"))
        }
        found = sorted(words.values(), key=lambda word: word.start)
        if any(text[word.start : word.content].lstrip().startswith(">") for word in found):
            found = list(self._with_commands(text, found, (start, end), whole))
        return found

    def _with_commands(
        self, text: str, words: Sequence[_Word], inner: tuple[int, int], whole: Whole
    ) -> Iterator[_Word]:
        """The words and, in the form of ALFWorld, the calls after `> ` and the observations on the lines below."""
        known = {word.start: word for word in words}
        for match in self._prompt.finditer(text, *inner):
            if whole.holds(match.start()):
                continue
            word = known.get(match.start()) or _Word("action", match.start(), match.end())
            yield word
            below = text.find("\n", word.content, inner[1]) + 1
            following = text[below : min(inner[1], below + 200)].lstrip()[:1] if below else ""
            if following not in ("", ">") and not whole.holds(below):
                yield _Word("observation", below, below)

    def _cut(self, text: str, piece: Piece, whole: Whole) -> list[Piece]:
        start, end = self._tagged.inside(text, piece)
        words = self._words(text, start, end, whole)
        if not words:
            return [piece]
        parts: list[Piece] = []
        if text[start : words[0].start].strip():
            parts.append(Piece(kind="thought", start=piece.start, end=words[0].start, label="preamble"))
        stops = [*(word.start for word in words[1:]), end]
        for word, stop in zip(words, stops, strict=True):
            if word.role == "input" and parts and parts[-1].label == "action":
                parts[-1] = replace(parts[-1], end=stop)
            else:
                parts.append(Piece(kind=ROLES[word.role], start=word.start, end=stop, label=word.role))
            if word.role in ("input", "action"):
                parts += _trailing(text, parts, word.content, whole)
        parts = [_checked(text, part, self) for part in parts]
        parts[0] = replace(parts[0], start=piece.start)
        parts[-1] = replace(parts[-1], end=piece.end)
        return parts

    def call(self, text: str) -> Call:
        """What the text of an action step calls: `Action: f` and `Action Input: ...`, `Action: f[...]`, or JSON.

        Never raises on any text; `malformed` says what is wrong.
        """
        words = [
            match for match in self._line.finditer(text) if self._roles[match["word"].lower()] in ("action", "input")
        ]
        prompt = self._prompt.match(text.lstrip("\n"))
        if not words and prompt:
            return _call(text.strip().removeprefix(">").strip(), None)
        heads = [match for match in words if self._roles[match["word"].lower()] == "action"]
        inputs = [match for match in words if self._roles[match["word"].lower()] == "input"]
        if not heads:
            return Call(None, text.strip(), text.strip(), "an input without an action")
        stop = inputs[0].start() if inputs else len(text)
        return _call(text[heads[0].end() : stop].strip(), text[inputs[0].end() :].strip() if inputs else None)

    def _sentences(self, text: str, piece: Piece, whole: Whole) -> list[Piece]:
        if not self.config.split_thoughts or piece.kind != "thought" or piece.label == "observation":
            return [piece]
        return cut_up(piece, sentence_cuts(text, *self._tagged.inside(text, piece), whole))

    def _labelled(self, text: str, piece: Piece) -> Piece:
        if self._kinds is None or piece.label in ("no_action", "malformed"):
            return piece
        what = self._kinds.label(text[piece.start : piece.end], piece.kind)
        return replace(piece, label=f"{piece.label or piece.kind}/{what}")


def _checked(text: str, piece: Piece, parser: ReactParser) -> Piece:
    """An action that calls nothing becomes a thought."""
    if piece.label not in ("action", "input"):
        return piece
    call = parser.call(text[piece.start : piece.end])
    if call.name is None:
        return replace(piece, kind="thought", label="no_action" if piece.label == "action" else "malformed")
    return piece


def _trailing(text: str, parts: list[Piece], content: int, whole: Whole) -> list[Piece]:
    """Take from the last part what follows its JSON value or fenced block; it is reply."""
    piece = parts[-1]
    fence = _FENCE.match(text, content, piece.end)
    if fence:
        stop = fence.end()
    else:
        begin = content + len(text[content : piece.end]) - len(text[content : piece.end].lstrip())
        value = _json_end(text, begin, piece.end)
        if value is None:
            return []
        stop = value
    if not text[stop : piece.end].strip():
        return []
    cut = border(text, stop)
    if whole.holds(cut):
        return []
    parts[-1] = replace(piece, end=cut)
    return [Piece(kind="reply", start=cut, end=piece.end, label="trailing")]


def _json_end(text: str, start: int, end: int) -> int | None:
    if text[start : start + 1] not in ("{", "["):
        return None
    try:
        _, stop = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return stop if stop <= end else None


def _call(head: str, written: str | None) -> Call:
    """A call from what stands after `Action:` and, where there is one, after `Action Input:`."""
    head, value = _unfenced(head), _value(_unfenced(head))
    if isinstance(value, Mapping):
        name = next((str(value[key]) for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
        given = next((value[key] for key in _INPUT_KEYS if key in value), None)
        missing = None if name else f"no key of {', '.join(_NAME_KEYS)} names the tool"
        return Call(name, json.dumps(given, ensure_ascii=False) if given is not None else "", given, missing)
    name = head.strip("`*\"' .")
    if name.lower() in NO_ACTION:
        return Call(None, written or "", None, f"{head!r} is no tool")
    if written is not None:
        arguments = _unfenced(written)
        value = _value(arguments)
        broken = arguments[:1] in ("{", "[") and isinstance(value, str)
        return Call(name, arguments, value, "the input is no JSON value" if broken else None)
    if match := _CALL.fullmatch(head):
        return Call(match["name"], match["arguments"], _value(match["arguments"]), None)
    return Call(name.split("\n")[0], "", "", None)


def _unfenced(text: str) -> str:
    match = _FENCE.fullmatch(text)
    return (match["body"] if match else text).strip()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
