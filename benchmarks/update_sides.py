"""The sides of `update.py`: TRL's GRPOTrainer, and this project's Updater and Trainer, each as users run it."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common import Gate, MemoryProbe, Sample

if TYPE_CHECKING:
    from slea_llm.crediting import Crediting
    from slea_llm.interfaces import LossTerm
    from slea_llm.settings import ModelSettings, StreamSettings, TrainerSettings
    from slea_llm.types import Generation, ScoredTrajectory

Critic = Literal["none", "own_adapter"]
"""`none`: the policy alone, its ratio starting from the sampler's log-probabilities: what GRPOTrainer does as well.
`own_adapter` is the project's default, with all its cost."""

LORA_RANK, LORA_ALPHA = 16, 32
LEARNING_RATE = 1e-5
ENDLESS = 1_000_000
"""Updates that a side would make if nobody stopped it."""
SHORTEST_CONTEXT = 128
"""The engine's canary is a prompt of its own."""


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

    @property
    def trained(self) -> int:
        """Tokens that one update trains."""
        return self.rows * self.new_tokens


def grpo(gate: Gate, job: Job, generate_once: bool) -> None:
    """GRPOTrainer in its own loop, with its own generation by transformers.

    `update` is a step without `_prepare_inputs`, which generates and scores: forward, loss, backward, clip, AdamW and
    metrics are left. With `generate_once` all updates reuse the first completions (`num_iterations`).
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
            num_iterations=ENDLESS if generate_once else 1,
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


def update(gate: Gate, job: Job, critic: Critic) -> None:
    """Collate and Updater over recorded rows: forward, losses, backward, clip, AdamW and metrics."""
    from slea_llm.batching import collate
    from slea_llm.distributed import AcceleratorReducer, make_accelerator
    from slea_llm.models.policy import build
    from slea_llm.models.stats import token_stats
    from slea_llm.updates import Updater

    streams, settings = _streams(), _trainer_settings(job, critic)
    prompts, pad_id = _prompt_ids(job)
    model = build(_model_settings(job, critic), streams=tuple(streams), temperature=1.0, seed=0)
    accelerator = make_accelerator(settings)
    reducer = AcceleratorReducer(accelerator)
    updater = Updater(
        model,
        _losses(critic),
        settings=settings,
        total_updates=settings.iterations,
        accelerator=accelerator,
        reducer=reducer,
    )
    rows = _recorded(prompts, job)
    trajectories = [one.trajectory for one in rows]
    stats = token_stats(
        model, trajectories, microbatch=job.rows, policy_version=0, critic_version=0, pad_id=pad_id, reference=False
    )
    experiences = _crediting(streams).credit(rows, stats, progress=0.0, reducer=reducer)
    probe = MemoryProbe()
    while gate.wait():
        resident = probe.mark()
        begun = _now()
        batch = collate(experiences, streams=tuple(streams), pad_id=pad_id, dtype=model.dtype)
        updater.run([batch], train_policy=True)
        seconds, cpu = (end - begin for begin, end in zip(begun, _now(), strict=True))
        gate.send(_sample(job, {"update": seconds}, {"update": cpu}, probe, resident))


def iteration(gate: Gate, job: Job, critic: Critic) -> None:
    """The Trainer's loop: vLLM rollout, stats of policy and critic, credit, update, weight sync.

    Nothing charges a KL to the reference, as by GRPOTrainer's default, so that it is not run either.
    """
    from slea_llm.distributed import make_accelerator
    from slea_llm.generation.vllm import VllmGenerator
    from slea_llm.models.policy import build
    from slea_llm.settings import RolloutSettings
    from slea_llm.trainer import Parts, Trainer, TrainerOptions

    streams, settings, model = _streams(), _trainer_settings(job, critic), _model_settings(job, critic)
    prompts, pad_id = _prompt_ids(job)
    engine = VllmGenerator(
        VllmGenerator.Config(),
        model=model,
        max_context=max(SHORTEST_CONTEXT, job.prompt_tokens + job.new_tokens),
        temperature=1.0,
        stop_ids=frozenset(),
        seed=0,
    )
    probe = MemoryProbe()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            build(model, streams=tuple(streams), temperature=1.0, seed=0),
            settings,
            RolloutSettings(episodes=job.rows, group_size=job.group, max_turns=1, max_reply_tokens=job.new_tokens),
            Parts(
                losses=_losses(critic),
                collector=SingleTurns(engine, prompts, job),
                crediting=_crediting(streams),
                generator=engine,
            ),
            accelerator=make_accelerator(settings),
            options=TrainerOptions(output_dir=Path(folder), seed=0, pad_id=pad_id, reference=False),
        )
        while gate.wait():
            resident, begun = probe.mark(), _now()
            trainer.run(until=trainer.iteration + 1)
            seconds, cpu = (end - begin for begin, end in zip(begun, _now(), strict=True))
            *_, last = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            phases = json.loads(last)["seconds"]
            phases["generation"] = phases.pop("collect")
            gate.send(_sample(job, {"iteration": seconds, **phases}, {"iteration": cpu}, probe, resident))
        engine.close()


class SingleTurns:
    """A collector of one-turn dialogues with replies of one length: what GRPOTrainer's rows are.

    The reward is a number of the reply's tokens, as cheap as GRPOTrainer's here; no environment or evaluator runs.
    """

    def __init__(self, generator: Any, prompts: Sequence[tuple[int, ...]], job: Job) -> None:
        self._generator, self._prompts, self._job = generator, prompts, job

    def collect(self, *, iteration: int, policy_version: int) -> Sequence[ScoredTrajectory]:
        """The dialogues of one iteration, all sampled at once."""
        from slea_llm.types import GenerationRequest

        del policy_version
        requests = [
            GenerationRequest(prompt_ids=prompt, key=(0, iteration, row), max_tokens=self._job.new_tokens)
            for row, prompt in enumerate(_of_iteration(self._prompts, self._job, iteration))
        ]

        async def replies() -> list[Generation]:
            return list(await asyncio.gather(*(self._generator.generate(request) for request in requests)))

        return [
            _dialogue(f"{iteration}-{row}", request.prompt_ids, reply)
            for row, (request, reply) in enumerate(zip(requests, asyncio.run(replies()), strict=True))
        ]

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


def _recorded(prompts: Sequence[tuple[int, ...]], job: Job) -> list[ScoredTrajectory]:
    """Rows whose replies are random tokens: an update costs the same whatever they say."""
    from slea_llm.types import Generation

    draw = random.Random(0)  # noqa: S311  no secret
    return [
        _dialogue(
            str(row),
            prompt,
            Generation(
                token_ids=tuple(draw.choices([token for one in prompts for token in one], k=job.new_tokens)),
                logprobs=(-5.0,) * job.new_tokens,
                finish_reason="length",
                policy_version=0,
            ),
        )
        for row, prompt in enumerate(_of_iteration(prompts, job, 0))
    ]


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


def _of_iteration(prompts: Sequence[tuple[int, ...]], job: Job, iteration: int) -> list[tuple[int, ...]]:
    """The prompt of every row: the next few of the list, each for a whole group."""
    groups = job.rows // job.group
    chosen = [prompts[(iteration * groups + number) % len(prompts)] for number in range(groups)]
    return [prompt for prompt in chosen for _ in range(job.group)]


def _prompt_ids(job: Job) -> tuple[list[tuple[int, ...]], int]:
    """The prompts' ids, and an id to pad with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.base)
    return [tuple(tokenizer(text)["input_ids"]) for text in job.prompts], int(tokenizer.eos_token_id)


