"""Rollouts of order_taking with a tiny random model: what is recorded is what the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slea_llm.environments.order_taking import OrderTaking
from slea_llm.generation.transformers import TransformersGenerator
from slea_llm.models.chat import ChatTokenizer, Thoughts
from slea_llm.models.loading import load_base, load_tokenizer
from slea_llm.models.tiny import make_tiny
from slea_llm.rollout import Rollout, play
from slea_llm.settings import ModelSettings, RolloutSettings
from slea_llm.types import Trajectory
from slea_llm.users.scripted import ScriptedUser

pytestmark = pytest.mark.integration

TEMPERATURE = 0.7
SETTINGS = RolloutSettings(max_turns=3, max_reply_tokens=12, max_context_tokens=700, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def environment() -> OrderTaking:
    return OrderTaking(OrderTaking.Config())


@pytest.fixture(scope="module")
def user() -> ScriptedUser:
    return ScriptedUser(ScriptedUser.Config())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, environment: OrderTaking, user: ScriptedUser) -> ModelSettings:
    texts = []
    for seed in range(20):
        task = environment.task(seed)
        trajectory = play(environment, user, environment.expert(task), task, seed=seed, max_turns=12)
        assert trajectory.success
        texts += [text for turn in trajectory.turns for text in (turn.text, *(m.content for m in turn.context))]
    folder: Path = make_tiny(tmp_path_factory.mktemp("tiny"), texts, vocab_size=500, hidden=32, heads=2, seed=1)
    return ModelSettings(base=str(folder))


@pytest.fixture(scope="module")
def chat(model: ModelSettings) -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(model))


@pytest.fixture
def generator(model: ModelSettings, chat: ChatTokenizer) -> Iterator[TransformersGenerator]:
    made = TransformersGenerator(
        TransformersGenerator.Config(),
        model=model,
        max_context=SETTINGS.max_context_tokens,
        temperature=TEMPERATURE,
        stop_ids=chat.stop_ids,
        seed=0,
    )
    yield made
    made.close()


def run(
    environment: OrderTaking,
    user: ScriptedUser,
    generator: TransformersGenerator,
    chat: ChatTokenizer,
    *,
    settings: RolloutSettings = SETTINGS,
) -> list[Trajectory]:
    rollout = Rollout(environment, user, generator, chat, settings, environment_name="order_taking", seed=3)
    return rollout.run([environment.task(n) for n in range(4)], first_episode=0, policy_version=0)


@pytest.mark.parametrize("thoughts", ["keep", "strip"])
def test_recorded_log_probabilities_are_those_of_the_recorded_rows(
    environment: OrderTaking,
    user: ScriptedUser,
    generator: TransformersGenerator,
    model: ModelSettings,
    thoughts: Thoughts,
) -> None:
    chat = ChatTokenizer(load_tokenizer(model), thoughts=thoughts)
    report = chat.check(tools=True)
    assert report.appends
    assert not report.strips_thoughts
    trajectories = run(environment, user, generator, chat)
    network = load_base(model).eval()
    sampled = 0
    for trajectory in trajectories:
        assert not trajectory.failed
        assert len(trajectory.traces) == (1 if thoughts == "keep" else len(trajectory.turns))
        for trace in trajectory.traces:
            ids = torch.tensor([trace.token_ids])
            with torch.inference_mode():
                logits = network(input_ids=ids).logits[0, :-1].double() / TEMPERATURE
            own = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None]).squeeze(1)
            mask = torch.tensor(trace.sampled_mask)[1:]
            recorded = torch.tensor(trace.logprobs, dtype=torch.float64)[1:]
            torch.testing.assert_close(recorded[mask], own[mask], atol=1e-4, rtol=0)
            sampled += int(mask.sum())
    assert sampled == sum(trajectory.sampled_tokens for trajectory in trajectories) > 0


def test_the_same_call_gives_the_same_dialogues_however_many_run_at_once(
    environment: OrderTaking, user: ScriptedUser, generator: TransformersGenerator, chat: ChatTokenizer
) -> None:
    together = run(environment, user, generator, chat)
    one_by_one = run(environment, user, generator, chat, settings=replace(SETTINGS, concurrency=1))
    assert [t.turns for t in together] == [t.turns for t in one_by_one]
    assert [t.traces[0].token_ids for t in together] == [t.traces[0].token_ids for t in one_by_one]
    assert [t.id for t in together] == [t.id for t in one_by_one]
