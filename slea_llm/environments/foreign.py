"""The frame of adapters: text worlds of other libraries, restored by playing their actions again from the start.

An adapter gives `Worlds`, which opens the world of a task; everything else is here. The user only says go on: what the
world shows reaches the agent as tool messages, and a reply without its thought is the next action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from slea_llm.environments.speech import spoken
from slea_llm.errors import EpisodeError
from slea_llm.types import Message, Outcome, State, Task, Termination

SAID = "user/foreign.{code}.yaml"
"""What the scripted user says in tasks of other libraries."""


class Shown(NamedTuple):
    """What a world shows after an action. `ended` None: it goes on; `actions`: those that it says are possible."""

    text: str
    reward: float = 0.0
    ended: Termination | None = None
    actions: tuple[str, ...] = ()


class World(Protocol):
    """One running text world."""

    def begin(self) -> Shown: ...

    def act(self, action: str) -> Shown: ...

    def close(self) -> None: ...


Opener = Callable[[Task], World]


@dataclass(slots=True, kw_only=True)
class _History:
    """All that changes: the actions so far, what was shown last, and the rewards."""

    actions: list[str] = field(default_factory=list)
    shown: str = ""
    possible: list[str] = field(default_factory=list)
    rewards: float = 0.0
    ended: bool = False


def foreign_task(name: str, seed: int, goal: Mapping[str, Any], *, language: str = "en", number: int) -> Task:
    """A task of another library, with a user who only says go on."""
    user = {
        "values": {},
        "volunteers": [],
        "together": {},
        "vague": {},
        "misstated": {},
        "patience": number,
        "wording": SAID.format(code=language),
    }
    return Task(id=f"{name}-{seed}", seed=seed, goal={**goal, "user": user}, language=language)


class ForeignEpisode:
    """One dialogue with a world. Its snapshot is the list of actions; restoring plays them again.

    Raises EpisodeError when the world shows something else the second time, so that nothing goes on from a state that
    is not the one recorded.
    """

    def __init__(self, task: Task, opener: Opener, *, prompt: str, max_turns: int) -> None:
        self._prompt, self._max_turns = prompt, max_turns
        self._world = opener(task)
        self._first = self._world.begin()
        self._history = _History()
        self._take(self._first)

    def replay(self, snapshot: Mapping[str, Any]) -> None:
        """Play the actions of a snapshot again."""
        names = {entry.name for entry in fields(_History)}
        if snapshot.keys() != names:
            raise EpisodeError(f"snapshot has the keys {sorted(snapshot)}; expected {sorted(names)}")
        rewards = 0.0
        for action in snapshot["actions"]:
            shown = self._world.act(action)
            rewards += shown.reward
            self._take(shown)
            self._history.actions.append(action)
        self._history.rewards = rewards
        if (self._history.shown, rewards) != (snapshot["shown"], snapshot["rewards"]):
            raise EpisodeError(
                f"after {len(snapshot['actions'])} actions played again the world shows {self._history.shown[:80]!r} "
                f"and not {str(snapshot['shown'])[:80]!r}; it draws by chance beyond its seed and cannot be restored"
            )
        self._history.ended = bool(snapshot["ended"])

    def system_prompt(self) -> tuple[Message, ...]:
        return (Message(role="system", content=f"{self._prompt}\n\n{self._first.text}".strip()),)

    def state(self) -> State:
        history = self._history
        return {
            "turn": len(history.actions),
            "turns_left": self._max_turns - len(history.actions),
            "shown": history.shown,
            "actions": list(history.possible),
            "rewards": history.rewards,
        }

    def snapshot(self) -> Mapping[str, Any]:
        return asdict(self._history)

    def agent_says(self, text: str) -> Outcome:
        self._check_open()
        action = spoken(text)
        shown = self._world.act(action)
        self._history.actions.append(action)
        self._history.rewards += shown.reward
        self._take(shown)
        ended = shown.ended
        if ended is None and len(self._history.actions) >= self._max_turns:
            ended = "failure"
        if ended is not None:
            self._history.ended = True
            self._world.close()
        message = Message(role="tool", content=shown.text, name="world")
        acts = {"heard": action}
        return Outcome(messages=(message,), acts=acts, reward=shown.reward, termination=ended)

    def user_says(self, text: str, *, leaving: bool = False) -> Outcome:
        self._check_open()
        del text
        if leaving:
            self._history.ended = True
            self._world.close()
            return Outcome(termination="user_left")
        return Outcome()

    def _take(self, shown: Shown) -> None:
        self._history.shown, self._history.possible = shown.text, list(shown.actions)

    def _check_open(self) -> None:
        if self._history.ended:
            raise EpisodeError("this dialogue has ended; start another episode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saying:
    """An agent that gives fixed replies in turn, and the last of them for ever."""

    replies: Sequence[str]

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages
        turn: int = state["turn"]
        return self.replies[min(turn, len(self.replies) - 1)]
