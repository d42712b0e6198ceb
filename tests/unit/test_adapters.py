"""Environments of other libraries, each on a tiny one of its API that is written here."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import pytest

from slea_llm.environments.foreign import ForeignEpisode, Saying
from slea_llm.environments.gymnasium_text import GymnasiumText
from slea_llm.environments.textworld_games import TextWorldGames
from slea_llm.environments.verifiers_tasks import VerifiersTasks
from slea_llm.errors import ConfigError, EpisodeError, MissingDependencyError, UnsupportedError
from slea_llm.interfaces import Environment
from slea_llm.rollout import play
from slea_llm.types import Trajectory
from slea_llm.users.scripted import ScriptedUser

# Gymnasium ------------------------------------------------------------------------------------------------------------


class Guess(gymnasium.Env[str, str]):
    """Guess a number; too high or too low is said. Cut after six guesses."""

    action_space = gymnasium.spaces.Text(max_length=20)
    observation_space = gymnasium.spaces.Text(max_length=40)

    def __init__(self, most: int = 9) -> None:
        self._most, self._guesses = most, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._hidden, self._guesses = int(self.np_random.integers(1, self._most + 1)), 0
        return f"A number from 1 to {self._most}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._guesses += 1
        if not action.strip().isdecimal():
            return "No number.", 0.0, False, self._guesses >= 6, {}
        right = int(action) == self._hidden
        shown = "Right." if right else "Higher." if int(action) < self._hidden else "Lower."
        return shown, float(right), right, self._guesses >= 6 and not right, {}


class Switch(gymnasium.Env[str, Any]):
    """Two named actions; only the second ends it, and its info says whether that was a success."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Text(max_length=40)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return "A switch.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "On." if action else "Off.", 0.0, bool(action), False, {"success": bool(action)}


class Shifted(Switch):
    """The same with actions 5 and 6, of which the second pays nothing that counts."""

    action_space = gymnasium.spaces.Discrete(2, start=5)

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "Moved.", float("nan") if action == 6 else 0.0, False, False, {}


class Moody(Guess):
    """Forgets its seed, so that no episode of it can be played again."""

    moods: ClassVar[Iterator[int]] = iter(range(1000))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        del action
        return f"Mood {next(self.moods)}", 0.0, False, False, {}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    worlds: tuple[Any, ...] = (Guess, Switch, Shifted, Moody)
    for made in worlds:
        gymnasium.register(f"{made.__name__}Text-v0", made, disable_env_checker=True, order_enforce=False)
    yield
    for made in worlds:
        gymnasium.registry.pop(f"{made.__name__}Text-v0")


def gym(**settings: Any) -> GymnasiumText:
    return GymnasiumText(GymnasiumText.Config(**{"id": "GuessText-v0", "max_turns": 20, **settings}))


def played(environment: Environment, *replies: str, seed: int = 3) -> Trajectory:
    task, user = environment.task(seed), ScriptedUser(ScriptedUser.Config())
    return play(environment, user, Saying(replies=replies), task, seed=1, max_turns=30)


def test_a_gymnasium_episode_ends_as_its_rewards_say() -> None:
    won = played(gym(), *(f"<think>try</think>{number}" for number in range(1, 10)), seed=1)
    assert (won.termination, won.outcome) in {("success", 1.0), ("max_turns", 0.0)}
    ends = {played(gym(), *map(str, range(1, 7)), seed=seed).termination for seed in range(12)}
    assert ends == {"success", "max_turns"}
    assert "A number from 1 to 9." in won.turns[0].context[0].content
    assert played(gym(success_return=2.0, options={"most": 1}), "1").termination == "failure"


def test_named_and_numbered_actions() -> None:
    switch = gym(id="SwitchText-v0", actions=("off", "on"))
    assert played(switch, "off", "ON").termination == "success"
    assert played(switch, "0", "1").termination == "success"
    wrong = played(switch, "jump", "2", "on")
    assert (wrong.termination, len(wrong.turns)) == ("success", 3)
    assert "one of: off, on" in wrong.turns[1].context[0].content


ODD = ("", " ", "\0", "\ud800", "-1", "2", "9" * 9999, "1.0", "\u0663", "²", "off on", "x" * 100_000, "<think>on")


