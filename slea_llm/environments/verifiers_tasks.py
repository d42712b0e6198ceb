"""Tasks of a verifiers taskset (its v1 API): the task's prompt is shown, one reply is scored by the task's own rewards.

Needs verifiers. Tasks that want tools, a container or a user who opens belong to an agent loop of verifiers' own and
are refused. Checked with verifiers 0.4.0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

from slea_llm import prompts
from slea_llm.environments.foreign import ForeignEpisode, Saying, Shown, foreign_task
from slea_llm.errors import ConfigError, EpisodeError, MissingDependencyError, UnsupportedError
from slea_llm.interfaces import Agent
from slea_llm.types import Task

MOST = 1_000_000
"""Tasks that are drawn from a taskset before it counts as one without an end."""


class VerifiersTasks:
    """Seed s is task s of the taskset, modulo the number of tasks of a bounded one."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        taskset: str = ""
        """Id of an installed taskset package, as verifiers takes it."""
        options: Mapping[str, Any] = field(default_factory=dict)
        """Fields of the taskset's own config."""
        success_reward: float = 1.0
        """A reply whose weighted rewards sum to this or more succeeded."""
        prompt: str = "foreign/question.en"
        """The prompt file that stands before the task's own system prompt and prompt."""

    name: ClassVar[str] = "verifiers"
    has_expert: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config
        self._prompt = prompts.load(config.prompt)
        self._tasks: list[Any] = []
        self._rest: Iterator[Any] | None = None

    def task(self, seed: int) -> Task:
        return foreign_task(self.name, seed, {"taskset": self.config.taskset}, number=2)

    def start(self, task: Task) -> ForeignEpisode:
        return ForeignEpisode(task, self._open, prompt=self._prompt.render(), max_turns=1)

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> ForeignEpisode:
        """The episode, scored again; raises EpisodeError when it comes out otherwise."""
        episode = self.start(task)
        episode.replay(snapshot)
        return episode

    def expert(self, task: Task, *, error_rate: float = 0.0) -> Agent:
        """There is none: raises UnsupportedError, so that a warm start says why it cannot be had."""
        del task, error_rate
        raise UnsupportedError(f"verifiers taskset {self.config.taskset!r} has no scripted expert to imitate")

    def idler(self, task: Task) -> Saying:
        del task
        return Saying(replies=("...",))

    def _open(self, task: Task) -> _VerifiersWorld:
        found = self._find(task.seed)
        kind = type(found)
        if kind.NEEDS_CONTAINER or kind.toolsets(found.config):
            raise UnsupportedError(f"task {kind.__name__} of {self.config.taskset!r} wants tools or a container")
        if found.data.prompt is None:
            raise UnsupportedError(f"task {kind.__name__} of {self.config.taskset!r} has no prompt: its user opens")
        return _VerifiersWorld(found, self.config)

    def _find(self, seed: int) -> Any:
        if self._rest is None:
            self._rest = iter(_taskset(self.config))
        self._tasks += islice(self._rest, max(0, min(max(seed, 0) + 1, MOST) - len(self._tasks)))
        if not self._tasks:
            raise ConfigError(f"verifiers taskset {self.config.taskset!r} holds no task")
        if seed >= MOST and len(self._tasks) == MOST:
            raise ConfigError(
                f"task seed {seed} of verifiers taskset {self.config.taskset!r}, which has {MOST} tasks or more (or no "
                f"end): seeds below {MOST} are taken"
            )
        return self._tasks[seed % len(self._tasks)]


class _VerifiersWorld:
    def __init__(self, task: Any, config: VerifiersTasks.Config) -> None:
        self._task, self._config = task, config

    def begin(self) -> Shown:
        parts = (self._task.data.system_prompt, self._task.data.prompt_text)
        return Shown(text="\n\n".join(part for part in parts if part))

    def act(self, action: str) -> Shown:
        trace = _trace(self._task, action)
        # Scoring is a coroutine and this call may already run inside an event loop: a thread has a loop of its own.
        with ThreadPoolExecutor(max_workers=1) as pool:
            pool.submit(asyncio.run, self._task.score(trace)).result()
        reward = float(trace.reward)
        if not math.isfinite(reward):
            raise EpisodeError(f"the rewards of taskset {self._config.taskset!r} sum to {reward}")
        return Shown(text="", reward=reward, ended="success" if reward >= self._config.success_reward else "failure")

    def close(self) -> None:
        """Nothing is held open."""


def _taskset(config: VerifiersTasks.Config) -> Any:
    if not config.taskset:
        raise ConfigError("environment verifiers needs taskset, the id of an installed taskset package")
    loaders = _verifiers()[1]
    try:
        made = loaders.taskset_config_type(config.taskset)
        return loaders.load_taskset(made(id=config.taskset, **config.options))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"verifiers could not load taskset {config.taskset!r}: {error}") from error


def _trace(task: Any, reply: str) -> Any:
    """The conversation as verifiers' rewards read it: prompt and one sampled reply."""
    vf = _verifiers()[0]
    data = task.data
    texts = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    texts += [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    nodes = [
        vf.MessageNode(parent=number - 1 if number else None, message=message) for number, message in enumerate(texts)
    ]
    answer = vf.AssistantMessage(content=reply)
    nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=answer, sampled=True))
    told = vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
    return vf.Trace(task=told, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)


def _verifiers() -> tuple[Any, Any]:
    """The package with its records, and its loaders."""
    try:
        import verifiers.v1 as vf
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise MissingDependencyError(f"verifiers cannot be imported ({error}); pip install verifiers") from error
    names = (MessageNode, AgentInfo, Trace, TraceTask, AssistantMessage, SystemMessage, UserMessage)
    return SimpleNamespace(AgentConfig=vf.AgentConfig, **{one.__name__: one for one in names}), loaders
