"""Scripted agents of the data-driven environments: what an expert plans, how it errs, and how both are worded."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slea_llm.checks import check_shares
from slea_llm.environments.speech import Speech
from slea_llm.errors import ConfigError, nearest
from slea_llm.types import Message, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a scripted agent does next: an entry of the data file's `agents`, and what stands for `<name>` in it.

    `call` is said in place of one of the entry's replies.
    """

    name: str
    values: Mapping[str, str] = field(default_factory=dict)
    call: str | None = None


Plan: TypeAlias = Callable[[State], Move]
Errors: TypeAlias = Callable[[State, random.Random], Sequence[Move]]
Track: TypeAlias = Callable[[State, Speech], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """Plays `plan`; in a share `error_rate` of its replies one of `errors`, each possible one with equal chance.

    Its draws depend on (seed, turn). `track` is the first sentence of a thought: what is so, true even when it errs.
    """

    speeches: Mapping[str, Speech]
    plan: Plan
    errors: Errors
    track: Track
    error_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_shares(self, "error_rate")

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages  # the public state holds all it needs
        rng = random.Random(f"expert/{self.seed}/{state['turn']}")  # noqa: S311 (not a secret)
        erring = rng.random() < self.error_rate
        move = rng.choice(list(self.errors(state, rng))) if erring else self.plan(state)
        speech = self.speeches[state["language"]]
        return worded(move, speech, self.track(state, speech), rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idler:
    """Only ever makes small talk."""

    speeches: Mapping[str, Speech]

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages
        talk = self.speeches[state["language"]].agents["small_talk"]
        replies: Sequence[str] = talk["replies"]
        return f"<think>{talk['thought']}</think>{replies[state['turn'] % len(replies)]}"


def worded(move: Move, speech: Speech, tracked: str, rng: random.Random) -> str:
    """A reply of a scripted agent: its thought and what it says."""
    entry: Any = speech.agents
    for key in move.name.split("."):
        if key not in entry:
            known = ", ".join(entry)
            raise ConfigError(f"{speech.source}: agents lacks {move.name!r}; known: {known}{nearest(key, entry)}")
        entry = entry[key]
    said = move.call if move.call is not None else rng.choice(list(entry["replies"]))
    thought = str(entry["thought"])
    for name, value in move.values.items():
        thought, said = thought.replace(f"<{name}>", value), said.replace(f"<{name}>", value)
    gap = str(speech.agents["gap"]) if tracked else ""
    return f"<think>{tracked}{gap}{thought}</think>{said}"


def track_missing(state: State, speech: Speech) -> str:
    """What is still to be told, or that all is, or that all is agreed."""
    tracks: Mapping[str, str] = speech.agents["tracks"]
    if state["missing"]:
        return tracks["missing"].format(slots=speech.slot_list(state["missing"]))
    return tracks["whole"] if state["unconfirmed"] else tracks["agreed"]
