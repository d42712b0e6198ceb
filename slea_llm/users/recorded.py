"""A user that was logged: it says its words again while the agent stays on the recorded path, and says when it left."""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from slea_llm.errors import ConfigError, EpisodeError, StorageError, nearest
from slea_llm.models.thoughts import without_thoughts
from slea_llm.storage import log_kind, read_scored, read_trajectories
from slea_llm.types import Message, Task, Trajectory, UserReply
from slea_llm.users.speech import words_of

OFF_PATH = ("leave", "go_on")


@dataclass(slots=True, kw_only=True)
class _Memory:
    """All that changes during a dialogue; `left_at` is the number of the agent's reply that left the path."""

    record: str
    said: int = 0
    left_at: int | None = None
    spent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One logged dialogue as its user knew it: `answers[i]` followed `replies[i]`, with `leaving` after the last."""

    id: str
    opening: str
    replies: tuple[str, ...]
    answers: tuple[str, ...]
    leaves: bool


class RecordedUser:
    """Starts sessions that replay the users of a log, each for the task that it was recorded with.

    The agent is on the path while each of its replies, thoughts removed, is as close to the recorded one as `closeness`
    asks, word by word. The session's record (`provenance`) names the first reply that was not (`left_at`), and whether
    the agent went on after the last recorded word (`spent`). The words that the environment filled in for a placeholder
    are compared as they were heard.
    """

    name: ClassVar[str] = "recorded"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        log: str = ""
        """Log of dialogues or of scored dialogues in this project's format, such as `slea rollout` writes."""
        closeness: float = 0.6
        """Share of equal words (2 * equal / all of both) from which two replies count as the same, in [0, 1]."""
        off_path: Literal["leave", "go_on"] = "leave"
        """`leave`: it ends the dialogue when the agent leaves the path, since nobody knows what it would have said.
        `go_on`: it says its recorded words all the same, and leaves after the last."""

        def __post_init__(self) -> None:
            if not 0.0 <= self.closeness <= 1.0:
                raise ConfigError(f"closeness {self.closeness} is not in [0, 1]")
            if self.off_path not in OFF_PATH:
                raise ConfigError(
                    f"off_path {self.off_path!r} is not one of {', '.join(OFF_PATH)}{nearest(self.off_path, OFF_PATH)}"
                )

    @classmethod
    def preflight(cls, config: Config) -> None:
        """Raises ConfigError when no log is named, StorageError when it is no file."""
        if not config.log:
            raise ConfigError("user 'recorded' needs the log that it replays: log: <file that slea rollout wrote>")
        if not Path(config.log).is_file():
            raise StorageError(f"user 'recorded': log {config.log} is no file")

    def __init__(self, config: Config) -> None:
        """Read the log. Raises ConfigError without one, StorageError for one that cannot be read."""
        self.preflight(config)
        self.config = config
        self._records: dict[str, list[_Record]] = {}
        for trajectory in _read(config.log):
            record = _record(trajectory)
            if record is not None:
                self._records.setdefault(str(trajectory.task.get("id", "")), []).append(record)
        if not self._records:
            raise ConfigError(f"log {config.log} holds no dialogue with a user")

    def start(self, task: Task, seed: int) -> RecordedSession:
        """A session of one of the task's records, drawn by the seed; raises EpisodeError when it has none."""
        records = self._of(task)
        chosen = random.Random(f"{task.seed}/{seed}").choice(records)  # noqa: S311 (not a secret)
        return RecordedSession(chosen, self.config, _Memory(record=chosen.id))

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> RecordedSession:
        """The session as it was; raises EpisodeError for a snapshot of another shape or log."""
        names = {entry.name for entry in fields(_Memory)}
        if snapshot.keys() != names:
            raise EpisodeError(f"user snapshot has the keys {sorted(snapshot)}; expected {sorted(names)}")
        memory = _Memory(**snapshot)
        found = [record for record in self._of(task) if record.id == memory.record]
        if not found:
            raise EpisodeError(f"log {self.config.log} has no dialogue {memory.record!r} of task {task.id!r}")
        return RecordedSession(found[0], self.config, memory)

    def _of(self, task: Task) -> list[_Record]:
        if task.id not in self._records:
            raise EpisodeError(
                f"log {self.config.log} has no dialogue of task {task.id!r}; it has {len(self._records)} tasks"
                f"{nearest(task.id, self._records)}"
            )
        return self._records[task.id]


class RecordedSession:
    """One replay."""

    def __init__(self, record: _Record, config: RecordedUser.Config, memory: _Memory) -> None:
        self._record, self._config, self._memory = record, config, memory

    async def opening(self) -> UserReply:
        return UserReply(text=self._record.opening)

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        del acts
        memory, record = self._memory, self._record
        place = memory.said
        replies = [message.content for message in messages if message.role == "assistant"]
        said = replies[-1] if replies and messages[-1].role == "assistant" else ""
        if place >= len(record.answers):
            memory.spent = True
            if memory.left_at is None:
                memory.left_at = place
            return UserReply(text="", leaving=True)
        if memory.left_at is None and likeness(said, record.replies[place]) < self._config.closeness:
            memory.left_at = place
            if self._config.off_path == "leave":
                return UserReply(text="", leaving=True)
        memory.said += 1
        last = memory.said == len(record.answers)
        return UserReply(text=record.answers[place], leaving=last and record.leaves)

    def snapshot(self) -> Mapping[str, Any]:
        return asdict(self._memory)

    def provenance(self) -> Mapping[str, Any]:
        """Whose words these are, and where the agent left their path: JSON values."""
        memory = self._memory
        return {
            "name": RecordedUser.name,
            "log": self._config.log,
            "record": memory.record,
            "left_at": memory.left_at,
            "spent": memory.spent,
        }


def likeness(one: str, other: str) -> float:
    """Share of words that two texts have in common in the same order, in [0, 1]; 1 for two texts without words."""
    first, second = words_of(one), words_of(other)
    if not first and not second:
        return 1.0
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()


def _read(log: str) -> list[Trajectory]:
    if log_kind(log) == "slea.scored_trajectories":
        return [one.trajectory for one in read_scored(log)]
    return list(read_trajectories(log))


def _record(trajectory: Trajectory) -> _Record | None:
    """The dialogue as its user knew it; None for one that broke or has no user."""
    if trajectory.failed or not trajectory.turns:
        return None
    heard = [_heard_by_agent(turn.context) for turn in trajectory.turns]
    opening = heard[0]
    if opening is None:
        return None
    last = trajectory.provenance.get("last_messages", ())
    after = [str(one.get("content", "")) for one in last if isinstance(one, Mapping) and one.get("role") == "user"]
    after += [message.content for message in trajectory.closing if message.role == "user"]
    changed = trajectory.provenance.get("heard", {})
    following: list[str | None] = [*heard[1:], after[-1] if after else None]
    pairs = [
        (str(changed.get(str(turn.index), without_thoughts(turn.text))), answer)
        for turn, answer in zip(trajectory.turns, following, strict=True)
        if answer is not None
    ]
    return _Record(
        id=trajectory.id,
        opening=opening,
        replies=tuple(reply for reply, _ in pairs),
        answers=tuple(answer for _, answer in pairs),
        leaves=trajectory.termination == "user_left",
    )


def _heard_by_agent(context: Sequence[Message]) -> str | None:
    said = [message.content for message in context if message.role == "user"]
    return "\n".join(said) if said else None
