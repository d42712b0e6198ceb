"""Rollouts of NeMo-Gym and other records of OpenAI's Responses API: input items, output items, reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from slea_llm.logs.chat import block_parts, say_result
from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import (
    content_text,
    first_text,
    has_list,
    mapping,
    name_text,
    optional_list,
    optional_mapping,
    optional_text,
    role_of,
    shown,
    tool_call,
    truth,
)
from slea_llm.logs.formats import JsonFormat, LogRecord, RecordError
from slea_llm.logs.grading import residue
from slea_llm.logs.transcript import Part, Transcript
from slea_llm.types import Trajectory

CALL_ITEMS = frozenset({"function_call", "custom_tool_call", "mcp_call", "local_shell_call", "computer_call"})
OUTPUT_ITEMS = frozenset(
    {"function_call_output", "custom_tool_call_output", "local_shell_call_output", "computer_call_output"}
)


class NemoGym(JsonFormat):
    """`{responses_create_params: {input}, response: {output}, reward}`, or a response alone.

    Reasoning, message and call items that follow each other are one reply; an item may be a list of items. Replies in
    the input are replies too; `provenance.prompt_turns` says how many they are.
    """

    name: ClassVar[str] = "nemo_gym"

    def recognises(self, value: Any) -> bool:
        return isinstance(value, dict) and (
            (isinstance(value.get("responses_create_params"), dict) and isinstance(value.get("response"), dict))
            or (value.get("object") == "response" and has_list(value, "output"))
        )

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = record.value
        whole = "responses_create_params" in value
        request = optional_mapping(value.get("responses_create_params")) if whole else value
        response = optional_mapping(value.get("response")) if whole else value
        transcript = Transcript(record.flags)
        if instructions := first_text(request, "instructions"):
            transcript.say("system", instructions)
        given = request.get("input")
        if isinstance(given, str):
            transcript.say("user", given)
        else:
            self._items(transcript, optional_list(given), "input")
        transcript.close()
        before = transcript.replies
        output = response.get("output")
        if not isinstance(output, list):
            raise RecordError(f"response.output is {shown(output)}, where a list must stand")
        self._items(transcript, output, "output")
        incomplete = name_text(optional_mapping(response.get("incomplete_details")).get("reason"))
        transcript.close(finish="length" if incomplete == "max_output_tokens" else None)
        yield transcript.trajectory(record, self.name, self._facts(value, response, transcript, before))

    def _facts(self, value: Mapping[str, Any], response: Mapping[str, Any], transcript: Transcript, before: int) -> Any:
        info = optional_mapping(value.get("info"))
        task = optional_mapping(value.get("task"))
        criteria = optional_mapping(task.get("evaluation_criteria"))
        numbers = [name_text(value.get(key)) for key in ("_ng_task_index", "_ng_rollout_index")]
        name = first_text(value, "instance_id") or "/".join(part for part in numbers if part)
        known: dict[str, Any] = {
            "id": name or name_text(response.get("id")) or name_text(value.get("id")),
            "cut": "max_turns" if truth(value.get("truncated")) else None,
            "environment": _agent(value),
            "grader": residue(value, optional_list(criteria.get("actions"))),
            "more": {"model": optional_text(response.get("model")), "prompt_turns": before},
        }
        if task:
            known["task"] = {key: item for key, item in task.items() if key != "evaluation_criteria"}
        if (success := truth(value.get("success", info.get("success")))) is not None:
            known["success"] = success
        used = ("responses_create_params", "response", "output", "input", "tools", "instructions", "result")
        return facts_of(value, used, transcript.flags, **known)

    def _items(self, transcript: Transcript, items: Sequence[Any], what: str) -> None:
        for index, item in enumerate(items):
            here = f"{what}[{index}]"
            if isinstance(item, list):
                self._items(transcript, item, here)
            else:
                self._item(transcript, mapping(item, here), here)

    def _item(self, transcript: Transcript, item: Mapping[str, Any], what: str) -> None:
        kind = name_text(item.get("type", "message" if "role" in item else None))
        if kind == "message":
            self._message(transcript, item, what)
        elif kind == "reasoning":
            if thought := _thought(item, what, transcript):
                transcript.add(("thought", thought))
        elif kind in CALL_ITEMS:
            name = {} if "name" in item else {"name": kind, "arguments": optional_mapping(item.get("action"))}
            transcript.add(("call", tool_call({**item, **name, "id": name_text(item.get("call_id"))}, what)))
        elif kind in OUTPUT_ITEMS:
            say_result(transcript, {"content": item.get("output"), "id": item.get("call_id")}, what)
        else:
            transcript.flags.append(f"{what}: an item of type {shown(kind)} is not kept")

    def _message(self, transcript: Transcript, item: Mapping[str, Any], what: str) -> None:
        role = role_of(item.get("role"))
        content = item.get("content")
        if role != "assistant":
            transcript.say(role, content_text(content, f"{what}.content", transcript.flags))
            return
        blocks = content if isinstance(content, list) else [content]
        parts: list[Part] = [part for block in blocks for part in block_parts(block, what, transcript.flags)]
        # An empty message is a reply too.
        transcript.add(*([part for part in parts if part[0] == "call" or part[1]] or [("text", "")]))


def _thought(item: Mapping[str, Any], what: str, transcript: Transcript) -> str:
    for key in ("content", "summary"):
        if text := content_text(item.get(key), f"{what}.{key}", transcript.flags):
            return text
    transcript.flags.append(f"{what}: a thought that is not readable is not kept")
    return ""


def _agent(value: Mapping[str, Any]) -> str:
    return name_text(optional_mapping(value.get("agent_ref")).get("name"))
