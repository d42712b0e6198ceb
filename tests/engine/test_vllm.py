"""The vLLM sampler on a tiny random model: the contract of all samplers, with both ways of bringing weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slea_llm.errors import ConfigError, GenerationError, UnsupportedError
from slea_llm.generation.vllm import VllmGenerator
from slea_llm.interfaces import Generator
from slea_llm.settings import ModelSettings
from tests.support.generation import RANK, LoraSource, ask, make_base, prompt_of
from tests.support.generator_contract import (
    MAX_CONTEXT,
    STOP_IDS,
    TEMPERATURE,
    TOLERANCE,
    GeneratorContract,
    request_of,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # those of the engine and what it imports
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_base(tmp_path_factory.mktemp("base"))


def make(base: str, config: VllmGenerator.Config) -> VllmGenerator:
    return VllmGenerator(
        config,
        model=ModelSettings(base=base, lora_rank=RANK),
        max_context=MAX_CONTEXT,
        temperature=TEMPERATURE,
        stop_ids=STOP_IDS,
        seed=0,
    )


@pytest.fixture(scope="module", params=["merged", "adapter"])
def generator(base: str, request: pytest.FixtureRequest) -> Iterator[Generator]:
    threads = torch.get_num_threads()
    made = make(base, VllmGenerator.Config(sync=request.param, max_num_seqs=32))
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads
    yield made
    made.close()
    made.close()


class TestContract(GeneratorContract):
    pass


def test_an_isolated_engine_takes_merged_weights_and_leaves_nothing_behind(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several ranks use: the engine's core in a process that knows nothing of the launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    made = make(base, VllmGenerator.Config(max_num_seqs=8))
    assert os.environ["WORLD_SIZE"] == "2"
    source = LoraSource(base, scale=0.15, seed=1)
    prompt = prompt_of(150, 0)
    ask(made, request_of(prompt, 0, 0, 0))
    made.load(source, 1)
    (reply,) = ask(made, request_of(prompt, 0, 0, 0))
    assert reply.policy_version == 1
    assert reply.logprobs == pytest.approx(source.logprobs(prompt, reply.token_ids, TEMPERATURE), abs=TOLERANCE)
    folder: Path = made._core._folder
    assert list(folder.iterdir()) == []
    made.close()
    assert not folder.exists()
    with pytest.raises(GenerationError, match="closed"):
        ask(made, request_of(prompt, 0, 0, 0))


def test_what_cannot_be_served_is_refused_before_the_engine_starts(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {"max_context": 64, "stop_ids": STOP_IDS, "seed": 0}
    with pytest.raises(ConfigError, match="is not above 0"):
        VllmGenerator(VllmGenerator.Config(), model=ModelSettings(base=base), temperature=0.0, **rest)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="no float64"):
        VllmGenerator(VllmGenerator.Config(), model=ModelSettings(base=base, dtype="float64"), temperature=1.0, **rest)  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="isolate=never does not go with a process group"):
        make(base, VllmGenerator.Config(isolate="never"))


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="nowhere"):
        make(str(tmp_path / "nowhere"), VllmGenerator.Config())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sync": "adaptor"}, "adaptor"),
        ({"isolate": "sometimes"}, "sometimes"),
        ({"gpu_memory_utilization": 0.0}, "0.0"),
        ({"kv_cache_gib": 0.0}, "not above 0"),
        ({"max_num_seqs": 0}, "below 1"),
    ],
)
def test_config_names_what_is_wrong(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        VllmGenerator.Config(**options)  # type: ignore[arg-type]
