"""The scripted user on a toy agenda of its own: vagueness, misstatements, patience, and words from the task alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.errors import ConfigError, EpisodeError
from slea_llm.types import Task, UserReply
from slea_llm.users.scripted import PHRASINGS, ScriptedSession, ScriptedUser

WORDING: dict[str, Any] = {
    **{name: [name] for name in PHRASINGS},
    **{name: [name + " {told}"] for name in ("opening", "answer", "again", "correct")},
    "tell": {"size": ["{size}"], "colour": ["{colour}"], "size+colour": ["{size} {colour}"], "date": ["on {date}"]},
    "vague": {"size": ["hm size"], "colour": ["hm colour"], "date": ["hm date"]},
    "separator": ", ",
}
VALUES = {"size": "small", "colour": "red", "date": "Monday"}


def task_of(**traits: Any) -> Task:
    agenda = {
        "values": VALUES,
        "volunteers": [],
        "together": {},
        "vague": {},
        "misstated": {},
        "patience": 3,
        "wording": WORDING,
        **traits,
    }
    return Task(id="toy", seed=5, goal={"user": agenda})


def begun(answers_at_most: int = 2, **traits: Any) -> ScriptedSession:
    return ScriptedUser(ScriptedUser.Config(answers_at_most=answers_at_most)).start(task_of(**traits), 1)


def answer(session: ScriptedSession, *asks: str, **acts: Any) -> UserReply:
    return asyncio.run(session.answer({"asks": asks, **acts}, ()))


def opening(session: ScriptedSession) -> str:
    return asyncio.run(session.opening()).text


def test_opening_tells_what_is_volunteered() -> None:
    assert opening(begun()) == "opening_empty"
    assert opening(begun(volunteers=["colour", "size"])) == "opening small red"
    assert opening(begun(volunteers=["date", "size"])) == "opening small, on Monday"


def test_asked_slot_is_told() -> None:
    session = begun()
    assert answer(session, "date").text == "answer on Monday"
    assert session.snapshot()["told"] == {"date": "Monday"}


def test_slots_told_together() -> None:
    assert answer(begun(together={"size": ["date"]}), "size").text == "answer small, on Monday"


def test_answers_only_the_first_questions_at_no_cost() -> None:
    session = begun(answers_at_most=1)
    assert answer(session, "size", "colour").text == "answer small"
    assert answer(session, "colour").text == "answer red"
    assert session.snapshot()["patience"] == 3


def test_vague_answer_leaves_the_slot_untold_until_asked_again() -> None:
    session = begun(vague={"size": 2})
    assert [answer(session, "size").text for _ in range(3)] == ["hm size", "hm size", "answer small"]
    assert session.snapshot()["patience"] == 3


def test_misstatement_shows_only_when_read_back() -> None:
    session = begun(misstated={"size": "large"})
    assert answer(session, "size").text == "answer large"
    assert answer(session, "size").text == "again large"
    assert answer(session, reads_back={"size": "large"}).text == "correct small"
    assert answer(session, reads_back={"size": "small"}).text == "agree"
    assert session.snapshot()["told"] == {"size": "small"}


def test_correction_names_every_wrong_value_and_nothing_else() -> None:
    session = begun()
    reply = answer(session, reads_back={"size": "large", "colour": "blue", "date": "Monday"})
    assert reply.text == "correct small red"


def test_yes_and_answer_in_one_breath() -> None:
    assert answer(begun(volunteers=["size"]), "date", reads_back={"size": "small"}).text == "agree answer on Monday"


@pytest.mark.parametrize(
    ("asks", "acts", "text"),
    [
        (("size",), {}, "again small"),
        (("taste",), {}, "unneeded"),
        ((), {}, "useless"),
        ((), {"recommends": ("size",)}, "useless"),
        ((), {"reads_back": {"taste": "sweet"}}, "useless"),
        ((), {"reads_back": {"size": "small"}}, "agree_again"),
    ],
)
def test_useless_reply_costs_patience(asks: tuple[str, ...], acts: dict[str, Any], text: str) -> None:
    session = begun(volunteers=["size"])
    opening(session)
    answer(session, reads_back={"size": "small"})
    assert answer(session, *asks, **acts).text == text
    assert session.snapshot()["patience"] == 2


def test_recommendation_of_an_untold_slot_is_a_question() -> None:
    assert answer(begun(), recommends=("colour",)).text == "answer red"


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_leaves_when_patience_is_used_up(patience: int) -> None:
    session = begun(patience=patience)
    replies = [answer(session) for _ in range(patience)]
    assert [reply.leaving for reply in replies] == [False] * (patience - 1) + [True]
    assert replies[-1].text == "leave"


def test_br_083_a_yes_never_leaves_in_the_same_breath() -> None:
    session = begun(volunteers=["size"], patience=1)
    opening(session)
    agreed = answer(session, reads_back={"size": "small"})
    assert (agreed.text, agreed.leaving) == ("agree", False)
    again = answer(session, reads_back={"size": "small"})
    assert (again.text, again.leaving) == ("leave", True)


ACTS = st.fixed_dictionaries(
    {
        "asks": st.lists(st.sampled_from([*VALUES, "taste"]), max_size=3, unique=True),
        "reads_back": st.dictionaries(
            st.sampled_from([*VALUES, "taste"]), st.sampled_from(["small", "red", "x"]), max_size=3
        ),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.lists(ACTS, min_size=1, max_size=6), st.integers(0, 5))
def test_restored_session_goes_on_identically(history: list[dict[str, Any]], cut: int) -> None:
    user, task = ScriptedUser(ScriptedUser.Config()), task_of(vague={"size": 1}, misstated={"colour": "blue"})
    session = user.start(task, 9)
    for index, acts in enumerate(history):
        if index == min(cut, len(history) - 1):
            restored = user.restore(task, json.loads(json.dumps(session.snapshot())))
            rest = [asyncio.run(restored.answer(later, ())) for later in history[index:]]
            assert rest == [asyncio.run(session.answer(later, ())) for later in history[index:]]
            assert restored.snapshot() == session.snapshot()
            return
        asyncio.run(session.answer(acts, ()))


def test_restored_session_shares_nothing_with_its_snapshot() -> None:
    user, task = ScriptedUser(ScriptedUser.Config()), task_of()
    snapshot = user.start(task, 1).snapshot()
    answer(user.restore(task, snapshot), "size")
    assert snapshot["told"] == {}


def test_choice_of_words_depends_on_both_seeds() -> None:
    wording = {**WORDING, "useless": [f"useless {number}" for number in range(1000)]}
    user = ScriptedUser(ScriptedUser.Config())
    tasks = [task_of(wording=wording), Task(id="other", seed=6, goal=task_of(wording=wording).goal)]
    said = {answer(user.start(task, seed)).text for task in tasks for seed in (1, 2)}
    assert len(said) == 4


def test_named_wording_is_read_from_data() -> None:
    session = begun(wording="order_taking/user.en.yaml")
    assert opening(session)


@pytest.mark.parametrize(
    ("traits", "fault"),
    [
        (
            {"volunteers": ["colur"]},
            r"volunteers names 'colur', no slot of values: size, colour, date \(did you mean 'colour'",
        ),
        ({"together": {"size": ["weight"]}}, "together names 'weight'"),
        ({"together": [["size", "colour"]]}, "together .* is not slot -> a list of slots"),
        ({"vague": ["size"]}, "vague .* is not slot -> a whole number"),
        ({"vague": {"size": "once"}}, "vague .* is not slot -> a whole number"),
        ({"misstated": {"weight": "heavy"}}, "misstated names 'weight'"),
        ({"patience": "two"}, "patience 'two' is not a whole number"),
        ({"patience": 0}, "patience 0 is not a whole number, 1 or more"),
    ],
)
def test_an_agenda_of_another_shape_or_with_unknown_slots_is_refused(traits: dict[str, Any], fault: str) -> None:
    with pytest.raises(EpisodeError, match=fault):
        begun(**traits)


def test_faulty_wording_and_agenda_are_refused() -> None:
    with pytest.raises(ConfigError, match="lacks leave"):
        begun(wording={**WORDING, "leave": []})
    with pytest.raises(ConfigError, match=r"order_taking/user\.en\.yaml"):
        begun(wording="order_taking/user.em.yaml")
    with pytest.raises(EpisodeError, match="no agenda"):
        ScriptedUser(ScriptedUser.Config()).start(Task(id="bare", seed=0, goal={}), 1)
    with pytest.raises(EpisodeError, match="keys"):
        ScriptedUser(ScriptedUser.Config()).restore(task_of(), {"seed": 1})
    with pytest.raises(ConfigError, match="answers_at_most is 0"):
        begun(answers_at_most=0)
