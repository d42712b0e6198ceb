"""The dispatcher over a toy sampler that answers after as many advances as a request has tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import pytest

from slea_llm.errors import GenerationError
from slea_llm.generation.dispatch import Dispatcher
from slea_llm.types import Generation, GenerationRequest

ToyDispatcher: TypeAlias = Dispatcher[GenerationRequest, Generation]


class Countdown:
    """Needs `max_tokens` advances for a request; keeps the make-up of its batches."""

    def __init__(self) -> None:
        self.active: dict[int, tuple[GenerationRequest, int]] = {}
        self.batches: list[list[tuple[int, ...]]] = []
        self.stopped: list[int] = []
        self.fault: Exception | None = None
        self.closed = 0

    def advance(
        self, starts: Sequence[tuple[int, GenerationRequest]], stops: Sequence[int]
    ) -> list[tuple[int, Generation]]:
        if self.fault is not None:
            raise self.fault
        self.active |= {number: (request, request.max_tokens) for number, request in starts}
        self.stopped += [number for number in stops if self.active.pop(number, None) is not None]
        self.batches.append(sorted(request.key for request, _ in self.active.values()))
        self.active = {number: (request, left - 1) for number, (request, left) in self.active.items()}
        done = [number for number, (_, left) in self.active.items() if left == 0]
        return [(number, self._reply(self.active.pop(number)[0])) for number in done]

    def _reply(self, request: GenerationRequest) -> Generation:
        return Generation(
            token_ids=request.key, logprobs=(0.0,) * len(request.key), finish_reason="stop", policy_version=0
        )

    def close(self) -> None:
        self.closed += 1


def request_of(*key: int, tokens: int = 1) -> GenerationRequest:
    return GenerationRequest(prompt_ids=(1,), key=key, max_tokens=tokens)


@pytest.fixture
def backend() -> Countdown:
    return Countdown()


@pytest.fixture
def dispatcher(backend: Countdown) -> ToyDispatcher:
    return Dispatcher(backend, name="toy")


async def episode(dispatcher: ToyDispatcher, number: int, turns: int, tokens: int = 2) -> None:
    for turn in range(turns):
        reply = await dispatcher.sample(request_of(number, turn, tokens=tokens))
        assert reply.token_ids == (number, turn)


def test_episodes_that_go_on_together_share_every_batch(backend: Countdown, dispatcher: ToyDispatcher) -> None:
    """The make-up of batches follows from the episodes alone, so a run repeats to the bit."""

    async def together() -> None:
        await asyncio.gather(*(episode(dispatcher, number, turns=3) for number in range(20)))

    asyncio.run(together())
    expected = [[(number, turn) for number in range(20)] for turn in range(3) for _ in range(2)]
    assert backend.batches == expected
    dispatcher.close(backend.close)


def test_new_requests_join_a_running_batch_and_short_ones_leave_early(
    backend: Countdown, dispatcher: ToyDispatcher
) -> None:
    async def together() -> None:
        await asyncio.gather(dispatcher.sample(request_of(0, 0, tokens=4)), episode(dispatcher, 1, turns=2, tokens=1))

    asyncio.run(together())
    assert backend.batches == [[(0, 0), (1, 0)], [(0, 0), (1, 1)], [(0, 0)], [(0, 0)]]
    dispatcher.close(backend.close)


def test_a_slow_user_delays_nobody(backend: Countdown, dispatcher: ToyDispatcher) -> None:
    async def together() -> None:
        over = asyncio.Event()

        async def slow() -> None:
            await episode(dispatcher, 0, turns=1)
            await over.wait()
            await episode(dispatcher, 0, turns=1)

        waiting = asyncio.create_task(slow())
        await asyncio.gather(*(episode(dispatcher, number, turns=3) for number in range(1, 4)))
        assert not waiting.done()
        over.set()
        await waiting

    asyncio.run(asyncio.wait_for(together(), timeout=10))
    dispatcher.close(backend.close)


def test_a_cancelled_request_is_dropped(backend: Countdown, dispatcher: ToyDispatcher) -> None:
    async def together() -> None:
        long = asyncio.create_task(dispatcher.sample(request_of(9, tokens=1_000_000)))
        await episode(dispatcher, 1, turns=1)
        long.cancel()
        await episode(dispatcher, 2, turns=2)

    asyncio.run(asyncio.wait_for(together(), timeout=10))
    assert len(backend.stopped) == 1
    assert backend.active == {}
    dispatcher.close(backend.close)


def test_an_error_fails_every_request_and_every_later_one(backend: Countdown, dispatcher: ToyDispatcher) -> None:
    backend.fault = ValueError("no memory")

    async def together() -> list[Generation | BaseException]:
        asked = [dispatcher.sample(request_of(number)) for number in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(asyncio.wait_for(together(), timeout=10))
    for outcome in outcomes:
        assert isinstance(outcome, GenerationError)
        assert isinstance(outcome.__cause__, ValueError)
        assert "ValueError: no memory" in str(outcome)
    backend.fault = None
    with pytest.raises(GenerationError, match="not usable any more: ValueError: no memory"):
        asyncio.run(dispatcher.sample(request_of(1)))
    with pytest.raises(GenerationError, match="not usable any more"):
        dispatcher.run(lambda: None)
    dispatcher.close(backend.close)
    assert backend.closed == 1


def test_weights_are_not_loaded_between_a_request_and_its_reply(backend: Countdown, dispatcher: ToyDispatcher) -> None:
    async def together() -> None:
        running = asyncio.create_task(dispatcher.sample(request_of(0, tokens=3)))
        await asyncio.sleep(0)
        with pytest.raises(GenerationError, match="1 requests are in flight"):
            dispatcher.run(lambda: None)
        await running

    asyncio.run(together())
    assert dispatcher.run(lambda: 7) == 7
    dispatcher.close(backend.close)


def test_what_an_ended_event_loop_left_is_dropped_before_the_next_load(
    backend: Countdown, dispatcher: ToyDispatcher
) -> None:
    async def give_up() -> None:
        left = asyncio.create_task(dispatcher.sample(request_of(0, tokens=1_000_000)))
        while not backend.batches:
            await asyncio.sleep(0)
        assert not left.done()

    asyncio.run(give_up())
    assert dispatcher.run(lambda: dict(backend.active)) == {}
    asyncio.run(episode(dispatcher, 1, turns=2))
    dispatcher.close(backend.close)


def test_close_runs_once_and_ends_the_dispatcher(backend: Countdown, dispatcher: ToyDispatcher) -> None:
    dispatcher.close(backend.close)
    dispatcher.close(backend.close)
    assert backend.closed == 1
    with pytest.raises(GenerationError, match="closed"):
        asyncio.run(dispatcher.sample(request_of(0)))


@pytest.mark.parametrize("later", range(24))
def test_a_request_at_any_moment_around_the_end_of_the_last_one_is_served(
    later: int, dispatcher: ToyDispatcher
) -> None:
    async def second() -> Generation:
        for _ in range(later):
            await asyncio.sleep(0)
        return await dispatcher.sample(request_of(2))

    async def both() -> list[Generation]:
        first = asyncio.create_task(dispatcher.sample(request_of(1)))
        for _ in range(2):  # the serving task is there now, and in every pass goes before what is made next
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            return list(await asyncio.gather(first, second()))

    assert [reply.token_ids for reply in asyncio.run(both())] == [(1,), (2,)]
