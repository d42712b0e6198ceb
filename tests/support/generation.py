"""Sources of weights, an independent reference for log-probabilities, and requests, for tests of samplers."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from slea_llm.models.tiny import make_tiny
from slea_llm.types import Generation, GenerationRequest

if TYPE_CHECKING:
    from slea_llm.interfaces import Generator

RANK = 3  # an engine limit of 8
VOCAB_SIZE = 263


def make_base(folder: Path) -> str:
    return str(make_tiny(folder, ["noodle soup to garden street"], vocab_size=VOCAB_SIZE, seed=0))


class LoraSource:
    """A policy made by PEFT alone. `scale` 0 leaves the adapter without effect; weights depend on the seed."""

    def __init__(self, base: str, *, scale: float, seed: int, rank: int = RANK) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(model, config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    size = scale if "lora_B" in name else 0.1
                    parameter.copy_(size * torch.randn(parameter.shape, generator=generator))

    def save_adapter(self, folder: Path) -> Path:
        self.model.save_pretrained(folder)
        return folder

    def merged_weights(self) -> list[tuple[str, torch.Tensor]]:
        return list(copy.deepcopy(self.model).merge_and_unload().state_dict().items())

    def logprobs(self, prompt: Sequence[int], reply: Sequence[int], temperature: float) -> list[float]:
        """The slow way: one full forward pass and the log-softmax of logits over temperature."""
        table = torch.log_softmax(self._logits(prompt, reply) / temperature, dim=-1)
        return [float(row[token]) for row, token in zip(table, reply, strict=True)]

    def most_likely(self, prompt: Sequence[int], reply: Sequence[int]) -> list[int]:
        """The most likely token at each position of the reply, given what came before it."""
        return self._logits(prompt, reply).argmax(-1).tolist()

    @torch.inference_mode()
    def _logits(self, prompt: Sequence[int], reply: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=torch.tensor([[*prompt, *reply]])).logits[0].double()
        return logits[len(prompt) - 1 : -1]


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)  # noqa: S311  test data
    return tuple(rng.randrange(10, VOCAB_SIZE) for _ in range(length))


def ask(generator: Generator, *requests: GenerationRequest) -> list[Generation]:
    """All requests at once."""

    async def together() -> list[Generation]:
        return await asyncio.gather(*(generator.generate(request) for request in requests))

    return asyncio.run(together())
