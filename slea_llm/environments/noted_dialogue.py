"""A dialogue in which a tracker notes down what the user tells: the frame of the data-driven environments.

An environment derives its family of tasks from `NotedTasks` and its episode from `NotedEpisode`, and says what the user
wants, what calls do and when a dialogue is over.
"""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

from slea_llm import prompts
from slea_llm.environments.agents import Errors, Expert, Idler, Plan, Track
from slea_llm.environments.speech import Call, Heard, Speech, calls, normal, sentences, speeches, spoken
from slea_llm.errors import EpisodeError
from slea_llm.types import Message, Outcome, State, Task, Termination

REWARDS: MappingProxyType[Termination, float] = MappingProxyType({"success": 10.0, "failure": -1.0, "user_left": -1.0})
"""Reward of each ending; every other turn earns 0."""


@dataclass(slots=True, kw_only=True)
class Notes:
    """All that changes during an episode. `pending` holds the values just read back, which a yes confirms.

    `extra` holds what an environment keeps beyond that, as JSON values.
    """

    turn: int = 0
    filled: dict[str, str] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    last_filled: list[str] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


def restored(snapshot: Mapping[str, Any]) -> Notes:
    """The notes of a snapshot; raises EpisodeError for one of another shape."""
    names = {entry.name for entry in fields(Notes)}
    if snapshot.keys() != names:
        raise EpisodeError(f"snapshot has the keys {sorted(snapshot)}; expected {sorted(names)}")
    return Notes(**copy.deepcopy(dict(snapshot)))


class NotedEpisode:
    """One dialogue. `required`: the slots that the task asks for; `{notes}` in a reply is what has been noted down."""

    def __init__(
        self,
        *,
        speech: Speech,
        prompt: str,
        required: Sequence[str],
        max_turns: int,
        notes: Notes,
    ) -> None:
        self.speech = speech
        self.notes = notes
        self.required = tuple(required)
        self._prompt = prompt
        self._max_turns = max_turns

    def system_prompt(self) -> tuple[Message, ...]:
        return (Message(role="system", content=self._prompt),)

    def state(self) -> State:
        notes = self.notes
        return {
            "language": self.speech.code,
            "required": list(self.required),
            "filled": {slot: notes.filled[slot] for slot in self.required if slot in notes.filled},
            "confirmed": [slot for slot in self.required if slot in notes.confirmed],
            "missing": [slot for slot in self.required if slot not in notes.filled],
            "unconfirmed": [slot for slot in self.required if slot in notes.filled and slot not in notes.confirmed],
            "asked": dict(notes.asked),
            "last_filled": list(notes.last_filled),
            "turn": notes.turn,
            "turns_left": self._max_turns - notes.turn,
            **copy.deepcopy(notes.extra),
        }

    def snapshot(self) -> Mapping[str, Any]:
        return asdict(self.notes)

    def agent_says(self, text: str) -> Outcome:
        self._check_open()
        self.notes.turn += 1
        self.notes.last_filled = []
        self.notes.pending = {}
        reply = spoken(text)
        made = calls(reply)
        outcome = self.take_calls(made) if made else self.take_words(reply)
        if outcome.termination is None and self.notes.turn >= self._max_turns:
            return self.end("failure", acts=outcome.acts, messages=outcome.messages)
        return outcome

    def user_says(self, text: str, *, leaving: bool = False) -> Outcome:
        self._check_open()
        self.note(text)
        return self.end("user_left") if leaving else self.user_answered(text)

    def take_words(self, reply: str) -> Outcome:
        """What a spoken reply does: the user answers it."""
        heard = self.speech.understand(reply, filled=self.notes.filled)
        for slot in heard.asks:
            self.notes.asked[slot] = self.notes.asked.get(slot, 0) + 1
        self.notes.pending = dict(heard.reads_back)
        acts = {"heard": heard.text, "asks": heard.asks, "reads_back": dict(heard.reads_back), "does": heard.does}
        return Outcome(to_user=True, acts={**acts, **self.acts_of(heard, reply)})

    def take_calls(self, made: Sequence[Call]) -> Outcome:
        """What the calls of one reply do, in order; what stands behind the one that ends the dialogue does nothing."""
        messages: tuple[Message, ...] = ()
        for call in made:
            outcome = self.take_call(call)
            messages += outcome.messages
            if outcome.termination is not None:
                return replace(outcome, messages=messages)
        return Outcome(messages=messages, acts={**outcome.acts, "heard": ""})

    def take_call(self, call: Call) -> Outcome:
        """What one call does; an environment without tools says so."""
        return self.tool_error("malformed" if call.arguments is None else "unknown", name=call.name)

    def acts_of(self, heard: Heard, reply: str) -> Mapping[str, Any]:
        """What the user reacts to, beyond questions, values and acts."""
        del heard, reply
        return {}

    def user_answered(self, text: str) -> Outcome:
        """What follows from the user's answer, once it is noted down."""
        del text
        return Outcome()

    def tool_error(self, kind: str, *, name: str = "", **values: str) -> Outcome:
        text = str(self.speech.tool_errors[kind]).format(**values)
        return Outcome(messages=(Message(role="tool", content=text, name=name or "error"),), acts={"heard": ""})

    def end(
        self,
        termination: Termination,
        acts: Mapping[str, Any] | None = None,
        messages: tuple[Message, ...] = (),
    ) -> Outcome:
        self.notes.ended = True
        return Outcome(acts=acts or {}, reward=REWARDS[termination], termination=termination, messages=messages)

    def note(self, text: str) -> None:
        """Fill slots from the user's words, and confirm what was read back when the user agrees to it."""
        notes = self.notes
        told = {slot: value for slot, value in self.speech.values(text).items() if slot in self.required}
        changed = [slot for slot, value in told.items() if notes.filled.get(slot) != value]
        notes.filled.update(told)
        notes.last_filled = changed
        confirmed = set(notes.confirmed) - set(changed)
        verdict = self.speech.verdict(text)
        if verdict or (verdict is False and told.keys() & notes.pending.keys()):
            # A no that names the right values agrees to the rest of what was read back.
            right = {slot for slot, value in notes.pending.items() if notes.filled.get(slot) == value}
            confirmed |= right - set(changed)
        notes.confirmed = [slot for slot in self.required if slot in confirmed]
        notes.pending = {}

    def _check_open(self) -> None:
        if self.notes.ended:
            raise EpisodeError("this dialogue has ended; start another episode")


