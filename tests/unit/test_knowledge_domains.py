"""The knowledge files of the support, trip, code and strategy domains, on the dialogues that they were written for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from slea_llm import assets
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.scoring import Scorer
from slea_llm.types import Message, ScoredStep, Trajectory, Turn
from tests.strategies import tagged_texts
from tests.support.timeouts import ALL_FINE, ASKS_FOR_DETAIL, GENERIC_CHECK, LOG, NO_HELP, RESTART, dialogue

DOMAINS = ("support", "trip", "code", "strategy")
PARSER = TaggedParser(TaggedParser.Config())


def knowledge(domain: str) -> KnowledgeBase:
    return KnowledgeBase(KnowledgeBase.Config(file=f"knowledge/{domain}.yaml", features=True))


def words(domain: str, trajectory: Trajectory) -> tuple[ScoredStep, ...]:
    return Scorer(PARSER, [knowledge(domain)]).score(trajectory).scores


def said(*lines: str) -> Trajectory:
    """User and agent in turn, the user first."""
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    return Trajectory(
        id="said",
        task={},
        environment="none",
        seed=0,
        policy_version=0,
        turns=tuple(
            Turn(index=index, context=(Message(role="user", content=user),), text=agent)
            for index, (user, agent) in enumerate(pairs)
        ),
        traces=(),
        outcome=0.0,
        termination="failure",
    )


def last(domain: str, *lines: str) -> float:
    """The score of the last step of a dialogue."""
    score = words(domain, said(*lines))[-1].score
    assert score is not None
    return score


def test_there_is_a_file_for_each_domain() -> None:
    files = set(assets.names("data"))
    assert {
        f"knowledge/{domain}.yaml" for domain in (*DOMAINS, "order", "complaint", "trip_planning", "strategy_game")
    } <= files


# ---- the database timeout: seeds A32 to A37 ------------------------------------------------------------------------


def test_both_generic_steps_of_the_timeout_dialogue_score_low_and_say_why() -> None:
    first, second = words("support", dialogue(GENERIC_CHECK, RESTART, feedback=(ALL_FINE,)))
    assert first.score is not None
    assert second.score is not None
    assert second.score < first.score < 0
    assert "asks for nothing concrete" in first.rationale
    assert "passes over what the user has just answered" in second.rationale
    assert (first.parts["specific"], first.parts["ignores_feedback"]) == (0.0, 0.0)
    assert (second.parts["specific"], second.parts["ignores_feedback"]) == (0.0, 1.0)


@pytest.mark.parametrize("before", [(), (GENERIC_CHECK,)])
def test_asking_for_the_timeout_value_and_the_version_scores_high(before: tuple[str, ...]) -> None:
    word = words("support", dialogue(*before, ASKS_FOR_DETAIL))[-1]
    assert word.score == 1.0
    assert "timeout" in word.rationale
    assert "version" in word.rationale
    assert word.parts["specific"] == 1.0
    assert word.parts["ignores_feedback"] == 0.0


def test_the_order_decides_between_the_same_two_replies() -> None:
    """A37: the value of a step is that in its state, not that of its words."""
    early = words("support", dialogue(RESTART, GENERIC_CHECK))[0].score
    late = words("support", dialogue(GENERIC_CHECK, RESTART))[1].score
    assert early is not None
    assert late is not None
    assert late < early


COARSE = [
    "Is your network okay? Is the server up?",
    "Please make sure that the database is running.",
    "Have you tried turning it off and on again?",
    "Could you check the connection?",
    "请检查网络连接是否正常。",
    "请确认数据库服务是否启动。",
]
FINE = [
    "Could you paste the exact error message from the log?",
    "Which version of the database do you run, and what is the connection timeout set to?",
    "How large is the connection pool, and is there a firewall between the two machines?",
    "When did this first happen, and what changed before it?",
    "Does it happen on all machines or only this one?",
    "请提供完整的报错信息和日志。",
    "请问超时时间设置为多少？数据库是什么版本？",
    "防火墙有没有放行端口？连接池的最大连接数是多少？",
]


@pytest.mark.parametrize("reply", COARSE)
def test_coarse_diagnosis_is_low_and_lower_after_an_answer_that_rules_it_out(reply: str) -> None:
    zh = not reply.isascii()
    problem = "我的应用连不上数据库，日志显示连接超时。" if zh else LOG
    answer = (
        "网络和数据库服务我都检查过了，都正常。" if zh else "Network, connection, server and database are all fine."
    )
    opening = "您好，我来看看。" if zh else "Let me see."
    assert last("support", problem, reply) < 0
    assert last("support", problem, opening, answer, reply) == -1.0


@pytest.mark.parametrize("reply", FINE)
def test_asking_for_something_concrete_is_high_once(reply: str) -> None:
    answer = "我不知道在哪里看。" if not reply.isascii() else "I would not know where to look."
    assert last("support", LOG, reply) == 1.0
    assert last("support", LOG, GENERIC_CHECK, ALL_FINE, reply) == 1.0
    assert last("support", LOG, reply, answer, reply) == -1.0


def test_a_fix_that_uses_what_was_told_is_high_and_asking_for_it_again_low() -> None:
    told = "The connection timeout value is 5 seconds and the version is MySQL 8.0.36."
    assert last("support", LOG, ASKS_FOR_DETAIL, told, "Raise the connect timeout value to 30 seconds.") == 1.0
    assert last("support", LOG, GENERIC_CHECK, told, "Which database version do you run?") == -1.0
    assert last("support", LOG, GENERIC_CHECK, ALL_FINE, RESTART, NO_HELP, RESTART) == -1.0


def test_the_washing_machine() -> None:
    """A5 and A7: asking for the order beats soothing, and soothing twice is worse than once."""
    complaint = "My washing machine does not spin and makes a noise. I am really angry!"
    asks = "Could you give me your order number and where you bought it?"
    assert last("support", complaint, asks) == 1.0
    assert last("support", complaint, "We can send a technician for an on-site inspection.") == 0.5
    soothing = "We are very sorry for the inconvenience."
    assert last("support", complaint, soothing) == 0.0
    assert last("support", complaint, soothing, "And what now?", soothing) < 0
    assert last("support", "洗衣机不脱水，还有异响！", "请提供订单号和购买渠道。") == 1.0
    assert last("support", "洗衣机不脱水，还有异响！", "给您带来不便非常抱歉。") == 0.0


# ---- the business trip: A13 to A15, A21 ----------------------------------------------------------------------------

TRIP = "Plan a business trip from Beijing to Shanghai; I want to see companies of the AI industry."
TRIP_ZH = "帮我安排一次从北京到上海的商务出差，考察人工智能行业。"


def test_the_trip_asks_before_it_offers() -> None:
    asks, offers = "What are your travel dates and your budget?", "I recommend the Grand Hotel and a morning flight."
    told = "The 5th to 7th of May, a medium budget."
    assert last("trip", TRIP, asks) == 1.0
    assert last("trip", TRIP, offers) == -1.0
    assert last("trip", TRIP, asks, told, offers) == 1.0
    assert last("trip", TRIP, asks, told, asks) == -1.0
    assert last("trip", TRIP, asks, "The 5th to 7th of May.", offers) == -0.5
    assert last("trip", TRIP_ZH, "请问您的出行日期和预算是多少？") == 1.0
    assert last("trip", TRIP_ZH, "推荐您住外滩附近的酒店。") == -1.0
    assert last("trip", TRIP_ZH, "请问您的日期和预算？", "5号到7号，中等预算。", "推荐您住张江附近的酒店。") == 1.0


def test_pushing_luxury_before_money_was_spoken_of_is_the_worst_step() -> None:
    """A21: the worse action of the counterfactual."""
    push = "Let me book a luxury five-star suite for you."
    assert last("trip", TRIP, push) == -1.0
    assert last("trip", TRIP, "What budget and dates?", "A medium budget, next week.", push) < 0
    assert last("trip", TRIP_ZH, "为您推荐豪华五星级套房。") == -1.0


def test_the_step_chain_of_the_trip_scores_as_a_chain() -> None:
    """A15: identify, decompose, request, generate candidates."""
    thought = "<think>The user wants a business trip to Shanghai.</think>"
    chain = words("trip", said(TRIP, f"{thought}What are your dates and your budget?"))
    assert [word.score for word in chain] == [0.5, 1.0]
    parts = words("trip", said(TRIP, "<think>Break it down: first transport, then hotel.</think>When do you leave?"))
    assert [word.score for word in parts] == [0.5, 1.0]


def test_what_real_dialogues_of_an_airline_taught() -> None:
    ask = "I can help you with that. I'll need your user ID. Could you please provide it?"
    flight = "I need to change my flight back from Denver to Houston on May 27."
    assert last("support", flight, ask) == 1.0
    assert last("trip", flight, ask) == 1.0
    assert last("trip", flight, ask, "It is ivan_smith_3668.", ask) == -1.0
    for domain in ("support", "trip"):
        thanks = "You're welcome! If you have any other questions, feel free to ask. Have a great day!"
        assert last(domain, flight, "Done.", "Thank you.", thanks) == 0.0
        calls = [
            f'<tool_call>{{"name": "search_flight", "arguments": {{"day": "{day}"}}}}</tool_call>' for day in (27, 28)
        ]
        assert last(domain, flight, calls[0], "none", calls[1]) == 0.5
        assert last(domain, flight, calls[0], "none", calls[0]) == -0.5
    upgrade = "The upgrade to business class costs 120 dollars. Would you like me to proceed?"
    assert last("trip", "Please upgrade my flight on May 27 to business class.", upgrade) == 0.5
    assert last("trip", flight, "Why not upgrade to business class?") == -1.0


# ---- the function that fetches and stores: A69, A70 ----------------------------------------------------------------

CODE = "Write a function that fetches users from an API and stores them in SQLite."
GOOD_CODE = [
    "I use httpx for the request and sqlite3 for the database.",
    "response = httpx.get(url, timeout=10)\nresponse.raise_for_status()",
    "conn.execute('INSERT INTO users VALUES (?, ?)', (user['id'], user['name']))",
    "with sqlite3.connect(path) as conn:\n    conn.executemany(sql, rows)\n    conn.commit()",
    "def store_users(url: str, path: str) -> int:",
    "Requirements: handle pagination and an empty response.",
    "使用 requests 库发送请求，设置超时并检查状态码。",
    "用事务写入数据库，失败时回滚，最后关闭连接。",
]
BAD_CODE = [
    "response = requests.get(url)\ndata = response.json()",
    "conn.execute(f\"INSERT INTO users VALUES ({user['id']}, '{user['name']}')\")",
    "try:\n    fetch()\nexcept Exception:\n    pass",
    "API_KEY = 'abcdef123456'",
    "There is no need for error handling here.",
    "发送请求获取数据。",
    "直接拼接SQL语句插入数据。",
    "忽略所有异常。",
]


@pytest.mark.parametrize("step", GOOD_CODE)
def test_library_choice_error_handling_and_care_score_high(step: str) -> None:
    assert last("code", CODE, step) >= 0.5


@pytest.mark.parametrize("step", BAD_CODE)
def test_careless_code_scores_low(step: str) -> None:
    assert last("code", CODE, step) < 0


# ---- the game: A71 -------------------------------------------------------------------------------------------------


def test_technology_when_rich_defence_when_weak_and_no_army_for_scouts() -> None:
    rich, weak, watched = (
        "Gold: 900, wood: 700.",
        "You are under attack, few troops left.",
        "Enemy scouts near the base.",
    )
    tech, show, hide = (
        "Research the weapon upgrade.",
        "March the army to the hill.",
        "Keep the army hidden in the woods.",
    )
    assert last("strategy", rich, tech) == 1.0
    assert last("strategy", weak, tech) == -1.0
    assert last("strategy", "Nothing new.", tech) == 0.0
    assert last("strategy", watched, show) == -1.0
    assert last("strategy", watched, hide) == 1.0
    assert last("strategy", weak, "Build walls and defend the base.") == 1.0
    assert last("strategy", weak, "Attack their base.") == -1.0
    assert last("strategy", rich, "Gather more wood.") == -0.5
    assert last("strategy", "资源充足，金币900。", "升级科技。") == 1.0
    assert last("strategy", "发现敌方斥候。", "出动主力部队。") == -1.0
    assert last("strategy", "发现敌方斥候。", "隐藏主力部队。") == 1.0
    assert last("strategy", rich, "Gather.", "Nothing new.", tech) == 0.0, "riches of the past do not count"


@pytest.mark.parametrize("domain", DOMAINS)
@given(first=tagged_texts(), second=tagged_texts())
@settings(deadline=None, max_examples=25)
def test_every_step_of_any_text_gets_a_score_in_range_and_a_rationale(domain: str, first: str, second: str) -> None:
    for word in words(domain, said(LOG, first, ALL_FINE, second)):
        assert word.score is not None
        assert -1 <= word.score <= 1
        assert word.rationale
