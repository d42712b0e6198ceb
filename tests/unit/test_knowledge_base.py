"""Evaluator `knowledge_base` and the patterns for taking orders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings

from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import ConfigError
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.types import STEP_KINDS, ScoredStep, Trajectory, Turn, leaf_steps
from slea_llm.users.scripted import ScriptedUser
from tests.strategies import tagged_texts

SLOTS = ("dish", "quantity", "address", "time", "phone")
CALL = '<tool_call>{"name": "place_order", "arguments": {}}</tool_call>'
PARSER = TaggedParser(TaggedParser.Config())
ORDER = KnowledgeBase(KnowledgeBase.Config())


def state(filled: tuple[str, ...] = (), confirmed: tuple[str, ...] = (), *, placed: bool = False) -> dict[str, Any]:
    return {
        "required": list(SLOTS),
        "filled": dict.fromkeys(filled, "x"),
        "confirmed": list(confirmed),
        "placed": placed,
    }


NOTHING, WHOLE, AGREED = state(), state(SLOTS), state(SLOTS, SLOTS)


def others(slot: str) -> tuple[str, ...]:
    return tuple(name for name in SLOTS if name != slot)


DIALOGUE = Trajectory(
    id="t",
    task={},
    environment="order_taking",
    seed=0,
    policy_version=0,
    turns=(),
    traces=(),
    outcome=None,
    termination="failure",
)


def words(text: str, before: dict[str, Any], evaluator: KnowledgeBase = ORDER) -> tuple[ScoredStep, ...]:
    turn = Turn(index=0, context=(), text=text, state_before=before)
    return evaluator.score(dataclasses.replace(DIALOGUE, turns=(turn,)), PARSER.parse(turn, "t", None))


def scores(text: str, before: dict[str, Any]) -> list[float | None]:
    return [word.score for word in words(text, before)]


# What the scripted agents of the environment say, in both languages, and paraphrases.
ASKS = [
    ("dish", "Need dish.", "What dish would you like?"),
    ("dish", "The user has not told the dish; I ask for the dish.", "Hello! What would you like to eat?"),
    ("quantity", "Need quantity.", "How many would you like?"),
    ("quantity", "Quantity is missing.", "How many portions?"),
    ("address", "Need address.", "What is the address?"),
    ("address", "Still no address, ask for it.", "Where should it go?"),
    ("address", "1. The user told me the dish.\n2. The address is missing.\n3. I ask.", "Please give me the address."),
    ("time", "Need time.", "At what time?"),
    ("time", "Ask when.", "When do you want it?"),
    ("phone", "Need phone.", "What is your phone number?"),
    ("phone", "The phone number is unclear.", "Which phone number can I call?"),
    ("dish", "问菜名。", "请问要什么菜？"),
    ("dish", "还不知道菜名。", "您想吃什么？"),
    ("quantity", "问份数。", "请问要几份？"),
    ("quantity", "还差数量，问一下。", "一共几份？"),
    ("address", "问地址。", "请问地址是什么？"),
    ("address", "1. 用户说了菜名。\n2. 缺地址。\n3. 我来问地址。", "请问送到哪里？"),
    ("time", "问时间。", "请问几点送？"),
    ("time", "需要问时间。", "什么时候送？"),
    ("phone", "问电话。", "请问电话是多少？"),
    ("phone", "No phone number yet.", "How can we reach you?"),
    ("phone", "没有电话。", "请留一个手机号码。"),
]


@pytest.mark.parametrize(("slot", "thought", "reply"), ASKS)
def test_asking_is_good_while_the_slot_is_missing_and_bad_after(slot: str, thought: str, reply: str) -> None:
    text = f"<think>{thought}</think>{reply}"
    assert scores(text, NOTHING) == [1.0, 1.0]
    assert scores(text, state(others(slot))) == [1.0, 1.0]
    assert scores(text, state((slot,))) == [-1.0, -1.0]
    assert scores(text, WHOLE) == [-1.0, -1.0]


@pytest.mark.parametrize(("slot", "thought", "reply"), ASKS)
def test_asking_for_what_the_order_does_not_need_is_bad(slot: str, thought: str, reply: str) -> None:
    before = {**NOTHING, "required": list(others(slot))}
    assert scores(f"<think>{thought}</think>{reply}", before) == [-1.0, -1.0]


@pytest.mark.parametrize(("both", "one"), [("Missing time, phone.", "Missing phone."), ("缺时间、电话。", "缺电话。")])
def test_a_list_of_what_is_missing_must_be_whole(both: str, one: str) -> None:
    two_missing = state(("dish", "quantity", "address"))

    def first(thought: str, before: dict[str, Any]) -> float | None:
        return scores(f"<think>{thought}</think>So.", before)[0]

    assert first(both, two_missing) == 1.0
    assert first(one, two_missing) == -0.5
    assert first(one, state(others("phone"))) == 1.0
    assert first(both, state(others("phone"))) == -1.0
    assert first(one, WHOLE) == -1.0
    assert first("Missing phone, ask for it.", two_missing) == 1.0, "a plan, no list"


@pytest.mark.parametrize("thought", ["Nothing missing.", "不缺什么。"])
def test_nothing_missing_leaves_out_that_the_user_agreed(thought: str) -> None:
    text = f"<think>{thought}</think>So."
    assert [scores(text, before)[0] for before in (NOTHING, WHOLE, AGREED)] == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize("text", ["<think>Place it.</think>", '<think>Place it."name": "place_order"}</tool_call>'])
def test_a_thought_that_nothing_follows_is_bad_whatever_it_plans(text: str) -> None:
    assert scores(text, AGREED) == [-1.0]


READ_BACKS = [
    ("Read back the order.", "Your order is {order}. Is that right?"),
    (
        "1. Every detail is there.\n2. Nothing is missing, but the user has not agreed yet.\n3. I read the order back.",
        "So that is {order}, correct?",
    ),
    ("I should confirm with the user.", "Let me confirm: two pizzas, right?"),
    ("复述订单。", "您的订单是{order}，对吗？"),
    ("1. 信息都有了。\n2. 不缺什么，但用户还没有同意。\n3. 我来复述订单。", "跟您确认：{order}，对吗？"),
]


@pytest.mark.parametrize(("thought", "reply"), READ_BACKS)
def test_reading_back_is_good_only_for_a_whole_order_not_confirmed(thought: str, reply: str) -> None:
    text = f"<think>{thought}</think>{reply}"
    assert scores(text, WHOLE) == [1.0, 1.0]
    assert scores(text, NOTHING) == [-1.0, -1.0]
    assert scores(text, AGREED) == [-1.0, -1.0]
    assert scores(text, state(others("phone"))) == [-1.0, -0.5]
    assert scores(text, state(SLOTS, others("phone"))) == [1.0, 1.0]


@pytest.mark.parametrize(
    "thought",
    [
        "All confirmed, place it.",
        "1. The user agreed to the order.\n2. Nothing is missing.\n3. I place the order.",
        "已确认，下单。",
        "1. 用户同意了订单。\n2. 不缺什么。\n3. 我来下单。",
    ],
)
def test_placing_is_good_only_for_a_whole_confirmed_order(thought: str) -> None:
    text = f"<think>{thought}</think>{CALL}"
    assert scores(text, AGREED) == [1.0, 1.0]
    assert scores(text, WHOLE) == [-1.0, -1.0]
    assert scores(text, state(others("dish"), others("dish"))) == [-1.0, -1.0]
    assert scores(text, NOTHING) == [-1.0, -1.0]
    assert scores(CALL, state(SLOTS, SLOTS, placed=True)) == [-1.0]


@pytest.mark.parametrize("call", ["<tool_call>{", "<tool_call>[1]</tool_call>", CALL.replace("place", "cancel")])
def test_a_call_that_cannot_run_is_bad(call: str) -> None:
    assert scores(call, AGREED) == [-1.0]


@pytest.mark.parametrize(
    "reply", ["Nice weather today.", "Thank you so much.", "今天天气不错。", "asdf qwer", "How are you?", "....", ""]
)
def test_small_talk_and_gibberish_lose_half(reply: str) -> None:
    assert scores(reply, NOTHING) == [-0.5]
    assert scores(f"<think>{reply or 'hm'}</think>What dish?", NOTHING) == [-0.5, 1.0]


def test_one_question_for_told_and_missing_slots_is_worth_nothing() -> None:
    assert scores("What dish and how many?", NOTHING) == [1.0]
    assert scores("What dish and how many?", state(("dish",))) == [0.0]
    assert scores("What dish and how many?", state(("dish", "quantity"))) == [-1.0]


def test_a_rationale_names_the_slots_and_the_pattern() -> None:
    (word,) = words("Where should it go?", state(("address",)))
    assert word.rationale == "asks again for what the user has told: address"
    assert word.parts == {"ask": -1.0}
    assert (word.evaluator, word.version) == ("knowledge_base", ORDER.version)


@pytest.mark.parametrize("before", [{}, {"required": ["dish"]}, {"required": 3, "filled": {}, "confirmed": []}])
def test_a_state_without_slots_is_a_reason_not_a_score(before: dict[str, Any]) -> None:
    (word,) = words("What dish?", before)
    assert word.score is None
    assert word.reason is not None
    assert word.reason.startswith("the state before the turn has no list")


@given(text=tagged_texts())
@settings(deadline=None, max_examples=30)
def test_every_leaf_step_of_any_text_gets_a_score_in_range(text: str) -> None:
    turn = Turn(index=0, context=(), text=text, state_before=WHOLE)
    leaves = leaf_steps(PARSER.parse(turn, "t", None))
    given_words = words(text, WHOLE)
    assert [(word.turn, word.step) for word in given_words] == [(leaf.turn, leaf.index) for leaf in leaves]
    assert all(word.score is not None and -1 <= word.score <= 1 for word in given_words)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_scripted_expert_does_everything_right_and_the_idler_nothing(language: Literal["en", "zh"]) -> None:
    environment = OrderTaking(OrderTaking.Config(language=language))
    user = ScriptedUser(ScriptedUser.Config())
    scorer = Scorer(PARSER, [ORDER])
    for seed in range(10):
        task = environment.task(seed)
        for agent, worth in ((environment.expert(task), 1.0), (environment.idler(task), -0.5)):
            trajectory = play(environment, user, agent, task, seed=seed, max_turns=12)
            assert {word.score for word in scorer.score(trajectory).scores} == {worth}


SMALL = """
slots: {dish: {en: [dish]}}
patterns:
  - name: first
    kinds: [reply]
    regex: {en: ['dish\\?']}
    cases: [{when: {slot_missing: dish}, score: 1, rationale: first}]
  - name: second
    kinds: [reply]
    regex: {en: ['give (?P<slot>\\w+) and dish']}
    cases: [{when: {slot_named: true}, score: 0.5, rationale: $slot}, {score: -0.5, rationale: no slot}]
