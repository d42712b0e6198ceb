"""A user played by a language model: persona, goal and rules in prompts/, its words cleaned before they count."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from slea_llm import prompts
from slea_llm.endpoints import Endpoint, HttpChatModel
from slea_llm.errors import ConfigError, EpisodeError, UnsupportedError
from slea_llm.questions import AsyncChatModel, Question, Usage
from slea_llm.types import Message, Task, UserReply
from slea_llm.users import speech
from slea_llm.users.briefing import Briefing

FIELDS = frozenset({"persona", "goal", "stop"})
RULE_WORDS, TOLD_WORDS = 7, 5
"""Words in a row, of the rules and of the remarks between, that show that the model recites them."""
LONGEST_RAW = 200_000
"""Characters of a raw answer that are looked at, private reasoning included."""
FAULTS: Mapping[str, str] = {
    "empty": "it says nothing",
    "both_sides": "it holds words of the other side; write the customer's words alone",
    "over_long": "it is too long; say one short thing",
    "role_flip": "it is what the agent would say; you are the customer",
    "out_of_character": "it speaks of your instructions or of being a model; speak as the customer",
    "repeated": "you have just said the same; answer what the agent said last",
    "echo": "it only repeats the agent's words; answer them as the customer",
    "early_stop": "the conversation has only begun; say what you call for",
}
"""What can be wrong with the model's words -> how it is told. Words that are wrong to the last attempt are delivered as
far as they go, and the fault is in the record; only empty ones end the episode."""


@dataclass(slots=True, kw_only=True)
class _Memory:
    """All that changes during a dialogue. `stopping`: the last words came with a stop signal.

    `taken` counts what was taken out of raw words, `asked_again` the faults that were told to the model, `delivered`
    lists `[utterance, fault]` of what was heard all the same.
    """

    seed: int
    said: list[str] = field(default_factory=list)
    stopping: bool = False
    stopped: bool = False
    taken: dict[str, int] = field(default_factory=dict)
    asked_again: dict[str, int] = field(default_factory=dict)
    delivered: list[list[Any]] = field(default_factory=list)
    attempts: int = 0


class LlmUser:
    """Starts sessions of a user that a chat model plays: behind an OpenAI-compatible endpoint, or in this process.

    The model sees persona, goal and rules as its system prompt, then what was said, the agent's words as its `user`.
    Its private reasoning, stop signals and labels are taken out of its words; what looks like a control token is broken
    up in what it sees and stays text in what it says. A stop signal that comes with words does not end the dialogue:
    the agent gets another turn. Words with a fault are asked for again, with the fault named, `endpoint.attempts` times
    in all.

    It may answer otherwise when asked again, so that its dialogues cannot be branched.
    """

    name: ClassVar[str] = "llm"
    needs: ClassVar[frozenset[str]] = frozenset()
    unrepeatable: ClassVar[str] = (
        "the user 'llm' may answer otherwise when the same dialogue is played again, so that no step of it can be "
        "played on from the same state; take user scripted or recorded"
    )

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        endpoint: Endpoint = field(default_factory=lambda: Endpoint(max_tokens=160, temperature=0.7))
        """Who plays the user. Its `temperature` is 0 unless given: 0.7 or more makes users that differ by seed."""
        prompt: str = "users/rules"
        """Prompt of prompts/ with the fields persona, goal and stop; `.<language of the task>` is added."""
        personas: tuple[str, ...] = ("plain", "hurried", "chatty", "careful")
        """Names in prompts/users/persona/, one drawn for each dialogue by its user's seed."""
        stop: str = "###STOP###"
        """What the model writes when it has nothing to add. Never seen by the agent."""
        longest: int = 600
        """Characters of one utterance, 20 or more; a longer one is asked for again, and cut at a sentence at last."""

        def __post_init__(self) -> None:
            if not self.personas:
                raise ConfigError("personas is empty; name at least one of prompts/users/persona/, such as plain")
            if len(self.stop.strip()) < 3 or self.stop != self.stop.strip():
                raise ConfigError(f"stop {self.stop!r} must be 3 characters or more, without blanks around them")
            if self.longest < 20:
                raise ConfigError(f"longest {self.longest} is below 20")

    def __init__(self, config: Config, *, chat_model: AsyncChatModel | None = None) -> None:
        """`chat_model` answers instead of an HTTP endpoint; one whose url is `engine` needs it.

        Raises ConfigError for a prompt that is not there or has other fields, and for a key variable that is not set.
        """
        if chat_model is None and config.endpoint.in_process:
            raise UnsupportedError(
                "the user's endpoint is a model in this process, which `slea` loads; hand it over as chat_model, or "
                "give the address of an endpoint"
            )
        self.config = config
        self._model: AsyncChatModel = HttpChatModel(config.endpoint) if chat_model is None else chat_model
        self._scripts: dict[str, _Script] = {}
        self._script("en")

    @property
    def usage(self) -> Usage:
        """What all dialogues have cost so far."""
        return self._model.usage

    def start(self, task: Task, seed: int) -> LlmSession:
        return self._session(task, _Memory(seed=seed))

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> LlmSession:
        """The session as it was; raises EpisodeError for a snapshot of another shape."""
        names = {entry.name for entry in fields(_Memory)}
        if snapshot.keys() != names:
            raise EpisodeError(f"user snapshot has the keys {sorted(snapshot)}; expected {sorted(names)}")
        copied: dict[str, Any] = {
            name: value.copy() if isinstance(value, dict | list) else value for name, value in snapshot.items()
        }
        return self._session(task, _Memory(**copied))

    def _session(self, task: Task, memory: _Memory) -> LlmSession:
        script = self._script(task.language)
        persona = random.Random(f"persona/{task.seed}/{memory.seed}").choice(self.config.personas)  # noqa: S311
        goal = script.briefing.goal(task, stop=self.config.stop)
        system = script.prompt.render(persona=script.personas[persona].text, goal=goal, stop=self.config.stop)
        return LlmSession(self._model, self.config, script=script, system=system, persona=persona, memory=memory)

    def _script(self, code: str) -> _Script:
        if code not in self._scripts:
            prompt = prompts.load(f"{self.config.prompt}.{code}")
            if prompt.fields != FIELDS:
                raise ConfigError(
                    f"prompt {prompt.name!r} has the fields {', '.join(sorted(prompt.fields)) or 'none'}; "
                    f"a user's has {', '.join(sorted(FIELDS))}"
                )
            personas = {name: prompts.load(f"users/persona/{name}.{code}") for name in self.config.personas}
            briefing = Briefing(code)
            rules = prompt.render(persona="", goal="", stop=self.config.stop)
            told = [briefing.begin, briefing.silence, briefing.again, *FAULTS.values()]
            runs = speech.runs_of(rules, RULE_WORDS).union(*(speech.runs_of(line, TOLD_WORDS) for line in told))
            self._scripts[code] = _Script(prompt=prompt, personas=personas, briefing=briefing, own=runs)
        return self._scripts[code]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """What one language needs."""

    prompt: prompts.Prompt
    personas: Mapping[str, prompts.Prompt]
    briefing: Briefing
    own: frozenset[tuple[str, ...]]
    """Runs of words of the rules and of what the model is told between, which no customer says."""


