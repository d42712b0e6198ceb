"""Replay: earlier dialogues in later batches, drawn by priority, with the weights that undo it.

What is stored is what was sampled: tokens, behaviour log-probabilities, raw rewards and scores with the versions of who
gave them. Values and advantages are never stored: the trainer makes them anew, with today's critic, when a dialogue is
drawn. Two weights keep it honest. The loss's own, min(p_proximal / p_behaviour, C), mends that an older policy sampled
(Hilton et al. 2022); the one made here, (N P)^-beta, that dialogues of high priority come more often (Schaul et al.
2016).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slea_llm.demonstrations import is_tokenised
from slea_llm.errors import CheckpointError, ConfigError, CreditError
from slea_llm.interfaces import Reducer
from slea_llm.overrides import Override, Overrides, overridden
from slea_llm.segments import Location, Segments, Stored
from slea_llm.settings import ReplaySettings
from slea_llm.storage import Place
from slea_llm.types import AugmentedExperience, ScoredTrajectory

Floats = NDArray[np.float64]
Priority = Callable[[AugmentedExperience, float], float]
"""Experience and share of the training done -> priority, above 0."""

POWER = 0.6
"""Of the priorities: a dialogue is drawn with the chance p^0.6 / sum of p^0.6 (Schaul et al. 2016)."""
BETA = 0.4
"""Of the weights (N P)^-beta at the start; it rises to 1 at the end of the training."""
ERROR_FLOOR = 0.01
"""Added to every error, so that nothing has probability 0 (Schaul et al. 2016)."""
SEGMENTS = 8
"""Files over which the capacity is spread: at most an eighth more than it lies on the disk."""

_COLUMNS = np.dtype(
    [
        ("segment", np.int64),
        ("offset", np.int64),
        ("length", np.int64),
        ("entered", np.int64),
        ("group", np.int64),
        ("priority", np.float64),
        ("draws", np.int64),
        ("steps", np.int64),
    ]
)


def probabilities(priorities: Floats, power: float) -> Floats:
    """P_i = p_i^power / sum of p^power; uniform at power 0."""
    scaled = np.asarray(priorities, np.float64) ** power
    return scaled / scaled.sum()  # type: ignore[no-any-return]


def importance(chances: Floats, beta: float) -> Floats:
    """(N P_i)^-beta over its largest; the largest belongs to the least likely of all that could be drawn."""
    weights = (len(chances) * chances) ** -beta
    return weights / weights.max()  # type: ignore[no-any-return]


def beta(progress: float) -> float:
    """Exponent of the weights when this share of the training is done: from 0.4 in a straight line to 1."""
    return BETA + (1.0 - BETA) * progress


class ReplayBuffer:
    """This rank's dialogues of the last policy versions, on disk, with an index of a few numbers each in memory.

    Dialogues of one task and round are drawn together, so that a baseline over a group stays whole. `checkpoints` is
    how many of them a run keeps: a file is removed when none of them counts on it any more. `priority` says from its
    credit how much a dialogue is worth another visit. `played` finds a dialogue of this rank that has left the buffer,
    for a reviewer who comes late.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        folder: Path,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        checkpoints: int = 2,
        priority: Priority | None = None,
        overrides: Overrides | None = None,
        played: Callable[[str], ScoredTrajectory | None] = lambda _id: None,
    ) -> None:
        self.settings = settings
        self._capacity = max(1, settings.capacity // world_size)
        self._seed, self._rank, self._checkpoints = seed, rank, checkpoints
        self._segments = Segments(folder, size=max(1, -(-self._capacity // SEGMENTS)))
        self._ids: list[str] = []
        self._table = np.zeros(0, _COLUMNS)
        self._groups = 0
        self._held: list[list[int]] = []
        self._weights: dict[str, float] = {}
        self._progress = 0.0
        if priority is None and settings.priority not in PRIORITIES:
            raise ConfigError(
                f"replay.priority {settings.priority!r} needs weights in use by the sampler; without any: "
                f"{', '.join(PRIORITIES)}"
            )
        self._priority = priority or PRIORITIES[settings.priority]
        self._overrides, self._played = overrides, played

    def __len__(self) -> int:
        """Dialogues that may be drawn, or could be if they were younger."""
        return len(self._ids)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the dialogues, the oldest first."""
        return tuple(self._ids)

    @property
    def priorities(self) -> tuple[float, ...]:
        """Of the dialogues in the order of `ids`."""
        return tuple(self._table["priority"].tolist())

    @property
    def steps(self) -> int:
        return int(self._table["steps"].sum())

    @property
    def bytes_on_disk(self) -> int:
        return self._segments.bytes

    def close(self) -> None:
        self._segments.close()

    def mix(
        self,
        fresh: Sequence[ScoredTrajectory],
        *,
        iteration: int,
        policy_version: int,
        progress: float,
        reducer: Reducer,
    ) -> tuple[list[ScoredTrajectory], dict[str, float]]:
        """The fresh dialogues, and earlier ones behind them that make up at most `share` of the whole.

        Fresh ones are on the disk before this returns, and can be drawn from the next iteration on. `progress` in
        [0, 1] is the share of training done. Raises StorageError when they cannot be written or a drawn one is damaged.
        """
        self._progress = progress
        changed, refused = self._override(policy_version, reducer)
        expired = self._keep(policy_version - self._table["entered"] <= self.settings.max_age)
        limit = int(self.settings.share / (1.0 - self.settings.share) * len(fresh) + 1e-9)
        drawn = self.draw(limit, iteration=iteration, progress=progress)
        self.add(fresh)
        evicted = self._evict()
        ages = [policy_version - one.trajectory.policy_version for one in drawn]
        today = fresh[0].evaluator_versions if fresh else {}
        stale = sum(one.evaluator_versions != today for one in drawn)
        names = ("size", "bytes", "drawn", "expired", "evicted")
        own = (len(self), self.bytes_on_disk, len(drawn), expired, evicted, len(fresh), sum(ages), stale)
        *counts, played, age, older = reducer.sum([float(number) for number in own])
        (oldest,) = reducer.max([float(max(ages, default=0))])
        metrics = {f"replay/{name}": count for name, count in zip(names, counts, strict=True)}
        metrics |= {"replay/beta": beta(progress), "replay/overrides": changed, "replay/overrides_refused": refused}
        count = metrics["replay/drawn"]
        metrics |= {
            "replay/share": count / max(count + played, 1.0),
            "replay/age_mean": age / max(count, 1.0),
            "replay/age_max": oldest,
            "replay/stale_scores": older / max(count, 1.0),
        }
        return [*fresh, *drawn], metrics

    def weigh(
        self, experiences: Sequence[AugmentedExperience], *, reducer: Reducer
    ) -> tuple[list[AugmentedExperience], dict[str, float]]:
        """The experiences, those drawn by the last `mix` with their importance weight in `weights`.

        What credit says of the critic's error becomes the priority of every dialogue that is still here.
        """
        rows = {name: row for row, name in enumerate(self._ids)}
        weighed = []
        for one in experiences:
            name = one.scored.trajectory.id
            if name in rows:
                priority = self._priority(one, self._progress)
                if not 0.0 < priority < np.inf:
                    raise CreditError(f"trajectory {name} has priority {priority}; it must be above 0 and finite")
                self._table["priority"][rows[name]] = priority
            weight = self._weights.get(name)
            weighed.append(one if weight is None else replace(one, weights=one.weights * weight))
        weights = np.array(list(self._weights.values()))
        total, squares, count = reducer.sum(
            [float(weights.sum()), float(np.square(weights).sum()), float(len(weights))]
        )
        if not count:
            return weighed, {}
        return weighed, {"replay/weight": total / count, "replay/ess": total**2 / (count * squares)}

    def add(self, scored: Sequence[ScoredTrajectory]) -> None:
        """Store these; when this returns they are on the disk. Those of one task are a group.

        A dialogue whose id is here already takes the place of the older one. Raises ValueError for a dialogue without
        tokens that were sampled, which has no log-probability to weigh it by.
        """
        groups: dict[str, int] = {}
        stored = []
        for one in scored:
            trajectory = one.trajectory
            if trajectory.failed or not trajectory.sampled_tokens or is_tokenised(trajectory):
                raise ValueError(
                    f"trajectory {trajectory.id} has no tokens that were sampled; such a record can be scored and "
                    "imitated, never replayed"
                )
            task = json.dumps(trajectory.task, sort_keys=True, default=str) if trajectory.task else trajectory.id
            group = groups.setdefault(task, self._groups + len(groups))
            stored.append(Stored(scored=one, group=group, entered=trajectory.policy_version))
        self._groups += len(groups)
        self._index(zip(self._segments.append(stored), stored, strict=True))

    def recover(self) -> None:
        """Take in all that lies in the folder, as after a kill: every dialogue that `add` reported as stored."""
        self._ids, self._table = [], np.zeros(0, _COLUMNS)
        self._index(list(self._segments.recover()))
        self._groups = int(self._table["group"].max(initial=-1)) + 1
        self._evict()

    def read(self, name: str) -> ScoredTrajectory:
        """The dialogue of that id. Raises KeyError when it is not here."""
        if name not in self._ids:
            raise KeyError(f"no dialogue {name!r} in the buffer")
        return self._read(self._ids.index(name)).scored

    def state(self) -> Mapping[str, Any]:
        """The index, for a checkpoint: files that it counts on stay until as many later checkpoints were written."""
        live = sorted(set(self._table["segment"].tolist()))
        self._held = [*self._held[-self._checkpoints :], live]
        return {
            "settings": self._settings_that_bind(),
            "ids": list(self._ids),
            "columns": {name: self._table[name].tolist() for name in _COLUMNS.names or ()},
            "groups": self._groups,
            "held": self._held,
            "files": dict(self._segments.state()),
            "overrides": dict(self._overrides.state()) if self._overrides else {"read": 0},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state. Raises CheckpointError when a file is gone or the buffer was set up otherwise."""
        if (own := self._settings_that_bind()) != state["settings"]:
            odd = [f"{key}: {state['settings'].get(key)!r} there, {own[key]!r} here" for key in own
                   if own[key] != state["settings"].get(key)]  # fmt: skip
            raise CheckpointError(f"the buffer of the checkpoint has other settings ({'; '.join(odd)})")
        self._segments.restore(state["files"])
        self._ids, self._groups = list(state["ids"]), int(state["groups"])
        self._held = [list(map(int, row)) for row in state["held"]]
        self._table = np.zeros(len(self._ids), _COLUMNS)
        for name, column in state["columns"].items():
            self._table[name] = column
        if self._overrides:
            self._overrides.restore(state["overrides"])

    def _settings_that_bind(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self.settings).items() if key != "overrides"}

    def _index(self, found: Iterable[tuple[Location, Stored]]) -> None:
        """New rows behind the others, with the highest priority there is: each is visited once."""
        rows, names = [], []
        priority = float(self._table["priority"].max(initial=0.0)) or 1.0
        for (segment, place), stored in found:
            trajectory = stored.scored.trajectory
            names.append(trajectory.id)
            rows.append((segment, place.offset, place.length, stored.entered, stored.group, priority, 0,
                         len(stored.scored.steps)))  # fmt: skip
        last = {name: number for number, name in enumerate([*self._ids, *names])}
        table = np.concatenate([self._table, np.array(rows, _COLUMNS)])
        kept = sorted(last.values())
        self._ids, self._table = [[*self._ids, *names][number] for number in kept], table[kept]

    def _read(self, row: int) -> Stored:
        segment, offset, length = (int(self._table[name][row]) for name in ("segment", "offset", "length"))
        return self._segments.read(Location(segment, Place(offset, length)))

    def _keep(self, alive: NDArray[np.bool_]) -> int:
        """Forget the other rows; how many they were."""
        if gone := int((~alive).sum()):
            self._ids = [name for name, here in zip(self._ids, alive.tolist(), strict=True) if here]
            self._table = self._table[alive]
        return gone

    def _evict(self) -> int:
        """Make room by whole groups, the oldest first, and give back the disk of files that nothing counts on."""
        gone = 0
        if (over := len(self) - self._capacity) > 0:
            leaving = set(self._table["group"][:over].tolist())
            gone = self._keep(~np.isin(self._table["group"], list(leaving)))
        wanted = {*self._table["segment"].tolist(), *(number for row in self._held for number in row)}
        self._segments.drop(lambda segment: segment not in wanted)
        return gone

    def draw(self, count: int, *, iteration: int, progress: float) -> list[ScoredTrajectory]:
        """At most `count` dialogues, by groups, with replacement; one drawn twice comes once, with twice the weight."""
        self._weights = {}
        groups, member, sizes = np.unique(self._table["group"], return_inverse=True, return_counts=True)
        draws = count // int(sizes.max(initial=1))
        if not len(groups) or not draws:
            return []
        chances = probabilities(np.bincount(member, self._table["priority"]) / sizes, POWER)
        weights = importance(chances, beta(progress))
        rng = np.random.default_rng([self._seed, self._rank, iteration])
        picked, times = np.unique(rng.choice(len(groups), size=draws, p=chances), return_counts=True)
        drawn = []
        for number, often in zip(picked.tolist(), times.tolist(), strict=True):
            for row in np.flatnonzero(member == number).tolist():
                self._weights[self._ids[row]] = float(weights[number]) * often
                self._table["draws"][row] += often
                drawn.append(self._read(row).scored)
        if self.settings.max_draws:
            self._keep(self._table["draws"] < self.settings.max_draws)
        return drawn

    def _override(self, policy_version: int, reducer: Reducer) -> tuple[float, float]:
        """Put what reviewers said since the last time into the buffer; how many, and how many lines were of no use."""
        if self._overrides is None:
            return 0.0, 0.0
        asked, report = self._overrides.fresh(), self._overrides.report
        found = [self._apply(override, policy_version, report) for override in asked]
        own = float(self._overrides.refused)
        *applied, refused = reducer.sum([*map(float, found), own])
        for override, ranks in zip(asked, applied, strict=True):
            if not ranks and self._rank == 0:
                report(f"override of {override.trajectory!r} is not used: no such dialogue can be changed")
        return float(sum(ranks > 0 for ranks in applied)), refused + sum(not ranks for ranks in applied)

    def _apply(self, override: Override, policy_version: int, report: Callable[[str], None]) -> bool:
        """Change the dialogue if it is of this rank. Its age, and that of its group, counts anew from today."""
        name = override.trajectory
        if name in self._ids:
            row = self._ids.index(name)
            before, group = self._read(row).scored, int(self._table["group"][row])
        else:
            known = self._played(name)
            if known is None:
                return False
            before, group = known, self._groups
            self._groups += 1
        try:
            after = overridden(before, override, policy_version=policy_version)
        except ConfigError as error:
            report(f"override of {name!r} is not used: {error}")
            return False
        self._table["entered"][self._table["group"] == group] = policy_version
        stored = [Stored(scored=after, group=group, entered=policy_version)]
        self._index(zip(self._segments.append(stored), stored, strict=True))
        return True


def error_priority(experience: AugmentedExperience, progress: float) -> float:
    """Mean absolute error of the critic where it is read, summed over streams, and a little more."""
    del progress
    read = experience.value_mask
    errors = [
        float(np.abs(target - experience.stats.values[name][:-1])[read].mean()) if read.any() else 0.0
        for name, target in experience.returns.items()
    ]
    return sum(errors) + ERROR_FLOOR


def success_priority(experience: AugmentedExperience, progress: float) -> float:
    """A success comes twice as often as any other dialogue, before the power."""
    del progress
    return 2.0 if experience.scored.trajectory.counts_as_success else 1.0


def uniform_priority(experience: AugmentedExperience, progress: float) -> float:
    del experience, progress
    return 1.0


PRIORITIES: Mapping[str, Priority] = MappingProxyType(
    {"error": error_priority, "success": success_priority, "uniform": uniform_priority}
)
