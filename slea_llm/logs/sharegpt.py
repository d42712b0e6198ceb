"""ShareGPT: `{conversations: [{from, value}]}` with all the role names in use, and rows with typed blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from slea_llm.logs.chat import add_messages
from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import first_text, has_list, mapping, sequence
from slea_llm.logs.formats import JsonFormat, LogRecord
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Trajectory

LISTS = ("conversations", "conversation")


class ShareGpt(JsonFormat):
    """Any order of roles: two calls in a row or two lines of the user are kept as they are.

    `messages` whose blocks hold their text under `value` (`{type: reasoning, value}`) belong here too.
    """

    name: ClassVar[str] = "sharegpt"

    def recognises(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        if any(has_list(value, key) for key in LISTS):
            return True
        return has_list(value, "messages") and any(_has_values(one) for one in value["messages"][:2])

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = record.value
        transcript = Transcript(record.flags)
        if system := first_text(value, "system", "system_prompt"):
            transcript.say("system", system)
        key = next((key for key in (*LISTS, "messages") if key in value), LISTS[0])
        messages = [_named(one, f"{key}[{index}]") for index, one in enumerate(sequence(value.get(key), key))]
        add_messages(transcript, messages, key)
        facts = facts_of(value, (*LISTS, "messages", "system", "system_prompt", "tools"), transcript.flags)
        yield transcript.trajectory(record, self.name, facts)


def _named(message: Any, what: str) -> dict[str, Any]:
    """A message with the keys of the chat form; a pair `[from, value]` is one too."""
    if isinstance(message, list) and len(message) == 2:
        return {"role": message[0], "content": message[1]}
    one = dict(mapping(message, what))
    if "role" not in one and "from" in one:
        one["role"] = one["from"]
    if "content" not in one:
        one["content"] = next((one[key] for key in ("value", "text", "markdown") if key in one), None)
    return one


def _has_values(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return False
    return any(isinstance(block, dict) and "type" in block and "value" in block for block in message["content"][:1])
