"""A dialogue in which a tracker notes down what the user tells: the frame of the data-driven environments.

An environment derives an episode from `NotedEpisode` and says what its calls do and when it is over.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from slea_llm.environments.speech import Call, Heard, Speech, calls, normal, sentences, spoken
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


def speech_of(speeches: Mapping[str, Speech], task: Task) -> Speech:
    """The language of a task; raises EpisodeError when the environment does not speak it."""
    if task.language not in speeches:
        raise EpisodeError(f"task {task.id!r} is in {task.language!r}; this environment speaks {[*speeches]}")
    return speeches[task.language]


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
