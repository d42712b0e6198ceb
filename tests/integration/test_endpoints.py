"""The client of chat endpoints, against a real server that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slea_llm import endpoints
from slea_llm.endpoints import Endpoint, HttpChatModel, chat_model_of, json_object
from slea_llm.errors import ConfigError, UnsupportedError
from slea_llm.http_responses import seconds_to_wait
from slea_llm.questions import Answer, Question
from slea_llm.redaction import find_secrets
from slea_llm.types import Message
from tests.support.chat_server import ChatServer, Reply, closed_port, completion, serving

pytestmark = pytest.mark.integration

SECRET = "not-shaped-like-a-key-7261"  # noqa: S105  (no real one)
GOOD = Reply(body=completion({"n": 3}))
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def read(answer: Mapping[str, Any]) -> int:
    if not isinstance(answer.get("n"), int):
        raise ValueError(f"n is {answer.get('n')!r}, not a whole number")  # noqa: TRY004
    return int(answer["n"])


def question(text: str = "How many?") -> Question:
    return Question(name="count", messages=(Message(role="user", content=text),), schema=SCHEMA, read=read)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.01)


def model_of(server: ChatServer, **options: Any) -> HttpChatModel:
    return HttpChatModel(Endpoint(url=server.url, **{"model": "m", "deadline_s": 5.0, "timeout_s": 2.0, **options}))


def ask(server: ChatServer, **options: Any) -> Answer:
    return model_of(server, **options).ask([question()])[0]


def test_a_good_answer_is_its_value_and_its_tokens_are_counted() -> None:
    with serving(GOOD) as server:
        model = model_of(server, price_in=2.0, price_out=10.0, temperature=0.5, max_tokens=7)
        assert model.ask([question()]) == [Answer(value=3, attempts=1)]
        assert model.ask([]) == []
    assert server.requests == [
        {
            "path": "/v1/chat/completions",
            "messages": [{"role": "user", "content": "How many?"}],
            "model": "m",
            "max_tokens": 7,
            "temperature": 0.5,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "count", "schema": SCHEMA, "strict": True},
            },
        }
    ]
    usage = model.usage
    assert (usage.questions, usage.requests, usage.retries, usage.unanswered) == (1, 1, 0, 0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.unmetered) == (10, 5, 0)
    assert usage.cost == pytest.approx((10 * 2.0 + 5 * 10.0) / 1e6)
    assert "cost 0.0001" in usage.line()


@pytest.mark.parametrize(
    ("form", "sent"), [("json_object", {"type": "json_object"}), ("none", None)], ids=["json_object", "none"]
)
def test_a_server_that_knows_no_schema_is_asked_for_less(form: Any, sent: Any) -> None:
    with serving(GOOD) as server:
        assert ask(server, response_format=form, model="").value == 3
    assert server.requests[0].get("response_format") == sent
    assert "model" not in server.requests[0]


PASSING = {
    "429": Reply(status=429, body=b'{"error": {"message": "slow down"}}'),
    "429 with Retry-After": Reply(status=429, body=b"", headers={"Retry-After": "0.05"}),
    "500": Reply(status=500, body=b"oops"),
    "503": Reply(status=503, body=b""),
    "empty body": Reply(body=b""),
    "no completion": Reply(body=b"[1, 2]"),
    "not JSON": Reply(body=b"\xff\xfe<html>"),
    "empty answer": Reply(body=completion("  \n")),
    "null answer": Reply(body=completion(None)),
    "malformed": Reply(body=completion('{"n": 3')),
    "prose": Reply(body=completion("three of them")),
    "wrong type": Reply(body=completion({"n": "three"})),
    "cut": Reply(body=completion('{"n": 3}', finish_reason="length")),
    "deep": Reply(body=completion('{"n": ' + "[" * 100_000)),
    "hangs up": Reply(body=b"", hang_up=True),
    "breaks off": Reply(body=b"{", headers={"Content-Length": "100"}),
    "late": Reply(body=completion({"n": 3}), delay_s=3.0),
    "drips": Reply(body=completion({"n": 3}), drip_s=0.05),
}
REASONS = {
    "429": "status 429: slow down",
    "429 with Retry-After": "status 429",
    "500": "status 500: oops",
    "503": "status 503",
    "empty body": "the response is no chat completion",
    "no completion": "the response is no chat completion",
    "not JSON": "the response is no chat completion",
    "empty answer": "empty answer",
    "null answer": "empty answer",
    "malformed": "malformed answer: it is not JSON: Expecting ',' delimiter at character 7",
    "prose": "malformed answer: it holds no JSON object",
    "wrong type": "malformed answer: n is 'three', not a whole number",
    "cut": "the answer was cut at 512 tokens (max_tokens)",
    "deep": "malformed answer: it is nested too deep",
    "hangs up": "the connection failed: ",
    "breaks off": "the connection failed: ",
    "late": "no answer within 0.3 s (timeout_s)",
    "drips": "no answer within 0.3 s (timeout_s)",
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_asked_again_and_then_right(fault: str) -> None:
    with serving(PASSING[fault], GOOD) as server:
        model = model_of(server, timeout_s=1.0)
        assert model.ask([question()]) == [Answer(value=3, attempts=2)]
    assert (model.usage.requests, model.usage.retries) == (2, 1)


@pytest.mark.parametrize("fault", PASSING)
def test_what_stays_is_a_reason_within_the_deadline(fault: str) -> None:
    # A short wait for those alone that are to be late: on a busy machine the others would be late as well.
    waits = (
        {"timeout_s": 0.3, "deadline_s": 20.0}
        if fault in ("late", "drips")
        else {"timeout_s": 20.0, "deadline_s": 90.0}
    )
    with serving(PASSING[fault]) as server:
        model = model_of(server, **waits)
        begin = time.monotonic()
        (answer,) = model.ask([question()])
        assert time.monotonic() - begin < 2 * waits["deadline_s"]
    assert answer.value is None
    assert answer.attempts == 3
    assert answer.reason is not None
    assert answer.reason.startswith(REASONS[fault])
    assert (model.usage.requests, model.usage.unanswered) == (3, 1)


def test_a_faulty_answer_is_shown_to_the_model_with_its_fault() -> None:
    with serving(PASSING["wrong type"], GOOD) as server:
        assert ask(server).value == 3
    assert server.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": '{"n": "three"}'},
        {
            "role": "user",
            "content": "That cannot be used: malformed answer: n is 'three', not a whole number. "
            "Answer again with the JSON object alone.",
        },
    ]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 307])
def test_other_statuses_are_final(status: int) -> None:
    with serving(Reply(status=status, body=b'{"message": "no such model"}')) as server:
        answer = ask(server)
    assert answer == Answer(reason=f"status {status}: no such model", attempts=1)
    assert len(server.requests) == 1


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    with serving(Reply(status=429, body=b"", headers={"Retry-After": "3600"})) as server:
        begin = time.monotonic()
        answer = ask(server)
        assert time.monotonic() - begin < 60.0
    assert answer == Answer(reason="status 429 (no time for another attempt)", attempts=1)


def test_retry_after_is_kept_to() -> None:
    with serving(Reply(status=429, body=b"", headers={"Retry-After": "0.4"}), GOOD) as server:
        begin = time.monotonic()
        assert ask(server).value == 3
        assert time.monotonic() - begin >= 0.4


def test_the_deadline_cuts_an_attempt_short() -> None:
    with serving(Reply(body=GOOD.body, delay_s=9.0)) as server:
        begin = time.monotonic()
        answer = ask(server, timeout_s=10.0, deadline_s=0.3)
        assert time.monotonic() - begin < 6.0
    assert answer.reason == "no answer within 0.3 s (deadline_s) (no time for another attempt)"


def test_an_endpoint_that_is_not_there_fails_many_questions_at_once() -> None:
    url = f"http://127.0.0.1:{closed_port()}/v1"
    model = HttpChatModel(Endpoint(url=url, concurrency=4))
    begin = time.monotonic()
    answers = model.ask([question()] * 2000)
    assert time.monotonic() - begin < 20.0
    assert {answer.reason for answer in answers} == {f"{url} could not be reached: All connection attempts failed"}
    assert model.usage.unanswered == 2000
    assert model.usage.requests <= 4 * 3


def test_a_response_without_end_is_not_read_to_its_end() -> None:
    with serving(Reply(body=b" " * (endpoints.MAX_BODY + 1))) as server:
        assert ask(server).reason == f"the response is longer than {endpoints.MAX_BODY} bytes"


def test_many_questions_are_in_flight_at_once_and_answers_keep_their_order() -> None:
    def reply(asked: Mapping[str, Any]) -> Reply:
        number = int(asked["messages"][0]["content"])
        return Reply(body=completion({"n": number}), delay_s=0.1 if number % 2 else 0.05)

    with serving(reply) as server:
        model = model_of(server, concurrency=8)
        begin = time.monotonic()
        answers = model.ask([question(str(number)) for number in range(40)])
        took = time.monotonic() - begin
    assert [answer.value for answer in answers] == list(range(40))
    assert 1 < server.most_at_once <= 8
    assert took < 40 * 0.075, "slower than one after the other"


def test_it_can_be_asked_from_within_a_running_loop() -> None:
    async def notebook(server: ChatServer) -> Answer:
        return ask(server)

    with serving(GOOD) as server:
        assert asyncio.run(notebook(server)).value == 3


def test_br_095_the_key_comes_from_the_environment_and_reaches_no_reason_value_or_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    caplog.set_level(logging.DEBUG)
    with serving(Reply(status=401, body=f"Incorrect API key: {SECRET}".encode())) as server:
        answer = ask(server, key_variable="JUDGE_KEY")
        assert answer.reason == "status 401: Incorrect API key: [redacted]"
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"

    def keep(answer: Mapping[str, Any]) -> Any:
        return answer["n"]

    echo = Question(name="echo", messages=(), schema={}, read=keep)
    with serving(Reply(body=completion({"n": f"the key is {SECRET}"}))) as server:
        assert model_of(server, key_variable="JUDGE_KEY").ask([echo])[0].value == "the key is [redacted]"
    with serving(GOOD) as server:
        ask(server)
    assert "Authorization" not in server.headers[0]
    assert SECRET not in caplog.text


def test_br_095_a_recipe_that_names_the_variable_of_a_key_holds_no_secret() -> None:
    assert find_secrets(dataclasses.asdict(Endpoint(key_variable="OPENAI_API_KEY", model="judge"))) == []


def test_a_key_that_is_not_set_is_refused_and_a_key_in_place_of_its_variable_never_quoted() -> None:
    with pytest.raises(ConfigError, match="JUDGE_KEY_THAT_IS_NOT_SET"):
        HttpChatModel(Endpoint(key_variable="JUDGE_KEY_THAT_IS_NOT_SET"))
    faults: list[dict[str, Any]] = [{"key_variable": SECRET}, {"url": f"http://me:{SECRET}@host/v1"}]
    for faulty in faults:
        with pytest.raises(ConfigError) as raised:
            Endpoint(**faulty)
        assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://host"}, "neither an http address nor 'engine'"),
        ({"url": "engin"}, "did you mean 'engine'"),
        ({"url": "engine"}, "needs the folder"),
        ({"response_format": "json_shema"}, "did you mean 'json_schema'"),
        ({"timeout_s": 0}, "timeout_s 0 is not a number of seconds above 0"),
        ({"deadline_s": float("inf")}, "deadline_s inf"),
        ({"attempts": 0}, "attempts 0 is below 1"),
        ({"temperature": -1}, "temperature -1"),
        ({"price_out": float("nan")}, "price_out nan"),
    ],
)
def test_faulty_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Endpoint(**options)


def test_an_engine_endpoint_without_its_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="chat_model"):
        chat_model_of(Endpoint(url="engine", model="runs/models/x"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('<think>{"a": 2}</think>\n{"a": 1}', {"a": 1}),
        ('Here it is:\n```json\n{"a": 1}\n```\nDone {x}.', {"a": 1}),
        ('Sure! {"a": 1} I hope', {"a": 1}),
    ],
)
def test_the_object_is_found_where_models_put_it(text: str, value: Any) -> None:
    assert json_object(text) == value


def test_br_097_a_half_character_in_an_answer_is_replaced_and_a_whole_one_kept() -> None:
    value = json_object('{"whole": "\\ud83d\\ude80", "half": ["\\ud83d"], "\\ude80": {"a": "b\\ud83dc"}}')
    assert value == {"whole": "\U0001f680", "half": ["�"], "�": {"a": "b�c"}}
    json.dumps(value, ensure_ascii=False).encode()
    with serving(GOOD) as server:
        assert model_of(server).ask([question("half \ud83d")])[0].value == 3
    assert server.requests[0]["messages"][0]["content"] == "half �"


@given(text=st.text(alphabet=st.characters() | st.sampled_from('{}[]":,`<think>')))
def test_any_text_is_an_object_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(json_object(text), dict)


def test_retry_after_is_read_as_number_and_as_date() -> None:
    assert seconds_to_wait("1.5") == 1.5
    assert seconds_to_wait("-3") == 0.0
    assert seconds_to_wait(None) is None
    assert seconds_to_wait("soon") is None
    assert seconds_to_wait("nan") is None
    later = seconds_to_wait(email.utils.formatdate(time.time() + 30, usegmt=True))
    assert later is not None
    assert 27 < later <= 30
