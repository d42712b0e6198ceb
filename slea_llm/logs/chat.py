"""Messages in the form of OpenAI's chat API, which many formats share: one message after another into a transcript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slea_llm.logs.fields import (
    CALL_ROLES,
    calls_in_text,
    content_text,
    first_text,
    mapping,
    name_text,
    optional_mapping,
    optional_text,
    result_text,
    role_of,
    tool_call,
    tool_calls,
)
from slea_llm.logs.transcript import Part, Transcript
from slea_llm.types import ToolCall

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
THOUGHT_BLOCKS = frozenset({"reasoning", "thinking", "thought", "redacted_thinking", "redacted_reasoning"})
CALL_BLOCKS = frozenset({"tool_call", "tool_use", "function_call", "server_tool_use"})
RESULT_BLOCKS = frozenset({"tool_result", "tool_call_response", "function_call_output", "web_search_tool_result"})


def add_messages(transcript: Transcript, messages: Sequence[Any], what: str = "messages") -> None:
    """Every message of a list. Raises RecordError for one that cannot be read."""
    for index, message in enumerate(messages):
        add_message(transcript, mapping(message, f"{what}[{index}]"), f"{what}[{index}]")


def add_message(transcript: Transcript, message: Mapping[str, Any], what: str) -> None:
    """One message: a reply of the agent, or what it was given."""
    written = message.get("role", message.get("from"))
    role = role_of(written)
    content = message.get("content", message.get("value"))
    if role == "assistant":
        text_is_call = isinstance(written, str) and written.lower() in CALL_ROLES
        parts = call_parts(content, what) if text_is_call else reply_parts(message, content, what, transcript.flags)
        transcript.reply(*parts, finish=message.get("stop_reason", message.get("finish_reason")))
        return
    if role == "user" and isinstance(content, list):
        content = _tool_results_said(transcript, content, what)
        if content == []:
            return
    ids = message.get("tool_call_ids")
    number = name_text(message.get("tool_call_id")) or (name_text(ids[0]) if isinstance(ids, list) and ids else "")
    text = result_text if role == "tool" else content_text
    transcript.say(
        role,
        text(content, f"{what}.content", transcript.flags),
        tool_call_id=number or None,
        name=first_text(message, "name") or (optional_text(message.get("function")) if role == "tool" else None),
        tool_calls=tool_calls(message.get("tool_calls"), f"{what}.tool_calls"),
    )


def _tool_results_said(transcript: Transcript, blocks: list[Any], what: str) -> list[Any]:
    """Say the tool results among the blocks of a user's message, as they stand; the blocks that are left after them."""
    waiting: list[Any] = []
    for block in blocks:
        if name_text(optional_mapping(block).get("type")) not in RESULT_BLOCKS:
            waiting.append(block)
            continue
        if waiting:
            transcript.say("user", content_text(waiting, f"{what}.content", transcript.flags))
            waiting = []
        say_result(transcript, block, what)
    return waiting


def say_result(transcript: Transcript, block: Mapping[str, Any], what: str) -> None:
    """One block that holds what a tool gave."""
    content = next((block[key] for key in ("content", "response", "result", "output") if key in block), None)
    number = first_text(block, "tool_use_id", "call_id", "id", "tool_call_id")
    transcript.say(
        "tool",
        result_text(content, f"{what}.content", transcript.flags),
        tool_call_id=number,
        name=first_text(block, "name"),
    )


def call_parts(content: Any, what: str) -> list[Part]:
    """A message that is nothing but a call, or calls, written in JSON."""
    if isinstance(content, str):
        return [("call", call) for call in calls_in_text(content, what)]
    values = content if isinstance(content, list) else [content]
    return [("call", tool_call(value, what)) for value in values]


def reply_parts(message: Mapping[str, Any], content: Any, what: str, flags: list[str]) -> list[Part]:
    """The parts of a reply: its thought where it is a field of its own, its content in order, its calls."""
    parts: list[Part] = []
    thought = first_text(message, *THOUGHT_KEYS)
    if thought is not None:
        parts.append(("thought", thought))
    if isinstance(content, list):
        for index, block in enumerate(content):
            parts += block_parts(block, f"{what}.content[{index}]", flags)
    else:
        parts.append(("text", content_text(content, f"{what}.content", flags)))
    if refusal := first_text(message, "refusal"):
        parts.append(("text", refusal))
    parts += [("call", call) for call in tool_calls(message.get("tool_calls"), f"{what}.tool_calls")]
    if isinstance(message.get("function_call"), Mapping):
        parts.append(("call", tool_call(message["function_call"], f"{what}.function_call")))
    return [part for part in parts if part[0] == "call" or part[1]]


def block_parts(block: Any, what: str, flags: list[str]) -> list[Part]:
    """The parts of one typed block of a reply."""
    kind = name_text(optional_mapping(block).get("type"))
    if kind in THOUGHT_BLOCKS:
        text = first_text(block, "thinking", "reasoning", "text", "value", "content", "summary")
        if text is None:
            flags.append(f"{what}: a thought that is not readable is not kept")
            return []
        return [("thought", text)]
    if kind in CALL_BLOCKS:
        return [("call", call) for call in _block_calls(block, what)]
    if kind in RESULT_BLOCKS:
        content = next((block[key] for key in ("content", "response", "result", "output") if key in block), None)
        return [("text", result_text(content, what, flags))]
    return [("text", content_text(block, what, flags))]


def _block_calls(block: Mapping[str, Any], what: str) -> Sequence[ToolCall]:
    """The calls of a block: by its fields, or in the JSON of its text (`value`)."""
    value = block.get("value")
    if isinstance(value, str):
        return calls_in_text(value, what)
    return (tool_call(value if isinstance(value, Mapping) else block, what),)
