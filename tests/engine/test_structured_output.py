"""Verdicts and steps of the real SmolLM2-135M-Instruct, held to their form by real vLLM: in this process and served."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slea_llm.endpoints import Endpoint
from slea_llm.errors import StorageError
from slea_llm.evaluators.llm_judge import FEATURES, LlmJudge
from slea_llm.fetch_model import fetch
from slea_llm.generation.vllm_chat import VllmChat
from slea_llm.parsers.llm import LlmParser
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.questions import Question
from slea_llm.scoring import Scorer
from slea_llm.types import Message, Turn
from tests.support.chat_server import closed_port
from tests.support.timeouts import ALL_FINE, ASKS_FOR_DETAIL, GENERIC_CHECK, NO_HELP, RESTART, dialogue

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # those of the engine and what it imports
]

PARSER = TaggedParser(TaggedParser.Config())
START_S = 300
TIMEOUT = dialogue(GENERIC_CHECK, RESTART, ASKS_FOR_DETAIL, feedback=(ALL_FINE, NO_HELP))


@pytest.fixture(scope="module")
def folder() -> str:
    try:
        return str(fetch("smollm2-135m"))
    except StorageError as error:
        if "could not download" in str(error):
            pytest.skip(f"no model: {error}")
        raise


def endpoint(url: str, model: str) -> Endpoint:
    return Endpoint(url=url, model=model, concurrency=4, max_tokens=320, attempts=2, timeout_s=150, deadline_s=300)


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[VllmChat]:
    made = VllmChat(endpoint("engine", folder))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM server as its users start it; yields its address."""
    port, log = closed_port(), tmp_path_factory.mktemp("server") / "log.txt"
    arguments = f"--host 127.0.0.1 --port {port} --max-model-len 4096 --max-num-seqs 4 --enforce-eager"
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as out:
        process = subprocess.Popen([*module, *arguments.split()], stdout=out, stderr=out, env=environment)
    try:
        _wait(process, port, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"the server ended: {log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"no server within {START_S} s: {log.read_text()[-3000:]}")


def check(judge: LlmJudge) -> None:
    """Every step has a verdict in form, or a reason; the first is what structured output is for."""
    before = judge.usage  # of the whole engine, which other tests may have asked
    scored = Scorer(PARSER, [judge]).score(TIMEOUT)
    for word in scored.scores:
        print(word.turn, word.score, word.reason or word.rationale, dict(word.parts))  # noqa: T201  (read with -s)
    verdicts = [word for word in scored.scores if word.score is not None]
    # A model this small may hand the instruction back for a rationale, which is refused; never is an answer malformed.
    assert all("is copied from the instructions" in str(word.reason) for word in scored.scores if word.score is None)
    assert verdicts
    for word in verdicts:
        assert word.score in (-1.0, -0.5, 0.0, 0.5, 1.0)
        assert word.rationale
        assert set(word.parts) == set(FEATURES)
    usage = judge.usage
    assert usage.questions - before.questions == len(scored.scores)
    assert usage.prompt_tokens - before.prompt_tokens > 100 * len(scored.scores)
    assert usage.completion_tokens - before.completion_tokens > 10 * len(scored.scores)
    assert usage.unmetered == 0


LONG = "I understand that this is annoying. What are your travel dates and your budget? I can offer two hotels then."


def test_the_judge_gets_verdicts_from_the_engine_in_this_process(engine: VllmChat) -> None:
    judge = LlmJudge(LlmJudge.Config(endpoint=engine.endpoint), chat_model=engine)
    check(judge)


def test_the_parser_aligns_the_engine_s_answer_or_refuses_it(engine: VllmChat) -> None:
    parser = LlmParser(LlmParser.Config(endpoint=engine.endpoint), chat_model=engine)
    steps = parser.parse(Turn(index=0, context=(), text=LONG), "t", None)
    print([(step.text, step.label) for step in steps], parser.refusals)  # noqa: T201  (read with -s)
    assert "".join(step.text for step in steps) == LONG
    assert all((step.label or "").startswith("llm/") for step in steps) or sum(parser.refusals.values()) == 1


def test_the_engine_keeps_deadlines_and_refuses_what_is_too_long(
    engine: VllmChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def question(text: str) -> Question:
        message = Message(role="user", content=text)
        return Question(name="q", messages=(message,), schema={"type": "object"}, read=lambda answer: answer)

    (answer,) = engine.ask([question("word " * 20_000)])
    assert answer.reason is not None
    assert "model's context" in answer.reason
    monkeypatch.setattr(engine, "endpoint", replace(engine.endpoint, timeout_s=0.001))
    begin = time.monotonic()
    (answer,) = engine.ask([question("Tell a very long story.")])
    assert answer.reason == "no answer within 0.001 s (timeout_s)"
    assert time.monotonic() - begin < 60


def test_the_judge_gets_verdicts_from_a_served_model(server: str, folder: str) -> None:
    judge = LlmJudge(LlmJudge.Config(endpoint=endpoint(server, folder)))
    check(judge)


def test_the_parser_aligns_a_served_model_s_answer_or_refuses_it(server: str, folder: str) -> None:
    parser = LlmParser(LlmParser.Config(endpoint=endpoint(server, folder)))
    steps = parser.parse(Turn(index=0, context=(), text=LONG), "t", None)
    assert "".join(step.text for step in steps) == LONG
    assert parser.usage.questions == 1
