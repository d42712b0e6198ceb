"""The sides of `update.py`: TRL's GRPOTrainer, and this project's Trainer with its Updater, each as users run it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Gate, MemoryProbe, Sample

if TYPE_CHECKING:
    from slea_llm.interfaces import WeightSource
    from slea_llm.types import Generation, GenerationRequest, ScoredTrajectory

LORA_RANK, LORA_ALPHA = 16, 32
LEARNING_RATE = 1e-5
ENDLESS = 1_000_000
"""Updates that a side would make if nobody stopped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work that is the same for all sides: single-turn rows of equal length, in one batch, float32."""

    base: str
    prompts: tuple[str, ...]
    """Texts of `prompt_tokens` tokens each, used in turn."""
    prompt_tokens: int
    new_tokens: int
    rows: int
    group: int
    """Rows that share a prompt."""


def grpo(gate: Gate, job: Job) -> None:
    """GRPOTrainer with its own generation by transformers, in its own loop. `update` is a step without
    `_prepare_inputs`, in which it generates and scores: forward, loss, backward, clip, AdamW, metrics.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    probe, resident = MemoryProbe(), [0.0]
    begun, prepared = [_now()], [_now()]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            shape = (job.rows, job.prompt_tokens + job.new_tokens)
            found = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1).shape
            if found != shape or not bool(inputs["completion_mask"].all()):
                raise ValueError(f"GRPOTrainer trains on {tuple(found)}, meant was {shape} without padding")
            resident[0] = probe.mark()
            prepared[0] = _now()
            return inputs

    class Turnstile(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not gate.wait()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun[0] = _now()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            ended = _now()
            times = [
                {"iteration": end - begin, "update": end - middle, "generation": middle - begin}
                for begin, middle, end in zip(begun[0], prepared[0], ended, strict=True)
            ]
            gate.send(_sample(job, times[0], times[1], probe, resident[0]))
            control.should_training_stop = not gate.wait()

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        return [float(len(set(text)) % 7) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=ENDLESS,
            per_device_train_batch_size=job.rows,
            gradient_accumulation_steps=1,
            num_generations=job.group,
            max_completion_length=job.new_tokens,
            generation_kwargs={"min_new_tokens": job.new_tokens},
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        Timed(
            model=AutoModelForCausalLM.from_pretrained(job.base, dtype=torch.float32),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": list(job.prompts)}),
            processing_class=AutoTokenizer.from_pretrained(job.base, padding_side="left"),
            peft_config=LoraConfig(
                r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[Turnstile()],
        ).train()


def ours(gate: Gate, job: Job, critic: str) -> None:
    """The product's Trainer: vLLM rollout, stats of policy (and critic) and reference, credit, Updater, weight sync.

    `critic` is that of the model settings: `shared_trunk` puts a linear head of one output on the policy's own states,
    so that it is the policy's update and next to nothing else; `own_adapter` is the default with all its cost.
    `update` is the trainer's own phase: collate, forward, losses, backward, clip, AdamW, metrics.
    """
    from transformers import AutoTokenizer

    from slea_llm.distributed import make_accelerator
    from slea_llm.generation.vllm import VllmGenerator
    from slea_llm.models.policy import build
    from slea_llm.settings import ModelSettings, RolloutSettings, StreamSettings, TrainerSettings
    from slea_llm.trainer import Trainer, TrainerOptions

    tokenizer = AutoTokenizer.from_pretrained(job.base)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in job.prompts]
    model = ModelSettings(base=job.base, lora_rank=LORA_RANK, lora_alpha=LORA_ALPHA)
    model = replace(model, critic=critic)  # type: ignore[arg-type]
    context = max(128, job.prompt_tokens + job.new_tokens)  # the engine's canary needs some too
    engine = VllmGenerator(
        VllmGenerator.Config(), model=model, max_context=context, temperature=1.0, stop_ids=frozenset(), seed=0
    )
    settings = TrainerSettings(
        iterations=ENDLESS,
        epochs=1,
        minibatch=job.rows,
        microbatch=job.rows,
        learning_rate=LEARNING_RATE,
        critic_learning_rate=LEARNING_RATE,
        target_kl=0.0,
    )
    streams = {"outcome": StreamSettings(sources=("outcome",))}
    probe = MemoryProbe()
    watch = _Watch(engine, probe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            build(model, streams=tuple(streams), temperature=1.0, seed=0),
            settings,
            RolloutSettings(episodes=job.rows, group_size=job.group, max_turns=1, max_reply_tokens=job.new_tokens),
            _parts(streams, SingleTurns(engine, prompts, job), watch),
            accelerator=make_accelerator(settings),
            options=TrainerOptions(output_dir=Path(folder), seed=0, pad_id=int(tokenizer.eos_token_id)),
        )
        while gate.wait():
            begun = _now()
            trainer.run(until=trainer.iteration + 1)
            whole, cpu = (end - begin for begin, end in zip(begun, _now(), strict=True))
            *_, last = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            seconds = {"iteration": whole, **json.loads(last)["seconds"]}
            seconds["generation"] = seconds.pop("collect")
            cpu_seconds = {"iteration": cpu, "update": watch.update_cpu}
            gate.send(_sample(job, seconds, cpu_seconds, probe, watch.resident, update_peak=watch.update_peak))
        engine.close()


def _parts(streams: Mapping[str, Any], collector: SingleTurns, watch: _Watch) -> Any:
    from slea_llm.credit.nested_gae import NestedGae
    from slea_llm.crediting import Crediting
    from slea_llm.losses.ppo import PpoConfig, PpoLoss
    from slea_llm.losses.value import ValueConfig, ValueLoss
    from slea_llm.trainer import Parts

    class Marked(Crediting):
        """The last call before the updates: their peak begins here."""

        def summary(self, *arguments: Any, **named: Any) -> dict[str, float]:
            metrics = super().summary(*arguments, **named)
            watch.begin()
            return metrics

    crediting = Marked(streams, [], NestedGae(NestedGae.Config(), streams=streams))
    losses = (PpoLoss(PpoConfig()), ValueLoss(ValueConfig()))
    return Parts(losses=losses, collector=collector, crediting=crediting, generator=watch)


class _Watch:
    """A generator whose `load`, the first call after the updates, reads their peak and CPU time."""

    def __init__(self, inner: Any, probe: MemoryProbe) -> None:
        self._inner, self._probe = inner, probe
        self.resident = self.update_peak = self.update_cpu = self._begun = 0.0

    def begin(self) -> None:
        self.resident = self._probe.mark()
        self._begun = time.process_time()

    @property
    def policy_version(self) -> int:
        return int(self._inner.policy_version)

    async def generate(self, request: GenerationRequest) -> Generation:
        reply: Generation = await self._inner.generate(request)
        return reply

    def load(self, source: WeightSource, version: int) -> None:
        self.update_cpu = time.process_time() - self._begun
        self.update_peak = self._probe.peak()
        self._inner.load(source, version)

    def close(self) -> None:
        self._inner.close()


class SingleTurns:
    """A collector of one-turn dialogues with replies of one length: what GRPOTrainer's rows are.

    The reward is a number of the reply's tokens, as cheap as GRPOTrainer's here; no environment or evaluator runs.
    """

    def __init__(self, generator: Any, prompts: Sequence[tuple[int, ...]], job: Job) -> None:
        self._generator, self._prompts, self._job = generator, prompts, job

    def collect(self, *, iteration: int, policy_version: int) -> Sequence[ScoredTrajectory]:
        from slea_llm.types import GenerationRequest

        del policy_version

        groups = self._job.rows // self._job.group
        chosen = [self._prompts[(iteration * groups + number) % len(self._prompts)] for number in range(groups)]
        requests = [
            GenerationRequest(prompt_ids=prompt, key=(0, iteration, row), max_tokens=self._job.new_tokens)
            for row, prompt in enumerate(prompt for prompt in chosen for _ in range(self._job.group))
        ]
        replies = asyncio.run(self._all(requests))
        return [
            _dialogue(f"{iteration}-{row}", request.prompt_ids, reply)
            for row, (request, reply) in enumerate(zip(requests, replies, strict=True))
        ]

    async def _all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self._generator.generate(request) for request in requests)))

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


