"""The scripted agents of order_taking: an expert that may err on purpose, and one that does nothing of use."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slea_llm.checks import check_shares
from slea_llm.environments.order_taking_language import SLOTS, TOOL, Language
from slea_llm.environments.speech import call_text
from slea_llm.types import Message, State


def place_call(arguments: Mapping[str, str]) -> str:
    """The structured call that places the order."""
    return call_text(TOOL, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderExpert:
    """Asks for what is missing, reads the order back until all of it is confirmed, then places it.

    In a share `error_rate` of its replies it errs: asks for a filled slot, reads back or places too early, leaves out
    the read-back, or makes small talk, each of those possible now with equal chance. Its draws depend on (seed, turn).
    """

    languages: Mapping[str, Language]
    error_rate: float = 0.0
    seed: int = 0
    writes_values: bool = False

    def __post_init__(self) -> None:
        check_shares(self, "error_rate")

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages  # the public state holds all it needs
        rng = random.Random(f"order expert/{self.seed}/{state['turn']}")  # noqa: S311 (not a secret)
        if rng.random() < self.error_rate:
            return self._say(rng.choice(self._errors(state, rng)), state, rng)
        if state["missing"]:
            return self._say(self._next(state), state, rng)
        return self._say("read_back" if state["unconfirmed"] else "place", state, rng)

    @staticmethod
    def _next(state: State) -> str:
        """How to come by the first slot that is missing: by a question, or by an offer where one is due."""
        slot: str = state["missing"][0]
        if slot != "dish":
            return slot
        if state.get("advice") or state.get("suggested"):
            return "recommend"
        return "sold_out" if state.get("sold_out") else slot

    @staticmethod
    def _errors(state: State, rng: random.Random) -> list[str]:
        """The mistakes to choose from: each kind once, so that many filled slots do not crowd out the rest."""
        errors = ["small_talk"]
        if state["filled"]:
            errors.append(rng.choice(list(state["filled"])))
        if state["missing"] or state["unconfirmed"]:
            errors.append("place")
        if state["missing"] and state["filled"]:
            errors.append("read_back")
        return errors

    def _say(self, act: str, state: State, rng: random.Random) -> str:
        language = self.languages[state["language"]]
        wording = language.agents
        entry = wording["ask"][act] if act in SLOTS else wording[act]
        if act == "place":
            said = place_call(state["filled"] if self.writes_values else {})
        else:
            said = rng.choice(entry["replies"])
        if act == "recommend":
            tried = {*state["suggested"], *state["sold_out"]}
            said = said.format(dish=rng.choice([dish for dish in language.dishes if dish not in tried]))
        return f"<think>{_tracked(state, language)}{wording['gap']}{entry['thought']}</think>{said}"


def _tracked(state: State, language: Language) -> str:
    """The first sentence of a thought: what is still to come. True of the state even where the reply errs."""
    tracks: Mapping[str, str] = language.agents["tracks"]
    if state["missing"]:
        return tracks["missing"].format(slots=language.slot_list(state["missing"]))
    return tracks["whole"] if state["unconfirmed"] else tracks["agreed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idler:
    """Only ever makes small talk."""

    languages: Mapping[str, Language]

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages
        talk = self.languages[state["language"]].agents["small_talk"]
        replies: Sequence[str] = talk["replies"]
        return f"<think>{talk['thought']}</think>{replies[state['turn'] % len(replies)]}"
