"""Parser `llm`: answers of a real endpoint on this machine, aligned back to the text or refused."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm import endpoints
from slea_llm.endpoints import Endpoint
from slea_llm.errors import ConfigError
from slea_llm.parsers.llm import MOST_STEPS, LlmParser, align, read_steps
from slea_llm.questions import Answer, Question, Usage
from slea_llm.scoring import Scorer
from slea_llm.types import Message, Step, TokenSpan, Trajectory, Turn
from tests.strategies import tagged_texts
from tests.support.chat_server import Asked, ChatServer, Reply, completion, serving

pytestmark = pytest.mark.integration

REPLY = "I understand that this is annoying. What are your travel dates and your budget? I can offer two hotels then."
CUTS = ["I understand that", "What are your", "I can offer"]
KINDS = ["soothes", "asks_information", "proposes"]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.01)


def steps(*begins: str, does: Sequence[str] = ()) -> dict[str, Any]:
    acts = [*does, *["states"] * (len(begins) - len(does))]
    return {"steps": [{"begins": words, "does": act} for words, act in zip(begins, acts, strict=True)]}


def parser(server: ChatServer, **options: Any) -> LlmParser:
    return LlmParser(LlmParser.Config(endpoint=Endpoint(url=server.url, timeout_s=0.3, deadline_s=3.0), **options))


def parse(made: LlmParser, text: str, starts: Sequence[int] | None = None) -> tuple[Step, ...]:
    span = None if starts is None else TokenSpan(0, 0, len(starts))
    return made.parse(Turn(index=0, context=(), text=text, span=span), "t", starts)


class Saying:
    """A ChatModel that gives one answer to every question, and reads it as the client of an endpoint does."""

    usage = Usage()

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        return [self._one(question) for question in questions]

    def _one(self, question: Question) -> Answer:
        try:
            return Answer(value=question.read(self.answer), attempts=1)
        except ValueError as error:
            return Answer(reason=str(error), attempts=1)


def test_steps_begin_where_the_model_says_and_are_named_by_it() -> None:
    with serving(Reply(body=completion(steps(*CUTS, does=KINDS)))) as server:
        made = parser(server)
        found = parse(made, REPLY, range(len(REPLY) + 1))
    assert [step.text for step in found] == [
        "I understand that this is annoying.",
        " What are your travel dates and your budget?",
        " I can offer two hotels then.",
    ]
    assert [step.label for step in found] == [f"llm/{kind}" for kind in KINDS]
    assert [step.tokens for step in found] == [TokenSpan(0, 0, 35), TokenSpan(0, 35, 79), TokenSpan(0, 79, 109)]
    assert (made.usage.questions, dict(made.refusals)) == (1, {})
    assert json.dumps(REPLY) in server.requests[0]["messages"][0]["content"]


def test_thought_and_reply_are_asked_about_apart_and_calls_never() -> None:
    def answer(asked: Asked) -> Reply:
        reasoning = "Text (reasoning)" in asked["messages"][0]["content"]
        return Reply(body=completion(steps("The user wants", "So I") if reasoning else steps(*CUTS)))

    thought = "<think>The user wants a trip to the sea. So I ask for the dates.</think>"
    call = '<tool_call>{"name": "search", "arguments": {"q": "What are your travel dates and your budget"}}</tool_call>'
    with serving(answer) as server:
        found = parse(parser(server), thought + REPLY + call)
    assert [step.kind for step in found] == ["thought"] * 2 + ["reply"] * 3 + ["tool_call"]
    assert "".join(step.text for step in found) == thought + REPLY + call
    assert found[1].text == " So I ask for the dates.</think>"
    assert len(server.requests) == 2


def test_words_are_found_whatever_their_blanks_case_and_width() -> None:
    text = "Ｆｉｒｓｔ，I look\n at   the log of the server. THEN i Check the version!"
    with serving(Reply(body=completion(steps("first,i look at", "then I check  the")))) as server:
        found = parse(parser(server), text)
    assert [step.text for step in found] == [
        "Ｆｉｒｓｔ，I look\n at   the log of the server.",
        " THEN i Check the version!",
    ]


def test_chinese_is_cut_between_characters() -> None:
    text = "给您带来不便非常抱歉，请问您的订单号是多少？我们可以安排师傅上门检测，费用由我们承担，请您放心，谢谢。"
    with serving(Reply(body=completion(steps("给您带来不便", "请问您的订单号", "我们可以安排")))) as server:
        found = parse(parser(server), text)
    assert [step.text[:4] for step in found] == ["给您带来", "请问您的", "我们可以"]


REFUSED = {
    "made up": (
        steps("I understand that", "Which day do you"),
        "the words 'Which day do you' of step 2 are not in the text",
    ),
    "out of order": (steps("I understand that", "I can offer", "What are your"), "of step 3 are not in the text after"),
    "leaves out the beginning": (steps("What are your", "I can offer"), "leaves out the beginning of the text"),
    "inside a word": (steps("I understand that", "ravel dates"), "step 2 would begin inside a word"),
    "unknown kind": (steps("I understand", does=["jokes"]), "step 1 does 'jokes', which is not one of"),
    "no steps": ({"steps": []}, f"'steps' is not a list of 1 to {MOST_STEPS} steps"),
    "no words": (steps(" "), "step 1 does not say how it begins"),
    "another form": ({"cuts": [1, 2]}, "'steps' is not a list"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_an_answer_that_does_not_fit_the_text_is_refused_and_the_piece_stays_whole(fault: str) -> None:
    answer, reason = REFUSED[fault]
    with serving(Reply(body=completion(answer))) as server:
        made = parser(server)
        (step,) = parse(made, REPLY)
    assert (step.text, step.label) == (REPLY, "reply/refused")
    ((said, count),) = made.refusals.items()
    assert reason in said
    assert count == 1
    assert reason in server.requests[1]["messages"][-1]["content"], "the model is told"


@pytest.mark.parametrize(
    "text",
    [
        "Look at this code first:\n```python\nx = 1\ny = 2\n```\nand run it then.",
        'The order is {"dish": "soup", "address": "here"} and that is all of it.',
        "Read https://example.org/dish/address?x=1 and then tell me about it please.",
    ],
)
def test_no_cut_falls_into_code_json_or_an_address(text: str) -> None:
    inside = {"```": "y = 2", '{"': '"address"', "://": "address?x"}
    words = next(value for key, value in inside.items() if key in text)
    made = LlmParser(LlmParser.Config(), chat_model=Saying(steps(text[:8], words)))
    (step,) = parse(made, text)
    assert step.label == "reply/refused"
    assert "would begin inside a word, code, JSON, a table or a URL" in next(iter(made.refusals))


FAULTS = {
    "malformed": Reply(body=completion('{"steps": [')),
    "empty": Reply(body=completion("")),
    "late": Reply(body=b"", delay_s=5.0),
    "429": Reply(status=429, body=b""),
    "500": Reply(status=500, body=b""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_endpoint_costs_the_cuts_and_never_the_turn(fault: str) -> None:
    with serving(FAULTS[fault]) as server:
        made = parser(server)
        begin = time.monotonic()
        (step,) = parse(made, REPLY)
        assert time.monotonic() - begin < 4.9
    assert (step.text, step.label) == (REPLY, "reply/refused")
    assert sum(made.refusals.values()) == 1
    with serving(FAULTS[fault], Reply(body=completion(steps(*CUTS)))) as server:
        assert len(parse(parser(server), REPLY)) == 3


def test_short_pieces_are_not_asked_about_and_too_long_ones_are_refused() -> None:
    with serving(Reply(body=completion(steps("x")))) as server:
        made = parser(server, longest=200)
        (short,) = parse(made, "What dish?")
        (long,) = parse(made, "word " * 100)
    assert (short.label, long.label) == (None, "reply/refused")
    assert dict(made.refusals) == {"a piece is longer than 200 characters (longest)": 1}
    assert server.requests == []


def test_the_turns_of_many_dialogues_are_asked_about_at_once() -> None:
    def answer(_: Asked) -> Reply:
        return Reply(body=completion(steps(*CUTS)), delay_s=0.1)

    turns = tuple(Turn(index=n, context=(Message(role="user", content="hi"),), text=REPLY) for n in range(3))
    dialogues = [
        Trajectory(
            id=f"d{n}",
            task={},
            environment="none",
            seed=0,
            policy_version=0,
            turns=turns,
            traces=(),
            outcome=None,
            termination="failure",
        )
        for n in range(8)
    ]
    with serving(answer) as server:
        begin = time.monotonic()
        scored = list(Scorer(parser(server), []).score_many(dialogues))
        took = time.monotonic() - begin
    assert [len(one.steps) for one in scored] == [9] * 8
    assert {step.trajectory_id for step in scored[3].steps} == {"d3"}
    assert took < 24 * 0.1, "slower than one after the other"


@given(
    text=tagged_texts(),
    begins=st.lists(
        st.text(min_size=1, max_size=4) | st.sampled_from(["a", "Need", "v1.2.3", "你", "{", "`x"]), max_size=4
    ),
    data=st.data(),
)
@settings(deadline=None, max_examples=150)
def test_whatever_is_answered_the_steps_tile_text_and_tokens(text: str, begins: list[str], data: st.DataObject) -> None:
    quotes = [text[at : at + 5] for at in data.draw(st.lists(st.integers(0, len(text)), max_size=3).map(sorted))]
    answer = data.draw(st.sampled_from([steps(*begins), steps(*(quote for quote in quotes if quote)), {"steps": None}]))
    made = LlmParser(LlmParser.Config(shortest=0), chat_model=Saying(answer))
    starts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    found = parse(made, text, starts)
    assert "".join(step.text for step in found) == text
    assert [step.tokens.start for step in found if step.tokens is not None] == [
        0,
        *(step.tokens.end for step in found[:-1] if step.tokens is not None),
    ]
    assert parse(made, text, starts) == found


def test_a_cut_keeps_line_ends_with_the_step_before() -> None:
    text = "One thing.\n\n  Another thing."
    assert align(text, 0, len(text), [("One thing", "a"), ("Another", "b")]) == ([12], ["a", "b"])
    assert align(text, 0, len(text), [("One", "a"), ("thing.\n\n  Another", "b")]) == ([3], ["a", "b"])


def test_faulty_settings_and_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shortest 5 is not in \[0, longest\)"):
        LlmParser.Config(shortest=5, longest=5)
    with pytest.raises(ConfigError, match="what asks by it fills kind, kinds, text"):
        LlmParser(LlmParser.Config(prompt="judge/step"))
    with pytest.raises(ValueError, match="step 1 does 3"):
        read_steps({"steps": [{"begins": "x", "does": 3}]}, ["states"])
