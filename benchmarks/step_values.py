"""Step scores against true step values in the order task.

    python benchmarks/step_values.py [--dialogues N] [--held-out N] [--continuations N] [--labels N] [--error-rate P]

A scripted agent errs at random. The value of a reply is the change of the chance of success: the share of continuations
that succeed when the dialogue goes on after it, minus the share before it, the same seeds (user and agent) on both
sides. The reward model is fitted on --dialogues others: their outcomes, and soft labels from --labels continuations a
step (0: outcomes alone). Printed: Spearman correlation over the replies of held-out dialogues with its bootstrap
interval over dialogues, the reliability of the true values (correlation of their halves, Spearman-Brown), the same for
position alone, and with labels shuffled between dialogues, where the gate must stay shut.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slea_llm.encoders import DEFAULT_ENCODER, CachingEncoder, load_encoder
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.evaluators.reward_model_features import prefixes
from slea_llm.fitting.evaluator import FitSettings, FittedEvaluator, fit_evaluator, lines
from slea_llm.fitting.labels import StepLabel, examples, outcome_labels
from slea_llm.fitting.training import Example, predict
from slea_llm.interfaces import Episode, UserSession
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.types import Message, Step, Task, Termination, Trajectory, Turn
from slea_llm.users.scripted import ScriptedUser

PARSER = TaggedParser(TaggedParser.Config())
MAX_TURNS = 12
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Played:
    """A dialogue and, before each of its turns and at its end, what episode and user were (None once it is over)."""

    trajectory: Trajectory
    task: Task
    snapshots: tuple[str, ...]


class Table:
    """Environment, user and the agent that errs."""

    def __init__(self, error_rate: float) -> None:
        self.environment = OrderTaking(OrderTaking.Config())
        self.user = ScriptedUser(ScriptedUser.Config())
        self.error_rate = error_rate

    def play(self, seed: int) -> Played:
        task = self.environment.task(seed)
        episode, session = self.environment.start(task), self.user.start(task, seed)
        return asyncio.run(self._record(task, episode, session, seed))

    async def _record(self, task: Task, episode: Episode, session: UserSession, seed: int) -> Played:
        first = await session.opening()
        episode.user_says(first.text, leaving=first.leaving)
        new: tuple[Message, ...] = (*episode.system_prompt(), Message(role="user", content=first.text))
        said = list(new)
        turns: list[Turn] = []
        snapshots: list[str] = []
        agent = dataclasses.replace(self.environment.expert(task, error_rate=self.error_rate), seed=seed)
        ended: Termination | None = None
        while ended is None and len(turns) < MAX_TURNS:
            before = episode.state()
            snapshots.append(json.dumps([episode.snapshot(), session.snapshot()]))
            text = agent.act(before, said)
            ended, fresh, reward = await _exchange(episode, session, text, said)
            turns.append(
                Turn(
                    index=len(turns),
                    context=new,
                    text=text,
                    reward=reward,
                    state_before=before,
                    state_after=episode.state(),
                )
            )
            new = fresh
        trajectory = Trajectory(
            id=f"order-{seed}",
            task={"id": task.id},
            environment="order_taking",
            seed=seed,
            policy_version=0,
            turns=tuple(turns),
            traces=(),
            outcome=sum(turn.reward for turn in turns),
            termination=ended or "max_turns",
        )
        return Played(trajectory=trajectory, task=task, snapshots=tuple(snapshots))

    def successes(self, played: Played, turn: int, seeds: Sequence[int]) -> Floats:
        """(len(seeds),) 1 where the dialogue, played on before `turn`, succeeds; after its end: as it ended."""
        if turn >= len(played.snapshots):
            return np.full(len(seeds), float(played.trajectory.success))
        return np.array([asyncio.run(self._finish(played, turn, seed)) for seed in seeds])

    async def _finish(self, played: Played, turn: int, seed: int) -> float:
        of_episode, of_user = json.loads(played.snapshots[turn])
        episode = self.environment.restore(played.task, of_episode)
        session = self.user.restore(played.task, of_user)
        agent = dataclasses.replace(self.environment.expert(played.task, error_rate=self.error_rate), seed=seed)
        ended: Termination | None = None
        said: list[Message] = []
        for _ in range(MAX_TURNS - turn):
            ended, _, _ = await _exchange(episode, session, agent.act(episode.state(), said), said)
            if ended is not None:
                break
        return float(ended == "success")


async def _exchange(
    episode: Episode, session: UserSession, text: str, said: list[Message]
) -> tuple[Termination | None, tuple[Message, ...], float]:
    outcome = episode.agent_says(text)
    fresh = list(outcome.messages)
    said += [Message(role="assistant", content=text), *outcome.messages]
    ended, reward = outcome.termination, outcome.reward
    if outcome.to_user and ended is None:
        answer = await session.answer(outcome.acts, said)
        fresh.append(Message(role="user", content=answer.text))
        said.append(fresh[-1])
        after = episode.user_says(answer.text, leaving=answer.leaving)
        ended, reward = after.termination, reward + after.reward
    return ended, tuple(fresh), reward


def cut(trajectory: Trajectory) -> list[Step]:
    return [step for turn in trajectory.turns for step in PARSER.parse(turn, trajectory.id, None)]


def soft_labels(table: Table, played: Played, count: int) -> list[StepLabel]:
    """Of each reply what follows it, of each thought what follows the state before it."""
    shares = [
        float(table.successes(played, turn, range(count)).mean()) for turn in range(len(played.trajectory.turns) + 1)
    ]
    steps = cut(played.trajectory)
    last = {step.turn: step.index for step in steps}
    return [
        StepLabel(
            trajectory=played.trajectory.id,
            turn=step.turn,
            step=step.index,
            source="mc_soft",
            target=shares[step.turn + (step.index == last[step.turn])],
        )
        for step in steps
    ]


def true_values(
    table: Table, held_out: Sequence[Played], count: int
) -> tuple[Floats, Floats, Floats, NDArray[np.int64]]:
    """Value of every reply from all continuations and from each half of them, and the dialogue of each."""
    rows, owners = [], []
    for number, one in enumerate(held_out):
        ends = [table.successes(one, turn, range(1000, 1000 + count)) for turn in range(len(one.trajectory.turns) + 1)]
        for before, after in itertools.pairwise(ends):
            change = after - before
            rows.append((change.mean(), change[: count // 2].mean(), change[count // 2 :].mean()))
            owners.append(number)
    table_of = np.array(rows)
    return table_of[:, 0], table_of[:, 1], table_of[:, 2], np.array(owners)


def spearman(left: Floats, right: Floats) -> float:
    """Correlation of ranks, ties at their mean rank."""

    def ranks(values: Floats) -> Floats:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        found: Floats = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
        return found

    return float(np.corrcoef(ranks(left), ranks(right))[0, 1]) if np.ptp(left) and np.ptp(right) else 0.0


def interval(left: Floats, right: Floats, owners: NDArray[np.int64]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    members = [np.flatnonzero(owners == one) for one in np.unique(owners)]
    draws = []
    for _ in range(500):
        places = np.concatenate([members[one] for one in rng.integers(0, len(members), len(members))])
        draws.append(spearman(left[places], right[places]))
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def reply_scores(fit: FittedEvaluator, held_out: Sequence[Played], encoder: Any) -> Floats:
    """The scores of every turn's steps, summed: its thought's and its reply's."""
    a, b = fit.card.calibration["success"]
    pairs = [(one.trajectory, cut(one.trajectory)) for one in held_out]
    rows = prefixes(pairs, encoder, "apart")
    blank = [np.zeros((len(row), 2)) for row in rows]
    wrapped = [
        Example(group=str(place), prefixes=row, targets=zeros, weights=zeros)
        for place, (row, zeros) in enumerate(zip(rows, blank, strict=True))
    ]
    found = []
    for (_, steps), logits in zip(pairs, predict(fit.fitted, wrapped), strict=True):
        chances = 1.0 / (1.0 + np.exp(-(a * logits[:, 1] + b)))
        starts = [place for place, step in enumerate(steps) if step.index == 0]
        for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
            found.append(chances[end] - chances[start])
    return np.array(found)


