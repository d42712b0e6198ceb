"""A reviewer's word on a dialogue: a reward that takes the place of the one that was paid, with who said so and why."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slea_llm.errors import ConfigError, nearest
from slea_llm.types import OVERRIDE, ScoredTrajectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """`reward` takes the place of what turn `turn` earned; None: the last turn."""

    trajectory: str
    reward: float
    reviewer: str
    reason: str
    turn: int | None = None


def parse_override(value: Any) -> Override:
    """Raises ConfigError that says what is missing, unknown or of the wrong kind."""
    known = {field.name for field in dataclasses.fields(Override)}
    if not isinstance(value, dict):
        raise ConfigError(f"an override is an object with {', '.join(sorted(known))}, not {value!r}")
    for key in value:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}; known: {', '.join(sorted(known))}{nearest(key, known)}")
    for key in ("trajectory", "reviewer", "reason"):
        if not isinstance(value.get(key), str) or not value[key].strip():
            raise ConfigError(f"{key} is {value.get(key)!r}; it must say something, or nobody can look it up later")
    reward = value.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ConfigError(f"reward {reward!r} is not a finite number")
    turn = value.get("turn")
    if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or turn < 0):
        raise ConfigError(f"turn {turn!r} is not the number of a turn, counted from 0")
    return Override(**{**value, "reward": float(reward)})


def overridden(scored: ScoredTrajectory, override: Override, *, policy_version: int) -> ScoredTrajectory:
    """The dialogue with that reward; its provenance says what it was, who changed it, why, and under which policy.

    Raises ConfigError for a dialogue that broke, and for a turn that it lacks or that has no token to carry the reward.
    """
    trajectory = scored.trajectory
    if trajectory.failed or trajectory.excluded:
        why = f"broke ({trajectory.error})" if trajectory.failed else "was excluded by the referee"
        raise ConfigError(f"trajectory {trajectory.id} {why}; it is in no update, so nothing changes")
    index = len(trajectory.turns) - 1 if override.turn is None else override.turn
    if not 0 <= index < len(trajectory.turns) or not trajectory.reply_ids(trajectory.turns[index]):
        raise ConfigError(
            f"trajectory {trajectory.id} has {len(trajectory.turns)} turns; turn {index} is not among those that were "
            "sampled"
        )
    turns = list(trajectory.turns)
    was = turns[index].reward
    turns[index] = dataclasses.replace(turns[index], reward=override.reward)
    note = {
        "reviewer": override.reviewer,
        "reason": override.reason,
        "turn": index,
        "reward": override.reward,
        "was": was,
        "policy_version": policy_version,
    }
    earlier = list(trajectory.provenance.get(OVERRIDE, ()))
    changed = dataclasses.replace(
        trajectory,
        turns=tuple(turns),
        outcome=sum(turn.reward for turn in turns),
        provenance={**trajectory.provenance, OVERRIDE: [*earlier, note]},
    )
    return dataclasses.replace(scored, trajectory=changed)


class Overrides:
    """The lines that reviewers add to a file while a run goes on, each taken in once.

    The first rank reads and `gather` hands its lines to all, so that no rank sees another file than the others. A line
    that cannot be used is reported and counted, and the run goes on.
    """

    def __init__(
        self,
        path: Path,
        *,
        main: bool,
        gather: Callable[[list[Any]], list[Any]],
        report: Callable[[str], None],
    ) -> None:
        self._path, self._main, self._gather = path, main, gather
        self.report = report
        self._read = 0
        self.refused = 0

    def fresh(self) -> list[Override]:
        """What was added since the last call, the same on every rank; the first counts lines of no use in `refused`."""
        self.refused = 0
        found: list[Override] = []
        for line in self._gather(self._lines()):
            self._read = max(self._read, line["number"])
            try:
                found.append(parse_override(line["value"]))
            except ConfigError as error:
                self.refused += self._main
                self._say(f"{self._path}, line {line['number']} is not used: {error}")
        return found

    def state(self) -> Mapping[str, Any]:
        return {"read": self._read}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._read = int(state["read"])

    def _lines(self) -> list[Any]:
        """New lines, those that are not JSON as text; one without its end is still being written. First rank only."""
        if not self._main or not self._path.exists():
            return []
        lines: list[Any] = []
        for number, raw in enumerate(self._path.read_bytes().splitlines(keepends=True), start=1):
            if number <= self._read or not raw.endswith(b"\n") or raw.isspace():
                continue
            text = raw.decode("utf-8", errors="replace")
            try:
                lines.append({"number": number, "value": json.loads(text)})
            except ValueError:
                lines.append({"number": number, "value": text.strip()})
        return lines

    def _say(self, text: str) -> None:
        if self._main:
            self.report(text)
