"""Playing recorded dialogues on from a place in a reply: the same state, the same beginning, other draws."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from slea_llm.dialogue import Dialogue, Position, Speaker, Spoken
from slea_llm.errors import EpisodeError
from slea_llm.interfaces import Agent, Environment, SimulatedUser, Unrepeatable
from slea_llm.models.thoughts import without_thoughts
from slea_llm.rollout import Rollout, Script
from slea_llm.types import Continued, Message, ReplyPrefix, State, Task, Trajectory

ATTEMPTS = 512
"""Draws of a scripted agent until its reply begins as recorded."""


class Player(Protocol):
    """Who goes on with a dialogue."""

    def heard(self, text: str) -> str:
        """What the user gets of a reply."""
        ...

    def speaker(self, trajectory: Trajectory, task: Task, prefix: ReplyPrefix, seed: int) -> Speaker:
        """The agent's side from the reply of `prefix.turn` on, that reply begun as recorded."""
        ...


class PolicyPlayer:
    """The policy of a rollout: it goes on from the recorded tokens."""

    def __init__(self, rollout: Rollout, heard: Callable[[str], str]) -> None:
        self._rollout, self.heard = rollout, heard

    def speaker(self, trajectory: Trajectory, task: Task, prefix: ReplyPrefix, seed: int) -> Speaker:
        del task
        sampler = self._rollout.sampler(key=(seed, _number(f"episode/{trajectory.id}")))
        sampler.resume(trajectory, prefix)
        return sampler


class ScriptPlayer:
    """A scripted agent that is made anew for every seed; `make(task, seed)` names all of its draws by the seed.

    It cannot go on from half a reply: it is asked, under other seeds, until its reply begins as recorded. That is a
    draw from the replies of that beginning, as long as what it says depends on seed, state and messages alone.
    """

    def __init__(self, make: Callable[[Task, int], Agent]) -> None:
        self._make = make

    def heard(self, text: str) -> str:
        return without_thoughts(text)

    def speaker(self, trajectory: Trajectory, task: Task, prefix: ReplyPrefix, seed: int) -> Speaker:
        return _Begun(self._make, task, trajectory.turns[prefix.turn].text, prefix, seed)


class _Begun:
    """A script whose first reply begins as recorded."""

    def __init__(
        self, make: Callable[[Task, int], Agent], task: Task, recorded: str, prefix: ReplyPrefix, seed: int
    ) -> None:
        self._make, self._task, self._recorded, self._prefix, self._seed = make, task, recorded, prefix, seed
        self._script = Script(make(task, seed))

    async def reply(self, turn: int, new: tuple[Message, ...], state: State) -> Spoken:
        if turn != self._prefix.turn or not self._prefix.characters:
            return await self._script.reply(turn, new, state)
        begun = self._recorded[: self._prefix.characters]
        if begun == self._recorded:
            return Spoken(text=begun, heard=without_thoughts(begun))
        for attempt in range(ATTEMPTS):
            agent = self._make(self._task, self._seed if attempt == 0 else _number(f"{self._seed}/{turn}/{attempt}"))
            spoken = await Script(agent).reply(turn, new, state)
            if spoken.text.startswith(begun):
                return spoken
        raise EpisodeError(f"in {ATTEMPTS} draws the scripted agent never began its reply with {begun[:80]!r}")


class _Recorded:
    """Says what was said, up to a turn."""

    def __init__(self, trajectory: Trajectory, turns: int, heard: Callable[[str], str]) -> None:
        self._texts, self._heard = [turn.text for turn in trajectory.turns[:turns]], heard

    async def reply(self, turn: int, new: tuple[Message, ...], state: State) -> Spoken | None:
        del new, state
        if turn >= len(self._texts):
            return None
        return Spoken(text=self._texts[turn], heard=self._heard(self._texts[turn]))


