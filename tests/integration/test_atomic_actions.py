"""A task whose replies have no inner structure: it runs, says that steps add nothing, and is plain PPO to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slea_llm.interfaces import LocalReducer
from slea_llm.models.stats import token_stats
from slea_llm.settings import StreamSettings, TrainerSettings
from slea_llm.types import ScoredTrajectory
from tests.support import training
from tests.support.experience import dialogue

pytestmark = pytest.mark.integration

SETTINGS = TrainerSettings(iterations=2, epochs=2, minibatch=4, microbatch=4, learning_rate=1e-2, target_kl=0.0)
GAMMA, LAM = 0.99, 0.95
PLAIN = StreamSettings(sources=("outcome",), gamma_turn=GAMMA, lam_turn=LAM)
ODD: Mapping[str, Any] = {"gamma_step": 0.3, "lam_step": 0.2, "gamma_substep": 0.1, "lam_substep": 0.4}
"""What would change every number if there were steps in a reply."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_base(tmp_path_factory.mktemp("base"))


def atomic(rng: np.random.Generator, name: str) -> ScoredTrajectory:
    """One step a reply."""
    turns = int(rng.integers(1, 5))
    return dialogue(
        [[("reply", int(rng.integers(1, 6)))] for _ in range(turns)],
        rewards=[float(rng.normal()) for _ in range(turns)],
        name=name,
    )


def trained(base: Path, folder: Path, stream: StreamSettings, unit: str) -> tuple[Any, list[Any], list[str]]:
    """Weights, metrics and what was reported of a training with this credit."""
    credit = training.crediting({"outcome": stream}, unit=unit)
    model = training.policy(base, heads=credit.heads)
    rng = np.random.default_rng(1)
    shares = [
        [training.sampled_by(model, [atomic(rng, f"{number}.{one}") for one in range(8)])]
        for number in range(SETTINGS.iterations)
    ]
    said: list[str] = []
    training.trainer(model, SETTINGS, shares, folder, credit=credit, report=said).run()
    weights = {name: tensor.numpy().tobytes() for name, tensor in model.trainable_state().items()}
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return weights, [json.loads(line)["metrics"] for line in lines], said


def test_steps_add_nothing_and_the_run_says_so(base: Path, tmp_path: Path) -> None:
    odd = StreamSettings(sources=("outcome",), gamma_turn=GAMMA, lam_turn=LAM, **ODD)
    tokens = [trained(base, tmp_path / name, stream, "token") for name, stream in (("plain", PLAIN), ("odd", odd))]
    assert tokens[0][:2] == tokens[1][:2]
    coarse = [trained(base, tmp_path / unit, PLAIN, unit) for unit in ("substep", "step", "turn")]
    assert coarse[0][:2] == coarse[1][:2] == coarse[2][:2]
    assert coarse[0][0] != tokens[0][0]
    for *_, said in (*tokens, *coarse):
        (line,) = [line for line in said if line.startswith("steps: ")]
        assert "every reply is one step: credit by step is credit by turn here" in line


def test_its_advantages_are_those_of_ppo_that_never_heard_of_steps(base: Path) -> None:
    model = training.policy(base, heads=("outcome",))
    rng = np.random.default_rng(2)
    played = training.sampled_by(model, [atomic(rng, str(number)) for number in range(6)])
    stats = token_stats(
        model,
        [one.trajectory for one in played],
        microbatch=4,
        policy_version=0,
        critic_version=0,
        pad_id=training.PAD,
    )
    credit = training.crediting({"outcome": PLAIN}, unit="turn")
    got = credit.credit(played, stats, progress=0.0, reducer=LocalReducer())
    plain: list[Sequence[float]] = []
    for one, stat in zip(played, stats, strict=True):
        lengths = [len(turn.span or ()) for turn in one.trajectory.turns]
        starts = np.cumsum([0, *lengths])[:-1]
        values, rewards = stat.values["outcome"][starts], [turn.reward for turn in one.trajectory.turns]
        advantage = following = 0.0
        found = []
        for value, reward in zip(values[::-1], rewards[::-1], strict=True):
            advantage = reward + GAMMA * following - value + GAMMA * LAM * advantage
            following = value
            found.append(advantage)
        plain.append(np.repeat(found[::-1], lengths).tolist())
    flat = np.concatenate([np.asarray(one) for one in plain])
    white = (flat - flat.mean()) / flat.std()
    np.testing.assert_allclose(np.concatenate([one.advantages for one in got]), white, rtol=0, atol=1e-12)
