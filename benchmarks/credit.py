"""What the way from a dialogue to its advantages costs: parse, score, augment and credit, and its share of an update.

Dialogues of the order task's form: 12 turns of 5 steps (three thoughts, a reply, a call), as many sampled tokens a step
as asked for. The share is that of one epoch's update of SmolLM2 with an own critic over dialogues of the same form.

    OMP_NUM_THREADS=1 python benchmarks/credit.py --dialogues 1000 --tokens 10
    OMP_NUM_THREADS=2 python benchmarks/credit.py --dialogues 200 --model smollm2-135m --update-dialogues 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from common import model_folder
from tqdm import tqdm

from slea_llm import registry
from slea_llm.augmenters.slot_progress import SlotProgress
from slea_llm.crediting import Crediting
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.interfaces import LocalReducer
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.scoring import Scorer
from slea_llm.settings import StreamSettings
from slea_llm.types import Message, ScoredTrajectory, TokenSpan, TokenStats, TokenTrace, Trajectory, Turn

TURNS, STEPS, PROMPT = 12, 5, 24
SLOTS = tuple(f"slot{number}" for number in range(TURNS))
STREAMS = {
    "outcome": StreamSettings(sources=("outcome", "slot_progress")),
    "scores": StreamSettings(sources=("knowledge_base",), gamma_step=0.0, gamma_turn=0.0),
}
GROUPED = {"outcome": StreamSettings(sources=("outcome",)), "scores": STREAMS["scores"]}
METHODS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, StreamSettings]]] = {
    "nested_gae, token": ("nested_gae", {}, STREAMS),
    "nested_gae, step": ("nested_gae", {"unit": "step"}, STREAMS),
    "nested_gae, turn": (
        "nested_gae",
        {"unit": "turn"},
        {**STREAMS, "scores": StreamSettings(sources=("knowledge_base",), gamma_turn=0.0)},
    ),
    "nested_gae, q_head": ("nested_gae", {"unit": "step", "conditional": "q_head"}, STREAMS),
    "group_relative": ("group_relative", {}, {"outcome": GROUPED["outcome"]}),
    "group_relative, states": ("group_relative", {"step_weight": 1.0}, GROUPED),
}


def trajectory(number: int, tokens: int, vocabulary: int) -> Trajectory:
    """A dialogue of 12 turns in one row; every step has `tokens` sampled tokens, every prompt 24 others."""
    rng = np.random.default_rng(number)
    call = '<tool_call>{"name": "note", "arguments": {}}</tool_call>'
    ids: list[int] = []
    mask: list[bool] = []
    turns = []
    for turn in range(TURNS):
        mask += [False] * PROMPT
        start = len(mask)
        mask += [True] * (tokens * STEPS)
        text = (
            f"<think>The user wants {number}. The slot {turn} is open. I ask for it.</think>What is slot {turn}?{call}"
        )
        filled = dict.fromkeys(SLOTS[:turn], "x")
        state = {
            "language": "en",
            "required": list(SLOTS),
            "filled": filled,
            "confirmed": [],
            "missing": list(SLOTS[turn:]),
            "unconfirmed": list(filled),
            "placed": False,
        }
        after = {**state, "filled": {**filled, SLOTS[turn]: "x"}, "missing": list(SLOTS[turn + 1 :])}
        last = turn == TURNS - 1
        turns.append(
            Turn(
                index=turn,
                context=(Message(role="user", content=f"It is {turn}."),),
                text=text,
                span=TokenSpan(0, start, len(mask)),
                reward=float(rng.integers(0, 2)) if last else 0.0,
                state_before=state,
                state_after=after,
            )
        )
    ids = rng.integers(0, vocabulary, len(mask)).tolist()
    trace = TokenTrace(token_ids=tuple(ids), sampled_mask=tuple(mask), logprobs=(-1.0,) * len(mask))
    return Trajectory(
        id=f"d{number}",
        task={"id": f"task-{number // 8}"},
        environment="order_taking",
        seed=number // 8,
        policy_version=0,
        turns=tuple(turns),
        traces=(trace,),
        outcome=turns[-1].reward,
        termination="success" if turns[-1].reward else "failure",
    )


def starts(turn: Turn) -> Sequence[int]:
    """Where each token starts, evenly over the text; the last is the end of the turn."""
    count = len(turn.span or ())
    return [*(len(turn.text) * place // (count - 1) for place in range(count - 1)), len(turn.text)]


def stats(one: Trajectory, heads: Sequence[str], rng: np.random.Generator) -> TokenStats:
    count = one.sampled_tokens
    return TokenStats(
        proximal=np.full(count, -1.0),
        reference=np.full(count, -1.1),
        values={head: rng.normal(size=count + 1) for head in heads},
        after={head: rng.normal(size=count) for head in heads},
        policy_version=0,
        critic_version=0,
    )


def crediting(name: str, options: Mapping[str, Any], streams: Mapping[str, StreamSettings]) -> Crediting:
    method = registry.load("credit", name)
    shaped = any("slot_progress" in stream.sources for stream in streams.values())
    augmenters = [SlotProgress(SlotProgress.Config())] if shaped else []
    return Crediting(streams, augmenters, method(method.Config(**options), streams=streams))


def timed(work: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result and the median of the CPU seconds of this process."""
    seconds = []
    result: Any = None
    for _ in range(repeats):
        begin = time.process_time()
        result = work()
        seconds.append(time.process_time() - begin)
    return result, statistics.median(seconds)


