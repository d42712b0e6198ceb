"""An environment, an evaluator and a credit method of somebody else's package: a file each, an entry point each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from slea_llm.models.tiny import make_tiny

pytestmark = pytest.mark.integration

ENVIRONMENT = '''
from dataclasses import dataclass

from slea_llm.types import Message, Outcome, Task


class EchoEpisode:
    def __init__(self, task, turn=0):
        self._task, self._turn = task, turn

    def system_prompt(self):
        return (Message(role="system", content="Say the word."),)

    def state(self):
        return {"turn": self._turn}

    def agent_says(self, text):
        self._turn += 1
        if self._task.goal["word"] in text:
            return Outcome(reward=1.0, termination="success")
        return Outcome(to_user=True, acts={"heard": text})

    def user_says(self, text, *, leaving=False):
        return Outcome(reward=-1.0, termination="user_left") if leaving else Outcome()

    def snapshot(self):
        return {"turn": self._turn}


class Speaker:
    def __init__(self, word):
        self._word = word

    def act(self, state, messages):
        return self._word


class Echo:
    name = "echo"
    needs = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        word: str = "a"

    def __init__(self, config):
        self._word = config.word

    def task(self, seed):
        user = {"values": {}, "volunteers": 0, "patience": 3}
        return Task(id=f"echo-{seed}", seed=seed, goal={"word": self._word, "user": user})

    def start(self, task):
        return EchoEpisode(task)

    def restore(self, task, snapshot):
        return EchoEpisode(task, snapshot["turn"])

    def expert(self, task, *, error_rate=0.0):
        return Speaker(self._word)

    def idler(self, task):
        return Speaker("...")


class Patient:
    """A user who says the same again."""

    name = "patient"
    needs = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        line: str = "Say it."

    def __init__(self, config):
        self._line = config.line

    def start(self, task, seed):
        return PatientSession(self._line)

    def restore(self, task, snapshot):
        return PatientSession(self._line)


class PatientSession:
    def __init__(self, line):
        self._line = line

    async def opening(self):
        from slea_llm.types import UserReply

        return UserReply(text=self._line)

    async def answer(self, acts, messages):
        return await self.opening()

    def snapshot(self):
        return {}
'''

EVALUATOR = """
from dataclasses import dataclass

from slea_llm.types import ScoredStep


class Shortness:
    name = "shortness"
    needs = frozenset()
    version = "1"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        limit: int = 40

    def __init__(self, config):
        self._limit = config.limit

    def score(self, trajectory, steps):
        return tuple(
            ScoredStep(
                turn=step.turn, step=step.index, evaluator=self.name, version=self.version,
                score=1.0 if len(step.text) <= self._limit else -1.0, rationale="length",
            )
            for step in steps
        )
"""

CREDIT = '''
from dataclasses import dataclass

import numpy as np

from slea_llm.types import AugmentedExperience


class RewardToGo:
    """REINFORCE: the advantage of a token is the sum of rewards from it on."""

    name = "reward_to_go"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        scale: float = 1.0

    def __init__(self, config, *, streams):
        self._scale, self._streams = config.scale, streams

    def assign(self, scored, rewards, stats, reducer):
        done = []
        for one, parts, stat in zip(scored, rewards, stats, strict=True):
            togo = {s: np.cumsum(sum(p.values())[::-1])[::-1].copy() for s, p in parts.items()}
            n = len(stat.proximal)
            done.append(
                AugmentedExperience(
                    scored=one, stats=stat, rewards=parts, advantages=self._scale * sum(togo.values()), returns=togo,
                    weights=np.ones(n), value_mask=np.ones(n, bool), policy_mask=np.ones(n, bool),
                )
            )
        return tuple(done)
'''

ENTRY_POINTS = """
[slea_llm.environment]
echo = somebody.environment:Echo
[slea_llm.user]
patient = somebody.environment:Patient
[slea_llm.evaluator]
shortness = somebody.evaluator:Shortness
[slea_llm.credit]
reward_to_go = somebody.credit:RewardToGo
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    (site / "somebody").mkdir(parents=True)
    (site / "somebody" / "__init__.py").touch()
    for name, source in (("environment", ENVIRONMENT), ("evaluator", EVALUATOR), ("credit", CREDIT)):
        (site / "somebody" / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    info = site / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return site


def slea(package: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "slea_llm", *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(300)
def test_a_third_party_environment_evaluator_and_credit_train_together(package: Path, tmp_path: Path) -> None:
    texts = ["Say the word.", "Say it.", "a b c d e f g h", "<think>a</think>a"] * 4
    base = make_tiny(tmp_path / "base", texts, vocab_size=300, hidden=64, layers=1, heads=1, seed=0)
    recipe = {
        "model": {"base": str(base), "declared_base": "somebody/tiny", "lora_rank": 8},
        "environment": {"name": "echo", "word": "e"},
        "user": {"name": "patient"},
        "generation": {"name": "transformers"},
        "evaluators": [{"name": "shortness", "limit": 30}],
        "streams": {"outcome": {"sources": ["outcome"]}, "style": {"sources": ["shortness"]}},
        "credit": {"name": "reward_to_go", "scale": 0.5},
        "losses": [{"name": "ppo"}, {"name": "value"}],
        "rollout": {"episodes": 4, "max_turns": 2, "max_reply_tokens": 8, "max_context_tokens": 256},
        "trainer": {"iterations": 1, "epochs": 1, "minibatch": 4, "learning_rate": 1e-3},
        "evaluation": {"tasks": 0},
        "run": {"output_dir": str(tmp_path / "run")},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")

    listed = slea(package, "list")
    assert "somebody.credit:RewardToGo  (third party)" in listed
    slea(package, "train", str(path))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert len(metrics) == 1
    assert metrics[0]["metrics"]["episodes/played"] == 4.0
    scored = slea(
        package,
        "score",
        str(tmp_path / "run" / "rollouts"),
        "--recipe",
        str(path),
        "--output",
        str(tmp_path / "s.jsonl"),
    )
    assert "4 records, 4 trajectories" in scored
