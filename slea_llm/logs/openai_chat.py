"""OpenAI chat messages: fine-tuning rows, request logs, plain lists of messages, and whatever else has `messages`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from slea_llm.logs.chat import add_messages
from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import has_list, mapping, optional_list, optional_mapping, optional_text, sequence
from slea_llm.logs.formats import JsonFormat, LogRecord
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Trajectory

KEYS = ("messages", "traj", "prompt", "completion", "request", "response", "choices", "tools", "functions", "model")


class OpenAIChat(JsonFormat):
    """`{messages: [{role, content, tool_calls}]}`, a bare list of messages, prompt and completion, request and answer.

    Every assistant message is a reply. Per-message `weight`, `score` and `scores` are kept in the provenance by turn.
    """

    name: ClassVar[str] = "openai_chat"

    def recognises(self, value: Any) -> bool:
        if isinstance(value, list):
            return bool(value) and self.is_part(value[0])
        if not isinstance(value, dict):
            return False
        request = value.get("request")
        return (
            any(has_list(value, key) for key in ("messages", "traj"))
            or has_list(request, "messages")
            or (has_list(value, "prompt") and has_list(value, "completion"))
            or value.get("object") == "chat.completion"
        )

    def is_part(self, value: Any) -> bool:
        return isinstance(value, dict) and isinstance(value.get("role"), str) and not has_list(value, "messages")

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        transcript = Transcript(record.flags)
        value: Mapping[str, Any] = {"messages": record.value} if isinstance(record.value, list) else record.value
        messages = _messages(mapping(value, "record"))
        add_messages(transcript, messages)
        model = optional_text(value.get("model")) or optional_text(optional_mapping(value.get("request")).get("model"))
        more = {"model": model, **_marks(messages)}
        yield transcript.trajectory(record, self.name, facts_of(value, KEYS, transcript.flags, more=more))


def _messages(value: Mapping[str, Any]) -> list[Any]:
    """The messages of a row, those of a response after those of its request."""
    request = optional_mapping(value.get("request"))
    found = next((source[key] for source in (value, request) for key in ("messages", "traj") if key in source), None)
    if found is None:
        found = [*optional_list(value.get("prompt")), *optional_list(value.get("completion"))]
    answer = value if "choices" in value else optional_mapping(value.get("response"))
    choices = optional_list(answer.get("choices"))
    answers = [choice["message"] for choice in choices[:1] if isinstance(choice, Mapping) and "message" in choice]
    return [*sequence(found, "messages"), *answers]


def _marks(messages: list[Any]) -> dict[str, Any]:
    """What is written on the replies: `weight`, `score` and `scores`, each a list by turn, where any reply has it."""
    replies = [one for one in messages if isinstance(one, Mapping) and one.get("role") == "assistant"]
    return {
        f"message_{key}": [reply.get(key) for reply in replies]
        for key in ("weight", "score", "scores")
        if any(key in reply for reply in replies)
    }
