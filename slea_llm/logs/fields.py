"""Reading JSON of unknown make: typed access that says what is wrong, texts of blocks, numbers as written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from slea_llm.errors import nearest
from slea_llm.logs.formats import RecordError
from slea_llm.types import Role, ToolCall

SHOWN = 60
"""Characters of a value that a message quotes."""
ROLE_NAMES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "customer": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "agent": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "environment": "tool",
}
CALL_ROLES = frozenset({"function_call", "tool_call"})
"""Roles whose text is a call that the assistant makes."""
TEXT_KEYS = ("text", "value", "content", "output_text", "refusal")


def shown(value: object) -> str:
    """A value as a message quotes it: short, and with nothing that a terminal would obey."""
    text = ascii(value) if not isinstance(value, str) else repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Raises RecordError unless the value is an object."""
    if not isinstance(value, Mapping):
        raise RecordError(f"{what} is {shown(value)}, where an object must stand")
    return value


def sequence(value: Any, what: str) -> Sequence[Any]:
    """Raises RecordError unless the value is a list."""
    if not isinstance(value, list):
        raise RecordError(f"{what} is {shown(value)}, where a list must stand")
    return value


def optional_mapping(value: Any) -> Mapping[str, Any]:
    """The object, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def optional_list(value: Any) -> Sequence[Any]:
    """The list, or an empty one."""
    return value if isinstance(value, list) else ()


def has_list(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(key), list)


def role_of(name: Any) -> Role:
    """The role of a name that some format uses for it. Raises RecordError for an unknown one, naming the nearest."""
    found = ROLE_NAMES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        hint = nearest(name, ROLE_NAMES) if isinstance(name, str) else ""
        raise RecordError(f"role {shown(name)} is not one of {', '.join(ROLE_NAMES)}{hint}")
    return found


def optional_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def name_text(value: Any) -> str:
    """A name or an id as text: numbers as they are written, anything else as nothing."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value)


def first_text(value: Mapping[str, Any], *keys: str) -> str | None:
    """What stands under the first of these keys that holds a text with anything in it."""
    for key in keys:
        if isinstance(found := value.get(key), str) and found:
            return found
    return None


def content_text(value: Any, what: str, flags: list[str]) -> str:
    """The text of message content: null, a string, a block, or a list of strings and blocks.

    A block that is no text (an image, a sound) stands as its type in brackets, and is flagged. Raises RecordError for a
    number or a truth value.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _block_text(value, what, flags)
    if isinstance(value, list):
        return "\n".join(text for item in value if (text := content_text(item, what, flags)))
    raise RecordError(f"{what} is {shown(value)}, where text must stand")


def _block_text(block: Mapping[str, Any], what: str, flags: list[str]) -> str:
    for key in TEXT_KEYS:
        if key in block and (isinstance(block[key], str | list) or block[key] is None):
            return content_text(block[key], what, flags)
    kind = name_text(block.get("type")) or "block"
    flags.append(f"{what}: a block of type {shown(kind)} is no text and is not kept")
    return f"[{kind}]"


def result_text(value: Any, what: str, flags: list[str]) -> str:
    """What a tool gave: text as it is, content blocks as their text, any other value as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(item, str) or _is_block(item) for item in value):
        return content_text(value, what, flags)
    return json_text(value)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tool_call(value: Any, what: str) -> ToolCall:
    """A call as any of the formats writes it.

    `{id, function: {name, arguments}}` (OpenAI), `{id, name, arguments}` (tau2, Inspect, OTel), `{id, name, input}`
    (Anthropic), `{tool_call_id, function_name, arguments}` (ATIF), `{function: name, arguments}` (Inspect). Arguments
    that are a text stay as written. Raises RecordError when there is no name.
    """
    call = mapping(value, what)
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    name = first_text(inner, "name", "function_name", "tool_name", "recipient_name") or optional_text(function)
    if not name:
        raise RecordError(f"{what} has no name: {shown(value)}")
    arguments: Any = next(
        (inner[key] for key in ("arguments", "input", "parameters", "args", "kwargs") if key in inner), None
    )
    number = first_text(call, "id", "tool_call_id", "call_id")
    return ToolCall(id=number or "", name=name, arguments=arguments_text(arguments))


def arguments_text(value: Any) -> str:
    """Arguments as text: as written where they are a text, nothing for none."""
    if value is None:
        return "{}"
    return value if isinstance(value, str) else json_text(value)


def tool_calls(value: Any, what: str) -> tuple[ToolCall, ...]:
    """The calls of a list; none for null."""
    if value is None:
        return ()
    return tuple(tool_call(call, f"{what}[{index}]") for index, call in enumerate(sequence(value, what)))


def calls_in_text(text: str, what: str) -> tuple[ToolCall, ...]:
    """The calls of a text that is one call, or a list of calls, in JSON. Raises RecordError when it is not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what} is no call in JSON: {shown(text)}") from error
    return tool_calls(value if isinstance(value, list) else [value], what)


def number(value: Any, what: str, flags: list[str]) -> float | None:
    """A number exactly as written; None with a flag for one that is none or not finite, None for null."""
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    flags.append(f"{what} {shown(value)} is no finite number")
    return None


def truth(value: Any) -> bool | None:
    """True or false where the value is one of them, also as 1 or 0, else None."""
    return bool(value) if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)) else None


def leftovers(value: Mapping[str, Any], used: Sequence[str], limit: int) -> tuple[dict[str, Any], list[str]]:
    """What else a record holds: the values of at most `limit` characters of JSON, and the names of longer ones."""
    kept: dict[str, Any] = {}
    left: list[str] = []
    known = frozenset(used)
    for key, item in value.items():
        if key in known or item is None or item in ("", [], {}):
            continue
        if _size(item, limit) <= limit:
            kept[key] = item
        else:
            left.append(key)
    return kept, left


def _size(value: Any, limit: int) -> int:
    """About the characters of its JSON; counting ends above the limit."""
    total, waiting = 0, [value]
    while waiting and total <= limit:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item) + 2
        elif isinstance(item, Mapping):
            waiting += item.values()
            total += sum(len(key) + 4 for key in item)
        elif isinstance(item, list):
            waiting += item
            total += 2
        else:
            total += 4
    return total