class LlmSession:
    """One dialogue of the model's user."""

    def __init__(
        self,
        model: AsyncChatModel,
        config: LlmUser.Config,
        *,
        script: _Script,
        system: str,
        persona: str,
        memory: _Memory,
    ) -> None:
        self._model, self._config, self._script, self._briefing = model, config, script, script.briefing
        self._system, self._persona, self._memory = system, persona, memory

    async def opening(self) -> UserReply:
        return await self._speak(())

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        del acts  # it hears the words themselves
        return await self._speak(messages)

    def snapshot(self) -> Mapping[str, Any]:
        return asdict(self._memory)

    def provenance(self) -> Mapping[str, Any]:
        """What made this user and what had to be done to its words, as JSON values."""
        memory = self._memory
        return {
            "name": LlmUser.name,
            "model": self._config.endpoint.model,
            "endpoint": self._config.endpoint.url,
            "temperature": self._config.endpoint.temperature,
            "prompt": self._config.prompt,
            "prompt_hash": hashlib.sha256(self._system.encode()).hexdigest()[:16],
            "persona": self._persona,
            "attempts": memory.attempts,
            "stopped": memory.stopped,
            "taken": dict(memory.taken),
            "asked_again": dict(memory.asked_again),
            "delivered": [list(one) for one in memory.delivered],
        }

    async def _speak(self, messages: Sequence[Message]) -> UserReply:
        memory = self._memory
        agent = [message.content for message in messages if message.role == "assistant"]
        reading = _Reading(self._config, memory, agent, self._script.own)
        question = Question(
            name="user",
            messages=self._chat(messages),
            schema=None,
            read=reading.read,
            again=self._briefing.again,
        )
        answer = await self._model.answer(question)
        memory.attempts += answer.attempts
        memory.asked_again = dict(Counter(memory.asked_again) + reading.faults)
        found = reading.best if answer.value is None else answer.value
        if found is None or not (found.text or found.stop):
            raise EpisodeError(f"the simulated user did not answer: {answer.reason}")
        memory.taken = dict(Counter(memory.taken) + Counter(found.taken))
        if answer.value is None:
            memory.delivered += [[len(memory.said), fault] for fault in found.faults]
        return self._reply(found)

    def _reply(self, found: speech.Speech) -> UserReply:
        """What is heard of it. Words are never the last of a dialogue: after them the agent gets a turn."""
        memory = self._memory
        over = found.stop and (not found.text or (memory.stopping and speech.is_farewell(found.text)))
        memory.stopping = found.stop
        if over:
            memory.stopped = True
            return UserReply(text="", leaving=True)
        memory.said.append(found.text)
        return UserReply(text=found.text)

    def _chat(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """What the model sees: the agent's words as its user's, its own as the assistant's, in strict turns."""
        chat = [Message(role="system", content=self._system), Message(role="user", content=self._briefing.begin)]
        for message in messages:
            role = "assistant" if message.role == "user" else "user"
            text, _ = speech.without_stop(speech.defused(message.content), self._config.stop)
            if not text:
                continue
            if chat[-1].role == role:
                chat[-1] = Message(role=role, content=f"{chat[-1].content}\n{text}")
            else:
                chat.append(Message(role=role, content=text))  # type: ignore[arg-type]
        if chat[-1].role == "assistant":
            chat.append(Message(role="user", content=self._briefing.silence))
        return tuple(chat)


class _Reading:
    """Reads the attempts at one utterance: the first without a fault counts; `best` is the last that can be heard."""

    def __init__(
        self, config: LlmUser.Config, memory: _Memory, agent: Sequence[str], rules: frozenset[tuple[str, ...]]
    ) -> None:
        self._config, self._own, self._agent, self._rules = config, tuple(memory.said), agent, rules
        self.best: speech.Speech | None = None
        self.faults: Counter[str] = Counter()

    @cached_property
    def _first(self) -> bool:
        return not self._own

    def read(self, answer: Mapping[str, Any]) -> speech.Speech:
        """The words without a fault; raises ValueError that names the first one."""
        raw, cut = answer["text"], bool(answer["cut"]) or len(answer["text"]) > LONGEST_RAW
        found = speech.heard(raw[:LONGEST_RAW], stop=self._config.stop, longest=self._config.longest, cut=cut)
        faults = list(found.faults)
        if found.stop and not found.text and self._first:
            faults.append("early_stop")
            found = speech.Speech(text="", taken=found.taken)
        if "out_of_character" not in faults and speech.recites(found.text, self._rules):
            faults.append("out_of_character")
        if speech.repeats(found.text, self._own, self._agent):
            faults.append("repeated")
        if speech.echoes(found.text, self._agent):
            faults.append("echo")
        if not faults:
            return found
        self.faults.update(faults)
        if found.text or found.stop:
            self.best = speech.Speech(text=found.text, stop=found.stop, faults=tuple(faults), taken=found.taken)
        raise ValueError(FAULTS[faults[0]])
