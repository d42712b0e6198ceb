"""A plain loop over environment, user and agent: what a rollout does, without tokens, engine or concurrency."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slea_llm.interfaces import Agent, Environment, Episode, SimulatedUser, UserSession
from slea_llm.types import Message, State, Task, Termination


@dataclass(kw_only=True)
class Played:
    """A finished (or paused) dialogue. `snapshots[t]` is what episode and user were before reply t."""

    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    acts: list[Mapping[str, Any]] = field(default_factory=list)
    snapshots: list[tuple[str, str, int]] = field(default_factory=list)
    termination: Termination | None = None

    @property
    def turns(self) -> int:
        return len(self.rewards)

    @property
    def outcome(self) -> float:
        return sum(self.rewards)

    def said_by(self, role: str) -> list[str]:
        return [message.content for message in self.messages if message.role == role]


def play(environment: Environment, user: SimulatedUser, agent: Agent, task: Task, *, seed: int = 0) -> Played:
    """One dialogue from its start to its end."""
    episode, session = environment.start(task), user.start(task, seed)
    played = Played(messages=list(episode.system_prompt()))
    return asyncio.run(_run(episode, session, agent, played, opening=True))


def resume(
    environment: Environment, user: SimulatedUser, agent: Agent, task: Task, *, whole: Played, turn: int
) -> Played:
    """The rest of a dialogue from the snapshots before reply `turn`, which went through JSON."""
    episode_text, session_text, said = whole.snapshots[turn]
    episode = environment.restore(task, json.loads(episode_text))
    session = user.restore(task, json.loads(session_text))
    played = Played(
        messages=whole.messages[:said],
        rewards=whole.rewards[:turn],
        states=whole.states[:turn],
        acts=whole.acts[:turn],
        snapshots=whole.snapshots[:turn],
    )
    return asyncio.run(_run(episode, session, agent, played, opening=False))


async def _run(episode: Episode, session: UserSession, agent: Agent, played: Played, *, opening: bool) -> Played:
    if opening:
        first = await session.opening()
        played.messages.append(Message(role="user", content=first.text))
        assert episode.user_says(first.text, leaving=first.leaving).termination is None
    while played.termination is None:
        before = episode.state()
        played.snapshots.append(
            (
                json.dumps(episode.snapshot(), ensure_ascii=False),
                json.dumps(session.snapshot(), ensure_ascii=False),
                len(played.messages),
            )
        )
        played.states.append(before)
        text = agent.act(before, played.messages)
        outcome = episode.agent_says(text)
        played.messages += [Message(role="assistant", content=text), *outcome.messages]
        played.acts.append(outcome.acts)
        played.rewards.append(outcome.reward)
        played.termination = outcome.termination
        if outcome.to_user and outcome.termination is None:
            answer = await session.answer(outcome.acts, played.messages)
            played.messages.append(Message(role="user", content=answer.text))
            after = episode.user_says(answer.text, leaving=answer.leaving)
            played.rewards[-1] += after.reward
            played.termination = after.termination
    return played
