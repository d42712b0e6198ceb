"""What tools answered to the calls of an agent, and which of the answers are errors, read off the dialogue alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from slea_llm.types import Step, Trajectory, leaf_steps

LOOKED_AT = 4_000
"""Characters at each end of an answer that are searched for an error."""

_BEGINS = re.compile(
    r"\W*(?:(?:error|err|fatal|exception|traceback|failed|failure|invalid|denied|unauthori[sz]ed|forbidden)"
    r"(?=[\s:!.(\[]|$)|错误|失败|异常|无效)",
    re.IGNORECASE,
)
_HOLDS = re.compile(
    r"Traceback \(most recent call last\)|(?:Error|Exception): |: command not found|No such file or directory|"
    r"\b(?:exit|return)[ _]?(?:code|status)\W{1,3}(?!0\b)-?\d+|\bpermission denied\b|\bsegmentation fault\b|"
    r"\bHTTP(?:/\d\.\d)? [45]\d\d\b",
    re.IGNORECASE,
)
_HOLDS_ONE_OF = (
    *("traceback (", "error: ", "exception: ", ": command not", "no such file", "code", "status"),
    *("permission denied", "segmentation fault", "http"),
)
"""Words of which a text holds one, in small letters, wherever the pattern above is found: most answers hold none."""
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "null", "ok", "success")


def answers(trajectory: Trajectory, steps: Sequence[Step]) -> dict[tuple[int, int], str | None]:
    """`(turn, step)` of every call -> what the tool answered, in the order of the calls; None: no answer is logged."""
    heard = _heard(trajectory)
    calls: dict[int, list[tuple[int, int]]] = {}
    for step in leaf_steps(steps):
        if step.kind == "tool_call":
            calls.setdefault(step.turn, []).append((step.turn, step.index))
    found: dict[tuple[int, int], str | None] = {}
    for turn, places in calls.items():
        said = heard.get(turn, [])
        found.update({place: said[number] if number < len(said) else None for number, place in enumerate(places)})
    return found


def error_in(answer: str) -> str | None:
    """The first line of the error that an answer is, at most 120 characters; None when it is none.

    An answer is an error when it says so itself: it begins with such a word, is a JSON object with an error in it, or
    holds a traceback, an exit code other than 0 or what a shell says of a command that failed.
    """
    text = answer.strip()
    if text.startswith("{"):
        value = _object(text)
        if value is not None:
            return _error_of(value)
    ends = text if len(text) <= 2 * LOOKED_AT else f"{text[:LOOKED_AT]}\n{text[-LOOKED_AT:]}"
    match = _BEGINS.match(ends)
    if match is None and any(map(ends.casefold().__contains__, _HOLDS_ONE_OF)):
        match = _HOLDS.search(ends)
    if match is None:
        return None
    start = ends.rfind("\n", 0, match.end()) + 1
    return _short(ends[start:] or ends)


def _heard(trajectory: Trajectory) -> dict[int, list[str]]:
    """Turn index -> the tool messages that follow its reply."""
    found: dict[int, list[str]] = {}
    turns = trajectory.turns
    for turn, following in pairwise(turns):
        found[turn.index] = [message.content for message in following.context if message.role == "tool"]
    if turns:
        found[turns[-1].index] = [message.content for message in trajectory.closing if message.role == "tool"] + [
            str(row.get("content", ""))
            for row in _rows(trajectory.provenance.get("last_messages"))  # where rollouts keep what came last
            if row.get("role") == "tool"
        ]
    return found


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list | tuple) else []


def _object(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, Mapping) else None


def _error_of(value: Mapping[str, Any]) -> str | None:
    for key, item in value.items():
        name = str(key).lower()
        if name in ("error", "errors", "exception", "error_message", "error_code") and item not in _NOTHING:
            return _short(f"{key}: {item}")
        if (name in ("success", "ok") and item is False) or (
            name == "status" and str(item).lower() in ("error", "failed", "failure")
        ):
            return _short(f"{key}: {item}")
        if name in ("exit_code", "exitcode", "returncode", "return_code") and item not in (0, None, "0"):
            return _short(f"{key}: {item}")
    return None


def _short(text: str) -> str:
    line = " ".join(text.strip().split("\n", 1)[0].split())
    return line if len(line) <= 120 else f"{line[:119]}\u2026"
