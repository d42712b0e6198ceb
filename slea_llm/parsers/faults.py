"""What is broken in a sampled reply: what parsers read in spite of it, and a user should know of."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slea_llm.types import Step, Turn

_OPEN = re.compile(r"<(think|thinking|thought|thoughts|reasoning|reflection)>", re.IGNORECASE)
_CLOSE = re.compile(r"</(think|thinking|thought|thoughts|reasoning|reflection)>", re.IGNORECASE)
_END = re.compile(r"<\|(?:im_end|endoftext|eot_id|eom_id)\|>|</s>|<end_of_turn>")
_CALL_TAGS = re.compile(r"</?tool_call>")
_FORMS: Mapping[str, str] = {"no_action": "action without a call", "malformed": "input without an action"}
MAX_LITERAL = 20_000
"""Characters of a call that may be read as a Python literal: the reader of literals is not made for more."""


def faults(turn: Turn, steps: Sequence[Step]) -> list[str]:
    """The faults of a reply, each named once: thoughts that do not close, marks of an end inside, calls that are none.

    `steps` are those of any parser.
    """
    text = turn.text
    opened, closed = len(_OPEN.findall(text)), len(_CLOSE.findall(text))
    found = []
    if opened > closed:
        found.append("thought cut short" if turn.finish_reason == "length" else "thought never closed")
    elif closed > opened and opened:
        found.append("thought closed more often than opened")
    ends = list(_END.finditer(text))
    if len(ends) > 1:
        found.append("repeated end mark")
    if ends and _END.sub("", text[ends[0].start() :]).strip():
        found.append("text after the end mark")
    for step in steps:
        form = re.split(r"[/(]", (step.label or "").rpartition(":")[2])[0]
        if form in _FORMS:
            found.append(_FORMS[form])
        elif step.kind == "tool_call" and form == "tool_call" and (fault := read_call(step.text)[1]):
            found.append(fault)
    return list(dict.fromkeys(found))


def read_call(text: str) -> tuple[Mapping[str, Any] | None, str | None]:
    """What a `<tool_call>` block calls, and what is wrong with it.

    JSON is right; a Python dict, as some models write, is read and named as a fault; anything else gives None.
    """
    body = _END.sub("", _CALL_TAGS.sub("", text)).strip()
    value: Any
    fault = None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value, fault = _literal(body), "call is a Python literal, not JSON"
    if not isinstance(value, dict):
        return None, "call is no JSON object"
    if not isinstance(value.get("name"), str):
        return value, "call without a name"
    return value, fault


def _literal(body: str) -> Any:
    if len(body) > MAX_LITERAL:
        return None
    try:
        return ast.literal_eval(body)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
