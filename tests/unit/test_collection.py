"""Scoring beside play: the same records in the same order, a bounded queue, and errors that end both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from slea_llm.collection import OnlineCollector, Rank
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import EvaluatorError
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.settings import RolloutSettings
from slea_llm.storage import ScoredLog, read_scored
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, Task, Trajectory
from slea_llm.users.scripted import ScriptedUser

if TYPE_CHECKING:
    from slea_llm.rollout import Rollout

ENVIRONMENT = OrderTaking(OrderTaking.Config())
WAIT = 60.0


class Scripted:
    """Plays with the scripted expert in place of a policy; notes the episodes of each batch."""

    def __init__(self) -> None:
        self.batches: list[range] = []
        self.played = threading.Semaphore(0)

    def run(self, tasks: Sequence[Task], *, first_episode: int, policy_version: int) -> list[Trajectory]:
        del policy_version
        self.batches.append(range(first_episode, first_episode + len(tasks)))
        user = ScriptedUser(ScriptedUser.Config())
        found = [
            play(ENVIRONMENT, user, ENVIRONMENT.expert(task), task, seed=task.seed, max_turns=12) for task in tasks
        ]
        self.played.release()
        return found


class Counting:
    """An evaluator whose score is the number of dialogues it has seen before, and which may wait or break."""

    name: ClassVar[str] = "counting"
    needs: ClassVar[frozenset[str]] = frozenset()
    version = "1"

    def __init__(self, *, breaks_at: int = -1) -> None:
        self.seen = 0
        self.threads: set[int] = set()
        self.go = threading.Event()
        self.go.set()
        self._breaks_at = breaks_at

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        del trajectory
        assert self.go.wait(WAIT)
        if self.seen == self._breaks_at:
            raise AssertionError("a fault of the code itself")
        self.threads.add(threading.get_ident())
        said = tuple(
            ScoredStep(turn=s.turn, step=s.index, evaluator=self.name, version="1", score=float(self.seen))
            for s in steps
        )
        self.seen += 1
        return said


def collect(folder: Path, judge: Counting, rollout: Any = None, **settings: Any) -> list[ScoredTrajectory]:
    with ScoredLog(folder / "log.jsonl") as log:
        collector = OnlineCollector(
            environment=ENVIRONMENT,
            rollout=cast("Rollout", rollout or Scripted()),
            scorer=Scorer(TaggedParser(TaggedParser.Config()), [judge]),
            settings=RolloutSettings(episodes=7, tasks=7, **settings),
            seed=0,
            log=log,
            rank=Rank(),
        )
        scored = list(collector.collect(iteration=0, policy_version=0))
    assert list(read_scored(folder / "log.jsonl")) == scored
    return scored


def steady(scored: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """Without the seconds that play took."""
    return [replace(one, trajectory=replace(one.trajectory, provenance={})) for one in scored]


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_a_second_thread_gives_the_same_records_in_the_same_order(tmp_path: Path, ahead: int) -> None:
    plain, beside = Counting(), Counting()
    one, two = Scripted(), Scripted()
    wanted = collect(tmp_path / "plain", plain, one, scoring_batch=3)
    got = collect(tmp_path / "beside", beside, two, scoring_batch=3, scoring_ahead=ahead)
    whole = collect(tmp_path / "whole", Counting())
    assert steady(got) == steady(wanted) == steady(whole)
    assert [score.scores[0].score for score in got] == [0, 1, 2, 3, 4, 5, 6]
    assert one.batches == two.batches == [range(3), range(3, 6), range(6, 7)]
    assert plain.threads == {threading.get_ident()}
    assert len(beside.threads) == 1
    assert beside.threads != plain.threads


def test_no_more_batches_wait_than_were_asked_for(tmp_path: Path) -> None:
    judge, rollout = Counting(), Scripted()
    judge.go.clear()
    done: list[Any] = []
    runs = threading.Thread(
        target=lambda: done.append(collect(tmp_path, judge, rollout, scoring_batch=1, scoring_ahead=2))
    )
    runs.start()
    for _ in range(3):  # one is being scored, one waits, and one more was played meanwhile
        assert rollout.played.acquire(timeout=WAIT)
    assert not rollout.played.acquire(timeout=0.2)
    judge.go.set()
    runs.join(WAIT)
    assert len(done[0]) == 7


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_fault_in_the_scorer_ends_the_round(tmp_path: Path, ahead: int) -> None:
    with pytest.raises(AssertionError, match="a fault of the code itself"):
        collect(tmp_path, Counting(breaks_at=2), scoring_batch=1, scoring_ahead=ahead)
    assert len(list(read_scored(tmp_path / "log.jsonl"))) <= 2


def test_a_fault_in_play_ends_the_round(tmp_path: Path) -> None:
    class Breaking(Scripted):
        def run(self, tasks: Sequence[Task], *, first_episode: int, policy_version: int) -> list[Trajectory]:
            if first_episode == 4:
                raise EvaluatorError("the sampler broke")
            return super().run(tasks, first_episode=first_episode, policy_version=policy_version)

    with pytest.raises(EvaluatorError, match="the sampler broke"):
        collect(tmp_path, Counting(), Breaking(), scoring_batch=2, scoring_ahead=1)


def test_a_queue_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="scoring_ahead 2 is out of range"):
        RolloutSettings(scoring_ahead=2)
    with pytest.raises(ValueError, match="scoring_batch -1"):
        RolloutSettings(scoring_batch=-1)