"""


def load(tmp_path: Path, text: str, **options: Any) -> KnowledgeBase:
    path = tmp_path / "patterns.yaml"
    path.write_text(text, encoding="utf-8")
    return KnowledgeBase(KnowledgeBase.Config(file=str(path), **options))


def test_the_group_slot_says_where_slots_are_named(tmp_path: Path) -> None:
    knowledge = load(tmp_path, SMALL)
    assert words("give dish and dish", NOTHING, knowledge)[0].rationale == "dish"
    assert words("give time and dish", NOTHING, knowledge)[0].rationale == "no slot"


def test_an_unmatched_step_is_neutral_or_unscored_as_configured(tmp_path: Path) -> None:
    (neutral,) = words("hello", NOTHING, load(tmp_path, SMALL, default=-0.1))
    assert (neutral.score, neutral.rationale) == (-0.1, "no pattern")
    (unscored,) = words("hello", NOTHING, load(tmp_path, SMALL, unmatched="unscored"))
    assert (unscored.score, unscored.reason) == (None, "no pattern")


def test_the_version_follows_file_and_settings(tmp_path: Path) -> None:
    versions = {
        load(tmp_path, SMALL).version,
        load(tmp_path, SMALL, default=0.5).version,
        load(tmp_path, SMALL.replace("first", "1st")).version,
    }
    assert len(versions) == 3
    assert load(tmp_path, SMALL).version == load(tmp_path, SMALL).version


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slot_missing", "slot_mising", r"unknown key 'slot_mising'.*did you mean 'slot_missing'"),
        ("slot_missing: dish", "slot_missing: dihs", r"takes \$slot, dish, not 'dihs'"),
        ("slot_missing: dish", "all_filled: dish", "takes true or false"),
        ("score: 1,", "score: 2,", r"score 2 is not a number in \[-1, 1\]"),
        ("[reply]", "[answer]", "kind 'answer' is not one of " + ", ".join(STEP_KINDS)),
        ("dish\\?", "dish(", "not a regular expression"),
        ("name: second", "name: first", "named more than once: first"),
        ("cases: [{when", "case: [{when", "'cases' is missing"),
        ("en: [dish]", "en: dish", r"give regular expressions as 'language: \[expression, ...\]'"),
        ("slots:", "slots: [", "is not YAML"),
    ],
)
def test_a_faulty_file_is_refused_with_its_fault(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, SMALL.replace(old, new))


def test_faulty_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"default 2 is not in \[-1, 1\]"):
        KnowledgeBase.Config(default=2)
    with pytest.raises(ConfigError, match=r"there is no 'knowledge/ordr.yaml'.*order.yaml"):
        KnowledgeBase(dataclasses.replace(KnowledgeBase.Config(), file="knowledge/ordr.yaml"))


def test_a_file_of_ones_own_that_is_not_there_is_looked_for_nowhere_else() -> None:
    with pytest.raises(ConfigError, match=r"knowledge file mine.yaml is not there; give the path of your own"):
        KnowledgeBase(KnowledgeBase.Config(file="mine.yaml"))


def test_a_condition_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("patterns:\n  - name: a\n    cases: [{when: {slot_heard: x, slot_heard: y}, score: 1}]\n", "utf-8")
    with pytest.raises(ConfigError, match=r"'slot_heard' is given twice"):
        KnowledgeBase(KnowledgeBase.Config(file=str(path)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>All confirmed.All confirmed.</think>Thank you.", [-0.5, -0.5]),
        (f"<think>All confirmed. Place it.</think>{CALL}", [1.0, 1.0]),
        (f"<think>都确认了。都确认了，下单。都确认了，下单。</think>{CALL}", [-0.5, 1.0]),
        (f"<think>Place it.</think>{CALL}{CALL}", [1.0, 1.0, 1.0]),
    ],
)
def test_a_right_thought_said_twice_earns_nothing_more(text: str, expected: list[float]) -> None:
    assert scores(text, AGREED) == expected
    split = TaggedParser(TaggedParser.Config(split_thoughts=True))
    turn = Turn(
        index=0, context=(), text="<think>All confirmed. Place it. All confirmed.</think>" + CALL, state_before=AGREED
    )
    (again,) = [
        word
        for word in ORDER.score(dataclasses.replace(DIALOGUE, turns=(turn,)), split.parse(turn, "t", None))
        if "twice" in word.rationale
    ]
    assert (again.score, again.parts) == (-0.5, {"believes_agreed": 1.0, "said_twice": -0.5})


def test_said_twice_can_be_left_out_and_must_be_a_score() -> None:
    free = KnowledgeBase(KnowledgeBase.Config(said_twice=1.0))
    assert [word.score for word in words("<think>All confirmed.All confirmed.</think>Thank you.", AGREED, free)] == [
        1.0,
        -0.5,
    ]
    with pytest.raises(ConfigError, match=r"said_twice -2 is not in \[-1, 1\]"):
        KnowledgeBase.Config(said_twice=-2)


def test_a_reply_may_say_what_its_thought_had_drafted() -> None:
    assert scores("<think>What is the address?</think>What is the address?", state(others("address")))[1] == 1.0
