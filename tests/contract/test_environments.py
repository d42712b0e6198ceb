"""What every registered environment promises, shown with its scripted agents and the scripted user."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slea_llm import registry, rollout
from slea_llm.errors import EpisodeError, UnsupportedError
from slea_llm.interfaces import Environment
from slea_llm.referee import Referee
from slea_llm.types import Message, State
from slea_llm.users.scripted import ScriptedUser
from tests.support.dialogue import Played, play, resume

SEEDS = 15
"""Of every language of every environment; tests/integration/test_environment_tasks.py plays hundreds."""

ADAPTERS = {"gymnasium", "textworld", "verifiers"}
"""Environments of other libraries, which make no tasks of their own; tests/unit/test_adapters.py plays them."""

SANDBOXED = {"code_task"}
"""Environments that start processes: fewer tasks here, more in the integration tests; skipped where no sandbox is."""

SANDBOXED_SEEDS = 3

NAMES = sorted(registry.ROWS["environment"].keys() - ADAPTERS)
LANGUAGES = ("en", "zh", "mixed")


class SayOnly:
    """An agent that is polite and nothing else."""

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del state, messages
        return "ok"


def made(name: str, **settings: Any) -> Environment:
    component = registry.load("environment", name)
    environment: Environment = component(component.Config(**settings))
    return environment


def variants() -> Iterator[Any]:
    """Each environment once for each language it can speak."""
    for name in NAMES:
        fields = {field.name for field in dataclasses.fields(registry.load("environment", name).Config)}
        languages = LANGUAGES if name == "order_taking" else LANGUAGES[:2]  # a mix is drawn alike by all
        for language in languages if "language" in fields else (None,):
            options = {"language": language} if language else {}
            id = f"{name}-{language}" if language else name
            try:
                yield pytest.param(made(name, **options), id=id)
            except UnsupportedError as error:
                if name not in SANDBOXED:
                    raise
                yield pytest.param(None, id=id, marks=pytest.mark.skip(reason=str(error)))


@pytest.fixture(params=variants())
def environment(request: pytest.FixtureRequest) -> Environment:
    found: Environment = request.param
    return found


@pytest.fixture
def user() -> ScriptedUser:
    return ScriptedUser(ScriptedUser.Config())


def seeds(environment: Environment, most: int = SEEDS) -> range:
    return range(min(most, SANDBOXED_SEEDS) if environment.name in SANDBOXED else most)


def same(one: Played, other: Played) -> bool:
    return (one.messages, one.rewards, one.states, one.acts, one.termination) == (
        other.messages,
        other.rewards,
        other.states,
        other.acts,
        other.termination,
    )


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts(item)


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from keys(item)


def test_expert_succeeds_on_every_task(environment: Environment, user: ScriptedUser) -> None:
    for seed in seeds(environment):
        task = environment.task(seed)
        played = play(environment, user, environment.expert(task), task, seed=seed + 1)
        assert played.termination == "success", f"task {task.id}: {played.messages}"
        assert played.outcome > 0
        assert played.turns <= environment.config.max_turns  # type: ignore[attr-defined]


def test_expert_that_errs_sometimes_fails(environment: Environment, user: ScriptedUser) -> None:
    tasks = [environment.task(seed) for seed in range(30 if environment.name not in SANDBOXED else 8)]
    ends = [play(environment, user, environment.expert(t, error_rate=1.0), t).termination for t in tasks]
    assert "failure" in ends or "user_left" in ends


def test_what_a_bad_agent_fails_at_is_laid_to_nobody_else(environment: Environment, user: ScriptedUser) -> None:
    """What an environment notes in terms of its own (a finding, a code) is not taken for a word misheard."""
    tasks = [environment.task(seed) for seed in seeds(environment)]
    agents = [environment.expert(task, error_rate=0.6) for task in tasks]
    turns = environment.config.max_turns  # type: ignore[attr-defined]
    records = [
        rollout.play(environment, user, agent, task, seed=seed, max_turns=turns)
        for seed, (agent, task) in enumerate(zip(agents, tasks, strict=True))
    ]
    rulings = Referee(Referee.Config()).judge_many(records)
    others = [ruling for ruling in rulings if ruling.party not in ("agent", None)]
    assert not others


def test_idler_and_say_only_agent_fail(environment: Environment, user: ScriptedUser) -> None:
    for seed in range(SEEDS):
        task = environment.task(seed)
        for agent in (environment.idler(task), SayOnly()):
            played = play(environment, user, agent, task, seed=seed)
            assert played.termination in {"failure", "user_left"}
            assert played.outcome <= 0


def test_same_seed_gives_the_same_dialogue(environment: Environment, user: ScriptedUser) -> None:
    for seed in seeds(environment, 10):
        task = environment.task(seed)
        assert task == environment.task(seed)
        agent = environment.expert(task, error_rate=0.5)
        assert same(play(environment, user, agent, task, seed=3), play(environment, user, agent, task, seed=3))


def test_user_seed_changes_the_words(environment: Environment, user: ScriptedUser) -> None:
    task = environment.task(1)
    said = {tuple(play(environment, user, environment.expert(task), task, seed=s).said_by("user")) for s in range(8)}
    assert len(said) > 1


def test_restore_at_each_turn_continues_identically(environment: Environment, user: ScriptedUser) -> None:
    for seed in seeds(environment, 6):
        task = environment.task(seed)
        agent = environment.expert(task, error_rate=0.4)
        whole = play(environment, user, agent, task, seed=seed)
        for turn in range(whole.turns):
            assert same(whole, resume(environment, user, agent, task, whole=whole, turn=turn)), (seed, turn)


def test_a_thousand_seeds_give_a_thousand_tasks(environment: Environment) -> None:
    tasks = [environment.task(seed) for seed in range(1000)]
    assert len({json.dumps(task.goal, sort_keys=True) for task in tasks}) == 1000
    assert len({task.id for task in tasks}) == 1000


def test_task_and_state_are_json(environment: Environment, user: ScriptedUser) -> None:
    for seed in seeds(environment, 8):
        task = environment.task(seed)
        assert json.loads(json.dumps(dict(task.goal))) == task.goal
        played = play(environment, user, environment.expert(task, error_rate=0.3), task)
        for state in played.states:
            assert json.loads(json.dumps(dict(state))) == state


def test_goal_is_hidden_until_the_user_tells_it(environment: Environment) -> None:
    for seed in range(SEEDS):
        task = environment.task(seed)
        episode = environment.start(task)
        prompt = " ".join(message.content for message in episode.system_prompt())
        public = [*texts(episode.state()), *prompt.split()]
        hidden = {text for text in texts(task.goal) if len(text) > 2} - set(keys(task.goal))
        assert hidden
        assert not hidden & set(public)
        assert not any(text in prompt for text in hidden if " " in text or not text.isascii())


def test_snapshot_is_a_copy(environment: Environment, user: ScriptedUser) -> None:
    """Playing on changes neither an earlier snapshot nor an episode that was restored from one."""
    task = environment.task(2)
    agent = environment.expert(task)
    whole = play(environment, user, agent, task)
    episode = environment.restore(task, json.loads(whole.snapshots[1][0]))
    snapshot, state = episode.snapshot(), episode.state()
    twin = environment.restore(task, snapshot)
    twin.agent_says(agent.act(state, whole.messages))
    assert episode.state() == state
    assert json.dumps(snapshot) == json.dumps(episode.snapshot())


PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "{notes}", "{order}", "{day}", "?", "12", "AB12345", "\0"),
    *("attack", "不", '{"name": "book_visit"}', '{"name": "order", "arguments": {"do": ["x"]}}'),
    '{"name": "search_hotels", "arguments": {"start": 99, "nights": -3}}',
    '{"name": "book_trip", "arguments": {"journey": "", "hotel": "", "site": ""}}',
)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=7).map("".join), max_size=4))
def test_any_text_is_taken(environment: Environment, texts: list[str]) -> None:
    """No reply and no user's text breaks an episode, and the state stays JSON."""
    episode = environment.start(environment.task(3))
    for text in texts:
        if episode.agent_says(text).termination or episode.user_says(text).termination:
            break
        assert json.loads(json.dumps(dict(episode.state()))) == episode.state()
        assert environment.restore(environment.task(3), episode.snapshot()).state() == episode.state()


def test_a_long_reply_is_read_in_time_that_grows_with_its_length(environment: Environment) -> None:
    """42,000 words; work that grows with the square of them would run into the test's time limit."""
    episode = environment.start(environment.task(3))
    episode.agent_says("attack the error log, not the dish " * 6000)


def test_ended_episode_takes_nothing_more(environment: Environment) -> None:
    task = environment.task(0)
    episode = environment.start(task)
    assert episode.user_says("...", leaving=True).termination == "user_left"
    with pytest.raises(EpisodeError, match="ended"):
        episode.agent_says("hello")
    with pytest.raises(EpisodeError, match="ended"):
        environment.restore(task, episode.snapshot()).user_says("hello")


def test_snapshot_of_another_shape_is_refused(environment: Environment) -> None:
    with pytest.raises(EpisodeError, match="keys"):
        environment.restore(environment.task(0), {"unknown": 1})
