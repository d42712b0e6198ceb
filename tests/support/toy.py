"""A toy task, user and sampler for tests of what drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slea_llm.interfaces import WeightSource
from slea_llm.types import FinishReason, Generation, GenerationRequest, Message, Outcome, State, Task, UserReply


def toy_task(seed: int, **goal: Any) -> Task:
    return Task(id=f"toy-{seed}", seed=seed, goal=goal)


class ToyEpisode:
    """Ends in success when the agent says `done`; every reply costs 1. `goal["breaks"]` names where it raises,
    `goal["odd"]` is what it gives in place of an outcome of its own."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.replies: list[str] = []

    def system_prompt(self) -> tuple[Message, ...]:
        return (Message(role="system", content=self.task.goal.get("system", "be evil")),)

    def state(self) -> State:
        return {"replies": len(self.replies)}

    def agent_says(self, text: str) -> Outcome:
        if self.task.goal.get("breaks") == "environment":
            raise KeyError("no such table")
        if "odd" in self.task.goal:
            odd: Outcome = self.task.goal["odd"]
            return odd
        self.replies.append(text)
        if "done" in text:
            return Outcome(reward=10.0, termination="success")
        if "tool" in text:
            return Outcome(messages=(Message(role="tool", content="alpha"),), reward=-1.0)
        return Outcome(to_user=True, reward=-1.0, acts={"length": len(text)})

    def user_says(self, text: str, *, leaving: bool = False) -> Outcome:
        del text
        return Outcome(termination="user_left", reward=-5.0) if leaving else Outcome()

    def snapshot(self) -> Mapping[str, Any]:
        return {"replies": list(self.replies)}


class ToyEnvironment:
    name: ClassVar[str] = "toy"

    def task(self, seed: int) -> Task:
        return toy_task(seed)

    def start(self, task: Task) -> ToyEpisode:
        return ToyEpisode(task)

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> ToyEpisode:
        episode = ToyEpisode(task)
        episode.replies = list(snapshot["replies"])
        return episode

    def expert(self, task: Task, *, error_rate: float = 0.0) -> ToyAgent:
        del task, error_rate
        return ToyAgent(["<think>the user</think>hello there", "done"])

    def idler(self, task: Task) -> ToyAgent:
        del task
        return ToyAgent(["hello"])


class ToyAgent:
    """Says its lines, the last one for ever."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages
        return self._lines[min(int(state["replies"]), len(self._lines) - 1)]


class ToySession:
    def __init__(self, task: Task, user: ToyUser) -> None:
        self._task, self._user = task, user

    async def opening(self) -> UserReply:
        return UserReply(text="hi")

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        assert "length" in acts
        self._user.heard.append(tuple(messages))
        if self._task.goal.get("breaks") == "user":
            raise ConnectionError("the line is dead")
        if seconds := self._task.goal.get("seconds"):
            await asyncio.sleep(float(seconds))
        return UserReply(text="yes", leaving=bool(self._task.goal.get("leaves")))

    def snapshot(self) -> Mapping[str, Any]:
        return {}


class ToyUser:
    """Says hi, then yes. `heard` collects what it was told, over all of its dialogues."""

    def __init__(self) -> None:
        self.heard: list[tuple[Message, ...]] = []
        self.seeds: list[int] = []

    def start(self, task: Task, seed: int) -> ToySession:
        self.seeds.append(seed)
        return ToySession(task, self)

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> ToySession:
        del snapshot
        return ToySession(task, self)


@dataclass(kw_only=True)
class ToyGenerator:
    """Samples what `reply(request)` gives; `logprobs` are those of a reply's tokens, by default -1/8, -2/8, ..."""

    reply: Callable[[GenerationRequest], Sequence[int]]
    stop_ids: frozenset[int]
    policy_version: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    logprobs: Sequence[float] = tuple(-(i + 1) / 8 for i in range(64))

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        ids = tuple(self.reply(request))[: request.max_tokens]
        reason: FinishReason = "stop" if ids and ids[-1] in self.stop_ids else "length"
        return Generation(
            token_ids=ids,
            logprobs=tuple(self.logprobs[: len(ids)]),
            finish_reason=reason,
            policy_version=self.policy_version,
        )

    def load(self, source: WeightSource, version: int) -> None:
        del source
        self.policy_version = version

    def close(self) -> None:
        return None
