"""Messages of Anthropic's API: a request, a response, or both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from slea_llm.logs.chat import add_message, add_messages
from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import content_text, has_list, name_text, optional_mapping, optional_text, sequence
from slea_llm.logs.formats import JsonFormat, LogRecord
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Trajectory

BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use"})
KEYS = ("messages", "system", "tools", "content", "request", "response", "model", "role", "type", "usage")


class AnthropicMessages(JsonFormat):
    """`{system, messages}` with typed blocks, `{type: message, content}`, or `{request, response}` of the two."""

    name: ClassVar[str] = "anthropic"

    def recognises(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        request = value.get("request")
        if isinstance(request, dict):
            return self.recognises(request) or _is_response(value.get("response"))
        return _is_response(value) or _is_request(value)

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = record.value
        both = isinstance(value.get("request"), dict)
        request = value["request"] if both else value
        response = optional_mapping(value.get("response")) if both else value
        transcript = Transcript(record.flags)
        if system := content_text(request.get("system"), "system", transcript.flags):
            transcript.say("system", system)
        if "messages" in request or not _is_response(response):
            add_messages(transcript, sequence(request.get("messages"), "messages"))
        if _is_response(response):
            add_message(transcript, response, "response")
        model = optional_text(response.get("model")) or optional_text(request.get("model"))
        yield transcript.trajectory(record, self.name, facts_of(value, KEYS, transcript.flags, more={"model": model}))


def _is_response(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "message" and value.get("role") == "assistant"


def _is_request(value: Mapping[str, Any]) -> bool:
    if not has_list(value, "messages"):
        return False
    if "system" in value or "anthropic_version" in value or _has_schema(value.get("tools")):
        return True
    blocks = [
        block
        for message in value["messages"]
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for block in message["content"]
    ]
    return any(
        isinstance(block, dict) and name_text(block.get("type")) in BLOCKS and "value" not in block for block in blocks
    )


def _has_schema(tools: Any) -> bool:
    return isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools[:1])
