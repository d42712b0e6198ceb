"""ATIF, the Agent Trajectory Interchange Format of Harbor: `{schema_version, agent, steps}`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import (
    content_text,
    first_text,
    has_list,
    mapping,
    name_text,
    optional_list,
    optional_mapping,
    result_text,
    role_of,
    sequence,
    tool_calls,
)
from slea_llm.logs.formats import JsonFormat, LogRecord
from slea_llm.logs.grading import residue
from slea_llm.logs.transcript import Part, Transcript, reply_text
from slea_llm.types import Trajectory


class Atif(JsonFormat):
    """One session a record. Steps of the agent are replies, but those copied from a parent session are context."""

    name: ClassVar[str] = "atif"

    def recognises(self, value: Any) -> bool:
        if not isinstance(value, dict) or not has_list(value, "steps"):
            return False
        return name_text(value.get("schema_version")).startswith("ATIF") or (
            isinstance(value.get("agent"), dict)
            and all("source" in step for step in value["steps"][:1] if isinstance(step, dict))
        )

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = record.value
        transcript = Transcript(record.flags)
        for index, step in enumerate(sequence(value.get("steps"), "steps")):
            self._step(transcript, mapping(step, f"steps[{index}]"), f"steps[{index}]")
        agent = optional_mapping(value.get("agent"))
        facts = facts_of(
            value,
            ("steps", "agent", "session_id", "schema_version"),
            transcript.flags,
            environment=name_text(agent.get("name")),
            grader=residue(value),
            more={
                "schema_version": value.get("schema_version"),
                "model": name_text(agent.get("model_name")),
            },
        )
        yield transcript.trajectory(record, self.name, facts)

    def _step(self, transcript: Transcript, step: Mapping[str, Any], what: str) -> None:
        role = role_of(step.get("source"))
        message = step.get("message")
        if role != "assistant":
            transcript.say(role, content_text(message, f"{what}.message", transcript.flags))
        else:
            parts: list[Part] = []
            if thought := first_text(step, "reasoning_content"):
                parts.append(("thought", thought))
            if text := content_text(message, f"{what}.message", transcript.flags):
                parts.append(("text", text))
            parts += [("call", call) for call in tool_calls(step.get("tool_calls"), f"{what}.tool_calls")]
            if step.get("is_copied_context") is True:
                transcript.say("assistant", reply_text(parts), name="copied")
            else:
                transcript.reply(*parts)
            if isinstance(metrics := step.get("metrics"), dict) and metrics.get("completion_token_ids"):
                transcript.flags.append("token ids are not kept: they are not checked against the text")
        for index, result in enumerate(optional_list(optional_mapping(step.get("observation")).get("results"))):
            one = mapping(result, f"{what}.observation.results[{index}]")
            content = one.get("content", one.get("subagent_trajectory_ref"))
            transcript.say(
                "tool" if role == "assistant" else role,
                result_text(content, f"{what}.observation", transcript.flags),
                tool_call_id=first_text(one, "source_call_id"),
            )
