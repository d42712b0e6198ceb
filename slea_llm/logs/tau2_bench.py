"""Result files of tau2-bench: `{info, tasks, simulations: [{task_id, trial, reward_info, messages}]}`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from slea_llm.logs.chat import add_message
from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import has_list, mapping, name_text, number, optional_list, optional_mapping, sequence
from slea_llm.logs.formats import JsonFormat, LogRecord, RecordError
from slea_llm.logs.grading import add_replay, residue, split_replay
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Termination, Trajectory

CUTS: Mapping[str, Termination] = {"max_steps": "max_turns", "too_many_errors": "failure", "timeout": "budget"}
BREAKS = frozenset({"agent_error", "user_error", "infrastructure_error", "unexpected_error"})


class Tau2Bench(JsonFormat):
    """One simulation a record. Calls that the user makes, and their results, stand in the context as the user's."""

    name: ClassVar[str] = "tau2_bench"
    rows: ClassVar[str] = "simulations"

    def recognises(self, value: Any) -> bool:
        return isinstance(value, dict) and (
            has_list(value, "simulations")
            or (has_list(value, "messages") and "termination_reason" in value and "task_id" in value)
        )

    def opens(self, header: Mapping[str, Any]) -> bool:
        return "info" in header or "tasks" in header

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        if "simulations" not in record.value:
            yield self._simulation(record, record.value, record.header)
            return
        rows = sequence(record.value["simulations"], "simulations")
        if not rows:
            raise RecordError("it holds no simulation")
        for row in rows:
            yield self._simulation(replace(record, value=row), row, record.value)

    def _simulation(self, record: LogRecord, row: Any, header: Mapping[str, Any]) -> Trajectory:
        value = mapping(row, "simulation")
        transcript = Transcript(record.flags)
        task_id = name_text(value.get("task_id"))
        tasks = (optional_mapping(task) for task in optional_list(header.get("tasks")))
        task = next((one for one in tasks if name_text(one.get("id")) == task_id), {})
        criteria = optional_mapping(task.get("evaluation_criteria"))
        gold = optional_list(criteria.get("actions"))
        messages, replay = split_replay(sequence(value.get("messages"), "messages"), gold)
        for index, message in enumerate(messages):
            self._say(transcript, mapping(message, f"messages[{index}]"), f"messages[{index}]")
        add_replay(transcript, replay)
        reason = name_text(value.get("termination_reason"))
        checked = optional_mapping(value.get("reward_info"))
        domain = optional_mapping(optional_mapping(header.get("info")).get("environment_info")).get("domain_name")
        facts = facts_of(
            value,
            ("messages", "reward_info", "trial"),
            transcript.flags,
            id="/".join(part for part in (task_id, name_text(value.get("trial"))) if part),
            task={
                "id": task_id,
                **{key: item for key, item in task.items() if key not in ("id", "evaluation_criteria")},
            },
            environment=f"{self.name}:{name_text(domain)}" if domain else "",
            reward=number(checked.get("reward"), "reward_info.reward", transcript.flags),
            cut=CUTS.get(reason),
            error=f"termination_reason {reason}" if reason in BREAKS else None,
            grader=residue(value, gold, reward_info=_short(checked)),
        )
        return transcript.trajectory(record, self.name, facts)

    def _say(self, transcript: Transcript, message: Mapping[str, Any], what: str) -> None:
        several = message.get("tool_messages")
        for one in sequence(several, f"{what}.tool_messages") if several is not None else [message]:
            inner = dict(mapping(one, what))
            if inner.get("role") == "tool" and "tool_call_id" not in inner:
                inner["tool_call_id"] = inner.get("id")
                if inner.get("requestor") == "user":
                    inner["name"] = "user"
            add_message(transcript, inner, what)


def _short(checked: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a reward's parts, without the checks one by one."""
    kept = ("reward_breakdown", "reward_basis", "db_check")
    return {key: checked[key] for key in kept if checked.get(key) is not None}