def test_what_is_no_action_is_said_and_changes_nothing() -> None:
    episode = gym(id="SwitchText-v0", actions=("off", "on"), max_turns=50).start(gym().task(2**63))
    for reply in ODD:
        outcome = episode.agent_says(reply)
        assert "is no action; one of: off, on" in outcome.messages[0].content
        assert len(outcome.messages[0].content) < 400
        assert (outcome.reward, outcome.termination) == (0.0, None)
    assert episode.agent_says("<think>on?</think> On\n").termination == "success"
    free = gym(max_turns=50).start(gym().task(2**63))
    for reply in ODD[:5]:
        assert free.agent_says(reply).messages[0].content == "No number."


def test_actions_are_counted_from_the_first_of_the_space() -> None:
    episode = gym(id="ShiftedText-v0", actions=("stay", "jump")).start(gym().task(0))
    assert [episode.agent_says(reply).messages[0].content for reply in ("stay", "5")] == ["Moved.", "Moved."]
    assert "is no action" in episode.agent_says("0").messages[0].content
    with pytest.raises(EpisodeError, match="gave the reward nan after 'jump'"):
        episode.agent_says("jump")
    numbered = gym(id="ShiftedText-v0").start(gym().task(0))
    assert "one of: 5 to 6" in numbered.agent_says("0").messages[0].content


def test_turn_limit_of_an_adapter_is_a_failure() -> None:
    stuck = played(gym(id="SwitchText-v0", max_turns=4), "0")
    assert (stuck.termination, len(stuck.turns)) == ("failure", 4)


def test_restored_gymnasium_episode_goes_on_identically() -> None:
    environment = gym()
    task = environment.task(5)
    episode = environment.start(task)
    episode.user_says("Go ahead.")
    for guess in ("1", "x", "2"):
        episode.agent_says(guess)
    twin = environment.restore(task, json.loads(json.dumps(episode.snapshot())))
    assert twin.state() == episode.state()
    assert twin.agent_says("3") == episode.agent_says("3")
    with pytest.raises(EpisodeError, match="keys"):
        environment.restore(task, {"other": 1})


def test_an_environment_that_draws_beyond_its_seed_is_not_restored() -> None:
    environment = gym(id="MoodyText-v0")
    episode = environment.start(environment.task(0))
    episode.agent_says("1")
    with pytest.raises(EpisodeError, match="draws by chance beyond its seed"):
        environment.restore(environment.task(0), episode.snapshot())


def test_what_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs id"):
        gym(id="").start(gym().task(0))
    with pytest.raises(ConfigError, match="NoSuchGame"):
        gym(id="NoSuchGame-v0").start(gym().task(0))
    with pytest.raises(UnsupportedError, match="no scripted expert"):
        gym().expert(gym().task(0))
    with pytest.raises(ConfigError, match="max_turns 0"):
        gym(max_turns=0)
    with pytest.raises(ConfigError, match="not names that differ"):
        gym(actions=("on", "ON"))
    with pytest.raises(ConfigError, match="3 actions are named"):
        gym(id="SwitchText-v0", actions=("a", "b", "c")).start(gym().task(0))
    with pytest.raises(ConfigError, match="1 actions are named"):
        gym(actions=("a",)).start(gym().task(0))
    with pytest.raises(ConfigError, match="unexpected keyword"):
        gym(options={"least": 3}).start(gym().task(0))
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingDependencyError, match=r"slea-llm\[gymnasium\]"):
        gym().start(gym().task(0))


def test_leaving_user_closes_the_world() -> None:
    episode = gym().start(gym().task(0))
    assert episode.user_says("bye", leaving=True).termination == "user_left"
    with pytest.raises(EpisodeError, match="ended"):
        episode.agent_says("1")


# TextWorld (the calls of textworld 1.7: start, EnvInfos, reset, step, a state that is a mapping with attributes) ------


