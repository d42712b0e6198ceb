"""From the messages of a log to a trajectory: what each reply saw, its text with thoughts and calls in their places."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from slea_llm.logs.facts import Facts
from slea_llm.logs.formats import LogRecord, RecordError
from slea_llm.types import FinishReason, Message, Role, State, Termination, ToolCall, Trajectory, Turn

Part: TypeAlias = tuple[Literal["thought", "text"], str] | tuple[Literal["call"], ToolCall]

SUCCESS_AT = 1.0 - 1e-6
"""Reward from which on a dialogue counts as a success where its log does not say; that of tau-bench."""
FINISH_REASONS: Mapping[str, FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "abort",
    "error": "abort",
}

_CALL_TAG = re.compile(r"<(/?)(tool_call)", re.IGNORECASE)


def call_text(call: ToolCall) -> str:
    """A call as it stands in the text of a reply.

    Arguments that are JSON stand as written, others as a JSON string. The id is left out, so that equal calls read
    equal; what looks like the tag of a call within them is escaped as JSON allows.
    """
    arguments = call.arguments if _is_json(call.arguments) else json.dumps(call.arguments, ensure_ascii=False)
    body = f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return f"<tool_call>{_CALL_TAG.sub(_escaped, body)}</tool_call>"


def _escaped(match: re.Match[str]) -> str:
    return f"\\u003c{match[1]}{match[2]}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def reply_text(parts: Sequence[Part]) -> str:
    """The text of a reply: thoughts in `<think>`, calls in `<tool_call>`, each on a line of its own, in their order."""
    texts = []
    for part in parts:
        if part[0] == "call":
            texts.append(call_text(part[1]))
        elif part[1]:
            texts.append(f"<think>{part[1]}</think>" if part[0] == "thought" else part[1])
    return "\n".join(texts)


class Transcript:
    """Collects the messages of one dialogue in order; parts of one reply are joined until a message or `close`."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        self.flags: list[str] = list(flags)
        self._turns: list[Turn] = []
        self._context: list[Message] = []
        self._parts: list[Part] = []

    @property
    def replies(self) -> int:
        return len(self._turns) + bool(self._parts)

    def say(
        self,
        role: Role,
        content: str,
        *,
        tool_call_id: str | None = None,
        name: str | None = None,
        tool_calls: tuple[ToolCall, ...] = (),
    ) -> None:
        """A message that the agent was given."""
        self.close()
        self._context.append(
            Message(role=role, content=content, tool_call_id=tool_call_id, name=name, tool_calls=tool_calls)
        )

    def add(self, *parts: Part) -> None:
        """Parts of a reply that `say` or `close` will end."""
        self._parts += parts

    def reply(self, *parts: Part, reward: float = 0.0, state_after: State | None = None, finish: Any = None) -> None:
        """A whole reply."""
        self.close()
        self._parts += parts
        self.close(reward=reward, state_after=state_after, finish=finish, empty=True)

    def close(
        self, *, reward: float = 0.0, state_after: State | None = None, finish: Any = None, empty: bool = False
    ) -> None:
        """End the reply that is open, if one is (or with `empty` make one that says nothing)."""
        if not self._parts and not empty:
            return
        calls = tuple(part[1] for part in self._parts if part[0] == "call")
        reason = FINISH_REASONS.get(finish.lower(), "stop") if isinstance(finish, str) else "stop"
        self._turns.append(
            Turn(
                index=len(self._turns),
                context=tuple(self._context),
                text=reply_text(self._parts),
                reward=reward,
                finish_reason=reason,
                state_after=state_after or {},
                tool_calls=calls,
            )
        )
        self._context, self._parts = [], []

    def trajectory(self, record: LogRecord, format_name: str, facts: Facts) -> Trajectory:
        """The trajectory. The reward of the dialogue is put on the last reply, unless replies have their own.

        Raises RecordError when there is no message at all.
        """
        self.close()
        if not self._turns and not self._context:
            raise RecordError("it holds no message")
        turns, broke = list(self._turns), facts.error is not None
        flags = list(dict.fromkeys(self.flags))
        if facts.reward is not None and turns and not any(turn.reward for turn in turns):
            turns[-1] = replace(turns[-1], reward=facts.reward)
        place = {"format": format_name, "file": record.file, "line": record.line, "record": record.number}
        return Trajectory(
            id=facts.id or f"{record.file}#{record.number}",
            task=dict(facts.task),
            environment=facts.environment or format_name,
            seed=facts.seed if isinstance(facts.seed, int) and not isinstance(facts.seed, bool) else 0,
            policy_version=0,
            turns=tuple(turns),
            traces=(),
            outcome=None if broke else facts.reward,
            termination="error" if broke else _ending(facts.reward, facts.success, facts.cut),
            error=facts.error,
            provenance={**facts.provenance(), "source": place, **({"flags": flags} if flags else {})},
            closing=tuple(self._context),
        )


def _ending(reward: float | None, success: bool | None, cut: Termination | None) -> Termination:
    """What the log says of success decides; where it is silent, the reward."""
    won = success if success is not None else None if reward is None else reward >= SUCCESS_AT
    if won:
        return "success"
    if cut is not None:
        return cut
    return "unknown" if won is None else "failure"
