"""Knowledge of complaints on sentences of strangers: what was told, soothed and offered decides what they are worth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slea_llm.errors import ConfigError
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.evaluators.knowledge_file import read_knowledge
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.scoring import Scorer
from slea_llm.types import Message, ScoredStep, State, Trajectory, Turn

SLOTS = ("symptom", "order_number", "channel", "day")
SAID = Path(__file__).parents[1] / "fixtures/said"
COMPLAINT = Scorer(
    TaggedParser(TaggedParser.Config(split_thoughts=True)),
    [KnowledgeBase(KnowledgeBase.Config(file="knowledge/complaint.yaml"))],
)


def state(filled: Iterable[str] = (), confirmed: Sequence[str] = (), *, done: str = "") -> dict[str, Any]:
    """`done`: which of soothed, offered and booked are so."""
    flags = {flag: flag in done.split() for flag in ("soothed", "offered", "booked")}
    return {"required": list(SLOTS), "filled": dict.fromkeys(filled, "x"), "confirmed": list(confirmed), **flags}


def words(text: str, before: State) -> tuple[ScoredStep, ...]:
    turn = Turn(index=0, context=(Message(role="user", content="Hello."),), text=text, state_before=before)
    trajectory = Trajectory(
        id="said",
        task={},
        environment="complaint",
        seed=0,
        policy_version=0,
        turns=(turn,),
        traces=(),
        outcome=0.0,
        termination="failure",
    )
    return COMPLAINT.score(trajectory).scores


def last(text: str, before: State) -> float:
    score = words(text, before)[-1].score
    assert score is not None
    return score


def sentences() -> list[Any]:
    found = []
    for language in ("en", "zh"):
        for number, line in enumerate((SAID / f"complaint.{language}.jsonl").read_text(encoding="utf-8").splitlines()):
            entry = json.loads(line)
            found.append(pytest.param(entry["text"], entry["understood"], id=f"{language}-{number}"))
    return found


@pytest.mark.parametrize(("text", "understood"), sentences())
def test_what_strangers_say_is_good_in_its_place_and_bad_out_of_it(text: str, understood: dict[str, Any]) -> None:
    asks, acts = set(understood.get("asks", ())), understood.get("acts", ())
    rest = [slot for slot in SLOTS if slot not in asks and slot != "day"]
    if asks and not acts:
        assert last(text, state(rest, done="soothed offered")) > 0
        assert last(text, state(SLOTS, done="soothed offered")) < 0, "asks for what was told"
        if "day" in asks:
            assert last(text, state(rest, done="soothed")) < 0, "nothing was offered yet"
        elif asks != {"symptom"}:
            assert last(text, state()) < 0, "nobody was soothed yet"
    if "soothes" in acts:
        assert last(text, state(("symptom",) if "offers_visit" in acts else ())) > 0
        if not asks and len(acts) == 1:
            assert last(text, state(done="soothed")) < 0, "soothes again"
    if "offers_visit" in acts:
        assert last(text, state(SLOTS[:3], done="soothed")) > 0
        assert last(text, state(done="soothed")) < 0, "the trouble is not known"
        assert last(text, state(SLOTS, done="soothed offered")) < 0, "the day is agreed"
    if "reads_back" in understood:
        assert last(text, state(SLOTS, done="soothed offered")) > 0
        assert last(text, state(done="soothed")) < 0
    if understood.get("nothing"):
        assert last(text, state(("symptom",), done="soothed")) < 0


CALL = '<tool_call>{"name": "book_visit", "arguments": {}}</tool_call>'


def test_booking_needs_an_offer_every_detail_and_agreement() -> None:
    assert last(CALL, state(SLOTS, SLOTS, done="soothed offered")) == 1.0
    assert last(CALL, state(SLOTS, done="soothed offered")) == -0.5
    assert last(CALL, state(SLOTS[:3], SLOTS[:3], done="soothed offered")) == -1.0
    assert last(CALL, state(SLOTS, SLOTS, done="soothed")) == -1.0
    assert last(CALL, state(SLOTS, SLOTS, done="soothed offered booked")) == -1.0


def test_the_same_two_replies_are_worth_what_their_order_makes_them() -> None:
    """A7: soothing before the order number, and the order number before soothing."""
    soothes, asks = "I am so sorry about this.", "What is your order number?"
    assert last(soothes, state()) + last(asks, state(done="soothed")) == 2.0
    assert last(asks, state()) + last(soothes, state(done="soothed")) < 0


def test_a_state_without_the_flag_is_a_reason_and_no_score() -> None:
    (word,) = words("I am so sorry.", {})
    assert word.score is None
    assert "has no 'soothed'" in (word.reason or "")


@pytest.mark.parametrize("names", ["true", "[]", "[1]"])
def test_a_condition_on_the_state_takes_names(names: str) -> None:
    case = f"{{when: {{state_true: {names}}}, score: 1, rationale: r}}"
    file = f"slots: {{}}\npatterns: [{{name: a, kinds: [reply], cases: [{case}]}}]"
    with pytest.raises(ConfigError, match="state_true takes names of the public state"):
        read_knowledge("own.yaml", file.encode())
