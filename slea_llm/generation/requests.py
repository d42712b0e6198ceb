"""What every sampler does alike: what it accepts, which weights it serves under which version, and its canary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slea_llm.errors import ConfigError, GenerationError
from slea_llm.types import GenerationRequest

if TYPE_CHECKING:
    import torch

PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may hold."""

    max_context: int
    vocab_size: int

    def check(self, request: GenerationRequest) -> None:
        """Raise GenerationError for a request that the model cannot answer; one bad row must not fail a batch."""
        prompt = request.prompt_ids
        if not prompt or request.max_tokens < 1:
            raise GenerationError(
                f"request {request.key}: a prompt of {len(prompt)} tokens and max_tokens {request.max_tokens}; "
                "both must be at least 1"
            )
        if len(prompt) + request.max_tokens > self.max_context:
            raise GenerationError(
                f"request {request.key}: {len(prompt)} prompt tokens and max_tokens {request.max_tokens} exceed the "
                f"context of {self.max_context}; end the dialogue earlier or raise rollout.max_context_tokens"
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise GenerationError(
                f"request {request.key}: token ids span {min(prompt)} to {max(prompt)}, the model has 0 to "
                f"{self.vocab_size - 1}; tokenizer and base model do not belong together"
            )


def check_temperature(temperature: float) -> float:
    """Raise ConfigError unless the sampling temperature is above 0 (greedy is asked for by the request)."""
    if not temperature > 0.0:
        raise ConfigError(f"temperature {temperature} is not above 0; ask for greedy sampling in the request")
    return temperature


class ServedWeights:
    """Which weights are served: a version that only grows, and the canary's memory.

    The canary compares the log-probabilities of a fixed probe before and after a load. They must differ when the
    loaded tensors do; weights that never arrive are otherwise silent (the reward then moves only after a restart).
    """

    def __init__(self, *, unmoved_allowed: int, fingerprint: object | None = None) -> None:
        """`unmoved_allowed`: consecutive loads whose change may be too small to be seen (0 in float32; bfloat16
        rounds small changes away). `fingerprint`: that of the starting weights, None when it is unknown.
        """
        self.version = 0
        self._loaded = False
        self._fingerprint = fingerprint
        self._unmoved_allowed = unmoved_allowed
        self._unmoved = 0

    @property
    def loaded(self) -> bool:
        return self._loaded

    def check_version(self, version: int) -> None:
        """Raise GenerationError unless the version is new. Version 0, the starting weights, may be loaded once."""
        if version < 0 or (version <= self.version and (self._loaded or version < self.version)):
            raise GenerationError(
                f"policy version {version} does not follow {self.version}; versions only grow, so that every "
                "generation names the weights that made it"
            )

    def accept(self, version: int, fingerprint: object, before: Iterable[float], after: Iterable[float]) -> None:
        """Take over the version after the weights arrived.

        Raises GenerationError when the weights changed and the probe's log-probabilities did not.
        """
        changed = self._fingerprint is not None and fingerprint != self._fingerprint
        moved = tuple(before) != tuple(after)
        self._unmoved = self._unmoved + 1 if changed and not moved else 0
        if self._unmoved > self._unmoved_allowed:
            raise GenerationError(
                f"canary: policy version {version} has other weights than version {self.version}, yet the sampler's "
                f"log-probabilities of {PROBE_TOKENS} probe tokens are the same; the new weights did not arrive"
            )
        self._fingerprint = fingerprint
        self.version = version
        self._loaded = True


def probe_ids(vocab_size: int) -> tuple[int, ...]:
    """The canary's prompt: ids spread over the vocabulary, the same for every run."""
    return tuple((7919 * (index + 1)) % vocab_size for index in range(PROBE_TOKENS))


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """A cheap checksum of tensors as the sampler will hold them: the sum of their bit patterns in `dtype`, by name."""
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return tuple(
        (name, int(tensor.detach().to(dtype).contiguous().view(bits).sum(dtype=torch.int64)))
        for name, tensor in weights
    )
