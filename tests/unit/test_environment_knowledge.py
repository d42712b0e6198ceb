"""Knowledge of trips and of the strategy game, on sentences of strangers: good in their place, bad out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slea_llm.errors import ConfigError
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.evaluators.knowledge_file import read_knowledge
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.scoring import Scorer
from slea_llm.types import Message, ScoredStep, State, Trajectory, Turn

SAID = Path(__file__).parents[1] / "fixtures/said"
PARSER = TaggedParser(TaggedParser.Config(split_thoughts=True))
SCORERS = {
    name: Scorer(PARSER, [KnowledgeBase(KnowledgeBase.Config(file=f"knowledge/{name}.yaml"))])
    for name in ("trip_planning", "strategy_game")
}


def word(environment: str, text: str, before: State) -> ScoredStep:
    """On the last step of the text."""
    trajectory = Trajectory(
        id="said",
        task={},
        environment=environment,
        seed=0,
        policy_version=0,
        turns=(Turn(index=0, context=(Message(role="user", content="Hello."),), text=text, state_before=before),),
        traces=(),
        outcome=0.0,
        termination="failure",
    )
    return SCORERS[environment].score(trajectory).scores[-1]


def last(environment: str, text: str, before: State) -> float:
    score = word(environment, text, before).score
    assert score is not None
    return score


def sentences(environment: str) -> list[Any]:
    found = []
    for language in ("en", "zh"):
        lines = (SAID / f"{environment}.{language}.jsonl").read_text(encoding="utf-8").splitlines()
        for number, entry in enumerate(map(json.loads, lines)):
            found.append(pytest.param(entry["text"], entry["understood"], id=f"{language}-{number}"))
    return found


# ---- trips -------------------------------------------------------------------------------------------------------

SLOTS = ("city", "start", "nights", "budget", "purpose")
HOTEL = {"hotel": [{"id": "H1"}]}


def trip(filled: Any = (), confirmed: Any = (), found: Any = None) -> dict[str, Any]:
    noted = {"required": list(SLOTS), "filled": dict.fromkeys(filled, "x"), "confirmed": list(confirmed)}
    return {**noted, "found": found or {}, "booked": False}


@pytest.mark.parametrize(("text", "understood"), sentences("trip_planning"))
def test_what_strangers_say_of_a_trip(text: str, understood: dict[str, Any]) -> None:
    asks = understood.get("asks", ())
    if asks:
        assert last("trip_planning", text, trip([slot for slot in SLOTS if slot not in asks])) > 0
        assert last("trip_planning", text, trip(SLOTS)) < 0, "asks for what was told"
    elif "reads_back" in understood:
        assert last("trip_planning", text, trip(SLOTS)) > 0
        assert last("trip_planning", text, trip()) < 0, "there is nothing to read back"
        assert last("trip_planning", text, trip(SLOTS, SLOTS)) < 0, "all is confirmed"
    else:
        assert last("trip_planning", text, trip()) < 0


SEARCH = '<tool_call>{"name": "search_hotels", "arguments": {}}</tool_call>'
BOOK = '<tool_call>{"name": "book_trip", "arguments": {"journey": "J1", "hotel": "H1", "site": "S1"}}</tool_call>'


def test_a_trip_is_agreed_then_looked_up_then_booked() -> None:
    assert last("trip_planning", SEARCH, trip(SLOTS, SLOTS)) == 1.0
    assert last("trip_planning", SEARCH, trip(SLOTS)) == -0.5
    assert last("trip_planning", SEARCH, trip(SLOTS[1:])) == -1.0
    assert last("trip_planning", BOOK, trip(SLOTS, SLOTS, HOTEL)) == 1.0
    assert last("trip_planning", BOOK, trip(SLOTS, SLOTS)) == -1.0
    assert last("trip_planning", BOOK, trip(SLOTS, (), HOTEL)) == -0.5


# ---- the game ----------------------------------------------------------------------------------------------------

POOR: dict[str, Any] = {
    **{"gold": 0, "army": 0, "seen": None, "raid": None},
    **dict.fromkeys(("barracks", "shown", "rich", "watched", "stronger"), False),
}
READY: dict[str, dict[str, Any]] = {
    "gather": {},
    "barracks": {"gold": 40},
    "walls": {"gold": 30, "raid": {"days": 1, "strength": 3.0}},
    "train": {"gold": 30, "barracks": True},
    "research": {"gold": 120, "rich": True},
    "scout": {"army": 8},
    "march": {"army": 8, "seen": 3.0, "stronger": True},
    "hide": {"army": 8, "shown": True},
    "attack": {"army": 8, "seen": 3.0, "shown": True, "stronger": True},
}


@pytest.mark.parametrize(("text", "understood"), sentences("strategy_game"))
def test_what_strangers_order(text: str, understood: dict[str, Any]) -> None:
    order = understood.get("order")
    if order in READY:
        assert last("strategy_game", text, {**POOR, **READY[order]}) > 0
    if order != "gather":
        assert last("strategy_game", text, POOR) < 0, "cannot be carried out, or leads nowhere"


@pytest.mark.parametrize(
    ("text", "change", "score"),
    [
        ("March to the border.", {**READY["march"], "watched": True}, -1.0),
        ("军队开到边境。", {**READY["march"], "watched": True}, -1.0),
        ("March to the border.", {"army": 8}, -1.0),
        ("Attack the enemy.", READY["march"], -1.0),
        ("Attack the enemy.", {**READY["attack"], "seen": 12.0, "stronger": False}, -1.0),
        ("March to the border.", {"army": 8, "seen": 12.0}, -0.5),
        ("Train soldiers.", {"gold": 100, "barracks": True, "army": 8}, -1.0),
        ("Build walls.", {"gold": 100}, -0.5),
        ("Research better weapons.", {"gold": 60}, -0.5),
        ("Research better weapons.", {"gold": 60, "army": 8}, 1.0),
        ("Gather gold.", {"gold": 150, "rich": True}, -0.5),
    ],
)
def test_the_day_decides_what_an_order_is_worth(text: str, change: dict[str, Any], score: float) -> None:
    assert last("strategy_game", text, {**POOR, **change}) == score


def test_a_state_without_the_number_is_a_reason_and_no_score() -> None:
    silent = word("strategy_game", "Build walls.", {"raid": {"days": 1}, "gold": "much"})
    assert silent.score is None
    assert "no number 'gold'" in (silent.reason or "")


@pytest.mark.parametrize("least", ["3", "{}", "{gold: much}", "{gold: true}"])
def test_a_condition_on_numbers_takes_numbers(least: str) -> None:
    case = f"{{when: {{state_at_least: {least}}}, score: 1, rationale: r}}"
    with pytest.raises(ConfigError, match="state_at_least takes 'name: number'"):
        read_knowledge("own.yaml", f"slots: {{}}\npatterns: [{{name: a, kinds: [reply], cases: [{case}]}}]".encode())
