"""What every registered user promises: it speaks, says what it was made of, and goes on from its snapshot."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slea_llm import registry
from slea_llm.config import ComponentSpec, component_config
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import EpisodeError
from slea_llm.interfaces import SimulatedUser, Traced
from slea_llm.rollout import play
from slea_llm.storage import write_trajectories
from slea_llm.types import Message
from slea_llm.users.scripted import ScriptedUser
from tests.support.chat_server import Reply, completion, serving

ENVIRONMENT = OrderTaking(OrderTaking.Config())
TASK = ENVIRONMENT.task(3)
NAMES = sorted(registry.ROWS["user"])


@pytest.fixture
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimulatedUser]:
    name = request.param
    with serving(Reply(body=completion("I would like to order.")), Reply(body=completion("To my place."))) as server:
        options: dict[str, dict[str, Any]] = {
            "llm": {"endpoint": {"url": server.url}},
            "recorded": {"log": str(tmp_path / "log.jsonl")},
        }
        if name == "recorded":
            scripted = ScriptedUser(ScriptedUser.Config())
            played = play(ENVIRONMENT, scripted, ENVIRONMENT.expert(TASK), TASK, seed=1, max_turns=12)
            write_trajectories(tmp_path / "log.jsonl", [played])
        cls, config = component_config("user", ComponentSpec(name=name, **options.get(name, {})))
        yield cls(config)


@pytest.mark.parametrize("name", sorted(registry.names("user")))
def test_a_user_has_the_name_of_its_row_and_a_frozen_config(name: str) -> None:
    component = registry.load("user", name)
    assert component.name == name
    assert component.__doc__
    assert dataclasses.is_dataclass(component.Config)
    assert vars(component.Config)["__dataclass_params__"].frozen
    assert isinstance(component.needs, frozenset)


@pytest.mark.parametrize("user", NAMES, indirect=True)
def test_a_session_speaks_and_goes_on_from_its_snapshot(user: SimulatedUser) -> None:
    session = user.start(TASK, 1)
    first = asyncio.run(session.opening())
    assert first.text
    assert not first.leaving
    again = user.restore(TASK, json.loads(json.dumps(session.snapshot())))
    assert again.snapshot() == session.snapshot()
    said = (Message(role="user", content=first.text), Message(role="assistant", content="Where should it go?"))
    acts = {"asks": ("address",), "reads_back": {}, "recommends": ()}
    assert asyncio.run(again.answer(acts, said)) == asyncio.run(session.answer(acts, said))
    with pytest.raises(EpisodeError):
        user.restore(TASK, {"nonsense": 1})


@pytest.mark.parametrize("user", NAMES, indirect=True)
def test_a_session_says_what_it_was_made_of(user: SimulatedUser) -> None:
    session: object = user.start(TASK, 1)
    assert isinstance(session, Traced)
    made_of = session.provenance()
    assert json.loads(json.dumps(made_of)) == made_of
    assert made_of["name"] == type(user).name  # type: ignore[attr-defined]
