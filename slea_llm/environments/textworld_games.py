"""TextWorld games: every game file is a task, won by whoever finishes its quest.

Needs textworld (its own install page says how). Games made by `tw-make` carry a walkthrough, which the expert follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from slea_llm import prompts
from slea_llm.checks import check_least
from slea_llm.environments.foreign import ForeignEpisode, Saying, Shown, foreign_task
from slea_llm.errors import ConfigError, MissingDependencyError, UnsupportedError
from slea_llm.types import Task, Termination

SUFFIXES: tuple[str, ...] = (".z8", ".ulx", ".json")

MOST = 200
"""Characters of a command, more than any game reads: interpreters in C are given nothing longer."""


class TextWorldGames:
    """Seed s is game s modulo the number of games; equal games give equal dialogues."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        games: str = ""
        """A game file, or a folder of them."""
        prompt: str = "foreign/text.en"
        """The prompt file that stands before the first observation."""
        admissible: bool = True
        """The public state lists the commands that are possible now."""
        max_turns: int = 50

        def __post_init__(self) -> None:
            check_least(self, max_turns=1)

    name: ClassVar[str] = "textworld"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config
        self._prompt = prompts.load(config.prompt)

    def task(self, seed: int) -> Task:
        games = _games(self.config.games)
        return foreign_task(self.name, seed, {"game": str(games[seed % len(games)])}, number=self.config.max_turns)

    def start(self, task: Task) -> ForeignEpisode:
        text = self._prompt.render()
        return ForeignEpisode(task, self._open, prompt=text, max_turns=self.config.max_turns)

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> ForeignEpisode:
        """The game, played again; raises EpisodeError when it comes out otherwise."""
        episode = self.start(task)
        episode.replay(snapshot)
        return episode

    def expert(self, task: Task, *, error_rate: float = 0.0) -> Saying:
        """Follows the game's walkthrough; raises UnsupportedError for a game without one and for errors on purpose."""
        if error_rate:
            raise UnsupportedError("a walkthrough errs nowhere; set warm_start.error_rate to 0")
        world = self._open(task)
        world.begin()
        commands = world.walkthrough()
        world.close()
        if not commands:
            raise UnsupportedError(f"game {task.goal['game']!r} has no walkthrough to imitate")
        return Saying(replies=tuple(commands))

    def idler(self, task: Task) -> Saying:
        del task
        return Saying(replies=("look",))

    def _open(self, task: Task) -> _TextWorld:
        try:
            import textworld
        except ImportError as error:
            raise MissingDependencyError("textworld is not installed; pip install textworld") from error
        infos = textworld.EnvInfos(
            won=True, lost=True, score=True, admissible_commands=self.config.admissible, extras=["walkthrough"]
        )
        return _TextWorld(textworld.start(task.goal["game"], infos))


class _TextWorld:
    def __init__(self, made: Any) -> None:
        self._made = made
        self._score = 0.0
        self._state: Any = None

    def begin(self) -> Shown:
        self._state = self._made.reset()
        return Shown(text=str(self._state.feedback).strip(), actions=self._actions())

    def act(self, action: str) -> Shown:
        # A reply of several lines is one command: the interpreter would take each line for one.
        command = " ".join("".join(letter if letter.isprintable() else " " for letter in action).split())
        if len(command) > MOST:
            text = f"A command has at most {MOST} characters; this one has {len(command)}."
            return Shown(text=text, actions=self._actions())
        self._state, score, done = self._made.step(command or "look")
        gained, self._score = float(score or 0) - self._score, float(score or 0)
        ended: Termination | None = ("success" if self._state.won else "failure") if done else None
        return Shown(text=str(self._state.feedback).strip(), reward=gained, ended=ended, actions=self._actions())

    def close(self) -> None:
        self._made.close()

    def walkthrough(self) -> list[str]:
        found = self._state.get("extra.walkthrough")
        return [str(command) for command in found] if isinstance(found, list) else []

    def _actions(self) -> tuple[str, ...]:
        return tuple(self._state.get("admissible_commands") or ())


def _games(place: str) -> list[Path]:
    """The game files of a place, in the order of their names; raises ConfigError when there are none."""
    path = Path(place)
    if place and path.is_file() and path.suffix in SUFFIXES:
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in (".z8", ".ulx")) if place and path.is_dir() else []
    if not found:
        raise ConfigError(f"environment textworld: games {place!r} is no game file ({', '.join(SUFFIXES)}) or folder")
    return found
