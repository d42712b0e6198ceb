"""A text environment with the Gymnasium API: observations and actions are texts, or actions are named.

Needs `pip install slea-llm[gymnasium]`. `reset(seed)` must settle every draw: episodes are restored by playing again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slea_llm import prompts
from slea_llm.checks import check_least
from slea_llm.environments.foreign import ForeignEpisode, Saying, Shown, foreign_task
from slea_llm.errors import ConfigError, EpisodeError, MissingDependencyError, UnsupportedError
from slea_llm.interfaces import Agent
from slea_llm.types import Task, Termination


class GymnasiumText:
    """Every seed of a registered Gymnasium environment is a task."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        id: str = ""
        """What `gymnasium.make` takes: a registered id, or `module:id` for one that the module registers."""
        options: Mapping[str, Any] = field(default_factory=dict)
        """Keyword arguments of `gymnasium.make`."""
        actions: tuple[str, ...] = ()
        """Names of the actions of a Discrete action space, from its first on; empty: actions are texts or numbers."""
        success_return: float = 1.0
        """A finished episode whose rewards sum to this or more succeeded, unless its last info holds `success`."""
        prompt: str = "foreign/text.en"
        """The prompt file that stands before the first observation."""
        max_turns: int = 50

        def __post_init__(self) -> None:
            check_least(self, max_turns=1)
            names = [name.strip().lower() for name in self.actions]
            if len({*names}) < len(names) or "" in names:
                raise ConfigError(f"actions {list(self.actions)} are not names that differ (capitals do not count)")

    name: ClassVar[str] = "gymnasium"
    has_expert: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config
        self._prompt = prompts.load(config.prompt)

    def task(self, seed: int) -> Task:
        return foreign_task(self.name, seed, {"id": self.config.id}, number=self.config.max_turns)

    def start(self, task: Task) -> ForeignEpisode:
        text = self._prompt.render()
        return ForeignEpisode(task, self._open, prompt=text, max_turns=self.config.max_turns)

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> ForeignEpisode:
        """The episode, played again; raises EpisodeError when it comes out otherwise."""
        episode = self.start(task)
        episode.replay(snapshot)
        return episode

    def expert(self, task: Task, *, error_rate: float = 0.0) -> Agent:
        """There is none: raises UnsupportedError, so that a warm start says why it cannot be had."""
        del task, error_rate
        raise UnsupportedError(f"gymnasium environment {self.config.id!r} has no scripted expert to imitate")

    def idler(self, task: Task) -> Saying:
        del task
        return Saying(replies=("...",))

    def _open(self, task: Task) -> _GymnasiumWorld:
        try:
            import gymnasium
        except ImportError as error:
            raise MissingDependencyError("gymnasium is not installed; pip install 'slea-llm[gymnasium]'") from error
        if not self.config.id:
            raise ConfigError("environment gymnasium needs id, such as MyGame-v0 or my_package:MyGame-v0")
        try:
            made = gymnasium.make(self.config.id, **self.config.options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:  # TypeError: an option that it does not take
            raise ConfigError(f"gymnasium could not make {self.config.id!r}: {error}") from error
        return _GymnasiumWorld(made, self.config, seed=task.seed)


class _GymnasiumWorld:
    def __init__(self, made: Any, config: GymnasiumText.Config, *, seed: int) -> None:
        self._made, self._config, self._seed = made, config, seed
        self._rewards = 0.0
        space = made.action_space
        self._kind = type(space).__name__
        self._first, self._count = (int(space.start), int(space.n)) if self._kind == "Discrete" else (0, 0)
        if self._kind not in ("Text", "Discrete"):
            raise ConfigError(
                f"{config.id}: the action space {space} takes neither texts nor named or numbered actions"
            )
        if config.actions and len(config.actions) != self._count:
            raise ConfigError(f"{config.id}: {len(config.actions)} actions are named, the action space is {space}")

    def begin(self) -> Shown:
        observation, _ = self._made.reset(seed=self._seed)
        return Shown(text=_text(observation), actions=self._config.actions)

    def act(self, action: str) -> Shown:
        taken = self._action(action)
        if taken is None:
            known = ", ".join(self._config.actions) or f"{self._first} to {self._first + self._count - 1}"
            return Shown(text=f"{action[:80]!r} is no action; one of: {known}", actions=self._config.actions)
        observation, reward, terminated, truncated, info = self._made.step(taken)
        if not math.isfinite(float(reward)):
            raise EpisodeError(f"{self._config.id} gave the reward {reward} after {action[:80]!r}")
        self._rewards += float(reward)
        won = bool(info["success"]) if "success" in info else self._rewards >= self._config.success_return
        cut: Termination | None = "max_turns" if truncated else None
        ended: Termination | None = ("success" if won else "failure") if terminated else cut
        return Shown(text=_text(observation), reward=float(reward), ended=ended, actions=self._config.actions)

    def close(self) -> None:
        self._made.close()

    def _action(self, said: str) -> Any:
        """The action that a reply is; None when it is none."""
        if self._kind == "Text":
            return said
        word = said.strip().lower()
        names = [name.strip().lower() for name in self._config.actions]
        if word in names:
            return self._first + names.index(word)
        # Python reads no number of thousands of digits, and no action has one of twenty.
        number = int(word) if re.fullmatch(r"-?\d{1,20}", word) else None
        known = range(self._first, self._first + self._count)
        return number if number in known else None


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise EpisodeError(f"the observation is {type(observation).__name__} and no text; wrap the environment")
    return observation
