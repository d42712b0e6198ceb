"""A task that asking never solves, an expert that asks half of the time, and an evaluator that pays any question."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slea_llm.types import Message, Outcome, ScoredStep, State, Step, Task, Trajectory, UserReply

QUESTION, ANSWER = "Which?", "Done."
ASKS = 0.4
LIMIT = 3


class AskingEpisode:
    """Ends well with the first reply that says it is done, badly after three that do not."""

    def __init__(self, replies: int = 0) -> None:
        self.replies = replies

    def system_prompt(self) -> tuple[Message, ...]:
        return (Message(role="system", content="Help."),)

    def state(self) -> State:
        return {"replies": self.replies}

    def agent_says(self, text: str) -> Outcome:
        self.replies += 1
        if ANSWER in text:
            return Outcome(reward=1.0, termination="success")
        return Outcome(termination="failure") if self.replies == LIMIT else Outcome(to_user=True)

    def user_says(self, text: str, *, leaving: bool = False) -> Outcome:
        del text, leaving
        return Outcome()

    def snapshot(self) -> Mapping[str, Any]:
        return {"replies": self.replies}


class AskingEnvironment:
    name: ClassVar[str] = "asking"

    def task(self, seed: int) -> Task:
        return Task(id=f"asking-{seed}", seed=seed, goal={})

    def start(self, task: Task) -> AskingEpisode:
        del task
        return AskingEpisode()

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> AskingEpisode:
        del task
        return AskingEpisode(**snapshot)

    def expert(self, task: Task, *, error_rate: float = 0.0) -> Undecided:
        del error_rate
        return Undecided(task.seed)

    def idler(self, task: Task) -> Undecided:
        return Undecided(task.seed)


class Undecided:
    """Asks or answers by chance."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)  # noqa: S311 (test data)

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del state, messages
        return QUESTION if self._draws.random() < ASKS else ANSWER


class AskingSession:
    async def opening(self) -> UserReply:
        return UserReply(text="Hi")

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        del acts, messages
        return UserReply(text="Yes")

    def snapshot(self) -> Mapping[str, Any]:
        return {}


class AskingUser:
    def start(self, task: Task, seed: int) -> AskingSession:
        del task, seed
        return AskingSession()

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> AskingSession:
        del task, snapshot
        return AskingSession()


class AnyQuestion:
    """Pays 1 for whatever holds a question mark."""

    name: ClassVar[str] = "any_question"
    needs: ClassVar[frozenset[str]] = frozenset()
    version = "any_question:1"

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        del trajectory
        return tuple(
            ScoredStep(
                turn=step.turn,
                step=step.index,
                evaluator=self.name,
                version=self.version,
                score=float("?" in step.text),
            )
            for step in steps
        )
