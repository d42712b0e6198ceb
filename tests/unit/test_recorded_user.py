"""The user that was logged: its words again while the agent stays on the path, and a word on where it left it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.continuations import BranchingPlay, ScriptPlayer
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import ConfigError, EpisodeError, StorageError
from slea_llm.interfaces import Agent
from slea_llm.rollout import play
from slea_llm.storage import write_trajectories
from slea_llm.types import Message, ReplyPrefix, Task, Trajectory
from slea_llm.users.recorded import RecordedUser, likeness
from slea_llm.users.scripted import ScriptedUser

ENVIRONMENT = OrderTaking(OrderTaking.Config(language="mixed"))


def recorded(count: int = 6) -> list[Trajectory]:
    user = ScriptedUser(ScriptedUser.Config())
    tasks = [ENVIRONMENT.task(seed) for seed in range(count)]
    return [play(ENVIRONMENT, user, ENVIRONMENT.expert(task), task, seed=5, max_turns=12) for task in tasks]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    write_trajectories(path, recorded())
    return path


def test_an_agent_on_the_path_has_the_same_dialogue(log: Path) -> None:
    user = RecordedUser(RecordedUser.Config(log=str(log)))
    for old in recorded():
        task = ENVIRONMENT.task(old.task["seed"])
        new = play(ENVIRONMENT, user, ENVIRONMENT.expert(task), task, seed=9, max_turns=12)
        assert [turn.context for turn in new.turns] == [turn.context for turn in old.turns]
        assert (new.termination, new.outcome) == (old.termination, old.outcome)
        assert new.provenance["user"] == {
            "name": "recorded",
            "log": str(log),
            "record": old.id,
            "left_at": None,
            "spent": False,
        }


class OffAt:
    """An expert that says something else at one of its replies."""

    def __init__(self, agent: Agent, turn: int) -> None:
        self._agent, self._turn, self._count = agent, turn, 0

    def act(self, state: object, messages: object) -> str:
        self._count += 1
        text = self._agent.act(state, messages)  # type: ignore[arg-type]
        return "<think>x</think>Tell me about your dog." if self._count == self._turn + 1 else text


@pytest.mark.parametrize("turn", [0, 1])
def test_an_agent_that_leaves_the_path_ends_it_and_the_record_names_the_reply(log: Path, turn: int) -> None:
    user = RecordedUser(RecordedUser.Config(log=str(log)))
    task = ENVIRONMENT.task(1)
    new = play(ENVIRONMENT, user, OffAt(ENVIRONMENT.expert(task), turn), task, seed=9, max_turns=12)
    assert new.termination == "user_left"
    assert new.provenance["user"]["left_at"] == turn
    assert len(new.turns) == turn + 1


def test_it_may_go_on_all_the_same(log: Path) -> None:
    user = RecordedUser(RecordedUser.Config(log=str(log), off_path="go_on"))
    task = ENVIRONMENT.task(1)
    new = play(ENVIRONMENT, user, OffAt(ENVIRONMENT.expert(task), 0), task, seed=9, max_turns=12)
    assert new.provenance["user"]["left_at"] == 0
    assert len(new.turns) > 1


def test_an_agent_that_goes_on_after_the_last_word_left_the_path_there(log: Path) -> None:
    user = RecordedUser(RecordedUser.Config(log=str(log), closeness=0.0))
    task = ENVIRONMENT.task(1)
    new = play(ENVIRONMENT, user, ENVIRONMENT.idler(task), task, seed=9, max_turns=12)
    assert new.provenance["user"]["spent"]
    assert new.termination == "user_left"


def test_a_session_goes_on_from_its_snapshot_and_its_dialogues_can_be_branched(log: Path) -> None:
    user = RecordedUser(RecordedUser.Config(log=str(log)))
    task = ENVIRONMENT.task(1)
    session = user.start(task, 9)
    asyncio.run(session.opening())
    asyncio.run(session.answer({}, (Message(role="assistant", content=""),)))
    again = user.restore(task, json.loads(json.dumps(session.snapshot())))
    assert (again.snapshot(), again.provenance()) == (session.snapshot(), session.provenance())
    old = play(ENVIRONMENT, user, ENVIRONMENT.expert(task), task, seed=9, max_turns=12)

    def make(task: Task, seed: int) -> Agent:
        return ENVIRONMENT.expert(dataclasses.replace(task, seed=seed))

    branching = BranchingPlay(ENVIRONMENT, user, ScriptPlayer(make), max_turns=12)
    whole = ReplyPrefix(turn=0, characters=len(old.turns[0].text))
    assert len(branching.branch(old, [whole], [1, 2])[0].successes) == 2


def test_what_cannot_be_replayed_is_refused_with_the_reason(log: Path, tmp_path: Path) -> None:
    user = RecordedUser(RecordedUser.Config(log=str(log)))
    with pytest.raises(EpisodeError, match=r"has no dialogue of task .*did you mean"):
        user.start(ENVIRONMENT.task(99), 1)
    with pytest.raises(EpisodeError, match="snapshot has the keys"):
        user.restore(ENVIRONMENT.task(1), {})
    with pytest.raises(EpisodeError, match="has no dialogue 'x' of task"):
        user.restore(ENVIRONMENT.task(1), {"record": "x", "said": 0, "left_at": None, "spent": False})
    with pytest.raises(ConfigError, match="needs the log"):
        RecordedUser(RecordedUser.Config())
    with pytest.raises(ConfigError, match="closeness 2"):
        RecordedUser.Config(log="x", closeness=2.0)
    with pytest.raises(ConfigError, match="did you mean 'leave'"):
        RecordedUser.Config(log="x", off_path="leaves")  # type: ignore[arg-type]
    with pytest.raises(StorageError):
        RecordedUser(RecordedUser.Config(log=str(tmp_path / "none.jsonl")))
    empty = tmp_path / "empty.jsonl"
    write_trajectories(empty, [dataclasses.replace(recorded(1)[0], turns=())])
    with pytest.raises(ConfigError, match="no dialogue with a user"):
        RecordedUser(RecordedUser.Config(log=str(empty)))


@given(st.text(max_size=12), st.text(max_size=12))
@settings(max_examples=20, deadline=None)
def test_likeness_is_a_share_and_1_for_the_same_words(one: str, other: str) -> None:
    assert likeness(one, one) == 1.0
    assert 0.0 <= likeness(one, other) <= 1.0
