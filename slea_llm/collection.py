"""Fresh experience for the trainer: the next tasks, their dialogues, their scores, all of it logged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from slea_llm.adjudication import Playing
from slea_llm.distributed import shard
from slea_llm.errors import CheckpointError
from slea_llm.interfaces import Environment
from slea_llm.questions import Usage
from slea_llm.rollout import FailedEpisodesError
from slea_llm.scoring import Scorer
from slea_llm.settings import RolloutSettings
from slea_llm.task_order import TaskOrder
from slea_llm.types import ScoredTrajectory, Task, Trajectory


class Log(Protocol):
    """Where scored dialogues are kept; it can go back to an earlier `position`."""

    @property
    def position(self) -> int: ...

    def append(self, *scored: ScoredTrajectory) -> None: ...

    def rewind(self, position: int) -> None: ...


class Observer(Protocol):
    """Learns from the dialogues of the run (a refitted evaluator); its state is kept with the collector's."""

    def observe(self, iteration: int, scored: Sequence[ScoredTrajectory]) -> None:
        """Every rank calls it with its own dialogues, also when it has none."""
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """This process among the processes of a run."""

    index: int = 0
    world_size: int = 1


class OnlineCollector:
    """Plays the next tasks with the present policy, scores every step and logs the result.

    Each rank plays a consecutive piece of the groups, so that the dialogues of all ranks in rank order are those of one
    process. The state is the number of groups drawn and the position in the log, so that a resumed run goes on with the
    next task and logs no dialogue twice.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        rollout: Playing,
        scorer: Scorer,
        settings: RolloutSettings,
        seed: int,
        log: Log,
        rank: Rank,
        before: Callable[[int, int], None] = lambda _iteration, _version: None,
        observers: Mapping[str, Observer] | None = None,
    ) -> None:
        """`before(iteration, policy_version)` runs ahead of every round, for evaluations between updates.

        Every observer is shown the dialogues of a round after they are scored, so that it changes the next round's.
        """
        self._observers = dict(observers or {})
        self._environment, self._rollout, self._scorer = environment, rollout, scorer
        self._settings, self._log, self._rank = settings, log, rank
        self._order = TaskOrder(tasks=settings.tasks, seed=seed)
        self._before = before
        self._position = 0
        self._counted = scorer.usages()

    def state(self) -> Mapping[str, Any]:
        state: dict[str, Any] = {"groups_drawn": self._position, "log_position": self._log.position}
        if remembered := self._scorer.state():
            state["evaluators"] = remembered
        if self._observers:
            state["observers"] = {name: dict(one.state()) for name, one in self._observers.items()}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self._position = int(state["groups_drawn"])
        self._log.rewind(int(state["log_position"]))
        self._scorer.restore(state.get("evaluators", {}))
        for name, one in self._observers.items():
            if name not in state.get("observers", {}):
                raise CheckpointError(
                    f"the checkpoint holds nothing of {name!r}, which this recipe refits; start afresh"
                )
            one.restore(state["observers"][name])

    def spent(self) -> dict[str, Usage]:
        """What the chat models that score have cost this rank since it was last asked, by component."""
        now = self._scorer.usages()
        spent = {name: usage.since(self._counted[name]) for name, usage in now.items()}
        self._counted = now
        return spent

    def collect(self, *, iteration: int, policy_version: int) -> Sequence[ScoredTrajectory]:
        """This rank's dialogues of one iteration, failed and excluded ones included."""
        self._before(iteration, policy_version)
        size = self._settings.group_size
        groups = self._settings.episodes // size
        own = shard(groups, rank=self._rank.index, world_size=self._rank.world_size)
        seeds = self._order.take(self._position, groups)[own.start : own.stop]
        first_episode = (self._position + own.start) * size
        self._position += groups
        tasks = [task for task in map(self._environment.task, seeds) for _ in range(size)]
        scored: list[ScoredTrajectory] = []
        for part in self._scored(tasks, first_episode, policy_version):
            self._log.append(*part)
            scored += part
        telling = [one for one in scored if not one.trajectory.excluded]
        for observer in self._observers.values():
            observer.observe(iteration, telling)
        return scored

    def _scored(
        self, tasks: Sequence[Task], first_episode: int, policy_version: int
    ) -> Iterator[list[ScoredTrajectory]]:
        """The scored dialogues of these tasks, a batch at a time and in order.

        One thread does all the scoring, a batch at a time, so that evaluators see what they would see without it; this
        thread plays on meanwhile, until `scoring_ahead` batches wait. An error of either ends both.
        """
        size, ahead = self._settings.scoring_batch or max(len(tasks), 1), self._settings.scoring_ahead
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring") as pool:
            waiting: deque[Future[list[ScoredTrajectory]]] = deque()
            for start in range(0, len(tasks), size):
                while len(waiting) > ahead:
                    yield waiting.popleft().result()
                played = self._play(tasks[start : start + size], first_episode + start, policy_version)
                if ahead:
                    waiting.append(pool.submit(self._score, played))
                else:
                    yield self._score(played)
            for done in waiting:
                yield done.result()

    def _play(self, tasks: Sequence[Task], first_episode: int, policy_version: int) -> list[Trajectory]:
        try:
            return self._rollout.run(tasks, first_episode=first_episode, policy_version=policy_version)
        except FailedEpisodesError as error:
            return list(error.trajectories)  # logged here; the trainer judges the share over all ranks

    def _score(self, played: Sequence[Trajectory]) -> list[ScoredTrajectory]:
        return list(self._scorer.score_many(played))


def panel_player(
    rollout: Playing,
    *,
    rank: Rank,
    gather: Callable[[list[Trajectory]], list[Trajectory]],
    policy_version: int,
) -> Callable[[Sequence[Task]], list[Trajectory]]:
    """A function that plays a panel: every rank its piece, the dialogues of all ranks in task order on each."""

    def play_panel(tasks: Sequence[Task]) -> list[Trajectory]:
        own = shard(len(tasks), rank=rank.index, world_size=rank.world_size)
        played = rollout.run(tasks[own.start : own.stop], first_episode=own.start, policy_version=policy_version)
        return gather(played)

    return play_panel
