"""Messages and channels of the harmony format in a sampled text."""

from __future__ import annotations

import re
from typing import NamedTuple

from slea_llm.types import StepKind

HEADER = re.compile(
    r"(?:<\|start\|>(?P<role>[^<]{0,200}))?"
    r"(?:<\|channel\|>(?P<channel>[^<]{0,200})(?:<\|constrain\|>[^<]{0,200})?)?"
    r"<\|message\|>"
)
_STOP = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|(?=<\|channel\|>)")


class Message(NamedTuple):
    """One message: `[start, end)` with its header and end mark, `[body, body_end)` what it says."""

    kind: StepKind
    label: str
    start: int
    body: int
    body_end: int
    end: int


def messages(text: str) -> list[Message]:
    """The messages of a text in order, none when it is not written in harmony.

    `analysis` is thought; what names a recipient (`to=functions.x`) is a tool call; `final`, and `commentary` without a
    recipient, is reply. A message of another role (a tool's result, a user) is labelled `observation` and counts as
    thought: it is no answer of the agent. The label is the channel, `call` or `observation`.
    """
    found: list[Message] = []
    position = 0
    while header := HEADER.search(text, position):
        stop = _STOP.search(text, header.end())
        body_end, end = stop.span() if stop else (len(text), len(text))
        kind, label = _kind(header["role"] or "", header["channel"] or "")
        found.append(Message(kind, label, header.start(), header.end(), body_end, end))
        position = end
    return found


def _kind(role: str, channel: str) -> tuple[StepKind, str]:
    author = role.split()[0] if role.split() else "assistant"
    if author != "assistant":
        return "thought", "observation"
    if "to=" in role or "to=" in channel:
        return "tool_call", "call"
    name = channel.split()[0].lower() if channel.split() else "final"
    return ("thought" if name == "analysis" else "reply"), name
