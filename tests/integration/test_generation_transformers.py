"""The transformers sampler on a tiny random model: the contract of all samplers, and replies that repeat to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from slea_llm.errors import ConfigError, GenerationError, UnsupportedError
from slea_llm.generation.transformers import TransformersGenerator, check_attention
from slea_llm.interfaces import Generator
from slea_llm.settings import ModelSettings
from slea_llm.types import Generation
from tests.support.generation import RANK, LoraSource, ask, make_base, prompt_of
from tests.support.generator_contract import (
    MAX_CONTEXT,
    STOP_IDS,
    TEMPERATURE,
    TOLERANCE,
    GeneratorContract,
    request_of,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_base(tmp_path_factory.mktemp("base"))


def make(base: str, *, temperature: float = TEMPERATURE, **options: int) -> TransformersGenerator:
    return TransformersGenerator(
        TransformersGenerator.Config(**options),
        model=ModelSettings(base=base, lora_rank=RANK),
        max_context=MAX_CONTEXT,
        temperature=temperature,
        stop_ids=STOP_IDS,
        seed=0,
    )


@pytest.fixture(scope="module")
def generator(base: str) -> Iterator[Generator]:
    made = make(base)
    yield made
    made.close()


class TestContract(GeneratorContract):
    pass


def test_the_same_key_gives_the_same_reply_in_any_batch(generator: Generator) -> None:
    requests = [request_of(prompt_of(10 + 11 * index, index), 0, index, 0, max_tokens=20) for index in range(8)]
    together = ask(generator, *requests)
    reordered = ask(generator, *reversed(requests))
    alone = [ask(generator, request)[0] for request in requests]
    expected = [reply.token_ids for reply in together]
    assert [reply.token_ids for reply in reversed(reordered)] == expected
    assert [reply.token_ids for reply in alone] == expected
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


def test_other_keys_give_other_replies(generator: Generator) -> None:
    prompt = prompt_of(30, 3)
    replies = ask(generator, *(request_of(prompt, 0, episode, 0) for episode in range(12)))
    assert len({reply.token_ids for reply in replies}) > 6


def dialogues(generator: Generator) -> list[Generation]:
    """Eight dialogues of three turns, all at once."""

    async def dialogue(number: int) -> list[Generation]:
        ids, replies = prompt_of((number * 31) % 70 + 5, number), []
        for turn in range(3):
            replies.append(await generator.generate(request_of(ids, 9, number, turn)))
            ids = ids + replies[-1].token_ids + prompt_of(7, turn)
        return replies

    async def together() -> list[Generation]:
        return [reply for replies in await asyncio.gather(*map(dialogue, range(8))) for reply in replies]

    return asyncio.run(together())


def test_runs_repeat_to_the_bit(base: str) -> None:
    first, second = make(base), make(base)
    assert dialogues(first) == dialogues(second)
    first.close()
    second.close()


def test_neither_kept_states_nor_small_batches_change_a_reply(base: str) -> None:
    with_states, without = make(base), make(base, cache_mib=0, max_batch=3)
    for one, other in zip(dialogues(with_states), dialogues(without), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
    with_states.close()
    without.close()


def test_version_zero_is_the_base_and_may_be_loaded_once(base: str) -> None:
    made = make(base)
    source = LoraSource(base, scale=0.0, seed=0)
    prompt = prompt_of(30, 0)
    (before,) = ask(made, request_of(prompt, 0, 0, 0))
    assert before.policy_version == 0
    assert before.logprobs == pytest.approx(source.logprobs(prompt, before.token_ids, TEMPERATURE), abs=TOLERANCE)
    made.load(source, 0)
    with pytest.raises(GenerationError, match="does not follow 0"):
        made.load(source, 0)
    made.close()


def test_weights_of_another_model_are_refused(base: str) -> None:
    class Wrong(LoraSource):
        def merged_weights(self) -> list[tuple[str, torch.Tensor]]:
            return [("model.nothing.weight", super().merged_weights()[0][1])]

    made = make(base)
    with pytest.raises(GenerationError, match=r"unknown \['model.nothing.weight'\], missing"):
        made.load(Wrong(base, scale=0.0, seed=0), 1)
    assert made.policy_version == 0
    made.close()


def test_closing_ends_it(base: str) -> None:
    made = make(base)
    made.close()
    made.close()
    with pytest.raises(GenerationError, match="closed"):
        ask(made, request_of((30, 31), 0, 0, 0))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperatures_are_above_zero(base: str, temperature: float) -> None:
    with pytest.raises(ConfigError, match="not above 0"):
        make(base, temperature=temperature)


def test_a_start_from_an_adapter_is_loaded_first(base: str) -> None:
    made = TransformersGenerator(
        TransformersGenerator.Config(),
        model=ModelSettings(base=base, adapter="somewhere", lora_rank=RANK),
        max_context=MAX_CONTEXT,
        temperature=TEMPERATURE,
        stop_ids=STOP_IDS,
        seed=0,
    )
    with pytest.raises(GenerationError, match="load it before"):
        ask(made, request_of((30, 31), 0, 0, 0))
    made.close()


def test_windows_of_attention_are_refused() -> None:
    check_attention(SimpleNamespace(layer_types=["full_attention"], sliding_window=None), 512)
    check_attention(SimpleNamespace(layer_types=["sliding_attention"], sliding_window=4096), 512)
    for config in (
        SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=128),
        SimpleNamespace(layer_types=["linear_attention"], sliding_window=None),
        SimpleNamespace(sliding_window=128),
    ):
        with pytest.raises(UnsupportedError, match="full attention only"):
            check_attention(config, 512)
