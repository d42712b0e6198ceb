"""Planning a trip: the agent asks for city, days, budget and purpose, looks up what there is and books what fits.

The constraints are checked by code against a generated database. docs/environments.md states the rules.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from slea_llm.checks import check_least, check_shares
from slea_llm.environments.agents import Errors, Move, Plan, Track, track_missing
from slea_llm.environments.noted_dialogue import NotedConfig, NotedEpisode, NotedTasks, Notes, draw_vague
from slea_llm.environments.speech import Call, Speech, call_text
from slea_llm.environments.trip_database import Trip, TripDatabase
from slea_llm.errors import ConfigError, nearest
from slea_llm.types import Message, Outcome, State, Task

BOOK = "book_trip"
SEARCHES: Mapping[str, tuple[str, ...]] = {
    "search_journeys": ("city", "start", "nights"),
    "search_hotels": ("city", "start", "nights"),
    "search_sites": ("city", "purpose", "start", "nights"),
}
"""Tool -> its arguments; what a call leaves out is taken from what the user told."""

PARTS: Mapping[str, str] = {"search_journeys": "journey", "search_hotels": "hotel", "search_sites": "site"}

LONGEST_EXPERT = 12
"""Turns of the expert at worst: 5 questions, 2 vague answers, 2 read-backs, the look-ups, the booking, one to spare."""


class TripPlanning(NotedTasks["TripEpisode"]):
    """The task family; its tasks suit the user `scripted`."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(NotedConfig):
        max_turns: int = 14
        """Replies of the agent after which the dialogue ends with reward -1; at least 12, what the expert needs."""
        misstated_share: float = 0.25
        """Share of users who misstate a value and notice it only when it is read back; in [0, 1]."""
        vague_share: float = 0.15
        """Share of slots about which the user is vague when first asked; in [0, 1]."""
        slack: float = 0.5
        """Budget between the cheapest plan (0) and the dearest (1), as a share of the way; in [0, 1]."""
        database_seed: int = 0
        """Makes journeys, hotels and sites."""

        def __post_init__(self) -> None:
            check_least(self, max_turns=LONGEST_EXPERT, why="some trips need as many")
            check_shares(self, "misstated_share", "vague_share", "slack")

    name: ClassVar[str] = "trip_planning"
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.databases = {
            code: TripDatabase(
                speech.data["database"], speech.choices("city"), speech.choices("purpose"), seed=config.database_seed
            )
            for code, speech in self._speeches.items()
        }

    def _goal(self, rng: random.Random, speech: Speech) -> dict[str, Any]:
        trip = self._trip(rng, speech)
        wanted = values_of(trip, speech)
        vague = draw_vague(rng, speech.slots, self.config.vague_share)
        user = {
            "values": wanted,
            "volunteers": list(rng.choice(((), ("city",), ("city", "purpose"), ("city", "start", "nights")))),
            "together": {"start": ["nights"]} if rng.random() < 0.3 else {},
            "vague": vague,
            "misstated": self._misstated(rng, trip, speech),
            "patience": rng.choice((2, 2, 3)),
            "wording": f"{self.name}/user.{speech.code}.yaml",
        }
        return {"trip": asdict(trip), "user": user}

    def _trip(self, rng: random.Random, speech: Speech) -> Trip:
        """A trip of which the database has plans of several prices."""
        database = self.databases[speech.code]
        for _ in range(1000):
            city, purpose = rng.choice(speech.choices("city")), rng.choice(speech.choices("purpose"))
            start, nights = rng.randint(1, 20), rng.randint(2, 5)
            costs = database.costs(city, start, nights, purpose)
            if len(costs) >= 4 and costs[0] < costs[-1]:
                most = costs[0] + self.config.slack * rng.random() * (costs[-1] - costs[0])
                return Trip(city=city, start=start, nights=nights, budget=math.ceil(most), purpose=purpose)
        raise ConfigError(f"database_seed {self.config.database_seed} makes a database without plans; take another")

    def _misstated(self, rng: random.Random, trip: Trip, speech: Speech) -> dict[str, str]:
        if rng.random() >= self.config.misstated_share:
            return {}
        slot = rng.choice(speech.slots)
        other = {
            "city": rng.choice([city for city in speech.choices("city") if city != trip.city]),
            "start": speech.data["forms"]["start"].format(start=trip.start % 20 + 1),
            "nights": speech.data["forms"]["nights"].format(nights=trip.nights % 5 + 2),
            "budget": speech.data["forms"]["budget"].format(budget=trip.budget + 10 * rng.randint(5, 60)),
            "purpose": rng.choice([purpose for purpose in speech.choices("purpose") if purpose != trip.purpose]),
        }
        return {slot: other[slot]}

    def _extra(self, task: Task) -> dict[str, Any]:
        del task
        return {"found": {}, "booked": False}

    def _agent(self, task: Task) -> tuple[Plan, Errors, Track]:
        del task
        return plan, errors, track

    def _episode(self, task: Task, notes: Notes) -> TripEpisode:
        frame = self._frame(task, notes, book=call_text(BOOK, {"journey": "J1", "hotel": "H1", "site": "S1"}))
        return TripEpisode(Trip(**task.goal["trip"]), self.databases[task.language], **frame)


