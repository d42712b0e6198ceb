"""Between many coroutines that each want one reply and one sampler that advances all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from slea_llm.errors import GenerationError

T = TypeVar("T")
Request = TypeVar("Request")
Result = TypeVar("Result")
Incoming = TypeVar("Incoming", contravariant=True)
Outgoing = TypeVar("Outgoing", covariant=True)

# Passes of the event loop without a new request after which a batch counts as complete. Episodes that go on at the
# same moment then always share a batch: its make-up, and with it float rounding, does not depend on timing.
QUIET_PASSES = 8


class Backend(Protocol[Incoming, Outgoing]):
    """A sampler that works on many requests at once.

    A number may be stopped that is not known (any more); that does nothing.
    """

    def advance(self, starts: Sequence[tuple[int, Incoming]], stops: Sequence[int]) -> Sequence[tuple[int, Outgoing]]:
        """Take up new requests, drop the stopped ones, work for a moment, and return what finished.

        Called again as long as a request is unfinished. The event loop stands still meanwhile.
        """
        ...


class Dispatcher(Generic[Request, Result]):
    """Feeds a Backend from coroutines: new requests join between two advances, whoever is finished leaves at once.

    An episode that waits for a slow user has no request here, so it delays nobody. An error of the backend fails
    every request in flight with GenerationError, and every later one.

    The backend works on the event loop's own thread, which is the one that trains. On another thread it would have a
    second team of OpenMP threads; with more of those than cores they sleep at every barrier instead of spinning, and a
    small model decodes at half its speed.
    """

    def __init__(self, backend: Backend[Request, Result], *, name: str) -> None:
        self._backend = backend
        self._name = name
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._starts: list[tuple[int, Request]] = []
        self._stops: list[int] = []
        self._next = 0
        self._task: asyncio.Task[None] | None = None
        self._broken: str | None = None

    async def sample(self, request: Request) -> Result:
        """Answer one request. Cancelling the caller drops the request."""
        self._check_alive()
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._starts.append((number, request))
        if self._task is None:
            self._task = asyncio.create_task(self._serve(), name=f"slea-{self._name}")
            self._task.add_done_callback(self._ended)
        try:
            return await future
        finally:
            if self._waiting.pop(number, None) is not None:  # cancelled: the answer was never delivered
                self._stops.append(number)

    def run(self, action: Callable[[], T]) -> T:
        """Run something while nothing is in flight.

        Raises GenerationError when requests are in flight: they would be sampled from two versions of the weights.
        """
        self._check_alive()
        if self._waiting:
            raise GenerationError(f"{len(self._waiting)} requests are in flight; load weights between rollouts")
        if self._stops:  # left behind by an event loop that ended early
            stops, self._stops = self._stops, []
            self._backend.advance([], stops)
        return action()

    def close(self, action: Callable[[], None]) -> None:
        """Run a last action; nothing can be sampled after it, and a second call does nothing."""
        if self._broken == "closed":
            return
        self._broken = "closed"
        action()

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise GenerationError(f"the {self._name} sampler is not usable any more: {self._broken}")

    async def _serve(self) -> None:
        passes = QUIET_PASSES
        while True:
            await self._settle(passes)
            starts = [(number, request) for number, request in self._starts if number in self._waiting]
            stops, self._starts, self._stops = self._stops, [], []
            if not (self._waiting or stops):
                # Here and not in the callback, which runs a pass later: a request of that pass would find a task that
                # serves nobody any more, and wait for ever.
                self._task = None
                return
            finished = self._backend.advance(starts, stops)
            for number, result in finished:
                future = self._waiting.pop(number, None)
                if future is not None and not future.done():
                    future.set_result(result)
            passes = QUIET_PASSES if finished else 1

    async def _settle(self, passes: int) -> None:
        """Let coroutines that are ready go on until none of them has asked for more during so many passes."""
        quiet = 0
        while quiet < passes:
            before = self._next
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._next == before else 0

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Leave nothing waiting: whatever ended the task is handed to every request."""
        if self._task is task:
            self._task = None
        if task.cancelled():  # the event loop is shutting down; what it left behind is dropped with the next advance
            self._starts.clear()
            self._stops.extend(self._waiting)
            self._waiting.clear()
            return
        error = task.exception()
        if error is None:
            return
        self._broken = f"{type(error).__name__}: {error}"
        for future in self._waiting.values():
            if not future.done():
                failure = GenerationError(f"the {self._name} sampler failed: {self._broken}")
                failure.__cause__ = error
                future.set_exception(failure)
        self._waiting.clear()
