"""Labels of steps by playing on: how often a dialogue that has come this far succeeds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from slea_llm.errors import EvaluatorError
from slea_llm.evaluators.attribution import MonteCarloLabel, monte_carlo_label
from slea_llm.interfaces import Continuations
from slea_llm.types import ReplyPrefix, Step, Trajectory, leaf_steps


def monte_carlo_labels(
    trajectory: Trajectory, steps: Sequence[Step], continuations: Continuations, *, n: int, seed: int
) -> Mapping[tuple[int, int], MonteCarloLabel]:
    """`(turn, step) -> label` of the prefix that ends with each leaf step, from n continuations each.

    The same n seeds serve every step. Raises EpisodeError when the dialogue cannot be restored and EvaluatorError when
    a continuation broke: a label from the rest would be one of another policy.
    """
    leaves = leaf_steps(steps)
    if not leaves:
        return {}
    prefixes = [borders_of(step, trajectory)[1] for step in leaves]
    seeds = [draw(f"{seed}/{trajectory.id}/{index}") for index in range(n)]
    labels = {}
    for step, ends in zip(leaves, continuations.branch(trajectory, prefixes, seeds), strict=True):
        if ends.reason is not None:
            raise EvaluatorError(f"dialogue {trajectory.id!r}, step {step.turn}.{step.index}: {ends.reason}")
        labels[step.turn, step.index] = monte_carlo_label(sum(ends.successes), len(ends.successes))
    return labels


def borders_of(step: Step, trajectory: Trajectory) -> tuple[ReplyPrefix, ReplyPrefix]:
    """The places just before and just after a step."""
    turn = next(turn for turn in trajectory.turns if turn.index == step.turn)
    first = last = None
    if turn.span is not None and step.tokens is not None:
        first, last = step.tokens.start - turn.span.start, step.tokens.end - turn.span.start
    return (
        ReplyPrefix(turn=step.turn, characters=step.span.start, tokens=first),
        ReplyPrefix(turn=step.turn, characters=step.span.end, tokens=last),
    )


def draw(text: str) -> int:
    """A number in [0, 2^31) named by a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 33
