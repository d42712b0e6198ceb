"""Advantages of logged steps without any model: the same augmenters and credit method as in training, no critic.

A log has no sampled tokens (or the tokenizer is not here), so each leaf step stands for one token, and the critic's
word on the outcome is the mean outcome of the dialogues of the same task: where all of them ended alike, nobody did
better or worse, and the outcome gives an advantage of 0.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from slea_llm.crediting import OUTCOME, REFERENCE_KL, Crediting
from slea_llm.errors import CreditError, EvaluatorError, UnsupportedError
from slea_llm.interfaces import LocalReducer
from slea_llm.log_measures import known_end
from slea_llm.score_runs import StepCredit
from slea_llm.types import AugmentedExperience, ScoredTrajectory, Step, TokenSpan, TokenStats, TokenTrace, Trajectory


def refuse_live_parts(crediting: Crediting) -> None:
    """Raise UnsupportedError when a stream or the credit method needs what only training has."""
    if crediting.conditional != "none":
        raise UnsupportedError(
            f"credit.conditional {crediting.conditional} reads a trained critic after every step, and a log has none; "
            "set it to none, or look at it in training"
        )
    for name, stream in crediting.streams.items():
        if REFERENCE_KL in stream.sources:
            raise UnsupportedError(
                f"stream {name!r} takes {REFERENCE_KL}, the log-ratio of policy and reference model at every token; a "
                "log has neither: set kl_in_reward to 0 and take it out of the stream, or look at it in training"
            )


def step_credit(crediting: Crediting, scored: Sequence[ScoredTrajectory]) -> list[StepCredit]:
    """Credit of every trajectory, in order; whoever carries none says why. All are held in memory at once.

    Raises what the augmenters' own settings raise; what the data of one trajectory does to them is its `why_not`.
    """
    refuse_live_parts(crediting)
    why_not: dict[int, str] = {}
    kept: dict[int, tuple[ScoredTrajectory, TokenStats]] = {}
    graded = [_graded(one) for one in scored]
    baselines = _baselines([one.trajectory for one in graded])
    for number, one in enumerate(graded):
        if (reason := _unfit(one)) is not None:
            why_not[number] = reason
            continue
        standing = one_token_a_step(one)
        stats = _stats(standing, crediting, baselines[number])
        try:
            crediting.rewards(standing, stats, progress=0.0)
        except (CreditError, EvaluatorError) as error:
            why_not[number] = str(error)
        else:
            kept[number] = (standing, stats)
    pairs = list(kept.values())
    made = crediting.credit(
        [one for one, _ in pairs], [stats for _, stats in pairs], progress=0.0, reducer=LocalReducer()
    )
    found = dict(zip(kept, made, strict=True))
    return [
        _credit(found[number]) if number in found else StepCredit(trajectory=one.trajectory.id, why_not=why_not[number])
        for number, one in enumerate(scored)
    ]


def one_token_a_step(scored: ScoredTrajectory) -> ScoredTrajectory:
    """The same with one token for every leaf step, sampled in order; steps that others refine have none."""
    leaves = scored.leaves()
    place = {(step.turn, step.index): number for number, step in enumerate(leaves)}
    count = len(leaves)
    steps = tuple(_placed(step, place.get((step.turn, step.index))) for step in scored.steps)
    turns, start = [], 0
    for turn in scored.trajectory.turns:
        end = start + sum(leaf.turn == turn.index for leaf in leaves)
        turns.append(dataclasses.replace(turn, span=TokenSpan(0, start, end)))
        start = end
    trace = TokenTrace(token_ids=tuple(range(count)), sampled_mask=(True,) * count, logprobs=(0.0,) * count)
    trajectory = dataclasses.replace(scored.trajectory, turns=tuple(turns), traces=(trace,))
    return dataclasses.replace(scored, trajectory=trajectory, steps=steps)


def _placed(step: Step, number: int | None) -> Step:
    return dataclasses.replace(step, tokens=None if number is None else TokenSpan(0, number, number + 1))


def _graded(scored: ScoredTrajectory) -> ScoredTrajectory:
    """The same with an outcome where the log says success or failure and no number: what its turns earned, else 1 or 0.

    The 1 stands on the last turn. Nothing of this goes into the log.
    """
    trajectory = scored.trajectory
    if trajectory.outcome is not None or not known_end(trajectory) or not trajectory.turns:
        return scored
    turns = list(trajectory.turns)
    if not any(turn.reward for turn in turns):
        turns[-1] = dataclasses.replace(turns[-1], reward=float(trajectory.success))
    outcome = sum(turn.reward for turn in turns)
    return dataclasses.replace(scored, trajectory=dataclasses.replace(trajectory, turns=tuple(turns), outcome=outcome))


def _unfit(scored: ScoredTrajectory) -> str | None:
    trajectory = scored.trajectory
    if trajectory.failed:
        return f"the dialogue broke: {trajectory.error}"
    if not scored.steps:
        return "it holds no step of the agent"
    if trajectory.outcome is None:
        return "the log does not say how it ended"
    return None


def _baselines(trajectories: Sequence[Trajectory]) -> list[float]:
    """The mean outcome of each trajectory's group; of the whole log for one that is alone in its group."""
    groups: dict[str, list[float]] = defaultdict(list)
    known = [one.outcome for one in trajectories if one.outcome is not None]
    for one in trajectories:
        if one.outcome is not None:
            groups[_group(one)].append(one.outcome)
    overall = sum(known) / len(known) if known else 0.0
    means = {name: sum(values) / len(values) for name, values in groups.items() if len(values) > 1}
    return [means.get(_group(one), overall) for one in trajectories]


def _group(trajectory: Trajectory) -> str:
    return f"{trajectory.environment}/{trajectory.task.get('id', trajectory.id)}"


def _stats(scored: ScoredTrajectory, crediting: Crediting, baseline: float) -> TokenStats:
    """What a critic that knows the baseline alone would say before each step, discounted by the turns still to come.

    After the last one it says 0, also of a dialogue that was cut: the log knows its outcome.
    """
    count = len(scored.trajectory.traces[0])
    turns = np.array([leaf.turn for leaf in scored.leaves()])
    values: dict[str, np.ndarray] = {}
    for name, stream in crediting.streams.items():
        worth = stream.reward_scale * baseline if OUTCOME in stream.sources else 0.0
        values[name] = np.append(worth * stream.gamma_turn ** (turns.max(initial=0) - turns), 0.0)
    return TokenStats(
        proximal=np.zeros(count), reference=np.zeros(count), values=values, policy_version=0, critic_version=0
    )


def _credit(one: AugmentedExperience) -> StepCredit:
    leaves = one.scored.leaves()
    parts = [(f"{stream}.{part}", numbers) for stream, held in one.rewards.items() for part, numbers in held.items()]
    return StepCredit(
        trajectory=one.scored.trajectory.id,
        steps=tuple((leaf.turn, leaf.index) for leaf in leaves),
        advantages=tuple(round(float(number), 9) for number in one.advantages),
        rewards=tuple(
            {name: round(float(numbers[place]), 9) for name, numbers in parts if numbers[place]}
            for place in range(len(leaves))
        ),
    )
