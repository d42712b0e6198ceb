"""What every sampler promises, as tests to inherit, over the fixtures `base` and `generator` of the module."""

from __future__ import annotations

import asyncio

import pytest

from slea_llm.errors import GenerationError
from slea_llm.interfaces import Generator
from slea_llm.types import Generation, GenerationRequest
from tests.support.generation import VOCAB_SIZE, LoraSource, ask, prompt_of

MAX_CONTEXT = 384
TEMPERATURE = 0.7
STOP_IDS = frozenset(range(3, 23))
# Adapters of twice this size make some policies ill-conditioned: merged and unmerged weights in float32 were 2e-4
# apart, and a sampled reply went beyond that. Of 60 of this size the worst was 2e-5.
SCALE = 0.15
TOLERANCE = 3e-4


def request_of(prompt: tuple[int, ...], *key: int, max_tokens: int = 12, greedy: bool = False) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, key=key, max_tokens=max_tokens, greedy=greedy)


class GeneratorContract:
    @pytest.fixture
    def policy(self, base: str, generator: Generator) -> LoraSource:
        """A policy that differs from the base and from every earlier one, loaded."""
        version = generator.policy_version + 1
        source = LoraSource(base, scale=SCALE, seed=version)
        generator.load(source, version)
        return source

    def test_logprobs_are_those_of_the_tempered_distribution(self, generator: Generator, policy: LoraSource) -> None:
        requests = [request_of(prompt_of(length, length), 0, length, 0) for length in (131, 20, 94, 1, 57, 168, 22)]
        for request, reply in zip(requests, ask(generator, *requests), strict=True):
            expected = policy.logprobs(request.prompt_ids, reply.token_ids, TEMPERATURE)
            assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)

    def test_greedy_takes_the_most_likely_token_at_temperature_one(
        self, generator: Generator, policy: LoraSource
    ) -> None:
        prompt = prompt_of(60, 1)
        greedy, sampled = ask(
            generator, request_of(prompt, 0, 0, 0, greedy=True), request_of(prompt, 0, 1, 0)
        )  # in one batch
        assert list(greedy.token_ids) == policy.most_likely(prompt, greedy.token_ids)
        assert greedy.logprobs == pytest.approx(policy.logprobs(prompt, greedy.token_ids, 1.0), abs=TOLERANCE)
        assert sampled.logprobs == pytest.approx(policy.logprobs(prompt, sampled.token_ids, TEMPERATURE), abs=TOLERANCE)

    @pytest.mark.usefixtures("policy")
    def test_a_sampled_stop_token_ends_the_reply_and_is_part_of_it(self, generator: Generator) -> None:
        replies = ask(generator, *(request_of(prompt_of(30, i), 1, i, 0, max_tokens=24) for i in range(24)))
        reasons = {reply.finish_reason for reply in replies}
        assert reasons == {"stop", "length"}, "the sample is large enough to hold both"
        for reply in replies:
            *before, last = reply.token_ids
            assert not STOP_IDS & set(before)
            assert (last in STOP_IDS) == (reply.finish_reason == "stop") or len(reply.token_ids) == 24
            assert len(reply.logprobs) == len(reply.token_ids) <= 24
            assert reply.finish_reason == "stop" or len(reply.token_ids) == 24

    def test_turns_that_share_a_prefix_are_exact(self, generator: Generator, policy: LoraSource) -> None:
        """What earlier turns computed is reused; it must be what a fresh model computes."""

        async def dialogue(number: int) -> None:
            ids = prompt_of((number * 41) % 120 + 30, number)
            for turn in range(4):
                reply = await generator.generate(request_of(ids, 2, number, turn))
                expected = policy.logprobs(ids, reply.token_ids, TEMPERATURE)
                assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)
                ids = ids + reply.token_ids + prompt_of(9, 100 * number + turn)

        async def together() -> None:
            await asyncio.gather(*(dialogue(number) for number in range(6)))

        asyncio.run(together())

    def test_br_041_a_rollout_reports_the_version_that_served_it(self, base: str, generator: Generator) -> None:
        prompt = prompt_of(150, 5)  # long enough to be cached: stale states would show
        served = []
        loaded = []
        for _ in range(3):
            version = generator.policy_version + 1
            source = LoraSource(base, scale=SCALE, seed=1000 + version)
            generator.load(source, version)
            (reply,) = ask(generator, request_of(prompt, 3, 0, version))
            assert reply.logprobs == pytest.approx(source.logprobs(prompt, reply.token_ids, TEMPERATURE), abs=TOLERANCE)
            loaded.append(version)
            served.append(reply.policy_version)
        assert served == loaded
        assert generator.policy_version == loaded[-1]

    def test_versions_only_grow(self, generator: Generator, policy: LoraSource) -> None:
        for version in (generator.policy_version, generator.policy_version - 1, -1):
            with pytest.raises(GenerationError, match="does not follow"):
                generator.load(policy, version)

    def test_equal_weights_under_a_new_version_are_no_error(self, generator: Generator, policy: LoraSource) -> None:
        version = generator.policy_version + 1
        generator.load(policy, version)
        assert generator.policy_version == version

    @pytest.mark.usefixtures("policy")
    def test_a_slow_user_delays_nobody(self, generator: Generator) -> None:
        """One user answers only when every other dialogue is over: whoever waited for that user would wait for ever."""

        async def dialogue(number: int, answer: asyncio.Event | None) -> None:
            ids = prompt_of(20, number)
            for turn in range(3):
                reply: Generation = await generator.generate(request_of(ids, 4, number, turn, max_tokens=4))
                ids = ids + reply.token_ids
                if answer is not None:
                    await answer.wait()

        async def together() -> None:
            others_are_over = asyncio.Event()
            slow = asyncio.create_task(dialogue(0, others_are_over))
            await asyncio.gather(*(dialogue(number, None) for number in range(1, 5)))
            assert not slow.done()
            others_are_over.set()
            await slow

        asyncio.run(together())

    def test_a_cancelled_request_leaves_the_others_alone(self, generator: Generator, policy: LoraSource) -> None:
        prompt = prompt_of(40, 8)

        async def together() -> Generation:
            dropped = asyncio.create_task(generator.generate(request_of(prompt, 5, 0, 0, max_tokens=300)))
            kept = asyncio.create_task(generator.generate(request_of(prompt, 5, 1, 0)))
            for _ in range(40):  # long enough for the sampler to be at work
                await asyncio.sleep(0)
            dropped.cancel()  # does nothing when it has just stopped by itself
            await asyncio.gather(dropped, return_exceptions=True)
            return await kept

        reply = asyncio.run(together())
        assert reply.logprobs == pytest.approx(policy.logprobs(prompt, reply.token_ids, TEMPERATURE), abs=TOLERANCE)

    def test_a_rollout_that_is_torn_down_leaves_a_usable_sampler(
        self, generator: Generator, policy: LoraSource
    ) -> None:
        async def give_up() -> None:
            left = asyncio.create_task(generator.generate(request_of(prompt_of(40, 9), 6, 0, 0, max_tokens=300)))
            for _ in range(40):  # long enough for the sampler to be at work
                await asyncio.sleep(0)
            assert not left.cancelled()

        asyncio.run(give_up())
        generator.load(policy, generator.policy_version + 1)
        assert len(ask(generator, request_of(prompt_of(40, 9), 6, 1, 0))) == 1

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "match"),
        [
            ((), 4, "at least 1"),
            ((30, 31), 0, "at least 1"),
            ((30,) * (MAX_CONTEXT - 3), 4, "exceed the context of 384"),
            ((30, VOCAB_SIZE), 4, "do not belong together"),
        ],
    )
    def test_requests_out_of_limits_are_refused_alone(
        self, generator: Generator, prompt: tuple[int, ...], max_tokens: int, match: str
    ) -> None:
        with pytest.raises(GenerationError, match=match):
            ask(generator, request_of(prompt, 7, 0, 0, max_tokens=max_tokens))
        assert len(ask(generator, request_of(prompt_of(9, 0), 7, 1, 0))) == 1
