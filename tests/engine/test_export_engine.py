"""The last link of the proof on the real engine: the adapter by LoRA request, the merged weights from their folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slea_llm.errors import ExportError
from slea_llm.export import export
from slea_llm.export_proof import TOLERANCES
from slea_llm.folders import read_manifest
from slea_llm.generation.vllm import VllmGenerator
from slea_llm.models.policy import PolicyCritic, build
from slea_llm.models.tiny import make_tiny
from slea_llm.settings import ExportSettings, ModelSettings

if TYPE_CHECKING:
    from slea_llm.interfaces import Generator, WeightSource

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # those of the engine and what it imports
]

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyCritic:
    base = make_tiny(tmp_path_factory.mktemp("base"), ["noodle soup to garden street"], vocab_size=300, seed=0)
    settings = ModelSettings(base=str(base), declared_base="org/tiny", lora_rank=8, critic_rank=8)
    built = build(settings, streams=["outcome"], temperature=TEMPERATURE, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in built.policy_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return built.eval()


def engine(settings: ModelSettings, *, lora: bool) -> Generator:
    config = VllmGenerator.Config(sync="adapter" if lora else "merged", max_num_seqs=16)
    stop_ids: frozenset[int] = frozenset()
    return VllmGenerator(config, model=settings, max_context=1024, temperature=TEMPERATURE, stop_ids=stop_ids, seed=0)


class DeafEngine:
    """An engine that takes an adapter without a word and goes on serving the base."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner

    @property
    def policy_version(self) -> int:
        return self._inner.policy_version

    def load(self, source: WeightSource, version: int) -> None:
        pass

    def close(self) -> None:
        self._inner.close()

    async def generate(self, request: Any) -> Any:
        return await self._inner.generate(request)


def test_the_engine_serves_what_was_trained_from_both_forms(model: PolicyCritic, tmp_path: Path) -> None:
    settings = ExportSettings(form="both", probes=6)
    report = export(model, tmp_path, settings=settings, policy_version=4, generator_factory=engine)
    served = [link for link in report.links if link.name.startswith("the engine")]
    assert [link.name for link in served] == [
        "the engine with the exported adapter",
        "the engine with the exported merged weights",
    ]
    for link in served:
        assert link.tokens == 6 * 32
        assert link.largest <= TOLERANCES["float32"]["engine"].largest
        assert link.share == pytest.approx(1, abs=1e-2)
    assert report.adapter is not None
    assert len(read_manifest(report.adapter)["proof"]["links"]) == 5


def test_an_engine_that_ignores_the_adapter_is_found_out(model: PolicyCritic, tmp_path: Path) -> None:
    def deaf(settings: ModelSettings, *, lora: bool) -> Generator:
        return DeafEngine(engine(settings, lora=lora))

    settings = replace(ExportSettings(), form="adapter", probes=4)
    with pytest.raises(ExportError, match="engine with the exported adapter does not serve what was trained"):
        export(model, tmp_path, settings=settings, policy_version=4, generator_factory=deaf)
    assert list(tmp_path.iterdir()) == []