class GameState(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Lamp:
    """Take the lamp, then light it; a score for each."""

    def reset(self) -> GameState:
        self._done: list[str] = []
        return self._state("A dark room with a lamp.")

    def step(self, command: str) -> tuple[GameState, int, bool]:
        if command == ("light lamp" if self._done else "take lamp"):
            self._done.append(command)
        state = self._state("Light!" if len(self._done) == 2 else "It is dark.")
        return state, len(self._done), state["won"]

    def close(self) -> None:
        self._done = []

    def _state(self, feedback: str) -> GameState:
        commands = ["look", "light lamp" if self._done else "take lamp"]
        walk = {"extra.walkthrough": ["take lamp", "light lamp"]}
        return GameState(
            feedback=f"\n{feedback}\n", won=len(self._done) == 2, lost=False, admissible_commands=commands, **walk
        )


@pytest.fixture
def textworld(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TextWorldGames:
    module = ModuleType("textworld")
    module.EnvInfos = SimpleNamespace  # type: ignore[attr-defined]
    module.start = lambda game, infos: Lamp()  # type: ignore[attr-defined] # noqa: ARG005
    monkeypatch.setitem(sys.modules, "textworld", module)
    for name in ("one.z8", "two.ulx", "notes.txt"):
        (tmp_path / name).write_text("")
    return TextWorldGames(TextWorldGames.Config(games=str(tmp_path), max_turns=5))


def test_textworld_walkthrough_wins_and_looking_does_not(textworld: TextWorldGames) -> None:
    user = ScriptedUser(ScriptedUser.Config())
    task = textworld.task(1)
    assert task.goal["game"].endswith("two.ulx")
    won = play(textworld, user, textworld.expert(task), task, seed=1, max_turns=30)
    assert (won.termination, won.outcome, len(won.turns)) == ("success", 2.0, 2)
    assert won.turns[0].state_after["actions"] == ["look", "light lamp"]
    lost = play(textworld, user, textworld.idler(task), task, seed=1, max_turns=30)
    assert (lost.termination, lost.outcome, len(lost.turns)) == ("failure", 0.0, 5)


def test_textworld_is_restored_by_playing_again(textworld: TextWorldGames) -> None:
    task = textworld.task(0)
    episode = textworld.start(task)
    episode.agent_says("<think>first</think>take\nlamp")
    twin = textworld.restore(task, json.loads(json.dumps(episode.snapshot())))
    assert twin.agent_says("light lamp").termination == "success"


def test_textworld_settings(textworld: TextWorldGames, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="errs nowhere"):
        textworld.expert(textworld.task(0), error_rate=0.2)
    with pytest.raises(ConfigError, match="no game file"):
        TextWorldGames(TextWorldGames.Config(games=str(tmp_path / "none"))).task(0)
    with pytest.raises(ConfigError, match=r"notes.txt' is no game file"):
        TextWorldGames(TextWorldGames.Config(games=str(tmp_path / "notes.txt"))).task(0)


def test_textworld_commands_are_made_fit_for_an_interpreter(
    textworld: TextWorldGames, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    step = Lamp.step

    def listening(self: Lamp, command: str) -> tuple[GameState, int, bool]:
        heard.append(command)
        return step(self, command)

    monkeypatch.setattr(Lamp, "step", listening)
    episode = textworld.start(textworld.task(2**63))
    assert "at most 200 characters" in episode.agent_says("take lamp " * 9999).messages[0].content
    for reply in ("", "\0\x1b", "take\0\ud800 \n lamp"):
        episode.agent_says(reply)
    assert heard == ["look", "look", "take lamp"]
    twin = textworld.restore(textworld.task(2**63), json.loads(json.dumps(episode.snapshot())))
    assert twin.agent_says("light lamp").termination == "success"


def test_textworld_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)
    game = tmp_path / "one.z8"
    game.write_text("")
    environment = TextWorldGames(TextWorldGames.Config(games=str(game)))
    with pytest.raises(MissingDependencyError, match="pip install textworld"):
        environment.start(environment.task(0))


# verifiers (the calls of verifiers 0.4: a taskset that yields tasks, a trace with its last reply, an async score) -----


class Sum:
    """A task: what is n + n?"""

    NEEDS_CONTAINER: ClassVar[bool] = False
    config = None
    key = hash = "k"

    def __init__(self, number: int) -> None:
        prompt = f"What is {number} + {number}?"
        self.data = SimpleNamespace(prompt=prompt, prompt_text=prompt, system_prompt="Add.", answer=str(2 * number))

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        del config
        return []

    async def score(self, trace: Any) -> None:
        await asyncio.sleep(0)
        trace.reward = float(trace.nodes[-1].message.content == self.data.answer)


class Container(Sum):
    NEEDS_CONTAINER = True


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> list[Sum]:
    tasks: list[Sum] = [Sum(1), Sum(2), Sum(3)]
    record = SimpleNamespace
    modules: dict[str, dict[str, Any]] = {
        "verifiers": {},
        "verifiers.v1": {"AgentConfig": record},
        "verifiers.v1.graph": {"MessageNode": type("MessageNode", (record,), {})},
        "verifiers.v1.trace": {name: type(name, (record,), {}) for name in ("AgentInfo", "Trace", "TraceTask")},
        "verifiers.v1.types": {
            name: type(name, (record,), {}) for name in ("AssistantMessage", "SystemMessage", "UserMessage")
        },
        "verifiers.v1.utils": {},
    }
    loaders = record(taskset_config_type=lambda name: record, load_taskset=lambda config: tasks)  # noqa: ARG005
    for name, members in modules.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["verifiers.v1.utils"].loaders = loaders  # type: ignore[attr-defined]
    return tasks


def test_verifiers_rewards_score_one_reply(verifiers: list[Sum]) -> None:
    environment = VerifiersTasks(VerifiersTasks.Config(taskset="sums"))
    right = played(environment, "<think>add</think>4", seed=1)
    assert (right.termination, right.outcome, len(right.turns)) == ("success", 1.0, 1)
    assert "Add.\n\nWhat is 2 + 2?" in right.turns[0].context[0].content
    assert played(environment, "5", seed=1).termination == "failure"
    assert played(environment, "2", seed=len(verifiers)).termination == "success"


def test_verifiers_takes_any_seed_of_a_taskset_with_an_end(verifiers: list[Sum]) -> None:
    environment = VerifiersTasks(VerifiersTasks.Config(taskset="sums"))
    for seed in (2**63, -1):
        task = environment.task(seed)
        assert environment.start(task).system_prompt() == environment.start(environment.task(seed % 3)).system_prompt()
    verifiers[0].score = lambda trace: _scored(trace, float("nan"))  # type: ignore[method-assign]
    with pytest.raises(EpisodeError, match="sum to nan"):
        environment.start(environment.task(0)).agent_says("2")


async def _scored(trace: Any, reward: float) -> None:
    await asyncio.sleep(0)
    trace.reward = reward


def test_verifiers_taskset_without_an_end_takes_seeds_up_to_a_limit(
    verifiers: list[Sum], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slea_llm.environments.verifiers_tasks.MOST", 3)
    environment = VerifiersTasks(VerifiersTasks.Config(taskset="sums"))
    assert "3 + 3" in environment.start(environment.task(2)).system_prompt()[0].content
    with pytest.raises(ConfigError, match="seeds below 3 are taken"):
        environment.start(environment.task(2**63))
    assert len(verifiers) == 3


def test_verifiers_tasks_that_need_more_are_refused(verifiers: list[Sum]) -> None:
    environment = VerifiersTasks(VerifiersTasks.Config(taskset="sums"))
    verifiers[0] = Container(1)
    with pytest.raises(UnsupportedError, match="tools or a container"):
        environment.start(environment.task(0))
    verifiers[1].data.prompt = None
    again = VerifiersTasks(VerifiersTasks.Config(taskset="sums"))
    with pytest.raises(UnsupportedError, match="its user opens"):
        again.start(again.task(1))
    with pytest.raises(UnsupportedError, match="no scripted expert"):
        again.expert(again.task(0))
    with pytest.raises(ConfigError, match="needs taskset"):
        VerifiersTasks(VerifiersTasks.Config()).start(again.task(0))


def test_verifiers_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    environment = VerifiersTasks(VerifiersTasks.Config(taskset="sums"))
    with pytest.raises(MissingDependencyError, match="pip install verifiers"):
        environment.start(environment.task(0))


def test_an_episode_is_what_the_driver_takes() -> None:
    episode: ForeignEpisode = gym().start(gym().task(0))
    assert episode.state()["turns_left"] == 20
    assert json.loads(json.dumps(dict(episode.state()))) == episode.state()
