"""A customer complains of a washing machine; the agent soothes, finds out what is wrong and books a visit.

The order of the steps decides: an angry customer tells nothing of the purchase before being soothed, nobody names a
day before a visit is offered, and an offer convinces nobody while the trouble is not known. docs/environments.md has
the rules.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slea_llm.checks import check_least, check_shares
from slea_llm.environments.agents import Errors, Move, Plan, Track, track_missing
from slea_llm.environments.noted_dialogue import NotedConfig, NotedEpisode, NotedTasks, Notes, draw_vague
from slea_llm.environments.speech import Call, Heard, Speech, call_text
from slea_llm.types import Outcome, State, Task

TOOL = "book_visit"
SOOTHES = "soothes"
OFFERS = "offers_visit"

LONGEST_EXPERT = 11
"""Turns of the expert at worst: soothe, 3 questions, 2 vague answers, the offer, 2 read-backs of a misstated value, the
call, and one to spare."""


class Complaint(NotedTasks["ComplaintEpisode"]):
    """The task family; its tasks suit the user `scripted`."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(NotedConfig):
        max_turns: int = 12
        """Replies of the agent after which the dialogue ends with reward -1; at least 11, what the expert needs."""
        angry_share: float = 0.6
        """Share of customers who tell nothing of their purchase before they are soothed; in [0, 1]."""
        misstated_share: float = 0.25
        """Share of customers who misstate a value and notice it only when it is read back; in [0, 1]."""
        vague_share: float = 0.15
        """Share of slots about which the customer is vague when first asked; in [0, 1]."""

        def __post_init__(self) -> None:
            check_least(self, max_turns=LONGEST_EXPERT, why="some complaints need as many")
            check_shares(self, "angry_share", "misstated_share", "vague_share")

    name: ClassVar[str] = "complaint"
    config: Config

    def _goal(self, rng: random.Random, speech: Speech) -> dict[str, Any]:
        wanted = {slot: draw(rng, slot, speech) for slot in speech.slots}
        angry = rng.random() < self.config.angry_share
        vague = draw_vague(rng, speech.slots, self.config.vague_share)
        first = {"day": OFFERS, **(dict.fromkeys(("order_number", "channel"), SOOTHES) if angry else {})}
        user = {
            "values": wanted,
            "volunteers": [] if rng.random() < 0.3 else ["symptom"],
            "together": {"order_number": ["channel"]} if rng.random() < 0.3 and not angry else {},
            "vague": vague,
            "misstated": self._misstated(rng, wanted, speech),
            "patience": rng.choice((1, 2, 2)),
            "wording": f"{self.name}/user_{'angry' if angry else 'calm'}.{speech.code}.yaml",
            "first": first,
            "welcomes": {SOOTHES: "calmed", OFFERS: "convinced"},
        }
        return {"visit": wanted, "user": user}

    def _misstated(self, rng: random.Random, wanted: Mapping[str, str], speech: Speech) -> dict[str, str]:
        if rng.random() >= self.config.misstated_share:
            return {}
        slot = rng.choice(("order_number", "channel", "day"))
        while (value := draw(rng, slot, speech)) == wanted[slot]:
            pass
        return {slot: value}

    def _extra(self, task: Task) -> dict[str, Any]:
        del task
        return {"soothed": False, "offered": False, "booked": False}

    def _agent(self, task: Task) -> tuple[Plan, Errors, Track]:
        del task
        return plan, errors, track_missing

    def _episode(self, task: Task, notes: Notes) -> ComplaintEpisode:
        return ComplaintEpisode(task.goal["visit"], **self._frame(task, notes, call=call_text(TOOL, {})))


class ComplaintEpisode(NotedEpisode):
    """One complaint. The visit that is booked is what has been noted down; the hidden goal alone judges it."""

    def __init__(self, visit: Mapping[str, str], **frame: Any) -> None:
        super().__init__(**frame)
        self._visit = visit

    def take_call(self, call: Call) -> Outcome:
        if call.arguments is None or call.name != TOOL:
            return super().take_call(call)
        if not self.notes.extra["offered"]:
            return self.tool_error("not_offered", name=TOOL)
        self.notes.extra["booked"] = True
        right = {slot: self.notes.filled.get(slot) for slot in self.required} == dict(self._visit)
        return self.end("success" if right else "failure")

    def acts_of(self, heard: Heard, reply: str) -> Mapping[str, Any]:
        del reply
        does = [act for act in heard.does if act != OFFERS or "symptom" in self.notes.filled]
        self.notes.extra["soothed"] |= SOOTHES in does
        self.notes.extra["offered"] |= OFFERS in does
        # An offer of a visit asks for the day by itself.
        asks = [*heard.asks, *(["day"] if OFFERS in does and "day" not in {*heard.asks, *heard.reads_back} else [])]
        asks = [slot for slot in asks if slot != "day" or "day" not in self.notes.filled or "day" in heard.asks]
        return {"does": tuple(does), "asks": tuple(asks)}


def draw(rng: random.Random, slot: str, speech: Speech) -> str:
    """A value of a slot."""
    if slot == "order_number":
        return f"{rng.choice('ABCDEFGHKLMNPRSTUVWX')}{rng.choice('ABCDEFGHKLMNPRSTUVWX')}{rng.randint(0, 99999):05d}"
    return rng.choice(speech.choices(slot))


def plan(state: State) -> Move:
    """Soothe, find out, offer, read back, book: the order in which it works for every customer."""
    if not state["soothed"]:
        return Move(name="soothe")
    for slot in state["missing"]:
        if slot != "day":
            return Move(name=f"ask.{slot}")
    if not state["offered"] or "day" in state["missing"]:
        return Move(name="offer")
    return Move(name="read_back") if state["unconfirmed"] else Move(name="book", call=call_text(TOOL, {}))


def errors(state: State, rng: random.Random) -> Sequence[Move]:
    """Slips to choose from: each kind once."""
    found = [Move(name="small_talk"), Move(name=f"ask.{rng.choice(('order_number', 'channel'))}")]
    if state["filled"]:
        found.append(Move(name=f"ask.{rng.choice([slot for slot in state['filled'] if slot != 'day'] or ['symptom'])}"))
    if "day" in state["missing"]:
        found.append(Move(name="offer"))
    if state["missing"] or state["unconfirmed"]:
        found.append(Move(name="book", call=call_text(TOOL, {})))
    return found
