"""The outside check: TRL's own GRPOTrainer on a recipe's environment, users, warm start, tasks and sampler.

    python benchmarks/learning/outside.py RECIPE [key.sub=value ...] [--until N]

Dialogues are played by this project's rollout with the weights that TRL has trained so far, and handed over by
`rollout_func` token by token: prompt, sampled and other tokens, the outcome as reward. Advantages, loss, KL and
optimizer are TRL's with its defaults; learning rate, batch, groups, epochs, LoRA, temperature and the weight of the KL
are the recipe's. It writes metrics.jsonl and export/adapter into run.output_dir as `slea train` and `slea export` do. A
run that was stopped starts anew, since it has no checkpoints.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from slea_llm.cli.session import Session, open_session, quiet_third_parties
from slea_llm.config import Recipe, load_recipe
from slea_llm.errors import EpisodeError
from slea_llm.metrics_log import MetricsLog
from slea_llm.task_order import TaskOrder
from slea_llm.types import Trajectory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--until", type=int, default=None, metavar="N", help="stop after N iterations of the run")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    output = Path(recipe.run.output_dir)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    with quiet_third_parties(output / "trl.log"):
        session = open_session(recipe)
        try:
            train(recipe, session, output, until=arguments.until or recipe.trainer.iterations)
        finally:
            session.generator.close()


def train(recipe: Recipe, session: Session, output: Path, *, until: int) -> None:
    """Train for `until` iterations of the recipe's schedule, and write the adapter."""
    play = Play(recipe, session, MetricsLog(output / "metrics.jsonl"))
    settings, rollout = recipe.trainer, recipe.rollout
    updates = settings.epochs * rollout.episodes // settings.minibatch
    seeds = TaskOrder(tasks=rollout.tasks, seed=recipe.run.seed).take(
        0, settings.iterations * rollout.episodes // rollout.group_size
    )
    model = AutoModelForCausalLM.from_pretrained(recipe.model.base, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=outcome,
        rollout_func=play,
        args=GRPOConfig(
            output_dir=str(output / "trl"),
            max_steps=settings.iterations * updates,
            per_device_train_batch_size=settings.minibatch,
            steps_per_generation=rollout.episodes // settings.minibatch,
            num_iterations=settings.epochs,
            num_generations=rollout.group_size,
            gradient_accumulation_steps=1,
            temperature=rollout.temperature,
            beta=sum(loss.options.get("weight", 1.0) for loss in recipe.losses if loss.name == "reference_kl"),
            learning_rate=settings.learning_rate,
            lr_scheduler_type=settings.schedule,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            max_completion_length=rollout.max_context_tokens,
            shuffle_dataset=False,
            seed=recipe.run.seed,
            optim="adamw_torch",
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in seeds]}),
        processing_class=session.tokenizer,
        peft_config=LoraConfig(
            r=recipe.model.lora_rank,
            lora_alpha=recipe.model.lora_alpha,
            target_modules=recipe.model.lora_targets,
            task_type="CAUSAL_LM",
        ),
        callbacks=[StopAt(until * updates)],
    )
    trainer.train()
    play.finish()
    trainer.model.save_pretrained(output / "export" / "adapter")


def outcome(outcome: Sequence[float | None], **_: Any) -> list[float | None]:
    """The reward of a dialogue: the sum of what the environment paid. TRL leaves those out that have None."""
    return list(outcome)


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ends the training before its schedule does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self._step


class Play:
    """A `rollout_func`: prompts are numbers of tasks, each as often as a group has dialogues."""

    def __init__(self, recipe: Recipe, session: Session, log: MetricsLog) -> None:
        self._recipe, self._session, self._log = recipe, session, log
        self._played = self._iteration = 0
        self._line: dict[str, Any] | None = None
        self._began = (time.perf_counter(), time.process_time())

    def __call__(self, prompts: Sequence[str], trainer: Any) -> Mapping[str, list[Any]]:
        self.finish()
        if trainer.state.global_step:  # before, the sampler serves the same weights already
            self._session.generator.load(Weights(trainer.model), trainer.state.global_step)
        tasks = [self._session.environment.task(int(seed)) for seed in prompts]
        played = self._session.rollout.run(
            tasks, first_episode=self._played, policy_version=self._session.generator.policy_version
        )
        if broken := [one for one in played if one.failed]:
            raise EpisodeError(f"{len(broken)} dialogues broke, the first: {broken[0].error}")
        self._played += len(played)
        self._iteration += 1
        counted = [one for one in played if not one.excluded]
        if not counted:
            raise EpisodeError(f"the referee excludes all {len(played)} dialogues")
        self._line = {
            "iteration": self._iteration,
            "metrics": {
                "episodes/played": float(len(counted)),
                "episodes/success": sum(one.success for one in counted) / len(counted),
                "episodes/turns": sum(len(one.turns) for one in counted) / len(counted),
            },
        }
        rows = [row(one) for one in played]
        return {name: [one[name] for one in rows] for name in rows[0]}

    def finish(self) -> None:
        """Write down the iteration whose updates are over, with what it has cost."""
        now = (time.perf_counter(), time.process_time())
        if self._line is not None:
            wall, cpu = (round(after - before, 3) for before, after in zip(self._began, now, strict=True))
            self._log.append({**self._line, "seconds": {"all": wall}, "cpu_seconds": cpu, "alarms": []})
        self._line, self._began = None, now


def row(trajectory: Trajectory) -> dict[str, Any]:
    """A dialogue as TRL takes it: what comes before the first sampled token is the prompt, the rest is the completion.

    `env_mask` is 1 where the policy sampled the token. A dialogue that the referee excludes has no outcome.
    """
    (trace,) = trajectory.traces
    first = trace.sampled_mask.index(True)
    return {
        "prompt_ids": list(trace.token_ids[:first]),
        "completion_ids": list(trace.token_ids[first:]),
        "logprobs": list(trace.logprobs[first:]),
        "env_mask": [int(sampled) for sampled in trace.sampled_mask[first:]],
        "outcome": None if trajectory.excluded else trajectory.outcome,
    }


class Weights:
    """TRL's PEFT model as a source of merged weights for this project's sampler."""

    def __init__(self, model: Any) -> None:
        self._model = model.get_base_model()

    def save_adapter(self, folder: Path) -> Path:
        raise NotImplementedError(f"the outside check hands over merged weights, not an adapter in {folder}")

    def merged_weights(self) -> list[tuple[str, torch.Tensor]]:
        deltas = {
            f"{name}.weight": module.get_delta_weight("default")
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer)
        }
        return [
            (plain, tensor.detach() + deltas[plain].detach() if plain in deltas else tensor.detach())
            for name, tensor in self._model.named_parameters()
            if "lora_" not in name
            for plain in [name.replace(".base_layer", "")]
        ]


if __name__ == "__main__":
    main()
