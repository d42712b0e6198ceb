"""Result files of tau-bench: `{task_id, trial, reward, info, traj}`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from slea_llm.logs.chat import add_messages
from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import has_list, optional_list, optional_mapping, sequence
from slea_llm.logs.formats import JsonFormat, LogRecord
from slea_llm.logs.grading import add_replay, residue, split_replay
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Trajectory


class TauBench(JsonFormat):
    """One trial of one task a record; a dialogue without `reward_info` was cut before its end (max_turns)."""

    name: ClassVar[str] = "tau_bench"

    def recognises(self, value: Any) -> bool:
        return isinstance(value, dict) and has_list(value, "traj") and "task_id" in value

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        transcript = Transcript(record.flags)
        value = record.value
        info = optional_mapping(value.get("info"))
        task = optional_mapping(info.get("task"))
        gold = optional_list(task.get("actions"))
        dialogue, replay = split_replay(sequence(value.get("traj"), "traj"), gold)
        add_messages(transcript, dialogue, "traj")
        add_replay(transcript, replay)
        graded = info.get("reward_info") is not None
        places = [*(["info.task.actions"] if gold else []), *(["traj"] if replay else [])]
        facts = facts_of(
            value,
            ("traj", "info", "trial"),
            transcript.flags,
            task={
                "id": str(value.get("task_id")),
                **{key: item for key, item in task.items() if key not in ("id", "actions", "outputs")},
            },
            cut=None if graded or "info" not in value else "max_turns",
            grader=residue(value, gold, outputs=task.get("outputs"), also=places),
            more={"info": {key: info[key] for key in ("source", "user_cost", "error") if info.get(key) is not None}},
        )
        yield transcript.trajectory(record, self.name, facts)