def shuffled(rows: Sequence[Example]) -> list[Example]:
    """Every dialogue gets the labels of another: repeated or cut to its length."""
    order = np.random.default_rng(1).permutation(len(rows))
    return [
        dataclasses.replace(one, targets=np.resize(rows[other].targets, one.targets.shape))
        for one, other in zip(rows, order, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogues", type=int, default=300)
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--continuations", type=int, default=64)
    parser.add_argument("--labels", type=int, default=8)
    parser.add_argument("--error-rate", type=float, default=0.3)
    parser.add_argument("--encoder", default=DEFAULT_ENCODER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", type=int, default=FitSettings().members)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    table = Table(arguments.error_rate)
    seen = [table.play(seed) for seed in range(arguments.dialogues)]
    held_out = [table.play(500_000 + seed) for seed in range(arguments.held_out)]
    labels = [label for one in seen for label in outcome_labels(one.trajectory, cut(one.trajectory))]
    if arguments.labels:
        labels += [label for one in seen for label in soft_labels(table, one, arguments.labels)]
    values, half, other, owners = true_values(table, held_out, arguments.continuations)
    agreement = spearman(half, other)
    print(
        f"{len(values)} held-out replies valued, {len(labels)} labels, {time.perf_counter() - begun:.0f} s", flush=True
    )
    print(f"reliability of the true values {2 * agreement / (1 + agreement):.3f} (halves {agreement:.3f})")
    encoder = CachingEncoder(load_encoder(arguments.encoder), size=100_000)
    rows = examples([(one.trajectory, cut(one.trajectory)) for one in seen], labels, encoder, "apart")
    turns = np.concatenate([np.arange(len(one.trajectory.turns), dtype=np.float64) for one in held_out])
    for name, given in (("reward_model", rows), ("labels shuffled", shuffled(rows))):
        fit = fit_evaluator(
            given,
            labels,
            encoder=encoder.name,
            encoding="apart",
            settings=FitSettings(members=arguments.members),
            seed=arguments.seed,
        )
        scores = reply_scores(fit, held_out, encoder)
        low, high = interval(scores, values, owners)
        print(f"{name}: Spearman {spearman(scores, values):+.3f} (95 % {low:+.3f} to {high:+.3f})")
        for line in (*lines(fit.card), fit.verdict.line):
            print(f"  {line}", flush=True)
    print(f"position alone: Spearman {abs(spearman(turns, values)):.3f}")
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
