"""Sampling with Hugging Face transformers alone: slower than vLLM, with the same replies for the same seed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slea_llm.errors import ConfigError, GenerationError, UnsupportedError
from slea_llm.generation.dispatch import Dispatcher
from slea_llm.generation.requests import Limits, ServedWeights, check_temperature, fingerprint, probe_ids
from slea_llm.types import Generation, GenerationRequest

if TYPE_CHECKING:
    import torch

    from slea_llm.interfaces import WeightSource
    from slea_llm.settings import ModelSettings


class TransformersGenerator:
    """A Generator on its own copy of the base model.

    A reply depends on its request's key, the weights and nothing else, up to float rounding that comes with the
    make-up of batches; that make-up repeats when users answer without delay. A greedy request gets log-probabilities
    at temperature 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        max_batch: int = 128
        """Rows decoded together, at least 1."""
        cache_mib: int = 1024
        """Memory for what earlier turns of running dialogues computed, in MiB. 0: compute whole prompts every turn."""

        def __post_init__(self) -> None:
            if self.max_batch < 1 or self.cache_mib < 0:
                raise ConfigError(f"max_batch {self.max_batch} starts at 1 and cache_mib {self.cache_mib} at 0")

    def __init__(
        self,
        config: Config,
        *,
        model: ModelSettings,
        max_context: int,
        temperature: float,
        stop_ids: frozenset[int],
        seed: int,  # noqa: ARG002  noise is named by each request's key, which holds the seed
    ) -> None:
        """Load a copy of the base. Raises ConfigError for a temperature or model that cannot be used."""
        check_temperature(temperature)
        from slea_llm.models.loading import load_base

        self._core = ModelCore(
            load_base(model).eval().to(_device()),
            config,
            temperature=temperature,
            stop_ids=stop_ids,
            max_context=max_context,
        )
        self._limits = Limits(max_context=max_context, vocab_size=self._core.vocab_size)
        self._dispatcher = Dispatcher(self._core, name="transformers")
        self._start_needs_load = model.adapter is not None
        self._served = ServedWeights(
            unmoved_allowed=2 if model.dtype == "bfloat16" else 0, fingerprint=self._core.fingerprint()
        )

    @property
    def policy_version(self) -> int:
        return self._served.version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one reply. Raises GenerationError for a request out of limits and when the model failed."""
        self._limits.check(request)
        if self._start_needs_load and not self._served.loaded:
            raise GenerationError("the policy starts from an adapter: load it before the first request")
        return await self._dispatcher.sample(request)

    def load(self, source: WeightSource, version: int) -> None:
        """Serve these weights from now on, under this version. Raises GenerationError when they do not arrive."""
        self._served.check_version(version)
        self._dispatcher.run(lambda: self._load(source, version))

    def close(self) -> None:
        """Let go of the model; harmless when called twice."""
        self._dispatcher.close(self._core.close)

    def _load(self, source: WeightSource, version: int) -> None:
        before = self._core.probe()
        self._core.copy_weights(source)
        self._served.accept(version, self._core.fingerprint(), before, self._core.probe())
        self._core.version = version


class ModelCore:
    """The model's side: decoding and weights."""

    def __init__(
        self,
        model: Any,
        config: TransformersGenerator.Config,
        *,
        temperature: float,
        stop_ids: frozenset[int],
        max_context: int,
    ) -> None:
        from slea_llm.generation.decoding import DecodingBatch, DialogueStates
        from slea_llm.generation.forward import forward_of

        check_attention(model.config, max_context)
        self.version = 0
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._model: Any = model
        self._max_batch = config.max_batch
        self._states = DialogueStates(config.cache_mib * 2**20)
        self._waiting: list[tuple[int, GenerationRequest]] = []
        self._forward = forward_of(model, max_context=max_context)
        self._batch = DecodingBatch(
            self._forward,
            model.device,
            temperature=temperature,
            stop_ids=stop_ids,
            vocab_size=self.vocab_size,
            layers=int(model.config.num_hidden_layers),
        )

    def advance(
        self, starts: Sequence[tuple[int, GenerationRequest]], stops: Sequence[int]
    ) -> list[tuple[int, Generation]]:
        """Let rows join, then decode until half of the batch is done."""
        dropped = frozenset(stops)
        self._waiting = [job for job in [*self._waiting, *starts] if job[0] not in dropped]
        self._batch.retire(dropped)
        room = self._max_batch - len(self._batch)
        self._batch.admit(self._waiting[:room], self._states)
        self._waiting = self._waiting[room:]
        while len(self._batch) and 2 * self._batch.finished < len(self._batch):
            self._batch.step()
        finished = []
        for reply in self._batch.retire():
            ids = (reply.request.prompt_ids + reply.token_ids)[:-1]
            self._states.keep(reply.request.key[:-1], ids, reply.states)
            generation = Generation(
                token_ids=reply.token_ids,
                logprobs=reply.logprobs,
                finish_reason="stop" if reply.stopped else "length",
                policy_version=self.version,
            )
            finished.append((reply.number, generation))
        return finished

    def probe(self) -> tuple[float, ...]:
        """Log-probabilities of the probe's tokens under the weights that now serve."""
        import torch

        ids = torch.tensor([probe_ids(self.vocab_size)], device=self._model.device)
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(input_ids=ids).logits[0, :-1].double(), dim=-1)
        return tuple(logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist())

    def copy_weights(self, source: WeightSource) -> None:
        """Overwrite the model's weights in place and forget what the old ones had computed.

        Raises GenerationError when the names do not belong to this model or some of its weights are not given.
        """
        import torch

        own: dict[str, torch.Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        given = dict(source.merged_weights())
        unknown = sorted(given.keys() - own.keys() - dict(self._model.named_buffers()).keys())
        tied = {tensor.data_ptr() for name, tensor in own.items() if name in given}
        missing = sorted(name for name, tensor in own.items() if name not in given and tensor.data_ptr() not in tied)
        if unknown or missing:
            raise GenerationError(
                f"weights do not belong to this model: unknown {unknown[:3]}, missing {missing[:3]} "
                f"({len(unknown)} and {len(missing)} in all)"
            )
        with torch.no_grad():
            for name, tensor in given.items():
                if name in own:
                    own[name].copy_(tensor)
        self._forward.refresh()
        self._states.clear()

    def fingerprint(self) -> tuple[tuple[str, int], ...]:
        return fingerprint(self._model.named_parameters(), self._model.dtype)

    def close(self) -> None:
        self._states.clear()
        del self._model, self._forward, self._batch


def check_attention(config: Any, max_context: int) -> None:
    """Every layer must attend to the whole context: windows and recurrent layers are vLLM's business."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and getattr(config, "use_sliding_window", True) and window < max_context
    if kinds - {"full_attention", "sliding_attention"} or (windowed and kinds != {"full_attention"}):
        raise UnsupportedError(
            f"generation.name=transformers decodes full attention only; this model has {sorted(kinds) or 'a window'} "
            f"with a window of {window} below the context of {max_context}; use generation.name=vllm"
        )


def _device() -> torch.device:
    """This rank's GPU, or the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
