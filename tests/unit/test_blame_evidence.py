"""What the referee weighs: values told in any wording, evidence with the words that show it, learnt weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slea_llm.blame.evidence import evidence
from slea_llm.blame.exchanges import exchanges
from slea_llm.blame.facts import wanted
from slea_llm.blame.faults import KINDS
from slea_llm.blame.likeness import chinese_number, holds, overlap, spelled, tells
from slea_llm.blame.view import View, view
from slea_llm.blame.weighing import Weights, features, shipped, weighed
from slea_llm.referee import Referee, find
from tests.support.planted_faults import FLIGHT, HOTEL, PIZZA, PLANTED, planted, spoken

REFEREE = Referee(Referee.Config())
WORDS = (
    "two",
    "ham pizza",
    "no",
    "14 Mill Street",
    "18:45",
    "cheese",
    "?",
    "yes",
    "bye",
    "Where to?",
    "两份",
    "不要",
    "[x]",
    "",
)
LINES = st.lists(st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join) | st.text(max_size=30), max_size=10)


@pytest.mark.parametrize(
    ("text", "number"),
    [("八〇二", "802"), ("三千二", "3200"), ("五万", "50000"), ("十", "10"), ("二十三", "23"), ("一百零五", "105")],
)
def test_numbers_in_chinese_signs(text: str, number: str) -> None:
    assert chinese_number(text) == number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("14 Mill Street", "It goes to fourteen Mill St."),
        ("18:45", "about 6:45"),
        ("12:00", "at 12"),
        ("May 12", "on the 12th"),
        ("3000", "三千元"),
        ("W8820014", "w 882 0014, I think"),
        ("no onions", "without onion, no"),
        ("周六下午", "星期六下午来"),
        ("2", "two of them"),
    ],
)
def test_a_value_is_told_in_other_words(value: str, text: str) -> None:
    (slot,) = wanted({"slot": value})
    assert tells(slot, text), (holds(slot, text), spelled(text))


@pytest.mark.parametrize(
    ("value", "text"),
    [("14 Mill Street", "15 Mill Street"), ("May 12", "June 3"), ("ham pizza", "soup"), ("3000", "300")],
)
def test_another_value_does_not_tell_it(value: str, text: str) -> None:
    (slot,) = wanted({"slot": value})
    assert not tells(slot, text)


@given(st.text(max_size=60), st.text(max_size=60))
def test_likeness_is_a_share_whatever_the_text(one: str, other: str) -> None:
    assert 0 <= overlap(one, other) == overlap(other, one) <= 1
    for slot in wanted({"slot": one}):
        assert 0 <= holds(slot, other) <= 1


def weigh(seen: View) -> dict[str, float]:
    return features(seen, find(seen), evidence(seen))


@given(LINES, st.sampled_from([PIZZA, FLIGHT, HOTEL]))
def test_all_evidence_stands_in_the_dialogue_and_the_order_of_slots_says_nothing(
    lines: Sequence[str], goal: dict[str, str]
) -> None:
    seen = view(spoken("any", goal, tuple(lines), ending="failure"))
    for one in evidence(seen):
        assert any(line is one.line for line in seen.lines)
        assert one.strength > 0
        assert not one.kind or one.kind in KINDS
    turned = view(spoken("any", dict(reversed(goal.items())), tuple(lines), ending="failure"))
    assert weigh(seen) == weigh(turned)
    ruling = REFEREE.judge(seen.trajectory)
    assert ruling.party in ("user", "agent")
    if ruling.fault is not None and ruling.fault.kind != "empty" and ruling.fault.quote:
        assert any(
            ruling.fault.quote.lower() in text for line in seen.lines for text in (line.text.lower(), line.plain)
        )


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_what_decides_is_a_fault_of_the_user_or_a_line_of_the_agent(number: int) -> None:
    seen = view(planted(number))
    fault, line = weighed(seen, find(seen))
    assert (fault is None) or (line is None)
    assert fault is None or fault.party == "user"
    assert line is None or line.side == "agent"


def test_a_question_stays_open_until_it_is_answered() -> None:
    lines = (
        "A ham pizza, two.",
        "What is the address?",
        "And a good one.",
        "The address, please?",
        "14 Mill Street.",
        "Done.",
    )
    answered = view(spoken("late", PIZZA, lines, ending="failure"))
    first, second = exchanges(answered)
    assert [slot.slot for slot in first.open] == ["address"]
    assert second.open == ()
    assert {one.name for one in evidence(answered)} & {"answers_late", "unanswered"} == {"answers_late"}
    never = view(spoken("never", PIZZA, (*lines[:4], "Any news?", "No."), ending="failure"))
    assert "unanswered>=2" in weigh(never)
    assert "answers_late" not in weigh(never)


def test_a_user_that_told_its_goal_and_did_nothing_odd_did_its_part() -> None:
    lines = ("Two ham pizzas to 14 Mill Street at 18:45.", "One moment.", "Thanks.", "We are closed.")
    assert "did_its_part" in weigh(view(spoken("part", PIZZA, lines, ending="failure")))
    assert "did_its_part" not in weigh(
        view(spoken("part", PIZZA, (*lines[:3], "Which door code?", "I refuse to say.", "Then no."), ending="failure"))
    )


def test_the_weights_say_on_what_they_were_fitted_and_weigh_what_is_seen() -> None:
    weights = shipped()
    assert 0 < weights.threshold < 1
    assert all(math.isfinite(one) for one in (weights.bias, *weights.weights.values()))
    assert weights.chance({}) < weights.threshold, "a failure of which nothing is seen is not the user's"
    assert weights.chance({"no such feature": 5.0}) == weights.chance({})
    seen = {name for number in range(len(PLANTED)) for name in weigh(view(planted(number)))}
    assert len(seen & weights.weights.keys()) > 40


@given(st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6)))
def test_a_chance_is_a_probability(values: dict[str, float]) -> None:
    assert 0 <= Weights(bias=0.0, weights={"a": 1.0, "b": -1e9}, threshold=0.5).chance(values) <= 1


PROSE = {"user_id": "mia_li_1", "instruction": "You are mia_li_1. Fly from New York to Seattle on May 20, in economy."}


def test_a_goal_in_prose_is_not_held_against_what_a_user_says_beyond_its_slots() -> None:
    lines = (
        "Seattle on May 20, and an aisle seat for $50. I am mia_li_1.",
        "Which ticket?",
        "May 21 would do, too.",
        "No.",
    )
    ruling = REFEREE.judge(spoken("prose", PROSE, lines, ending="failure"))
    assert ruling.party == "agent"
    assert {one.weight for one in ruling.noted} <= {"minor"}


@pytest.mark.parametrize(
    "last", ["Thanks! That should be all for now. ###STOP###", "I appreciate it, thank you.###STOP###"]
)
def test_a_polite_end_with_a_stop_signal_is_an_end(last: str) -> None:
    lines = ("Two ham pizzas to 14 Mill Street at 18:45.", "Two cheese pizzas are on their way.", last)
    assert "stop_signal" not in {one.kind for one in find(view(spoken("polite", PIZZA, lines, ending="failure")))}


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (("A ham pizza.", "I need the order number.", "I lost it. Is there anything else I can provide?"), "role_flip"),
        (("A ham pizza.", "What else?", "Could you tell me what there is?"), "refuses"),
        (("A ham pizza.", "One moment.", "Once everything is set, I'd pay by card."), "claims_success"),
    ],
)  # fmt: skip
def test_what_users_say_who_do_nothing_wrong(lines: Sequence[str], kind: str) -> None:
    found = find(view(spoken("fine", PIZZA, tuple(lines), ending="failure")))
    assert kind not in {one.kind for one in found if one.weight != "minor"}
