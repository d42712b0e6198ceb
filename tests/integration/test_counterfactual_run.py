"""A real sampler plays its own dialogues on, wired as a training run wires it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slea_llm.cli import compose
from slea_llm.cli.session import open_session
from slea_llm.config import parse_recipe
from slea_llm.planning import check
from slea_llm.types import ReplyPrefix
from tests.support.loop import write_base

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize("thoughts", ["keep", "strip"])
def test_a_policy_plays_on_from_its_own_steps(tmp_path: Path, thoughts: str) -> None:
    recipe = parse_recipe(
        {
            "model": {"base": str(write_base(tmp_path / "base"))},
            "environment": {"name": "order_taking"},
            "parser": {"name": "tagged", "split_thoughts": True},
            "evaluators": [{"name": "counterfactual", "pairs": 3, "budget": 1.0}],
            "streams": {
                "outcome": {"sources": ["outcome"]},
                "steps": {"sources": ["counterfactual"], "gamma_turn": 0.0},
            },
            "trainer": {"minibatch": 4},
            "rollout": {
                "episodes": 4,
                "max_turns": 3,
                "max_reply_tokens": 12,
                "max_context_tokens": 512,
                "tasks": 10,
                "thoughts": thoughts,
            },
        }
    )
    check(recipe)
    session = open_session(recipe)
    try:
        scorer = compose.scorer(recipe, chat=session.chat, available={"continuations": session.continuations})
        tasks = [session.environment.task(seed) for seed in range(4)]
        played = session.rollout.run(tasks, first_episode=0, policy_version=0)
        scored = [scorer.score(one) for one in played]
        words = [word for one in scored for word in one.scores]
        assert len(words) >= 8
        assert [word.reason for word in words if word.reason] == []
        assert {word.parts["pairs"] for word in words} == {3.0}
        whole = [ReplyPrefix(turn=0, characters=len(one.turns[0].text), tokens=10**6) for one in played]
        for one, prefix in zip(played, whole, strict=True):
            begun = ReplyPrefix(turn=0, characters=1, tokens=len(one.reply_ids(one.turns[0])) // 2)
            first, again = (session.continuations.branch(one, [begun, prefix], [1, 2]) for _ in range(2))
            assert first == again
            assert all(ends.reason is None for ends in first)
        assert [scorer.score(one) for one in played] == scored
    finally:
        session.generator.close()
