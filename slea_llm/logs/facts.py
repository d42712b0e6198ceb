"""What a record says beside its messages: id, task, reward, success, and what else is short enough to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slea_llm.logs.fields import leftovers, name_text, number, optional_mapping, shown, truth
from slea_llm.types import Termination

ID_KEYS = ("trajectory_id", "conversation_id", "session_id", "dialogue_id", "uuid", "id", "instance_id", "task_id")
TRIAL_KEYS = ("trial", "rollout", "attempt", "epoch", "sample_index")
REWARD_KEYS = ("reward", "outcome", "return", "total_reward", "score")
SUCCESS_KEYS = ("success", "resolved", "solved", "passed", "is_correct", "correct", "win")
TASK_KEYS = ("task", "task_id", "instance_id", "question", "target", "goal")
KEPT_CHARACTERS = 2_000
"""Characters of JSON up to which a field that is not understood is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a log says of a dialogue.

    `cut` is how it ended when it was no success, `error` why it broke. `grader` holds what the grader left in the log:
    its places, and gold actions, which are never shown as the agent's. `more` goes to the provenance as it is.
    """

    id: str = ""
    task: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    seed: Any = None
    reward: float | None = None
    success: bool | None = None
    cut: Termination | None = None
    error: str | None = None
    grader: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    other: tuple[Mapping[str, Any], Sequence[str]] = ({}, ())
    """Other fields: those that are short, and the names of the longer ones."""

    def provenance(self) -> dict[str, Any]:
        kept, left = self.other
        parts = {"grader": self.grader, **self.more, "also": kept, "left_out": list(left)}
        return {key: value for key, value in parts.items() if value not in (None, "", {}, [])}


def facts_of(value: Mapping[str, Any], used: Sequence[str], flags: list[str], **known: Any) -> Facts:
    """The facts of a record whose keys `used` are read elsewhere; what is `known` already wins."""
    reward = next((number(value[key], key, flags) for key in REWARD_KEYS if _is_plain(value.get(key))), None)
    success = next((told for key in SUCCESS_KEYS if (told := truth(value.get(key))) is not None), None)
    if success is None and value.get("success") is not None:
        flags.append(f"success {shown(value['success'])} is neither true nor false")
    found: dict[str, Any] = {
        "id": identifier(value),
        "task": task_of(value),
        "reward": reward,
        "success": success,
        "seed": value.get("seed"),
        "other": leftovers(value, [*used, *TASK_KEYS], KEPT_CHARACTERS),
    }
    return Facts(**{**found, **known})


def identifier(value: Mapping[str, Any]) -> str:
    """The record's own id, with the number of its trial where it has one; nothing when it has no id."""
    name = next((text for key in ID_KEYS if (text := name_text(value.get(key)))), "")
    trial = next((text for key in TRIAL_KEYS if (text := name_text(value.get(key)))), "")
    return f"{name}/{trial}" if name and trial else name


def task_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says of its task, as it stands; `id` is the task's own."""
    found = {key: value[key] for key in TASK_KEYS if value.get(key) is not None}
    task = optional_mapping(found.get("task"))
    name = next(
        (text for text in map(name_text, (found.get("task_id"), found.get("instance_id"), task.get("id"))) if text), ""
    )
    return {**({"id": name} if name else {}), **found}


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
