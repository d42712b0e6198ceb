"""Tokens per second of a rollout against raw vLLM, in one run: what environment, user, templates and records cost.

The raw side calls `LLM.generate` round by round on the prompts that a rollout recorded, with the same lengths,
log-probabilities, cache and temperature, and does nothing else. Two processes, which work in turn; each starts every
round with an empty prefix cache. docs/performance.md says what is in each figure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common import Gate, MemoryProbe, Sample, Side, Spread, model_folder, paired_ratio, race, set_quiet, table

TINY = "tiny"
MAX_TURNS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both sides do. `record` is the file in which the rollout leaves its requests for the raw side."""

    base: str
    prompt: Literal["terse", "full"]
    dialogues: int
    reply_tokens: int
    context: int
    concurrency: int
    record: str


def main() -> None:
    arguments = _arguments()
    set_quiet()
    with tempfile.TemporaryDirectory(prefix="slea-bench-") as folder:
        job = Job(
            base=_tiny(Path(folder)) if arguments.model == TINY else model_folder(arguments.model),
            prompt="terse" if arguments.model == TINY else "full",
            dialogues=arguments.dialogues,
            reply_tokens=arguments.reply_tokens,
            context=2048,
            concurrency=arguments.concurrency,
            record=str(Path(folder) / "requests.json"),
        )
        sides = {"rollout": Side(play_dialogues, job), "raw": Side(generate_rounds, job)}
        samples = race(sides, rounds=arguments.repeats)
    speeds = {name: [one.tokens / one.seconds["rollout"] for one in several] for name, several in samples.items()}
    rows = []
    for name, title in (("rollout", "rollout of this project"), ("raw", "vLLM LLM.generate, round by round")):
        ratio = paired_ratio(speeds[name], speeds["raw"]).text() if name != "raw" else "1"
        memory = max(one.memory["process"] for one in samples[name])
        tokens = Spread.of([float(one.tokens) for one in samples[name]])
        rows.append([title, Spread.of(speeds[name]).text(0), ratio, tokens.text(0), f"{memory:.1f}"])
    print(
        f"{arguments.model}: {job.dialogues} dialogues of order_taking, up to {job.reply_tokens} tokens a reply, "
        f"{job.concurrency} at once, float32; {arguments.repeats} paired rounds after one to warm up; median (smallest "
        "to largest)"
    )
    print(table(["side", "tokens/s", "ratio to raw", "tokens", "peak GiB"], rows))


