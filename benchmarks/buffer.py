"""What a replay buffer costs: bytes and seconds of storing, sampling and resuming 1e6 steps.

    python benchmarks/buffer.py --folder /tmp/slea-buffer

Dialogues have 12 turns of 5 steps each (a thought of four and a reply) and 20 tokens a step, with the ids and
log-probabilities of a sampler, two scores a step and the public state of the order task. The folder is removed at the
end unless --keep is given. Times are CPU time of the one process, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import release_freed

from slea_llm.buffer import ReplayBuffer
from slea_llm.settings import ReplaySettings
from slea_llm.types import (
    Message,
    ScoredStep,
    ScoredTrajectory,
    Span,
    Step,
    TokenSpan,
    TokenTrace,
    Trajectory,
    Turn,
)

TURNS, STEPS, TOKENS, PROMPT = 12, 5, 20, 40
DRAWN = 42
"""A quarter of a batch with 128 fresh dialogues."""
JUDGES, VERSION = ("knowledge_base", "reward_model"), "1:0123456789ab"
STATE = {"required": ["dish", "quantity", "address"], "filled": {"dish": "margherita"}, "confirmed": []}
WORDS = ("still", "need", "the", "address", "then", "ask", "how", "many", "of", "them", "you", "would", "like", "today")


def dialogue(number: int, rng: np.random.Generator) -> ScoredTrajectory:
    """A dialogue of 60 steps as a run would store it."""
    text = " ".join(WORDS[int(word)] for word in rng.integers(0, len(WORDS), 14))
    name, kinds = f"0-{number}", ("thought",) * (STEPS - 1) + ("reply",)
    turns: list[Turn] = []
    steps: list[Step] = []
    mask: list[bool] = []
    for turn in range(TURNS):
        start = len(mask) + PROMPT
        mask += [False] * PROMPT + [True] * (STEPS * TOKENS)
        turns.append(
            Turn(
                index=turn,
                context=(Message(role="user", content=text),),
                text=text * STEPS,
                span=TokenSpan(0, start, len(mask)),
                state_before=STATE,
                state_after=STATE,
            )
        )
        for index, kind in enumerate(kinds):
            span = Span(index * len(text), (index + 1) * len(text))
            tokens = TokenSpan(0, start + index * TOKENS, start + (index + 1) * TOKENS)
            steps.append(
                Step(trajectory_id=name, turn=turn, index=index, kind=kind, text=text, span=span, tokens=tokens)
            )
    trace = TokenTrace(
        token_ids=tuple(rng.integers(0, 49_152, len(mask)).tolist()),
        sampled_mask=tuple(mask),
        logprobs=tuple(np.where(mask, -rng.exponential(1.0, len(mask)), 0.0).tolist()),
    )
    trajectory = Trajectory(
        id=name,
        task={"id": name},
        environment="order_taking",
        seed=number,
        policy_version=0,
        turns=tuple(turns),
        traces=(trace,),
        outcome=0.0,
        termination="success",
    )
    scores = tuple(
        ScoredStep(turn=step.turn, step=step.index, evaluator=judge, version=VERSION, score=float(rng.normal()))
        for step in steps
        for judge in JUDGES
    )
    return ScoredTrajectory(
        trajectory=trajectory,
        steps=tuple(steps),
        scores=scores,
        parser="tagged",
        evaluator_versions=dict.fromkeys(JUDGES, VERSION),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=128, help="dialogues stored at once, as after an iteration")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    dialogues = arguments.steps // (TURNS * STEPS)
    settings = ReplaySettings(share=0.25, capacity=dialogues, max_age=10**6, priority="error")
    rng = np.random.default_rng(0)
    with closing(ReplayBuffer(settings, arguments.folder / "first", seed=0)) as store:
        fill(store, rng, arguments.chunk, arguments.chunk)  # what the dialogues of a chunk take is not the index's
    before = resident()
    with closing(ReplayBuffer(settings, arguments.folder, seed=0)) as store:
        seconds = fill(store, rng, dialogues, arguments.chunk)
        print(f"{store.steps} steps in {len(store)} dialogues of {TURNS * STEPS * TOKENS} sampled tokens")
        print(f"disk    {store.bytes_on_disk / store.steps:.0f} bytes a step, {store.bytes_on_disk / 2**30:.2f} GiB")
        print(f"memory  {(resident() - before) / store.steps:.1f} bytes a step (growth of the process)")
        print(f"store   {1e3 * seconds / len(store):.2f} ms a dialogue, {1e6 * seconds / store.steps:.1f} us a step")
        for count in (1, DRAWN):
            middle, high = np.quantile(sample(store, count, arguments.draws), [0.5, 0.95])
            print(f"sample  {1e3 * middle:.1f} ms for {count}, read from the disk (95 %: {1e3 * high:.1f} ms)")
        begun = time.process_time()
        state = json.dumps(store.state())
        print(
            f"save    {time.process_time() - begun:.2f} s, {len(state) / store.steps:.2f} bytes a step in a checkpoint"
        )
    with closing(ReplayBuffer(settings, arguments.folder, seed=0)) as again:
        begun = time.process_time()
        again.restore(json.loads(state))
        print(f"resume  {time.process_time() - begun:.2f} s")
    if not arguments.keep:
        shutil.rmtree(arguments.folder)


def named(one: ScoredTrajectory, number: int) -> ScoredTrajectory:
    """The dialogue under an id and a task of its own."""
    name = f"0-{number}"
    trajectory = replace(one.trajectory, id=name, task={"id": name})
    return replace(one, trajectory=trajectory, steps=tuple(replace(step, trajectory_id=name) for step in one.steps))


def fill(store: ReplayBuffer, rng: np.random.Generator, dialogues: int, chunk: int) -> float:
    """Store so many dialogues; seconds of storing alone."""
    seconds = 0.0
    samples = [dialogue(number, rng) for number in range(64)]
    for start in range(0, dialogues, chunk):
        part = [named(samples[number % 64], number) for number in range(start, min(start + chunk, dialogues))]
        begun = time.process_time()
        store.add(part)
        seconds += time.process_time() - begun
    return seconds


def sample(store: ReplayBuffer, count: int, draws: int) -> list[float]:
    """Seconds of each draw."""
    times = []
    for iteration in range(draws):
        begun = time.process_time()
        store.draw(count, iteration=iteration, progress=0.5)
        times.append(time.process_time() - begun)
    return times


def resident() -> float:
    """Bytes of main memory that the process holds now, without what was freed and kept for later."""
    release_freed()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
