"""What is said to the engine around a change of weights, seen by a stand-in that keeps a log and starts nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import slea_llm.generation.vllm as module
from slea_llm.errors import GenerationError
from slea_llm.generation.vllm import VllmGenerator
from slea_llm.settings import ModelSettings
from slea_llm.types import Generation
from tests.support.generation import ask
from tests.support.generator_contract import request_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # those of importing vllm
]


class FakeEngine:
    """The part of LLMEngine that is used. Log-probabilities tell which weights answered."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.loras: list[Any] = []
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100)
        self.engine_core = SimpleNamespace(shutdown=lambda: self.events.append("shutdown"))
        self.weight = 0.0
        self.deaf = False
        self.cache_is_stuck = False
        self.fault: Exception | None = None
        self._queue: list[tuple[str, dict[str, Any], Any, Any]] = []

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any = None) -> None:
        if name != "canary":
            self.events.append("generate")
        self._queue.append((name, prompt, params, lora_request))

    def abort_request(self, names: list[str]) -> None:
        self._queue = [entry for entry in self._queue if entry[0] not in names]

    def step(self) -> list[Any]:
        if self.fault is not None:
            raise self.fault
        queue, self._queue = self._queue, []
        return [self._answer(*entry) for entry in queue]

    def _answer(self, name: str, prompt: dict[str, Any], params: Any, lora: Any) -> Any:
        logprob = -1.0 - self.weight - (0.1 * lora.lora_int_id if lora is not None and not self.deaf else 0.0)
        rows = None
        if params.prompt_logprobs is not None:
            ids = prompt["prompt_token_ids"]
            rows = [None, *({token: SimpleNamespace(logprob=logprob)} for token in ids[1:])]
        flat = SimpleNamespace(logprobs=[logprob], start_indices=[0])
        output = SimpleNamespace(token_ids=[7], logprobs=flat, finish_reason="length")
        return SimpleNamespace(request_id=name, finished=True, prompt_logprobs=rows, outputs=[output])

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        self.events.append("load_weights")
        if not self.deaf:
            self.weight = sum(float(tensor.sum()) for _, tensor in kwargs["weights_iterator"])

    def add_lora(self, request: Any) -> bool:
        self.events.append("load_weights")
        self.loras.append(request)
        return True

    def remove_lora(self, number: int) -> bool:
        return number in {request.lora_int_id for request in self.loras}

    def reset_prefix_cache(self) -> bool:
        self.events.append("reset_prefix_cache")
        return not self.cache_is_stuck


class Weights:
    """A source whose one tensor holds one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def merged_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.full((2, 2), self.value))]

    def save_adapter(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        save_file({"layer.lora_B.weight": torch.full((2, 2), self.value)}, folder / "adapter_model.safetensors")
        return folder


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(module, "start_engine", lambda *_args, **_kwargs: fake)
    return fake


def make(sync: str, *, dtype: str = "float32") -> VllmGenerator:
    return VllmGenerator(
        VllmGenerator.Config(sync=sync, isolate="never"),  # type: ignore[arg-type]
        model=ModelSettings(base="unused", dtype=dtype),  # type: ignore[arg-type]
        max_context=64,
        temperature=1.0,
        stop_ids=frozenset({1}),
        seed=0,
    )


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_br_043_the_prefix_cache_is_cleared_between_load_and_generate(engine: FakeEngine, sync: str) -> None:
    generator = make(sync)
    ask(generator, request_of((5, 6), 0))
    for version in (1, 2):
        generator.load(Weights(float(version)), version)
        ask(generator, request_of((5, 6), version))
    generator.close()
    assert engine.events == [
        "generate",
        "load_weights",
        "reset_prefix_cache",
        "generate",
        "load_weights",
        "reset_prefix_cache",
        "generate",
        "shutdown",
    ]


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_br_041_every_reply_names_the_version_that_served_it(engine: FakeEngine, sync: str) -> None:
    assert engine.events == []
    generator = make(sync)
    served = []
    for version in range(3):
        generator.load(Weights(version + 1.0), version)
        replies = ask(generator, *(request_of((5, 6), version, episode) for episode in range(4)))
        assert {reply.logprobs for reply in replies} == {replies[0].logprobs}
        served.append({reply.policy_version for reply in replies})
    generator.close()
    assert served == [{0}, {1}, {2}]


def test_br_041_each_adapter_has_a_name_an_id_and_a_folder_of_its_own(engine: FakeEngine) -> None:
    generator = make("adapter")
    for version in (0, 1, 5):
        generator.load(Weights(version + 1.0), version)
    for attribute in ("lora_name", "lora_int_id", "lora_path"):
        assert len({getattr(request, attribute) for request in engine.loras}) == 3
    assert not any(request.load_inplace for request in engine.loras)
    assert [Path(request.lora_path).exists() for request in engine.loras] == [False, False, True]
    generator.close()
    assert not Path(engine.loras[-1].lora_path).exists()


def test_br_041_merged_weights_that_never_arrive_are_an_error(engine: FakeEngine) -> None:
    generator = make("merged")
    generator.load(Weights(1.0), 1)
    engine.deaf = True
    generator.load(Weights(1.0), 2)  # nothing new: nothing has to move
    with pytest.raises(GenerationError, match="canary: policy version 3 has other weights than version 2"):
        generator.load(Weights(2.0), 3)
    assert generator.policy_version == 2
    generator.close()


def test_br_041_an_adapter_that_never_arrives_is_an_error(engine: FakeEngine) -> None:
    generator = make("adapter")
    generator.load(Weights(0.0), 0)  # B is 0: the base itself
    engine.deaf = True
    generator.load(Weights(0.0), 1)
    with pytest.raises(GenerationError, match="did not arrive"):
        generator.load(Weights(1.0), 2)
    generator.close()


def test_in_bfloat16_the_third_unmoved_load_in_a_row_is_an_error(engine: FakeEngine) -> None:
    generator = make("merged", dtype="bfloat16")
    generator.load(Weights(1.0), 1)
    engine.deaf = True
    generator.load(Weights(2.0), 2)
    generator.load(Weights(3.0), 3)
    with pytest.raises(GenerationError, match="canary"):
        generator.load(Weights(4.0), 4)
    generator.close()


def test_a_prefix_cache_that_stays_is_an_error(engine: FakeEngine) -> None:
    generator = make("merged")
    engine.cache_is_stuck = True
    with pytest.raises(GenerationError, match="prefix cache"):
        generator.load(Weights(1.0), 1)
    assert generator.policy_version == 0
    generator.close()


def test_an_engine_that_breaks_fails_every_request_and_hangs_none(engine: FakeEngine) -> None:
    generator = make("merged")
    engine.fault = RuntimeError("out of memory")

    async def together() -> list[Generation | BaseException]:
        asked = (generator.generate(request_of((5, 6), 0, episode)) for episode in range(5))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=10)

    outcomes = asyncio.run(together())
    assert len(outcomes) == 5
    assert all(isinstance(outcome, GenerationError) and "out of memory" in str(outcome) for outcome in outcomes)
    with pytest.raises(GenerationError, match="not usable any more"):
        generator.load(Weights(1.0), 1)
    generator.close()
    assert engine.events[-1] == "shutdown"