class BranchingPlay:
    """Restores the state before a reply and plays on from there, all continuations at once.

    The state is restored by playing the recorded replies again from the start, with the recorded seed of the user; what
    the agent saw at every turn must come out as recorded, or nothing is played. From the snapshot of environment and
    user before the reply each continuation then goes its own way.
    """

    def __init__(
        self,
        environment: Environment,
        user: SimulatedUser,
        player: Player,
        *,
        max_turns: int,
        concurrency: int = 128,
        deadline_s: float | None = 600.0,
    ) -> None:
        """`max_turns`, `concurrency` and `deadline_s` are those of the rollout; the last two for one continuation."""
        self._environment, self._user, self._player = environment, user, player
        self._max_turns, self._concurrency, self._deadline_s = max_turns, concurrency, deadline_s

    def branch(
        self, trajectory: Trajectory, prefixes: Sequence[ReplyPrefix], seeds: Sequence[int]
    ) -> tuple[Continued, ...]:
        """See Continuations. Raises EpisodeError when the dialogue cannot be restored."""
        if not prefixes or not seeds:
            raise EpisodeError(f"nothing to play: {len(prefixes)} prefixes, {len(seeds)} seeds")
        if isinstance(self._user, Unrepeatable):
            raise EpisodeError(self._user.unrepeatable)
        return asyncio.run(self._branch(trajectory, prefixes, seeds))

    async def _branch(
        self, trajectory: Trajectory, prefixes: Sequence[ReplyPrefix], seeds: Sequence[int]
    ) -> tuple[Continued, ...]:
        task = _task(trajectory)
        positions = await self._restore(trajectory, task, 1 + max(prefix.turn for prefix in prefixes))
        running = asyncio.Semaphore(self._concurrency)
        played = []
        for prefix in prefixes:
            dialogues = [self._dialogue(trajectory, task, positions[prefix.turn], prefix, seed) for seed in seeds]
            played.append([(one, asyncio.create_task(one.run(running, self._deadline_s))) for one in dialogues])
        await asyncio.wait([job for group in played for _, job in group])
        return tuple(_ended(group) for group in played)

    async def _restore(self, trajectory: Trajectory, task: Task, turns: int) -> list[Position]:
        """The positions before each of the first `turns` replies."""
        seed = trajectory.provenance.get("user_seed")
        if not isinstance(seed, int):
            raise EpisodeError(f"dialogue {trajectory.id!r} says no seed of its user; it cannot be played again")
        again = Dialogue(
            self._environment,
            self._user,
            _Recorded(trajectory, turns - 1, self._player.heard),
            task,
            id=f"{trajectory.id}-again",
            episode=0,
            user_seed=seed,
            max_turns=self._max_turns,
            keep_positions=True,
        )
        await again.run(asyncio.Semaphore(), self._deadline_s)
        if len(again.positions) < turns:
            raise EpisodeError(f"dialogue {trajectory.id!r} played again ended after {len(again.positions)} replies")
        for turn, position in zip(trajectory.turns, again.positions[:turns], strict=False):
            state = self._environment.restore(task, position.episode).state()
            if position.new != turn.context or not _same(state, turn.state_before):
                raise EpisodeError(
                    f"dialogue {trajectory.id!r} played again differs before turn {turn.index}: environment or user "
                    "are not those that it was recorded with, or do not answer the same way twice"
                )
        return again.positions

    def _dialogue(
        self, trajectory: Trajectory, task: Task, position: Position, prefix: ReplyPrefix, seed: int
    ) -> Dialogue:
        return Dialogue(
            self._environment,
            self._user,
            self._player.speaker(trajectory, task, prefix, seed),
            task,
            id=f"{trajectory.id}-{prefix.turn}.{prefix.characters}-{seed}",
            episode=0,
            user_seed=_number(f"user/{seed}"),
            max_turns=self._max_turns,
            position=position,
        )


def _task(trajectory: Trajectory) -> Task:
    names = {entry.name for entry in fields(Task)}
    if trajectory.task.keys() != names:
        raise EpisodeError(
            f"dialogue {trajectory.id!r} has a task with the keys {sorted(trajectory.task)}; to play it again it needs "
            f"{sorted(names)}"
        )
    return Task(**trajectory.task)


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: a list and a tuple of the same items are."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _ended(group: Sequence[tuple[Dialogue, asyncio.Task[None]]]) -> Continued:
    errors = [error for _, job in group if (error := job.exception()) is not None]
    if errors:
        first = errors[0]
        return Continued(reason=f"{len(errors)} of {len(group)} continuations broke: {type(first).__name__}: {first}")
    return Continued(successes=tuple(dialogue.termination == "success" for dialogue, _ in group))


def _number(text: str) -> int:
    """A seed in [0, 2^63) named by a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
