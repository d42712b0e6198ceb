"""The order task in its slot-state form: a vector of slots in, one of a few dialogue acts out.

Everything around the choice is the project's own: the act is spoken as the scripted expert speaks it, into the
environment `order_taking` with its scripted user, and the dialogue is recorded as any other. The vocabulary of such a
policy is the list of acts: a reply is one token, the act, with the log-probability under which it was drawn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slea_llm.dialogue import Dialogue, Spoken
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.environments.order_taking_agents import place_call
from slea_llm.environments.order_taking_language import SLOTS, Language
from slea_llm.models.thoughts import without_thoughts
from slea_llm.types import Message, State, TokenSpan, TokenTrace, Trajectory
from slea_llm.users.scripted import ScriptedUser

Floats = NDArray[np.float32]
Choose = Callable[[Floats], tuple[int, float]]
"""Vector of a state -> number of an act, and its log-probability."""

ACTS = (*(f"ask {slot}" for slot in SLOTS), "read back", "place", "small talk")
FACTS = 5
"""Numbers a slot: required, filled, confirmed, filled just now, how often it was asked for."""
SIZE = FACTS * len(SLOTS) + 1
OFTEN = 3
"""Questions for one slot from which more of them look the same."""


def vector(state: State) -> Floats:
    """(SIZE,) what the public state says of every slot, and the share of the turns that is gone; all in [0, 1]."""
    facts = [
        [
            float(slot in state["required"]),
            float(slot in state["filled"]),
            float(slot in state["confirmed"]),
            float(slot in state["last_filled"]),
            min(state["asked"].get(slot, 0), OFTEN) / OFTEN,
        ]
        for slot in SLOTS
    ]
    gone = state["turn"] / (state["turn"] + state["turns_left"])
    return np.array([*(fact for slot in facts for fact in slot), gone], np.float32)


def sentence(act: str, language: Language, rng: random.Random) -> str:
    """What the scripted expert says for an act, in one of its wordings."""
    wording = language.agents
    if act == "place":
        return place_call({})
    kind, _, slot = act.partition(" ")
    entry = wording["ask"][slot] if kind == "ask" else wording[act.replace(" ", "_")]
    said: str = rng.choice(entry["replies"])
    return said


@dataclass(slots=True)
class Actor:
    """A policy over acts as a speaker of one dialogue; it notes what it drew."""

    choose: Choose
    language: Language
    rng: random.Random
    acts: list[int]
    logprobs: list[float]

    async def reply(self, turn: int, new: tuple[Message, ...], state: State) -> Spoken:
        del turn, new  # the public state holds what it goes by
        act, logprob = self.choose(vector(state))
        text = sentence(ACTS[act], self.language, self.rng)
        self.acts.append(act)
        self.logprobs.append(logprob)
        place = len(self.acts)
        return Spoken(text=text, heard=without_thoughts(text), span=TokenSpan(0, place - 1, place))

    def traces(self) -> tuple[TokenTrace, ...]:
        if not self.acts:
            return ()
        sampled = (True,) * len(self.acts)
        return (TokenTrace(token_ids=tuple(self.acts), sampled_mask=sampled, logprobs=tuple(self.logprobs)),)


class Orders:
    """The environment, its user, and the dialogues of a policy over acts."""

    def __init__(self, config: OrderTaking.Config, *, seed: int) -> None:
        self._environment, self._user = OrderTaking(config), ScriptedUser(ScriptedUser.Config())
        self._language, self._max_turns, self._seed = Language("en"), config.max_turns, seed

    def play(self, choose: Choose, tasks: Sequence[int], *, policy_version: int, name: str) -> list[Trajectory]:
        """One record for every task seed; ids are `<name>-<task seed>`. What breaks in a dialogue is in its record."""
        return asyncio.run(self._play(choose, tasks, policy_version, name))

    async def _play(self, choose: Choose, tasks: Sequence[int], policy_version: int, name: str) -> list[Trajectory]:
        free = asyncio.Semaphore()  # one after the other: the choices are the draws of one generator
        played = []
        for number in tasks:
            wording = random.Random(f"wording/{self._seed}/{number}")  # noqa: S311 (not a secret)
            actor = Actor(choose, self._language, wording, [], [])
            dialogue = Dialogue(
                self._environment,
                self._user,
                actor,
                self._environment.task(number),
                id=f"{name}-{number}",
                episode=number,
                user_seed=number,
                max_turns=self._max_turns,
            )
            await dialogue.run(free, deadline_s=None)
            played.append(
                dialogue.record(
                    environment=self._environment.name,
                    seed=self._seed,
                    policy_version=policy_version,
                    traces=actor.traces(),
                    provenance={"policy": "dialogue acts"},
                    error=None,
                )
            )
        return played


def one_token(_turn: object) -> tuple[int, ...]:
    """Where the tokens of a reply start in its text: the one token is the whole of it."""
    return (0,)