def pipeline(dialogues: Sequence[Trajectory], repeats: int) -> tuple[list[ScoredTrajectory], float]:
    """Print the CPU seconds of every phase for 1,000 dialogues; the scored dialogues, and the seconds of the whole."""
    thousand = 1000 / len(dialogues)
    parser, judge = TaggedParser(TaggedParser.Config(split_thoughts=True)), KnowledgeBase(KnowledgeBase.Config())
    reading, judging = Scorer(parser, []), Scorer(parser, [judge])
    parsed, parse = timed(lambda: [reading.score(one, starts) for one in dialogues], repeats)
    scored, both = timed(lambda: [judging.score(one, starts) for one in dialogues], repeats)
    steps = sum(len(one.leaves()) for one in parsed) / len(parsed)
    augmenter = SlotProgress(SlotProgress.Config())
    _, augment = timed(lambda: [augmenter.augment(one, 0.5) for one in scored], repeats)
    print(f"{len(dialogues)} dialogues, {steps:.0f} steps and {dialogues[0].sampled_tokens} sampled tokens each")
    print("| phase | CPU s for 1,000 dialogues |\n|---|---|")
    for name, seconds in (("parse", parse), ("score (rules)", both - parse), ("augment (slots)", augment)):
        print(f"| {name} | {seconds * thousand:.2f} |")
    usual = 0.0
    for label, (name, options, streams) in METHODS.items():
        method, rng = crediting(name, options, streams), np.random.default_rng(0)
        told = [stats(one, method.heads, rng) for one in dialogues]

        def credit(method: Crediting = method, told: Sequence[TokenStats] = told) -> object:
            made = method.credit(scored, told, progress=0.0, reducer=LocalReducer())
            return method.summary(scored, made, reducer=LocalReducer())

        _, seconds = timed(credit, repeats)
        usual = usual or seconds
        print(f"| credit: {label} (its rewards and metrics included) | {seconds * thousand:.2f} |")
    whole = (both + usual) * thousand
    print(f"| **all, with {next(iter(METHODS))}** | **{whole:.2f}** |")
    return scored, whole


def update_seconds(base: str, dialogues: Sequence[ScoredTrajectory], repeats: int) -> float:
    """CPU seconds of one update over these dialogues, a dialogue: forward, losses, backward, clip, AdamW."""
    import torch
    from accelerate import Accelerator

    from slea_llm.batching import collate
    from slea_llm.losses.ppo import PpoConfig, PpoLoss
    from slea_llm.losses.value import ValueConfig, ValueLoss
    from slea_llm.models.policy import build
    from slea_llm.settings import ModelSettings, TrainerSettings
    from slea_llm.updates import Updater

    method = crediting(*METHODS["nested_gae, token"])
    model = build(ModelSettings(base=base), streams=method.heads, temperature=1.0, seed=0)
    settings = TrainerSettings(minibatch=len(dialogues), microbatch=1, target_kl=0.0)
    updater = Updater(
        model,
        [PpoLoss(PpoConfig()), ValueLoss(ValueConfig())],
        settings=settings,
        total_updates=1000,
        accelerator=Accelerator(cpu=not torch.accelerator.is_available()),
        reducer=LocalReducer(),
    )
    rng = np.random.default_rng(0)
    told = [stats(one.trajectory, method.heads, rng) for one in dialogues]
    made = method.credit(dialogues, told, progress=0.0, reducer=LocalReducer())
    batches = [collate([one], streams=method.heads, pad_id=0, dtype=torch.float32) for one in made]
    for _ in tqdm(range(1), desc="warm-up"):
        updater.run(batches, train_policy=True)
    _, seconds = timed(lambda: updater.run(batches, train_policy=True), repeats)
    return seconds / len(dialogues)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogues", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=10, help="sampled tokens a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="", help="also measure an update of this model, such as smollm2-135m")
    parser.add_argument("--update-dialogues", type=int, default=2)
    arguments = parser.parse_args()
    dialogues = [trajectory(number, arguments.tokens, 1000) for number in range(arguments.dialogues)]
    scored, whole = pipeline(dialogues, arguments.repeats)
    if arguments.model:
        base = model_folder(arguments.model)
        seconds = update_seconds(base, scored[: arguments.update_dialogues], arguments.repeats)
        print(f"an update of {arguments.model}: {seconds:.2f} CPU s a dialogue; the way to its advantages is "
              f"{whole / 1000 / seconds:.2%} of that")  # fmt: skip


if __name__ == "__main__":
    main()
