"""A user that real SmolLM2-135M-Instruct plays in this process, in many dialogues at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from slea_llm.endpoints import Endpoint
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import EpisodeError, StorageError
from slea_llm.fetch_model import fetch
from slea_llm.generation.vllm_chat import VllmChat
from slea_llm.questions import Question
from slea_llm.types import Message, Task, UserReply
from slea_llm.users.llm import LlmUser

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # those of the engine and what it imports
]
AT_ONCE = 16


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmChat]:
    try:
        folder = str(fetch("smollm2-135m"))
    except StorageError as error:
        if "could not download" in str(error):
            pytest.skip(f"no model: {error}")
        raise
    made = VllmChat(
        Endpoint(
            url="engine",
            model=folder,
            concurrency=AT_ONCE,
            max_tokens=32,
            attempts=2,
            temperature=0.7,
            timeout_s=200,
            deadline_s=400,
        )
    )
    yield made
    made.close()


def test_many_dialogues_share_the_engine_and_each_gets_words_or_a_reason(engine: VllmChat) -> None:
    user = LlmUser(LlmUser.Config(endpoint=engine.endpoint), chat_model=engine)
    environment = OrderTaking(OrderTaking.Config())

    async def talk(task: Task) -> list[UserReply] | str:
        session = user.start(task, task.seed)
        try:
            first = await session.opening()
            said = (Message(role="user", content=first.text), Message(role="assistant", content="What is the address?"))
            return [first, await session.answer({}, said)]
        except EpisodeError as error:
            return str(error)

    async def run() -> list[list[UserReply] | str]:
        return await asyncio.gather(*(talk(environment.task(seed)) for seed in range(AT_ONCE)))

    ends = asyncio.run(run())
    again = asyncio.run(run())  # in a second event loop
    spoken = [end for end in [*ends, *again] if isinstance(end, list)]
    for end in [*ends, *again]:
        print(end if isinstance(end, str) else [reply.text for reply in end])  # noqa: T201  (read with -s)
        assert isinstance(end, list) or "did not answer" in end
    assert len(spoken) >= AT_ONCE
    assert all(reply.text or reply.leaving for replies in spoken for reply in replies)
    usage = user.usage
    assert 2 * AT_ONCE <= usage.questions <= 8 * AT_ONCE, "a reply that cannot be used is asked for again once"
    assert usage.completion_tokens > usage.questions


def test_a_question_that_is_given_up_leaves_the_engine_free_for_the_next(engine: VllmChat) -> None:
    def question(text: str) -> Question:
        return Question(
            name="q", messages=(Message(role="user", content=text),), schema=None, read=lambda answer: answer["text"]
        )

    async def run() -> str:
        given_up = asyncio.create_task(engine.answer(question("Tell a very long story.")))
        await asyncio.sleep(0.05)
        given_up.cancel()
        answer = await engine.answer(question("Say yes."))
        return str(answer.value)

    assert asyncio.run(run())
    (answer,) = engine.ask([question("Say yes.")])
    assert answer.value