def _dialogue(name: str, prompt: tuple[int, ...], reply: Generation) -> ScoredTrajectory:
    from slea_llm.types import ScoredTrajectory, Span, Step, TokenSpan, TokenTrace, Trajectory, Turn

    start, length = len(prompt), len(reply.token_ids)
    span = TokenSpan(0, start, start + length)
    text = "x" * length
    reward = float(len(set(reply.token_ids)) % 7)
    trajectory = Trajectory(
        id=name,
        task={},
        environment="benchmark",
        seed=0,
        policy_version=reply.policy_version,
        turns=(Turn(index=0, context=(), text=text, span=span, reward=reward),),
        traces=(
            TokenTrace(
                token_ids=prompt + reply.token_ids,
                sampled_mask=(False,) * start + (True,) * length,
                logprobs=(0.0,) * start + reply.logprobs,
            ),
        ),
        outcome=reward,
        termination="success",
    )
    step = Step(trajectory_id=name, turn=0, index=0, kind="reply", text=text, span=Span(0, length), tokens=span)
    return ScoredTrajectory(trajectory=trajectory, steps=(step,), scores=(), parser="benchmark")


def _now() -> tuple[float, float]:
    """Seconds on the clock and of this process's CPU time."""
    return time.perf_counter(), time.process_time()


def _sample(
    job: Job,
    seconds: Mapping[str, float],
    cpu: Mapping[str, float],
    probe: MemoryProbe,
    resident: float,
    *,
    update_peak: float | None = None,
) -> Sample:
    peak = probe.peak() if update_peak is None else update_peak
    memory = {"update": peak, "update_above": peak - resident, "process": probe.whole_peak()}
    return Sample(seconds=seconds, cpu=cpu, tokens=job.rows * job.new_tokens, memory=memory)