def _model_settings(job: Job, critic: Critic) -> ModelSettings:
    from slea_llm.settings import ModelSettings

    return ModelSettings(base=job.base, lora_rank=LORA_RANK, lora_alpha=LORA_ALPHA, critic=critic)


def _trainer_settings(job: Job, critic: Critic) -> TrainerSettings:
    from slea_llm.settings import TrainerSettings

    return TrainerSettings(
        iterations=ENDLESS,
        epochs=1,
        minibatch=job.rows,
        microbatch=job.rows,
        learning_rate=LEARNING_RATE,
        critic_learning_rate=LEARNING_RATE,
        target_kl=0.0,
        proximal="sampler" if critic == "none" else "trainer",
    )


def _streams() -> dict[str, StreamSettings]:
    from slea_llm.settings import StreamSettings

    return {"outcome": StreamSettings(sources=("outcome",))}


def _crediting(streams: Mapping[str, StreamSettings]) -> Crediting:
    from slea_llm.credit.nested_gae import NestedGae
    from slea_llm.crediting import Crediting

    return Crediting(streams, [], NestedGae(NestedGae.Config(), streams=streams))


def _losses(critic: Critic) -> tuple[LossTerm, ...]:
    from slea_llm.losses.ppo import PpoConfig, PpoLoss
    from slea_llm.losses.value import ValueConfig, ValueLoss

    policy = PpoLoss(PpoConfig())
    return (policy,) if critic == "none" else (policy, ValueLoss(ValueConfig()))


def _now() -> tuple[float, float]:
    """Seconds on the clock and of this process's CPU time."""
    return time.perf_counter(), time.process_time()


def _sample(
    job: Job, seconds: Mapping[str, float], cpu: Mapping[str, float], probe: MemoryProbe, resident: float
) -> Sample:
    peak = probe.peak()
    return Sample(seconds=seconds, cpu=cpu, tokens=job.trained, memory={"peak": peak, "added": peak - resident})