def play_dialogues(gate: Gate, job: Job) -> None:
    """The rollout's side."""
    from slea_llm.environments.order_taking import OrderTaking
    from slea_llm.generation.vllm import VllmGenerator
    from slea_llm.models.chat import ChatTokenizer
    from slea_llm.models.loading import load_tokenizer
    from slea_llm.rollout import Rollout
    from slea_llm.settings import ModelSettings, RolloutSettings
    from slea_llm.types import Generation, GenerationRequest
    from slea_llm.users.scripted import ScriptedUser

    class Recording(VllmGenerator):
        """Notes down prompt and length of every reply by turn; the write to disk is outside of what is timed."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.rounds: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)

        async def generate(self, request: GenerationRequest) -> Generation:
            generation = await super().generate(request)
            self.rounds[request.key[-1]].append((request.prompt_ids, len(generation.token_ids)))
            return generation

        def forget(self) -> None:
            self.rounds.clear()
            self._dispatcher.run(self._core._reset_cache)

    memory = MemoryProbe()
    model = ModelSettings(base=job.base)
    chat = ChatTokenizer(load_tokenizer(model))
    settings = RolloutSettings(
        max_turns=MAX_TURNS,
        max_reply_tokens=job.reply_tokens,
        max_context_tokens=job.context,
        concurrency=job.concurrency,
        max_error_rate=0.0,
    )
    config = VllmGenerator.Config(sync="merged", max_num_seqs=job.concurrency)
    generator = Recording(config, model=model, max_context=job.context, temperature=1.0, stop_ids=chat.stop_ids, seed=0)
    environment = OrderTaking(OrderTaking.Config(prompt=job.prompt))
    user = ScriptedUser(ScriptedUser.Config())
    rollout = Rollout(environment, user, generator, chat, settings, environment_name="order_taking", seed=0)
    tasks = [environment.task(seed) for seed in range(job.dialogues)]
    while gate.wait():
        generator.forget()
        started = time.perf_counter()
        trajectories = rollout.run(tasks, first_episode=0, policy_version=0)
        seconds = time.perf_counter() - started
        rounds = [generator.rounds[turn] for turn in sorted(generator.rounds)]
        Path(job.record).write_text(json.dumps(rounds))
        tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
        gate.send(Sample(seconds={"rollout": seconds}, tokens=tokens, memory={"process": memory.whole_peak()}))
    generator.close()


def generate_rounds(gate: Gate, job: Job) -> None:
    """The raw side: the same engine arguments, each turn of all dialogues in one call."""
    from slea_llm.generation.processes import engine_environment, set_defaults
    from slea_llm.generation.vllm import VllmGenerator, engine_arguments
    from slea_llm.settings import ModelSettings

    memory = MemoryProbe()
    config = VllmGenerator.Config(sync="merged", max_num_seqs=job.concurrency)
    set_defaults()
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    arguments = engine_arguments(
        config,
        model=ModelSettings(base=job.base),
        max_context=job.context,
        lora_rank=None,
        on_cpu=bool(current_platform.is_cpu()),
        seed=0,
    )
    with engine_environment(isolated=False):
        llm = LLM(**arguments)
    while gate.wait():
        rounds = json.loads(Path(job.record).read_text())
        llm.reset_prefix_cache()
        seconds, tokens = 0.0, 0
        for turn in rounds:
            prompts = [{"prompt_token_ids": ids} for ids, _ in turn]
            params = [
                SamplingParams(
                    temperature=1.0,
                    max_tokens=length,
                    ignore_eos=True,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                )
                for _, length in turn
            ]
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds += time.perf_counter() - started
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        gate.send(Sample(seconds={"rollout": seconds}, tokens=tokens, memory={"process": memory.whole_peak()}))


def _tiny(folder: Path) -> str:
    """The demo's tiny architecture with random weights: replies run to their limit, which suits a speed test."""
    from slea_llm.environments.order_taking import OrderTaking
    from slea_llm.models.tiny import make_tiny
    from slea_llm.rollout import play
    from slea_llm.users.scripted import ScriptedUser

    environment, user = OrderTaking(OrderTaking.Config()), ScriptedUser(ScriptedUser.Config())
    texts: list[str] = []
    for seed in range(200):
        task = environment.task(seed)
        trajectory = play(environment, user, environment.expert(task), task, seed=seed, max_turns=MAX_TURNS)
        texts += [text for turn in trajectory.turns for text in (turn.text, *(m.content for m in turn.context))]
    return str(make_tiny(folder / "tiny", texts, vocab_size=2048, seed=0))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=TINY, help="`tiny`, a name of `slea fetch-model`, a folder or a hub name (default tiny)"
    )
    parser.add_argument("--dialogues", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=128, help="dialogues at once on both sides (default 128)")
    parser.add_argument("--reply-tokens", type=int, default=48, help="longest reply (default 48)")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds of each side (default 5)")
    parser.add_argument("--quick", action="store_true", help="one round of 8 dialogues: does it run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.dialogues, arguments.repeats = 8, 1
    if min(arguments.dialogues, arguments.repeats, arguments.concurrency, arguments.reply_tokens) < 1:
        parser.error("--dialogues, --repeats, --concurrency and --reply-tokens start at 1")
    return arguments


if __name__ == "__main__":
    main()