class TripEpisode(NotedEpisode):
    """One trip. What is booked is held against the hidden goal: days, rooms, opening days, purpose and budget."""

    def __init__(self, trip: Trip, database: TripDatabase, **frame: Any) -> None:
        super().__init__(**frame)
        self._trip, self._database = trip, database

    def take_call(self, call: Call) -> Outcome:
        if call.arguments is not None and call.name in SEARCHES:
            return self._search(call.name, call.arguments)
        if call.arguments is not None and call.name == BOOK:
            return self._book(call.arguments)
        if call.arguments is not None:
            hint = nearest(call.name, (*SEARCHES, BOOK))
            return self.tool_error("unknown", name=call.name, tools=", ".join((*SEARCHES, BOOK)), hint=hint)
        return super().take_call(call)

    def _search(self, tool: str, arguments: Mapping[str, Any]) -> Outcome:
        if unknown := sorted(arguments.keys() - set(SEARCHES[tool])):
            return self.tool_error("argument", name=tool, argument=unknown[0], known=", ".join(SEARCHES[tool]))
        given = {slot: self._value(slot, arguments.get(slot, self.notes.filled.get(slot))) for slot in SEARCHES[tool]}
        if missing := [slot for slot, value in given.items() if value is None]:
            return self.tool_error("missing", name=tool, slots=self.speech.slot_list(missing))
        found = self._found(tool, given)
        self.notes.extra["found"][PARTS[tool]] = found
        lines = [self.speech.data["database"]["line"].format(**entry) for entry in found]
        text = str(self.speech.data["separator"]).join(lines) or str(self.speech.data["database"]["none"])
        return Outcome(messages=(Message(role="tool", content=text, name=tool),), acts={"heard": ""})

    def _found(self, tool: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        city, start, nights = given["city"], given["start"], given["nights"]
        if tool == "search_journeys":
            journeys = self._database.find_journeys(city, start, nights)
            return [{"id": one.id, "name": one.kind, "price": one.price} for one in journeys]
        if tool == "search_hotels":
            hotels = self._database.find_hotels(city, start, nights)
            return [{"id": one.id, "name": one.name, "price": one.price} for one in hotels]
        sites = self._database.find_sites(city, given["purpose"], start, nights)
        return [{"id": one.id, "name": one.name, "price": one.fee} for one in sites]

    def _value(self, slot: str, value: Any) -> Any:
        """An argument or a noted value as the database takes it; None when it is no value of that slot."""
        if value is None or isinstance(value, bool):
            return None
        if slot in ("start", "nights"):
            # The last number of a date is its day: "5月10日", "2026-05-10", "10 May", 10.
            numbers = re.findall(r"\d+", str(value))
            return int(numbers[-1]) if numbers and len(numbers[-1]) < 3 else None
        return self.speech.values(str(value)).get(slot)

    def _book(self, arguments: Mapping[str, Any]) -> Outcome:
        parts = ("journey", "hotel", "site")
        if missing := [part for part in parts if not isinstance(arguments.get(part), str)]:
            return self.tool_error("argument", name=BOOK, argument=missing[0], known=", ".join(parts))
        self.notes.extra["booked"] = True
        plan = {part: str(arguments[part]).strip().upper() for part in parts}
        broken = self._database.faults(self._trip, journey=plan["journey"], hotel=plan["hotel"], site=plan["site"])
        return self.end("failure" if broken else "success", acts={"heard": "", "broken": broken})


def values_of(trip: Trip, speech: Speech) -> dict[str, str]:
    """The trip as the user says it, by slot."""
    forms = speech.data["forms"]
    return {
        "city": trip.city,
        "start": forms["start"].format(start=trip.start),
        "nights": forms["nights"].format(nights=trip.nights),
        "budget": forms["budget"].format(budget=trip.budget),
        "purpose": trip.purpose,
    }


def plan(state: State) -> Move:
    """Ask, read back until all is agreed, look everything up in one reply, book the cheapest of each."""
    if state["missing"]:
        return Move(name=f"ask.{state['missing'][0]}")
    if state["unconfirmed"]:
        return Move(name="read_back")
    found: Mapping[str, Sequence[Mapping[str, Any]]] = state["found"]
    if len(found) < len(PARTS):
        wanted = [tool for tool, part in PARTS.items() if part not in found]
        return Move(name="search", call="".join(call_text(tool, {}) for tool in wanted))
    cheapest = {part: min(options, key=lambda one: one["price"])["id"] for part, options in found.items() if options}
    order = {part: cheapest[part] for part in PARTS.values() if part in cheapest}
    if len(order) < len(PARTS):
        # Nothing fits what was told: it can only have been told wrongly.
        return Move(name="read_back")
    return Move(name="book", call=call_text(BOOK, order))


def errors(state: State, rng: random.Random) -> Sequence[Move]:
    """Slips to choose from: each kind once."""
    moves = [Move(name="small_talk")]
    if state["filled"]:
        moves.append(Move(name=f"ask.{rng.choice(list(state['filled']))}"))
    if state["missing"]:
        moves.append(Move(name="search", call="".join(call_text(tool, {}) for tool in SEARCHES)))
        if state["filled"]:
            moves.append(Move(name="read_back"))
    elif state["unconfirmed"] and not state["found"]:
        moves.append(Move(name="search", call="".join(call_text(tool, {}) for tool in SEARCHES)))
    found: Mapping[str, Sequence[Mapping[str, Any]]] = state["found"]
    if len(found) == len(PARTS) and all(found.values()):
        order = {part: rng.choice(list(found[part]))["id"] for part in PARTS.values()}
        moves.append(Move(name="book", call=call_text(BOOK, order)))
    return moves


def track(state: State, speech: Speech) -> str:
    """What is missing; once everything was looked up, that."""
    if len(state["found"]) == len(PARTS):
        return str(speech.agents["tracks"]["found"])
    return track_missing(state, speech)
