"""Alarms in real trainings of a tiny policy: a planted fault fires its own, and clean runs are silent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slea_llm.health import RULES
from slea_llm.interfaces import LossTerm
from slea_llm.losses.entropy import EntropyConfig, EntropyLoss
from slea_llm.losses.reference_kl import ReferenceKlConfig, ReferenceKlLoss
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import load_tokenizer
from slea_llm.models.policy import PolicyCritic
from slea_llm.models.tiny import make_tiny
from slea_llm.settings import ModelSettings, RolloutSettings, StreamSettings, TrainerSettings, WarmStartSettings
from slea_llm.types import ScoredTrajectory
from slea_llm.warm_start import warm_start
from tests.support import loop, training
from tests.support.asking import ANSWER, QUESTION, AnyQuestion, AskingEnvironment, AskingUser

pytestmark = pytest.mark.integration

CALM = TrainerSettings(
    iterations=6,
    epochs=1,
    minibatch=8,
    microbatch=8,
    learning_rate=1e-3,
    critic_learning_rate=1e-3,
    target_kl=0.0,
)
OUTCOME = {"outcome": StreamSettings(sources=("outcome",))}
ONE = {"all": StreamSettings(sources=("outcome", "judge"))}
RAW = {"outcome": StreamSettings(sources=("outcome",), whiten=False)}


class Plant(NamedTuple):
    """A fault: what is done to the model and to the rewards of each iteration, and the settings that let it happen."""

    settings: Mapping[str, Any] = {}
    streams: Mapping[str, StreamSettings] = training.STREAMS
    credit: Mapping[str, Any] = {}
    losses: Sequence[LossTerm] = ()
    spoil: Callable[[PolicyCritic], None] = lambda _model: None
    pay: Callable[[int], float] = lambda _iteration: 1.0
    score: float = 1.0


def rubbish_values(model: PolicyCritic) -> None:
    """A critic that says hundreds where ones are paid, as one does whose rate is far too high."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.critic_parameters():
        if "value_head" in name:
            with torch.no_grad():
                parameter.copy_(300.0 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def loud_head(model: PolicyCritic) -> None:
    """Logits of a trained model's size: on those of a random one no learning rate does harm."""
    head = model._base.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(20.0)


FAST = Plant(settings={"learning_rate": 0.1, "epochs": 4}, spoil=loud_head)
PLANTS: Mapping[str, Plant] = {
    "advantage_range": Plant(spoil=rubbish_values, settings={"critic_learning_rate": 0.0}),
    "explained_variance": Plant(spoil=rubbish_values, settings={"critic_learning_rate": 0.0}),
    "advantage_clip": Plant(credit={"clip": 0.5}),
    "no_signal": Plant(streams=OUTCOME, pay=lambda _: 0.0, settings={"critic_learning_rate": 0.0}),
    "drowned_outcome": Plant(streams=ONE, score=1000.0),
    "ppo_clip": FAST,
    "ratio": FAST,
    "update_kl": FAST,
    "reference_kl": FAST._replace(losses=(ReferenceKlLoss(ReferenceKlConfig(weight=0.0)),)),
    "entropy": FAST._replace(losses=(EntropyLoss(EntropyConfig(weight=-10.0)),)),
    "gradient": Plant(
        streams=RAW, credit={"whiten_final": False}, pay=lambda number: 1e5 if number == CALM.iterations - 1 else 1.0
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_base(tmp_path_factory.mktemp("base"))


def changed(one: ScoredTrajectory, *, pay: float, score: float) -> ScoredTrajectory:
    turns = tuple(dataclasses.replace(turn, reward=pay * turn.reward) for turn in one.trajectory.turns)
    trajectory = dataclasses.replace(one.trajectory, turns=turns, outcome=sum(turn.reward for turn in turns))
    scores = tuple(dataclasses.replace(word, score=score * (word.score or 0.0)) for word in one.scores)
    return dataclasses.replace(one, trajectory=trajectory, scores=scores)


def trained(base: Path, folder: Path, plant: Plant) -> tuple[list[list[str]], list[str]]:
    """The alarms of every iteration, and what was reported."""
    settings = dataclasses.replace(CALM, **plant.settings)
    credit = training.crediting(plant.streams, **plant.credit)
    model = training.policy(base, heads=credit.heads)
    plant.spoil(model)
    rng = np.random.default_rng(0)
    shares = []
    for iteration in range(settings.iterations):
        played = [training.random_dialogue(rng, f"{iteration}.{number}") for number in range(8)]
        paid = [changed(one, pay=plant.pay(iteration), score=plant.score) for one in played]
        shares.append([training.sampled_by(model, paid)])
    said: list[str] = []
    training.trainer(
        model, settings, shares, folder, credit=credit, more_losses=plant.losses, value_weight=0.01, report=said
    ).run()
    return alarms_of(folder), said


def alarms_of(folder: Path) -> list[list[str]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["alarms"] for line in lines]


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_fault_fires_its_alarm_and_the_terminal_hears_of_it_once(
    name: str, base: Path, tmp_path: Path
) -> None:
    alarms, said = trained(base, tmp_path, PLANTS[name])
    assert name in alarms[-1]
    lines = [line for line in said if line.startswith(f"alarm {name}: ")]
    assert len(lines) == 1
    (rule,) = [rule for rule in RULES if rule.name == name]
    assert rule.meaning in lines[0]
    assert lines[0].endswith(rule.mend)


def test_every_alarm_has_its_planted_fault() -> None:
    assert {rule.name for rule in RULES} == {*PLANTS, "reward_hacking", "reward_without_success", "success"}


def test_a_clean_run_on_recorded_dialogues_is_silent(base: Path, tmp_path: Path) -> None:
    alarms, said = trained(base, tmp_path, Plant(settings={"iterations": 13}))
    assert alarms == [[]] * 13
    assert not [line for line in said if "alarm" in line]


def test_a_clean_run_with_its_own_sampler_is_silent(tmp_path: Path) -> None:
    base, said = loop.write_base(tmp_path / "base"), []  # type: ignore[var-annotated]
    settings = dataclasses.replace(CALM, iterations=5, minibatch=4, microbatch=4)
    running = loop.running(
        base,
        tmp_path / "run",
        settings,
        engine="transformers",
        accelerator=training.fresh_accelerator(),
        report=said.append,
    )
    with running as (trainer, _, _):
        trainer.run()
    assert alarms_of(tmp_path / "run") == [[]] * 5
    assert not [line for line in said if "alarm" in line]


@pytest.mark.timeout(120)
def test_a_reward_that_pays_any_question_is_caught(tmp_path: Path) -> None:
    """The policy learns to ask for ever: the score rises, success falls, and the alarm says which part is at fault."""
    words = [QUESTION, ANSWER, "Help.", "Hi", "Yes"]
    make_tiny(tmp_path / "raw", words * 5, vocab_size=300, hidden=32, layers=1, heads=2, seed=0)
    model = ModelSettings(base=str(tmp_path / "raw"))
    environment, user = AskingEnvironment(), AskingUser()
    training.fresh_accelerator()
    warm = WarmStartSettings(dialogues=200, batch=8, learning_rate=1e-2)
    chat = ChatTokenizer(load_tokenizer(model))
    warm_start(environment, user, chat, model, warm, tmp_path / "base", seed=0, max_turns=3, progress=False)
    kit = loop.Kit(
        environment=environment,
        user=user,
        evaluators=[AnyQuestion()],
        streams={
            "outcome": StreamSettings(sources=("outcome",), weight=0.1),
            "scores": StreamSettings(sources=("any_question",), gamma_step=0.0, gamma_turn=0.0),
        },
        rollout=RolloutSettings(episodes=32, max_turns=3, max_reply_tokens=8, max_context_tokens=128, tasks=1000),
    )
    settings = dataclasses.replace(CALM, iterations=13, minibatch=16, microbatch=16, learning_rate=3e-3)
    said: list[str] = []
    running = loop.running(
        tmp_path / "base",
        tmp_path / "run",
        settings,
        engine="transformers",
        accelerator=training.fresh_accelerator(),
        kit=kit,
        report=said.append,
    )
    with running as (trainer, _, _):
        trainer.run()
    alarms = alarms_of(tmp_path / "run")
    assert {"reward_hacking", "reward_without_success"} <= set(alarms[-1])
    assert "reward_hacking" not in alarms[5]
    (line,) = [line for line in said if line.startswith("alarm reward_hacking: any_question pays ")]
    assert "success fell from" in line
