"""Many dialogues at once between environment, simulated user and policy. A dialogue that breaks is a record, no crash.

The agent's side is token ids all the way: what was sampled goes into the next prompt and into the record as it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from slea_llm.dialogue import Dialogue, Spoken
from slea_llm.errors import EpisodeError, GenerationError
from slea_llm.interfaces import Agent, Environment, Generator, SimulatedUser
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.thoughts import without_thoughts
from slea_llm.settings import RolloutSettings
from slea_llm.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    ReplyPrefix,
    State,
    Task,
    TokenSpan,
    TokenTrace,
    Trajectory,
)

NO_POLICY = -1
"""`policy_version` of dialogues that no policy played."""


class FailedEpisodesError(EpisodeError):
    """Too many dialogues of one rollout broke. `trajectories` holds all of its records, the sound ones included."""

    def __init__(self, text: str, trajectories: Sequence[Trajectory]) -> None:
        super().__init__(text)
        self.trajectories = tuple(trajectories)


class Rollout:
    """Plays tasks with the policy that `generator` serves.

    A dialogue that waits for its user holds up no other. Every draw is named by (seed, episode, turn), so that the same
    call gives the same dialogues in whatever order they run.
    """

    def __init__(
        self,
        environment: Environment,
        user: SimulatedUser,
        generator: Generator,
        chat: ChatTokenizer,
        settings: RolloutSettings,
        *,
        environment_name: str,
        seed: int,
        greedy: bool = False,
    ) -> None:
        self._environment, self._user, self._generator, self._chat = environment, user, generator, chat
        self._settings, self._name, self._seed, self._greedy = settings, environment_name, seed, greedy

    def run(
        self,
        tasks: Sequence[Task],
        *,
        first_episode: int,
        policy_version: int,
        progress: bool = False,
        episodes: Sequence[int] | None = None,
        user_draw: int = 0,
    ) -> list[Trajectory]:
        """One record for every task, in the order of `tasks`; task i is episode `first_episode + i`.

        `episodes` numbers them otherwise. Another `user_draw` is another seed of every user, all else drawn alike.

        Raises GenerationError when the generator serves another policy version than the one asked for, and
        FailedEpisodesError (with all records) when more than `max_error_rate` of the dialogues broke.
        """
        served = self._generator.policy_version
        if served != policy_version:
            raise GenerationError(
                f"the generator serves policy version {served}, the rollout asks for {policy_version}; load the "
                "weights before the rollout"
            )
        if not tasks:
            return []
        numbers = range(first_episode, first_episode + len(tasks)) if episodes is None else episodes
        jobs = [self._dialogue(task, number, user_draw) for task, number in zip(tasks, numbers, strict=True)]
        trajectories = asyncio.run(self._run(jobs, progress=progress))
        self._check_error_rate(trajectories)
        return trajectories

    def sampler(self, *, key: tuple[int, int]) -> Sampler:
        """The policy as a speaker of one dialogue, whose draws are named by `key`."""
        return Sampler(self._generator, self._chat, self._settings, key=key, greedy=self._greedy)

    async def _run(self, dialogues: Sequence[tuple[Dialogue, Sampler]], *, progress: bool) -> list[Trajectory]:
        running = asyncio.Semaphore(self._settings.concurrency)
        with tqdm(total=len(dialogues), desc="rollout", unit="dialogue", disable=None if progress else True) as bar:
            jobs = [asyncio.create_task(dialogue.run(running, self._settings.deadline_s)) for dialogue, _ in dialogues]
            for job in jobs:
                job.add_done_callback(lambda _: bar.update())
            await asyncio.wait(jobs)
        version = self._generator.policy_version
        # What a component raised is read off its task: no error is caught here, so none but the dialogue's own is lost.
        return [
            self._record(dialogue, sampler, job.exception(), version=version)
            for (dialogue, sampler), job in zip(dialogues, jobs, strict=True)
        ]

    def _dialogue(self, task: Task, episode: int, user_draw: int) -> tuple[Dialogue, Sampler]:
        sampler = self.sampler(key=(self._seed, episode))
        dialogue = Dialogue(
            self._environment,
            self._user,
            sampler,
            task,
            id=_identifier(self._name, task, f"e{episode}" + (f"-u{user_draw}" if user_draw else "")),
            episode=episode,
            user_seed=_user_seed(self._seed, episode, user_draw),
            max_turns=self._settings.max_turns,
        )
        return dialogue, sampler

    def _record(self, dialogue: Dialogue, sampler: Sampler, error: BaseException | None, *, version: int) -> Trajectory:
        versions = sorted(set(sampler.versions)) or [version]
        provenance = {
            "engine": type(self._generator).__name__,
            "greedy": self._greedy,
            "thoughts": self._chat.thoughts,
            "retokenised": sampler.retokenised,
        }
        if len(versions) > 1:
            provenance["policy_versions"] = versions
        return dialogue.record(
            environment=self._name,
            seed=self._seed,
            policy_version=versions[0],
            traces=sampler.traces(),
            provenance=provenance,
            error=error,
        )

    def _check_error_rate(self, trajectories: Sequence[Trajectory]) -> None:
        errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
        allowed = self._settings.max_error_rate
        if len(errors) <= allowed * len(trajectories):
            return
        (most, times), *_ = Counter(error.partition(" [")[0] for error in errors).most_common(1)
        raise FailedEpisodesError(
            f"{len(errors)} of {len(trajectories)} dialogues broke, more than rollout.max_error_rate {allowed} allows; "
            f"{times} of them with {most!r}",
            trajectories,
        )


def play(
    environment: Environment, user: SimulatedUser, agent: Agent, task: Task, *, seed: int, max_turns: int
) -> Trajectory:
    """One dialogue of a scripted agent: texts without tokens, for imitation, scoring and tests.

    What environment, user or agent raise is passed on. `policy_version` is NO_POLICY.
    """
    dialogue = Dialogue(
        environment,
        user,
        Script(agent),
        task,
        id=_identifier(environment.name, task, f"s{seed}"),
        episode=0,
        user_seed=seed,
        max_turns=max_turns,
    )
    asyncio.run(dialogue.run(asyncio.Semaphore(), deadline_s=None))
    return dialogue.record(
        environment=environment.name,
        seed=seed,
        policy_version=NO_POLICY,
        traces=(),
        provenance={"agent": type(agent).__name__},
        error=None,
    )


class Script:
    """A scripted agent as a speaker."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def reply(self, turn: int, new: tuple[Message, ...], state: State) -> Spoken:
        del turn
        text = self._agent.act(state, new)
        return Spoken(text=text, heard=without_thoughts(text))


