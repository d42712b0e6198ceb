"""Refits of a learnt evaluator inside a run: when, on what, and what is left in place when one is not possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.collection import OnlineCollector, Rank
from slea_llm.cotraining import Cotraining, balanced
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import CheckpointError, ConfigError
from slea_llm.evaluators.reward_model import RewardModel
from slea_llm.evaluators.reward_model_card import CARD, Card
from slea_llm.evaluators.reward_model_words import UNFITTED
from slea_llm.fitting.training import TrainingSettings
from slea_llm.rollout import Rollout, play
from slea_llm.scoring import Scorer
from slea_llm.settings import RolloutSettings
from slea_llm.storage import ScoredLog
from slea_llm.types import ScoredTrajectory, Task, Trajectory
from slea_llm.users.scripted import ScriptedUser
from tests.support.judged import GOOD, PARSER, TINY, dialogue, drawn, of_replies

pytestmark = pytest.mark.integration

QUICK = dataclasses.replace(TINY, training=TrainingSettings(epochs=2))


def played(count: int, *, seed: int = 0, model: RewardModel | None = None) -> list[ScoredTrajectory]:
    rng = drawn(seed)
    scorer = Scorer(PARSER, [] if model is None else [model])
    return list(scorer.score_many(dataclasses.replace(dialogue(n, rng), id=f"{seed}-{n}") for n in range(count)))


class Run:
    """A model that is refitted every two iterations in a folder, and what was said."""

    def __init__(self, folder: Path, **changes: int) -> None:
        options = {"refresh_every": 2, "window": 128, **changes}
        self.model = RewardModel(RewardModel.Config(encoder="hashing", **options))  # type: ignore[arg-type]
        self.said: list[str] = []
        self.cotraining = Cotraining(
            self.model,
            folder=folder,
            parser={"name": "tagged"},
            main=True,
            gather=list,
            seed=0,
            report=self.said.append,
            settings=QUICK,
        )


def test_a_refit_comes_when_it_is_due_and_changes_the_next_scores(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = played(60, model=run.model)
    assert {one.shut for one in first} == {("reward_model",)}
    run.cotraining.observe(0, first)
    assert run.model.version == UNFITTED
    assert not run.said
    run.cotraining.observe(1, played(60, seed=1, model=run.model))
    version = run.model.version
    assert version != UNFITTED
    assert Card.read(tmp_path / "iteration-2" / CARD).data["parser"] == {"name": "tagged"}
    assert "refitted on" in run.said[-1]
    assert "after iteration 2: reward_model: gate" in run.said[-1]
    run.cotraining.observe(2, played(60, seed=2, model=run.model))
    assert run.model.version == version  # a frozen copy in between
    after = played(4, seed=3, model=run.model)
    assert {word.version for one in after for word in one.scores} == {version}
    assert {one.shut for one in after} == {() if run.model.gate.open else ("reward_model",)}
    run.cotraining.observe(3, played(60, seed=4, model=run.model))
    assert run.model.version not in (UNFITTED, version)


def test_too_few_of_one_kind_leave_the_model_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, refresh_every=1)
    run.cotraining.observe(0, played(20))
    assert run.model.version == UNFITTED
    assert "not refitted after iteration 1" in run.said[-1]
    assert "32 of each are needed" in run.said[-1]


def test_a_resumed_run_has_the_same_model_and_window(tmp_path: Path) -> None:
    run = Run(tmp_path, refresh_every=1)
    run.cotraining.observe(0, played(100))
    state = run.cotraining.state()
    other = Run(tmp_path, refresh_every=1)
    other.cotraining.restore(state)
    assert other.model.version == run.model.version != UNFITTED
    assert other.cotraining.state() == state
    for one in (run, other):
        one.cotraining.observe(1, played(40, seed=5))
    assert other.model.version == run.model.version


def test_dialogues_without_an_outcome_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    cut = dataclasses.replace(of_replies("cut", GOOD), termination="max_turns")
    run.cotraining.observe(0, list(Scorer(PARSER, []).score_many([cut, of_replies("whole", GOOD)])))
    assert [one["trajectory"]["id"] for one in run.cotraining.state()["window"]] == ["whole"]


def test_only_a_model_that_is_to_be_refitted_is_taken(tmp_path: Path) -> None:
    model = RewardModel(RewardModel.Config())
    with pytest.raises(ConfigError, match="refresh_every 0"):
        Cotraining(model, folder=tmp_path, parser={}, main=True, gather=list, seed=0, report=print)
    for changes in ({"refresh_every": -1}, {"window": 63}):
        with pytest.raises(ConfigError, match="must be"):
            RewardModel.Config(**changes)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_balanced_takes_the_newest_of_both_kinds(outcomes: list[bool], most: int) -> None:
    scorer = Scorer(PARSER, [])
    made = [scorer.score(of_replies(str(place), GOOD[:1], success=success)) for place, success in enumerate(outcomes)]
    kept = balanced(made, most)
    good = [one for one in kept if one.trajectory.success]
    assert 2 * len(good) == len(kept) <= most
    places = [int(one.trajectory.id) for one in kept]
    assert places == sorted(places)
    for success in (True, False):
        every = [place for place, one in enumerate(outcomes) if one is success]
        mine = [place for place in places if outcomes[place] is success]
        assert mine == every[len(every) - len(mine) :]


class Noted:
    """An observer that notes what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def observe(self, iteration: int, scored: Sequence[ScoredTrajectory]) -> None:
        self.seen.append((iteration, len(scored)))

    def state(self) -> Mapping[str, Any]:
        return {"seen": [list(one) for one in self.seen]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seen = [tuple(one) for one in state["seen"]]


class Scripted:
    """Plays with the scripted expert in place of a policy; what a collector asks of a rollout."""

    def __init__(self, environment: OrderTaking) -> None:
        self.environment = environment

    def run(self, tasks: Sequence[Task], **_: int) -> list[Trajectory]:
        user = ScriptedUser(ScriptedUser.Config())
        return [
            play(self.environment, user, self.environment.expert(task), task, seed=task.seed, max_turns=12)
            for task in tasks
        ]


def collector(log: ScoredLog, observers: Mapping[str, Noted]) -> OnlineCollector:
    environment = OrderTaking(OrderTaking.Config())
    return OnlineCollector(
        environment=environment,
        rollout=cast("Rollout", Scripted(environment)),
        scorer=Scorer(PARSER, []),
        settings=RolloutSettings(episodes=3),
        seed=0,
        log=log,
        rank=Rank(),
        observers=observers,
    )


def test_the_collector_shows_every_round_to_its_observers_and_keeps_their_state(tmp_path: Path) -> None:
    with ScoredLog(tmp_path / "log.jsonl") as log:
        noted = Noted()
        first = collector(log, {"noted": noted})
        for iteration in range(2):
            first.collect(iteration=iteration, policy_version=iteration)
        assert noted.seen == [(0, 3), (1, 3)]
        resumed = Noted()
        collector(log, {"noted": resumed}).restore(first.state())
        assert resumed.seen == noted.seen
        plain = collector(log, {})
        assert "observers" not in plain.state()
        with pytest.raises(CheckpointError, match="holds nothing of 'noted'"):
            collector(log, {"noted": Noted()}).restore(plain.state())
