"""Event streams of OpenHands, alone or as the `history` of an evaluation or resolver row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from slea_llm.logs.facts import Facts, facts_of
from slea_llm.logs.fields import (
    arguments_text,
    content_text,
    first_text,
    mapping,
    name_text,
    optional_list,
    optional_mapping,
    optional_text,
    result_text,
    tool_call,
    truth,
)
from slea_llm.logs.formats import JsonFormat, LogRecord
from slea_llm.logs.grading import residue
from slea_llm.logs.transcript import Part, Transcript
from slea_llm.types import ToolCall, Trajectory

ENVELOPE = frozenset(
    {
        "action",
        "observation",
        "id",
        "timestamp",
        "source",
        "message",
        "cause",
        "timeout",
        "tool_call_metadata",
        "llm_metrics",
        "action_risk",
        "is_confirmed",
        "confirmation_state",
        "keep_prompt",
        "kernel_init_code",
        "thought",
        "impl_source",
        "translated_ipython_code",
        "args",
        "blocking",
        "hidden",
        "is_input",
    }
)
"""Keys of events and their arguments that are no argument of the call."""
SILENT = frozenset({"agent_state_changed", "change_agent_state", "null", "recall", "condensation", "pause", "resume"})
"""Events of the machinery: without a text they are left out, and counted."""


class OpenHands(JsonFormat):
    """Actions of the agent are replies (their thought, then the call), observations are tool results.

    The call is the one that the model wrote where the event has the model's response, else it is made of the event.
    """

    name: ClassVar[str] = "openhands"

    def recognises(self, value: Any) -> bool:
        if isinstance(value, list):
            return bool(value) and self.is_part(value[0])
        if not isinstance(value, dict):
            return False
        history = value.get("history")
        if not isinstance(history, list) or not history:
            return False
        return all(self.is_part(event) for event in _flat(history[:1]))

    def is_part(self, value: Any) -> bool:
        return isinstance(value, dict) and any(isinstance(value.get(key), str) for key in ("action", "observation"))

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        transcript = Transcript(record.flags)
        row = record.value if isinstance(record.value, dict) else {}
        events = row.get("history") if row else record.value
        self._events(transcript, list(_flat(optional_list(events))))
        yield transcript.trajectory(record, self.name, _facts(row, transcript))

    def _events(self, transcript: Transcript, events: Sequence[Any]) -> None:
        open_response = ""
        for index, event in enumerate(events):
            what = f"event {index}"
            one = mapping(event, what)
            if "observation" in one:
                self._observe(transcript, one, what)
            elif not _is_agents(one, transcript.replies > 0):
                arguments = _arguments(one)
                role = "system" if one.get("action") == "system" else "user"
                text = content_text(arguments.get("content", one.get("message")), what, transcript.flags)
                if text or name_text(one.get("action")) not in SILENT:
                    transcript.say("system" if role == "system" else "user", text)
            elif (kind := name_text(one.get("action"))) in SILENT:
                transcript.flags.append(f"an event {kind} of the agent is not kept")
            else:
                response = _response_id(one)
                if not response or response != open_response:
                    transcript.close()
                open_response = response
                transcript.add(*(self._act(one, what, transcript.flags) or [("text", "")]))

    def _observe(self, transcript: Transcript, event: Mapping[str, Any], what: str) -> None:
        kind = name_text(event.get("observation"))
        text = result_text(event.get("content"), f"{what}.content", transcript.flags)
        if not text and kind in SILENT:
            transcript.flags.append(f"an event {kind} without a text is not kept")
            return
        metadata = optional_mapping(event.get("tool_call_metadata"))
        transcript.say(
            "tool",
            text,
            tool_call_id=name_text(metadata.get("tool_call_id")) or None,
            name=name_text(metadata.get("function_name")) or kind or None,
        )

    def _act(self, event: Mapping[str, Any], what: str, flags: list[str]) -> list[Part]:
        arguments = _arguments(event)
        kind = name_text(event.get("action"))
        thought = content_text(arguments.get("thought"), f"{what}.thought", flags)
        if kind in ("message", "finish", "reject"):
            said = first_text(arguments, "content", "final_thought") or thought
            parts: list[Part] = [("text", said or name_text(event.get("message")))]
            call = _written_call(event)
            if kind == "finish" and call is not None:
                parts.append(("call", call))
            return [part for part in parts if part[0] == "call" or part[1]]
        told: list[Part] = [("thought", thought)] if thought else []
        if kind == "think":
            return told
        made = {key: item for key, item in arguments.items() if key not in ENVELOPE and item is not None}
        call = _written_call(event) or ToolCall(id="", name=kind or "action", arguments=arguments_text(made))
        return [*told, ("call", call)]


def _flat(history: Sequence[Any]) -> Iterator[Any]:
    """Events one by one; older rows hold pairs of action and observation."""
    for item in history:
        if isinstance(item, list):
            yield from item
        else:
            yield item


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of an action: in `args`, or beside its name in older logs."""
    found = event.get("args")
    return found if isinstance(found, dict) else event


def _is_agents(event: Mapping[str, Any], has_replied: bool) -> bool:
    """Whether an action is the agent's. Older logs name no source: messages before its first act are the user's."""
    source = optional_text(event.get("source"))
    if source is not None:
        return source == "agent" and event.get("action") != "system"
    return event.get("action") not in ("message", "system") or has_replied


def _response_id(event: Mapping[str, Any]) -> str:
    """The id of the model's response that an action is part of: calls of one response are one reply."""
    metadata = optional_mapping(event.get("tool_call_metadata"))
    if metadata.get("total_calls_in_response") in (None, 1):
        return ""
    return name_text(optional_mapping(metadata.get("model_response")).get("id"))


def _written_call(event: Mapping[str, Any]) -> ToolCall | None:
    """The call as the model wrote it."""
    metadata = optional_mapping(event.get("tool_call_metadata"))
    wanted = name_text(metadata.get("tool_call_id"))
    choices = optional_list(optional_mapping(metadata.get("model_response")).get("choices"))
    for choice in choices[:1]:
        for call in optional_list(optional_mapping(optional_mapping(choice).get("message")).get("tool_calls")):
            if optional_mapping(call).get("id") == wanted:
                return tool_call(call, "tool_call_metadata")
    return None


def _facts(row: Mapping[str, Any], transcript: Transcript) -> Facts:
    result = optional_mapping(row.get("test_result"))
    report = optional_mapping(result.get("report"))
    told = (row.get("success"), row.get("resolved"), report.get("resolved"), result.get("resolved"))
    success = next((found for one in told if (found := truth(one)) is not None), None)
    error = optional_text(row.get("error"))
    limit = error is not None and any(word in error for word in ("maximum iteration", "budget", "AgentStuckInLoop"))
    issue = {key: row[key] for key in ("issue", "instance") if isinstance(row.get(key), dict)}
    known: dict[str, Any] = {
        "success": success,
        "cut": "max_turns" if limit else None,
        "error": error if error and not limit and success is None else None,
        "grader": residue(row),
    }
    if issue:
        number = name_text(optional_mapping(issue.get("issue")).get("number"))
        known["task"] = {**({"id": name_text(row.get("instance_id")) or number}), **issue}
    return facts_of(row, ("history", "instruction", "error", "issue", "instance"), transcript.flags, **known)
