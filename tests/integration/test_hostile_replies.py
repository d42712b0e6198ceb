"""What a model may write in place of a reply: no environment breaks, each goes on or ends, and can be restored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from slea_llm import registry
from slea_llm.environments.code_task import CodeTask
from slea_llm.environments.speech import call_text
from slea_llm.errors import UnsupportedError
from slea_llm.interfaces import Environment
from slea_llm.rollout import play
from slea_llm.sandbox.runner import unavailable
from slea_llm.users.scripted import ScriptedUser

pytestmark = pytest.mark.integration

TOOLS = {
    "order_taking": "place_order",
    "complaint": "book_visit",
    "tech_support": "none",
    "trip_planning": "search_hotels",
    "strategy_game": "order",
    "code_task": "submit_code",
}
NAMES = sorted(TOOLS)

TEXTS = [
    *("", " ", "\n", "\0", "\x1b[31m?\x07", "\ud800 what?", "\udcff{notes}", "\u202e?{order}", "\2```?```\2"),
    *(
        "{",
        "{}",
        "{0}",
        "{notes",
        "{notes!r}",
        "{notes:>1000}",
        "{{notes}}",
        "%s%d",
        "{notes}{order}{city}{error}" * 50,
    ),
    *("<think>", "</think>", "<think>a</think>" * 99, "<tool_call>", "<tool_call></tool_call>" * 99, "```", "```py\n?"),
    *("?" * 9999, "please " * 2000, "什么" * 4000 + "？", "not " * 3000, "1" * 9999, "9" * 9999 + " nights?"),
    *(
        "where is " * 2000,
        "what do i, " * 2000 + "or?",
        "what is a: " + "b, " * 3000 + "?",
        "CSV" + " or to" * 2000 + "?",
    ),
    *("或者" * 4000 + "？", "的" * 9999 + "还是", "要不要" * 3000, "Is it CSV or JSON? " * 500, "from " * 2000),
    "What is your address? 请问送到哪里？ Which city? 去哪个城市？ {notes}，对吗？",
]
BODIES = [
    *("{}", "[]", "null", "1", "NaN", '"x"', "[" * 9999, '{"name":' * 999, '{"name": null}', '{"name": ""}'),
    *('{"name": 3, "arguments": {}}', '{"name": "\\ud800", "arguments": {}}', '{"name": "{hint}{0}", "arguments": {}}'),
]
ARGUMENTS: list[Any] = [
    *(None, [], "{}", json.dumps({"code": "x", "do": "train"})),
    {"code": 1, "do": 1, "city": 1, "nights": True, "start": 1e308},
    {"code": [], "do": [], "city": [], "nights": {}, "start": None},
    {"code": " ", "do": {"a": 1}, "city": "Shanghai", "start": "9" * 50, "nights": "-5"},
    {"code": "x" * 100_001, "city": "上海", "start": "\u0663", "nights": "²", "do": "\ud800"},
    {"city": "Shanghai", "start": 31, "nights": 99},
    {"{x}": 1, "dish": 1, "address": [1], "quantity": {"a": 1}},
]


def replies(tool: str) -> Iterator[str]:
    yield from TEXTS
    yield from (f"<tool_call>{body}</tool_call>" for body in BODIES)
    yield from (f"<tool_call>{json.dumps({'name': tool, 'arguments': given})}</tool_call>" for given in ARGUMENTS)
    yield f"<tool_call>{json.dumps({'name': 'x' * 9999, 'arguments': {}})}</tool_call>"
    yield call_text("nope", {}) * 99
    yield f"<tool_call>{call_text(tool, {})}</tool_call>"
    yield call_text("book_trip", {"journey": "\0", "hotel": "' OR 1", "site": "ß"})


@cache
def environment_of(name: str, language: str) -> Environment:
    component = registry.load("environment", name)
    try:
        environment: Environment = component(component.Config(language=language))
    except UnsupportedError as error:  # code_task, where no sandbox can be made
        pytest.skip(str(error))
    return environment


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", NAMES)
def test_no_reply_breaks_an_environment_and_each_can_be_restored(name: str, language: str) -> None:
    environment, users = environment_of(name, language), ScriptedUser(ScriptedUser.Config())
    task = environment.task(1)
    for reply in replies(TOOLS[name]):
        episode, user = environment.start(task), users.start(task, 1)
        episode.user_says(asyncio.run(user.opening()).text)
        twin = environment.restore(task, json.loads(json.dumps(episode.snapshot())))
        outcome = episode.agent_says(reply)
        assert twin.agent_says(reply) == outcome, reply[:80]
        if outcome.termination is None and outcome.to_user:
            again = users.restore(task, json.loads(json.dumps(user.snapshot())))
            answer = asyncio.run(user.answer(outcome.acts, ()))
            assert asyncio.run(again.answer(outcome.acts, ())) == answer
            episode.user_says(answer.text, leaving=answer.leaving)
            twin.user_says(answer.text, leaving=answer.leaving)
        assert twin.state() == episode.state()
        assert json.loads(json.dumps(episode.snapshot())) == twin.snapshot()


@pytest.mark.parametrize("seed", [-1, 2**31, 2**63, 2**64 + 7])
@pytest.mark.parametrize("name", NAMES)
def test_any_whole_number_is_a_seed(name: str, seed: int) -> None:
    environment, user = environment_of(name, "en"), ScriptedUser(ScriptedUser.Config())
    task = environment.task(seed)
    assert task == environment.task(seed)
    assert task.goal != environment.task(seed - 1).goal
    played = play(environment, user, environment.idler(task), task, seed=seed, max_turns=20)
    assert played.success is False


def test_what_stands_behind_the_call_that_ends_a_dialogue_does_nothing() -> None:
    environment = environment_of("trip_planning", "en")
    episode = environment.start(environment.task(0))
    book = call_text("book_trip", {"journey": "J1", "hotel": "H1", "site": "S1"})
    outcome = episode.agent_says(call_text("nope", {}) + book + call_text("nope", {}) + book)
    assert outcome.termination == "failure"
    assert len(outcome.messages) == 1


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_code_in_a_fence_asks_nothing_and_is_not_run() -> None:
    environment = CodeTask(CodeTask.Config())
    episode = environment.start(environment.task(0))
    code = '```python\n# what if an id comes twice?\nrun(f"INSERT INTO {target} VALUES (?, ?)")\n```'
    acts = episode.agent_says(f"Where does the data come from? {code} Thanks.").acts
    assert acts["asks"] == ("source",)
    assert not acts["reads_back"]
    assert acts["heard"] == f"Where does the data come from? {code} Thanks."
    episode.user_says("...")
    assert not episode.agent_says(code[:-3]).acts["asks"]
    assert episode.state()["submissions"] == 0