def parts_of(reply: str) -> tuple[str, ...]:
    """The normalised sentences of a reply."""
    return sentences(normal(reply))


def draw_vague(rng: random.Random, slots: Sequence[str], share: float) -> dict[str, int]:
    """Slot -> times that the user answers vaguely: once, for at most two slots."""
    return dict.fromkeys([slot for slot in slots if rng.random() < share][:2], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedConfig:
    """The settings of every such family."""

    language: Literal["en", "zh", "mixed"] = "en"
    """Language of the dialogues; `mixed` draws one for each task."""
    prompt: Literal["terse", "full"] = "terse"
    """System prompt: a line for tiny models, or one for chat models that asks for explicit steps."""
    max_turns: int
    """Replies of the agent after which the dialogue ends with reward -1; at least what the expert needs."""


Played = TypeVar("Played", bound=NotedEpisode)


class NotedTasks(ABC, Generic[Played]):
    """A family of tasks for the user `scripted`, with the data file, prompts and phrases that bear its name."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: NotedConfig) -> None:
        self.config = config
        self._speeches = speeches(self.name, config.language)
        self._prompts = {code: prompts.load(f"{self.name}/{config.prompt}.{code}") for code in self._speeches}

    def task(self, seed: int) -> Task:
        rng = random.Random(f"{self.name}/{seed}")  # noqa: S311 (not a secret)
        code = rng.choice(sorted(self._speeches))
        goal = self._goal(rng, self._speeches[code])
        return Task(id=f"{self.name}-{code}-{seed}", seed=seed, goal=goal, language=code)

    def start(self, task: Task) -> Played:
        return self._episode(task, Notes(extra=self._extra(task)))

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> Played:
        """The episode as it was; raises EpisodeError for a snapshot of another shape."""
        return self._episode(task, restored(snapshot))

    def expert(self, task: Task, *, error_rate: float = 0.0) -> Expert:
        plan, errors, track = self._agent(task)
        return Expert(
            speeches=self._speeches, plan=plan, errors=errors, track=track, error_rate=error_rate, seed=task.seed
        )

    def idler(self, task: Task) -> Idler:
        del task
        return Idler(speeches=self._speeches)

    @abstractmethod
    def _goal(self, rng: random.Random, speech: Speech) -> dict[str, Any]:
        """What is hidden from the agent; the agenda of the user is its `user`."""

    @abstractmethod
    def _extra(self, task: Task) -> dict[str, Any]:
        """What the notes keep beyond the slots, as it is at the start."""

    @abstractmethod
    def _agent(self, task: Task) -> tuple[Plan, Errors, Track]:
        """How the expert plans, errs and thinks."""

    @abstractmethod
    def _episode(self, task: Task, notes: Notes) -> Played:
        """The episode with these notes."""

    def _frame(self, task: Task, notes: Notes, **values: str) -> dict[str, Any]:
        """What every episode is made of; `values` fill the system prompt, beside `slots`."""
        speech, prompt = self._speech(task), self._prompts[task.language]
        values = {"slots": speech.slot_list(speech.slots), **values}
        return {
            "speech": speech,
            "prompt": prompt.render(**{name: values[name] for name in prompt.fields}),
            "required": speech.slots,
            "max_turns": self.config.max_turns,
            "notes": notes,
        }

    def _speech(self, task: Task) -> Speech:
        """The language of a task; raises EpisodeError when the environment does not speak it."""
        if task.language not in self._speeches:
            raise EpisodeError(f"task {task.id!r} is in {task.language!r}; this environment speaks {[*self._speeches]}")
        return self._speeches[task.language]
