"""A small war: gather, build, train, research, scout, and attack when the enemy does not expect it.

Every reply is one order and one day. docs/environments.md states the rules; there is no chance after the start.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from slea_llm import prompts
from slea_llm.checks import check_least, check_shares
from slea_llm.environments import strategy_rules as rules
from slea_llm.environments.agents import Errors, Move, Plan, Track
from slea_llm.environments.noted_dialogue import NotedConfig, NotedEpisode, NotedTasks, Notes, parts_of
from slea_llm.environments.speech import Call, Speech
from slea_llm.environments.strategy_rules import Enemy, Land
from slea_llm.types import Message, Outcome, State, Task

TOOL = "order"

MARGIN = 1.0
"""Growth of a few days and rounding: what was seen may be more by now."""

LONGEST_EXPERT = 15
"""Orders of the expert at worst, and one to spare."""


class StrategyGame(NotedTasks["StrategyEpisode"]):
    """The task family; its tasks suit the user `scripted`, who only watches."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(NotedConfig):
        max_turns: int = 16
        """Orders after which the war is lost; at least 15, what the expert needs."""
        rich_share: float = 0.5
        """Share of games that begin with plenty of gold, against a stronger enemy; in [0, 1]."""

        def __post_init__(self) -> None:
            check_least(self, max_turns=LONGEST_EXPERT, why="some games need as many orders")
            check_shares(self, "rich_share")

    name: ClassVar[str] = "strategy_game"
    config: Config

    def _goal(self, rng: random.Random, speech: Speech) -> dict[str, Any]:
        rich = rng.random() < self.config.rich_share
        days = range(1, self.config.max_turns + 1)
        # Never three days in a row, so that waiting for an unwatched day is always possible.
        watched = [day for day in days if day % 3 and rng.random() < 0.5]
        enemy = {
            "strength": round(rng.uniform(9.0, 12.0) if rich else rng.uniform(4.5, 6.5), 2),
            "growth": round(rng.uniform(0.0, 0.15), 3),
            "scouting": watched,
            "raid_day": rng.randint(8, 10) if rich else rng.randint(5, 7),
            "raid_strength": round(rng.uniform(3.0, 5.0) if rich else rng.uniform(2.0, 3.0), 2),
        }
        user = {
            "values": {},
            "volunteers": [],
            "together": {},
            "vague": {},
            "misstated": {},
            "patience": 3,
            "wording": f"{self.name}/user.{speech.code}.yaml",
        }
        gold = rng.randint(12, 16) * 10 if rich else rng.randint(2, 5) * 10
        return {"gold": gold, "enemy": enemy, "user": user}

    def _extra(self, task: Task) -> dict[str, Any]:
        return asdict(Land(gold=task.goal["gold"]))

    def _agent(self, task: Task) -> tuple[Plan, Errors, Track]:
        del task
        return plan, errors, track

    def _episode(self, task: Task, notes: Notes) -> StrategyEpisode:
        speech = self._speech(task)
        enemy = Enemy(**{**task.goal["enemy"], "scouting": tuple(task.goal["enemy"]["scouting"])})
        return StrategyEpisode(
            enemy,
            self._prompts[task.language],
            speech=speech,
            prompt="",
            required=(),
            max_turns=self.config.max_turns,
            notes=notes,
        )


