"""One dialogue between agent, simulated user and environment, turn by turn, and the record that it makes."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from slea_llm.errors import EpisodeError, nearest
from slea_llm.interfaces import Environment, Episode, Reseedable, SimulatedUser, Traced, UserSession
from slea_llm.types import (
    TERMINATIONS,
    FinishReason,
    Message,
    Outcome,
    State,
    Task,
    Termination,
    TokenSpan,
    TokenTrace,
    Trajectory,
    Turn,
    UserReply,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Spoken:
    """A reply of the agent; `heard` is what the user gets of it, thoughts removed."""

    text: str
    heard: str
    span: TokenSpan | None = None
    finish_reason: FinishReason = "stop"


class Speaker(Protocol):
    """The agent's side of one dialogue."""

    async def reply(self, turn: int, new: tuple[Message, ...], state: State) -> Spoken | None:
        """The next reply; None when the context has no room for one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A dialogue just before a reply of the agent: all that is needed to play on from there.

    `turn` is the reply that comes next, `episode` and `session` are snapshots (JSON values), `new` is what the agent
    hears before it, `said` the whole talk as the user heard it.
    """

    turn: int
    episode: Mapping[str, Any]
    session: Mapping[str, Any]
    new: tuple[Message, ...]
    said: tuple[Message, ...]


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A turn whose consequences are not all known yet."""

    context: tuple[Message, ...]
    spoken: Spoken
    before: State
    after: State
    reward: float = 0.0
    changed: str | None = None
    """What the user heard, where the environment changed it (it filled a placeholder)."""


class Dialogue:
    """One dialogue while it runs. Whatever it holds when something breaks still makes a record.

    With `position` it plays on from there, and what environment and user still draw is drawn from `user_seed` where
    they can be seeded anew (Reseedable); its record then begins at that turn. With `keep_positions` the list
    `positions` holds one entry for every reply, taken before it.
    """

    def __init__(
        self,
        environment: Environment,
        user: SimulatedUser,
        speaker: Speaker,
        task: Task,
        *,
        id: str,
        episode: int,
        user_seed: int,
        max_turns: int,
        position: Position | None = None,
        keep_positions: bool = False,
    ) -> None:
        self._environment, self._user, self._speaker, self._task = environment, user, speaker, task
        self._id, self._episode, self._user_seed, self._max_turns = id, episode, user_seed, max_turns
        self._position, self._keep_positions = position, keep_positions
        self._first = 0 if position is None else position.turn
        self.positions: list[Position] = []
        self._turns: list[_Draft] = []
        self._new: list[Message] = []
        self._said: list[Message] = []
        self._termination: Termination | None = None
        self._stage = "the start"
        self._session: UserSession | None = None
        self._prompt_hash = ""
        self._seconds = 0.0
        self._deadline_s: float | None = None

    async def run(self, running: asyncio.Semaphore, deadline_s: float | None) -> None:
        """Play to the end; raises what a component raises, and TimeoutError past the deadline."""
        async with running:
            self._deadline_s = deadline_s
            started = time.perf_counter()
            try:
                async with asyncio.timeout(deadline_s):
                    await self._play()
            finally:
                self._seconds = time.perf_counter() - started

    def record(
        self,
        *,
        environment: str,
        seed: int,
        policy_version: int,
        traces: tuple[TokenTrace, ...],
        provenance: Mapping[str, Any],
        error: BaseException | None,
    ) -> Trajectory:
        """The dialogue as far as it came."""
        text = None
        heard = {str(turn): draft.changed for turn, draft in enumerate(self._turns, self._first) if draft.changed}
        more: dict[str, Any] = {"heard": heard} if heard else {}
        session: object = self._session
        if isinstance(session, Traced):
            more["user"] = dict(session.provenance())
        if error is not None or self._termination is None:
            text = self._describe(error)
            # An EpisodeError says what is wrong; whatever else was raised may be a fault of somebody's code.
            trace = None if isinstance(error, EpisodeError) else error
            _log.warning("dialogue %s broke: %s", self._id, text, exc_info=trace)
        return Trajectory(
            id=self._id,
            task=asdict(self._task),
            environment=environment,
            seed=seed,
            policy_version=policy_version,
            turns=tuple(_turn(index, draft) for index, draft in enumerate(self._turns, self._first)),
            traces=traces,
            outcome=None if text is not None else sum((draft.reward for draft in self._turns), 0.0),
            termination="error" if text is not None or self._termination is None else self._termination,
            error=text,
            provenance={
                **provenance,
                **more,
                "episode": self._episode,
                "user_seed": self._user_seed,
                "prompt_hash": self._prompt_hash,
                "seconds": round(self._seconds, 3),
                "last_messages": [{"role": message.role, "content": message.content} for message in self._new],
            },
        )

    def _describe(self, error: BaseException | None) -> str:
        place = f" [turn {self._first + len(self._turns)}, {self._stage}]"
        if isinstance(error, TimeoutError) and self._deadline_s is not None and self._seconds >= self._deadline_s:
            return f"TimeoutError: no end within rollout.deadline_s {self._deadline_s} s{place}"
        return f"{type(error).__name__}: {error}{place}"

    @property
    def termination(self) -> Termination | None:
        """How it ended; None while it runs, and when it broke."""
        return self._termination

    async def _play(self) -> None:
        self._stage = "environment"
        episode, session = await self._open() if self._position is None else self._resume(self._position)
        while self._termination is None:
            if self._first + len(self._turns) == self._max_turns:
                self._termination = "max_turns"
            else:
                if self._keep_positions:
                    self.positions.append(self._note(episode, session))
                await self._play_turn(episode, session)

    async def _open(self) -> tuple[Episode, UserSession]:
        episode = self._environment.start(self._task)
        prompt = episode.system_prompt()
        self._prompt_hash = _hash("".join(f"{message.role}\n{message.content}\n" for message in prompt))
        self._new += prompt
        self._stage = "user"
        session = self._session = self._user.start(self._task, self._user_seed)
        reward = self._take(episode, await session.opening())
        if self._termination is not None or reward:
            raise EpisodeError(
                f"the user's opening ended the dialogue ({self._termination}) or earned {reward}; no reply led to it"
            )
        return episode, session

    def _resume(self, position: Position) -> tuple[Episode, UserSession]:
        episode = self._environment.restore(self._task, position.episode)
        session = self._session = self._user.restore(self._task, position.session)
        for part in (episode, session):
            if isinstance(part, Reseedable):
                part.reseed(self._user_seed)
        self._new, self._said = list(position.new), list(position.said)
        return episode, session

    def _note(self, episode: Episode, session: UserSession) -> Position:
        return Position(
            turn=self._first + len(self._turns),
            episode=copy.deepcopy(episode.snapshot()),
            session=copy.deepcopy(session.snapshot()),
            new=tuple(self._new),
            said=tuple(self._said),
        )

    async def _play_turn(self, episode: Episode, session: UserSession) -> None:
        self._stage = "environment"
        state = self._turns[-1].after if self._turns else episode.state()
        self._stage = "agent"
        context = tuple(self._new)
        spoken = await self._speaker.reply(self._first + len(self._turns), context, state)
        if spoken is None:
            self._termination = "budget"
            return
        turn = _Draft(context=context, spoken=spoken, before=state, after=state)
        self._turns.append(turn)
        self._new = []
        self._stage = "environment"
        outcome = _checked(episode.agent_says(spoken.text))
        turn.reward = outcome.reward
        self._new += outcome.messages
        self._termination = outcome.termination
        # An environment that changes what is heard (it fills a placeholder) says so.
        heard = outcome.acts.get("heard", spoken.heard)
        turn.changed = heard if heard != spoken.heard and outcome.to_user else None
        if heard:
            self._said.append(Message(role="assistant", content=heard))
        if outcome.to_user and self._termination is None:
            self._stage = "user"
            turn.reward += self._take(episode, await session.answer(outcome.acts, tuple(self._said)))
        turn.after = episode.state()

    def _take(self, episode: Episode, reply: UserReply) -> float:
        """Hand what the user said to the environment, and both to the agent; the reward of it."""
        self._stage = "environment"
        message = Message(role="user", content=reply.text)
        self._said.append(message)
        self._new.append(message)
        outcome = _checked(episode.user_says(reply.text, leaving=reply.leaving))
        self._new += outcome.messages
        self._termination = outcome.termination or ("user_left" if reply.leaving else None)
        return outcome.reward


def _checked(outcome: Outcome) -> Outcome:
    """The outcome. Raises EpisodeError for what no record could hold, so that this dialogue alone breaks."""
    if not math.isfinite(outcome.reward):
        raise EpisodeError(f"the environment pays {outcome.reward}, which is not finite")
    if outcome.termination is not None and outcome.termination not in TERMINATIONS:
        raise EpisodeError(
            f"the environment ends with {outcome.termination!r}; one of {', '.join(TERMINATIONS)}"
            f"{nearest(str(outcome.termination), TERMINATIONS)}"
        )
    return outcome


def _turn(index: int, draft: _Draft) -> Turn:
    return Turn(
        index=index,
        context=draft.context,
        text=draft.spoken.text,
        span=draft.spoken.span,
        finish_reason=draft.spoken.finish_reason,
        reward=draft.reward,
        state_before=draft.before,
        state_after=draft.after,
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
