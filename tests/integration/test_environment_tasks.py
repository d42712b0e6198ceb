"""Many tasks of every environment: the expert succeeds within the turn limit, those who do nothing fail."""

from __future__ import annotations

import pytest

from slea_llm.sandbox.runner import unavailable
from slea_llm.users.scripted import ScriptedUser
from tests.contract.test_environments import NAMES, SANDBOXED, SayOnly, made
from tests.support.dialogue import play

pytestmark = pytest.mark.integration

SEEDS = 400
SANDBOXED_SEEDS = 40
"""Where each success is a process."""


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", NAMES)
def test_many_tasks(name: str, language: str) -> None:
    if name in SANDBOXED and (reason := unavailable()):
        pytest.skip(reason)
    most = SANDBOXED_SEEDS if name in SANDBOXED else SEEDS
    environment, user = made(name, language=language), ScriptedUser(ScriptedUser.Config())
    for seed in range(1000, 1000 + most):
        task = environment.task(seed)
        played = play(environment, user, environment.expert(task), task, seed=seed)
        assert played.termination == "success", f"task {task.id}: {played.messages}"
        assert played.turns <= environment.config.max_turns  # type: ignore[attr-defined]
    for seed in range(2000, 2000 + SEEDS // 8):
        task = environment.task(seed)
        for agent in (environment.idler(task), SayOnly()):
            assert play(environment, user, agent, task, seed=seed).termination in {"failure", "user_left"}