@dataclass(slots=True)
class _Row:
    """A token row while it grows."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def given(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def add(self, generation: Generation) -> None:
        self.ids += generation.token_ids
        self.sampled += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs

    def trace(self) -> TokenTrace:
        return TokenTrace(token_ids=tuple(self.ids), sampled_mask=tuple(self.sampled), logprobs=tuple(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """The prompt and the first tokens of a reply that is given; `whole` is its finish reason when it is all given."""

    prompt: _Row
    ids: tuple[int, ...]
    whole: FinishReason | None


class Sampler:
    """The policy as a speaker: one growing row when thoughts are kept, else a row a turn."""

    def __init__(
        self,
        generator: Generator,
        chat: ChatTokenizer,
        settings: RolloutSettings,
        *,
        key: tuple[int, int],
        greedy: bool,
    ) -> None:
        self._generator, self._chat, self._settings, self._key = generator, chat, settings, key
        self._greedy = greedy
        self.versions: list[int] = []
        self.retokenised = 0
        self._rows: list[_Row] = []
        self._history: list[Message] = []
        self._replies: list[tuple[int, ...]] = []
        self._begun: _Begun | None = None

    def resume(self, trajectory: Trajectory, prefix: ReplyPrefix) -> None:
        """Take the place of the speaker of a recorded dialogue, in the midst of the reply of `prefix.turn`.

        The prompt of that reply and its own first tokens are the recorded ids. Raises EpisodeError for a record without
        tokens.
        """
        if prefix.tokens is None or not trajectory.traces:
            raise EpisodeError(f"dialogue {trajectory.id!r} has no tokens; a policy cannot go on from its text alone")
        for turn in trajectory.turns[: prefix.turn]:
            self._history += [*turn.context, Message(role="assistant", content=turn.text)]
            self._replies.append(trajectory.reply_ids(turn))
        turn = trajectory.turns[prefix.turn]
        ids = trajectory.reply_ids(turn)
        span = turn.span or TokenSpan(0, 0, 0)  # a record with traces has a span for every turn
        prompt = _Row()
        prompt.given(trajectory.traces[span.row].token_ids[: span.start])
        whole = turn.finish_reason if prefix.tokens >= len(ids) else None
        self._begun = _Begun(prompt=prompt, ids=ids[: prefix.tokens], whole=whole)

    def traces(self) -> tuple[TokenTrace, ...]:
        return tuple(row.trace() for row in self._rows)

    async def reply(self, turn: int, new: tuple[Message, ...], state: State) -> Spoken | None:
        del state
        begun, self._begun = self._begun, None
        if begun is None:
            kept = self._rows[-1] if self._rows and self._chat.thoughts == "keep" else _Row()
            added = self._added(kept, new)
        else:
            self._history += new
            kept, added = begun.prompt, ()
        prompt = (*kept.ids, *added)
        first = () if begun is None else begun.ids
        if begun is not None and begun.whole is not None:
            generation = Generation(
                token_ids=first,
                logprobs=(0.0,) * len(first),
                finish_reason=begun.whole,
                policy_version=self._generator.policy_version,
            )
        else:
            sampled = await self._sample(turn, prompt, first)
            if sampled is None:
                return None
            generation = sampled
        text = self._chat.text(generation.token_ids)
        self._note(kept, added, generation, text)
        return Spoken(
            text=text,
            heard=self._chat.heard(text),
            span=TokenSpan(len(self._rows) - 1, len(prompt), len(kept.ids)),
            finish_reason=generation.finish_reason,
        )

    async def _sample(self, turn: int, prompt: tuple[int, ...], first: tuple[int, ...]) -> Generation | None:
        """The reply to a prompt, which begins with the tokens `first`; None when there is no room for it."""
        room = self._settings.max_context_tokens - len(prompt) - len(first)
        if room < 1:
            if turn == 0:
                raise EpisodeError(
                    f"the first prompt has {len(prompt)} tokens and rollout.max_context_tokens is "
                    f"{self._settings.max_context_tokens}; raise it or shorten the system prompt"
                )
            return None
        request = GenerationRequest(
            prompt_ids=(*prompt, *first),
            key=(*self._key, turn),
            max_tokens=min(self._settings.max_reply_tokens - len(first), room),
            greedy=self._greedy,
        )
        generation = _checked(await self._generator.generate(request), request)
        if not first:
            return generation
        # Log-probabilities of the given beginning are not known here; a continuation is never trained on.
        return replace(
            generation,
            token_ids=(*first, *generation.token_ids),
            logprobs=((0.0,) * len(first) + tuple(generation.logprobs)),
        )

    def _added(self, kept: _Row, new: Sequence[Message]) -> tuple[int, ...]:
        """The ids that stand between what is kept of earlier prompts and the reply."""
        if kept.ids:
            return self._chat.extend(kept.ids, new)
        self._history += new
        rendered = self._chat.rerender(self._history, self._replies)
        self.retokenised += rendered.retokenised
        return rendered.ids

    def _note(self, kept: _Row, added: Sequence[int], generation: Generation, text: str) -> None:
        if not self._rows or self._rows[-1] is not kept:
            self._rows.append(kept)
        kept.given(added)
        kept.add(generation)
        self.versions.append(generation.policy_version)
        self._history.append(Message(role="assistant", content=text))
        self._replies.append(generation.token_ids)


def _checked(generation: Generation, request: GenerationRequest) -> Generation:
    tokens = len(generation.token_ids)
    if generation.finish_reason == "abort" or not 1 <= tokens <= request.max_tokens:
        raise GenerationError(
            f"request {request.key} came back with {tokens} tokens of 1 to {request.max_tokens}, finish reason "
            f"{generation.finish_reason}"
        )
    if len(generation.logprobs) != tokens:
        raise GenerationError(
            f"request {request.key}: {len(generation.logprobs)} log-probabilities for {tokens} tokens"
        )
    if odd := [one for one in generation.logprobs if not math.isfinite(one)]:
        raise GenerationError(f"request {request.key}: {len(odd)} log-probabilities are not finite, the first {odd[0]}")
    return generation


def _identifier(environment: str, task: Task, suffix: str) -> str:
    return f"{task.id}-{suffix}" if task.id.startswith(environment) else f"{environment}-{task.id}-{suffix}"


def _user_seed(seed: int, episode: int, draw: int) -> int:
    """A seed of the user's own for every episode and draw, in [0, 2^63)."""
    name = f"user/{seed}/{episode}" + (f"/{draw}" if draw else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