class StrategyEpisode(NotedEpisode):
    """One war. A reply of several orders is its first one; a reply without an order passes no day."""

    def __init__(self, enemy: Enemy, text: prompts.Prompt, **frame: Any) -> None:
        super().__init__(**frame)
        self._enemy, self._text = enemy, text
        self._orders = self.speech.patterns("orders")

    @property
    def land(self) -> Land:
        return Land(**{**self.notes.extra, "events": list(self.notes.extra["events"])})

    def system_prompt(self) -> tuple[Message, ...]:
        values = {"days": str(self._max_turns), "now": self._report(self.land)}
        text = self._text.render(**{name: values[name] for name in self._text.fields})
        return (Message(role="system", content=text),)

    def state(self) -> State:
        """Gold, buildings and troops; whether scouts watch today, days to a raid, and what was seen of the enemy.

        `stronger`: by more than the few days since it was seen can have changed.
        """
        land = self.land
        raid = self._enemy.raid_day - land.day
        return {
            "language": self.speech.code,
            "turn": self.notes.turn,
            "turns_left": self._max_turns - self.notes.turn,
            **{name: getattr(land, name) for name in ("day", "gold", "farms", "barracks", "walls", "army")},
            **{name: getattr(land, name) for name in ("technology", "shown", "seen", "force", "defence", "outcome")},
            "events": list(land.events),
            "rich": land.gold >= rules.RICH,
            "stronger": land.seen is not None and land.force > land.seen + MARGIN,
            "watched": land.day in self._enemy.scouting,
            # A raid shows two days ahead.
            "raid": {"days": raid, "strength": self._enemy.raid_strength} if 0 <= raid <= 2 else None,
        }

    def take_call(self, call: Call) -> Outcome:
        if call.arguments is None or call.name != TOOL:
            return super().take_call(call)
        name = call.arguments.get("do")
        if name not in rules.ORDERS:
            return self.tool_error("argument", name=TOOL, known=", ".join(rules.ORDERS))
        return self._give(str(name), "")

    def take_calls(self, made: Sequence[Call]) -> Outcome:
        return self.take_call(made[0])

    def take_words(self, reply: str) -> Outcome:
        name = self.understand(reply)
        return self._give(name, reply) if name else Outcome(to_user=True, acts={"heard": reply})

    def understand(self, reply: str) -> str:
        """The first order of a spoken reply, or the empty text; a question orders nothing."""
        for part in parts_of(reply):
            if part.rstrip().endswith("?"):
                continue
            found = {}
            for name, pattern in self._orders.items():
                starts = [match.start() for match in pattern.finditer(part) if self._meant(part, match.start())]
                if starts:
                    found[name] = min(starts)
            if found:
                first = min(found.values())
                name = next(name for name, start in found.items() if start == first)
                return ("farm" if self.land.barracks else "barracks") if name == "build" else name
        return ""

    def _meant(self, part: str, start: int) -> bool:
        return not self.speech.negates(part[:start])

    def _give(self, name: str, said: str) -> Outcome:
        land = self.land
        rules.order(land, self._enemy, name)
        self.notes.extra = asdict(land)
        acts = {"heard": said, "order": name}
        message = (Message(role="tool", content=self._report(land), name=TOOL),)
        if land.outcome:
            return self.end("success" if land.outcome == "won" else "failure", acts=acts, messages=message)
        return Outcome(messages=message, acts=acts)

    def _report(self, land: Land) -> str:
        """What is to be seen on the morning of the day."""
        wording: Mapping[str, Any] = self.speech.data["report"]
        numbers = {"day": str(land.day), "gold": str(land.gold), "army": str(land.army), "force": f"{land.force:g}"}
        parts = [wording["events"][event].format(seen=f"{land.seen or 0:g}") for event in land.events]
        parts.append(wording["now"].format(**numbers))
        parts += [wording["rich"]] if land.gold >= rules.RICH else []
        parts += [wording["watched"]] if land.day in self._enemy.scouting else []
        days = self._enemy.raid_day - land.day
        if 0 <= days <= 2:
            parts.append(wording["raid"].format(days=str(days), strength=f"{self._enemy.raid_strength:g}"))
        if land.outcome:
            parts = [wording[land.outcome]]
        return str(wording["gap"]).join(parts)


def plan(state: State) -> Move:
    """What a careful commander orders."""
    return Move(name=f"order.{_best(state)}")


def _best(state: State) -> str:
    gold, seen, raid = state["gold"], state["seen"], state["raid"]
    if state["shown"]:
        return "attack" if state["stronger"] else "hide"
    if raid is not None and state["defence"] < raid["strength"]:
        return _prepare(state, raid["days"])
    if not state["barracks"]:
        return "barracks" if gold >= rules.COSTS["barracks"] else "gather"
    if state["stronger"]:
        return "gather" if state["watched"] else "march"
    if state["army"] and seen is None and state["army"] >= rules.MOST_TROOPS - rules.TROOPS:
        return "scout"
    if state["rich"] and state["technology"] < 2:
        return "research"
    if state["army"] < rules.MOST_TROOPS:
        return "train" if gold >= rules.COSTS["train"] else "gather"
    if seen is None:
        return "scout"
    if state["technology"] < rules.MOST_TECHNOLOGY:
        return "research" if gold >= rules.COSTS["research"] else "gather"
    return "scout"


def _prepare(state: State, days: int) -> str:
    """Before a raid: troops where they can be trained, else walls."""
    if state["barracks"] and state["gold"] >= rules.COSTS["train"] and state["army"] < rules.MOST_TROOPS:
        return "train"
    if state["gold"] >= rules.COSTS["barracks"] + rules.COSTS["train"] and days and not state["barracks"]:
        return "barracks"
    return "walls" if state["gold"] >= rules.COSTS["walls"] else "gather"


def errors(state: State, rng: random.Random) -> Sequence[Move]:
    """Slips to choose from: small talk, showing the army, an early attack, research when poor, anything else."""
    found = [Move(name="small_talk"), Move(name=f"order.{rng.choice(rules.ORDERS)}")]
    if state["army"]:
        found.append(Move(name="order.attack" if state["shown"] else "order.march"))
    if not state["rich"]:
        found.append(Move(name="order.research"))
    return found


def track(state: State, speech: Speech) -> str:
    """What matters today: danger first, then eyes, then means."""
    tracks: Mapping[str, str] = speech.agents["tracks"]
    raid = state["raid"]
    if raid is not None and state["defence"] < raid["strength"]:
        return tracks["raid"]
    if state["stronger"]:
        return tracks["strong_watched"] if state["watched"] else tracks["strong"]
    return tracks["rich"] if state["rich"] else tracks["weak"]
