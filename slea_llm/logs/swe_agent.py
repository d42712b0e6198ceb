"""Trajectories of SWE-agent (`.traj`): `{history, trajectory, info, environment}`, any of the first two."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from slea_llm.logs.chat import add_message, reply_parts
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
)
from slea_llm.logs.formats import JsonFormat, LogRecord
from slea_llm.logs.transcript import Transcript, reply_text
from slea_llm.types import Termination, Trajectory

CUTS: Mapping[str, Termination] = {
    "exit_cost": "budget",
    "exit_total_execution_time": "budget",
    "exit_context": "budget",
    "exit_format": "failure",
    "exit_forfeit": "failure",
}


class SweAgent(JsonFormat):
    """The messages of `history` (demonstrations are context), else the steps of `trajectory`.

    `exit_status` says how it ended; whether a submitted patch is right is not in the file: that end is `unknown`.
    """

    name: ClassVar[str] = "swe_agent"

    def recognises(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        if has_list(value, "trajectory") and (value["trajectory"] or has_list(value, "history")):
            return all(isinstance(step, dict) and "action" in step for step in value["trajectory"][:1])
        history = value.get("history")
        return isinstance(history, list) and all(
            isinstance(one, dict) and "role" in one and ("agent" in one or "message_type" in one) for one in history[:1]
        )

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = record.value
        transcript = Transcript(record.flags)
        history = optional_list(value.get("history"))
        steps = optional_list(value.get("trajectory"))
        for index, message in enumerate(history):
            self._say(transcript, mapping(message, f"history[{index}]"), f"history[{index}]")
        if not history:
            for index, step in enumerate(steps):
                self._step(transcript, mapping(step, f"trajectory[{index}]"), f"trajectory[{index}]")
        info = optional_mapping(value.get("info"))
        status = name_text(info.get("exit_status"))
        broke = status.startswith(("exit_error", "exit_api", "exit_environment")) or status == "early_exit"
        facts = facts_of(
            value,
            ("history", "trajectory", "info", "environment", "replay_config"),
            transcript.flags,
            environment=name_text(value.get("environment")),
            cut=CUTS.get(status.removeprefix("submitted (").removesuffix(")")),
            error=f"exit_status {status}" if broke else None,
            more={"info": {key: info[key] for key in ("exit_status", "submission", "model_stats") if info.get(key)}},
        )
        yield _with_states(transcript.trajectory(record, self.name, facts), steps)

    def _say(self, transcript: Transcript, message: Mapping[str, Any], what: str) -> None:
        if message.get("role") == "assistant" and message.get("is_demo"):
            parts = reply_parts(message, message.get("content"), what, transcript.flags)
            transcript.say("assistant", reply_text(parts), name="demonstration")
        else:
            add_message(transcript, message, what)

    def _step(self, transcript: Transcript, step: Mapping[str, Any], what: str) -> None:
        for index, message in enumerate(optional_list(step.get("query"))):
            if not transcript.replies and optional_mapping(message).get("role") in ("system", "user"):
                add_message(transcript, mapping(message, what), f"{what}.query[{index}]")
        response = first_text(step, "response")
        if response is None:
            thought, action = (
                content_text(step.get(key), f"{what}.{key}", transcript.flags) for key in ("thought", "action")
            )
            response = f"{thought.rstrip()}\n```\n{action.rstrip()}\n```" if action else thought
        transcript.reply(*reply_parts({"tool_calls": step.get("tool_calls")}, response, what, transcript.flags))
        transcript.say("tool", result_text(step.get("observation"), f"{what}.observation", transcript.flags))


def _with_states(trajectory: Trajectory, steps: Sequence[Any]) -> Trajectory:
    """The public state after each reply, where there is one step for each."""
    if len(steps) != len(trajectory.turns):
        return trajectory
    states = [_state(optional_mapping(step).get("state")) for step in steps]
    turns = [
        replace(turn, state_before=before, state_after=after)
        for turn, before, after in zip(trajectory.turns, [{}, *states], states, strict=False)
    ]
    return replace(trajectory, turns=tuple(turns))


def _state(value: Any) -> Mapping[str, Any]:
    """States are objects, or their JSON as a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            return {}
    return optional_mapping(value)
