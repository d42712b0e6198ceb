"""What a run checks and says before its first update. Each check agrees over ranks before it raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from slea_llm.errors import StartupCheckError

if TYPE_CHECKING:
    from slea_llm.interfaces import LossTerm, Reducer
    from slea_llm.models.policy import PolicyCritic
    from slea_llm.settings import RolloutSettings, TrainerSettings
    from slea_llm.tensors import Batch
    from slea_llm.types import ScoredTrajectory, TokenStats

Numerics = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far two computations of the same log-probability may be apart, in nats.

    `repeat`: the largest gap between two forwards of the trainer, which differ in padding only. `sampler`: the mean gap
    between sampler and trainer. Measured: a float32 engine 5e-6, a bfloat16 engine against a float32 trainer 0.034.
    """

    repeat: float
    sampler: float

    @classmethod
    def of(cls, numerics: Numerics) -> Tolerances:
        """The tolerances of the coarsest type that sampler and trainer compute in."""
        return {
            "float64": cls(repeat=1e-9, sampler=1e-4),
            "float32": cls(repeat=1e-3, sampler=1e-3),
            "bfloat16": cls(repeat=0.5, sampler=0.1),
        }[numerics]


def arithmetic_line(rollout: RolloutSettings, trainer: TrainerSettings, *, world_size: int) -> str:
    """Prompts x group = dialogues, and what becomes of them, in one line."""
    prompts = rollout.episodes // rollout.group_size
    minibatches = rollout.episodes // trainer.minibatch
    updates = trainer.epochs * minibatches
    return (
        f"batch: {prompts} prompts x {rollout.group_size} dialogues x up to {rollout.max_turns} turns = "
        f"{rollout.episodes} trajectories an iteration over {world_size} process(es); {trainer.epochs} epochs x "
        f"{minibatches} minibatches of {trainer.minibatch} = {updates} updates an iteration, "
        f"{updates * trainer.iterations} in all"
    )


def check_equal_updates(updates: int, reducer: Reducer) -> str:
    """All ranks make the same number of updates an iteration, whatever they hold."""
    high, low = reducer.max([updates, -updates])
    if high != -low:
        raise StartupCheckError(f"ranks would make {-low:.0f} to {high:.0f} updates an iteration; they must agree")
    return f"updates: {updates} an iteration on each of {reducer.world_size} rank(s)"


def check_trainable_tokens(scored: Sequence[ScoredTrajectory], reducer: Reducer) -> str:
    """Trained tokens by role: what the policy sampled, nothing that others wrote; and there is something to train."""
    trajectories = [one.trajectory for one in scored]
    sampled, turns, seen = reducer.sum(
        [
            sum(t.sampled_tokens for t in trajectories),
            sum(len(t.turns) for t in trajectories),
            sum(len(trace) for t in trajectories for trace in t.traces),
        ]
    )
    if sampled == 0:
        raise StartupCheckError(
            "no token of the first dialogues can be trained: the sampled mask is empty everywhere; logged text without "
            "tokens can be imitated, never put in a ratio"
        )
    return (
        f"trained tokens: assistant {sampled:.0f} ({sampled / max(turns, 1):.1f} a turn), system, user and tool 0 of "
        f"{seen - sampled:.0f}"
    )


def steps_line(scored: Sequence[ScoredTrajectory], reducer: Reducer) -> str:
    """How finely replies are cut; where they are not cut at all, what that means for credit."""
    leaves = [len(one.leaves()) for one in scored]
    steps, turns = reducer.sum([float(sum(leaves)), float(sum(len(one.trajectory.turns) for one in scored))])
    if steps <= turns:
        return (
            "steps: every reply is one step: credit by step is credit by turn here, and what is set for transitions "
            "between steps changes nothing"
        )
    return f"steps: {steps / max(turns, 1.0):.1f} a reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerGap:
    """|log-probability of the sampler - of the trainer| over `tokens` sampled tokens of all ranks, in nats."""

    mean: float
    peak: float
    tokens: float


def check_sampler(gap: SamplerGap, tolerances: Tolerances) -> str:
    """The sampler's log-probabilities are those of the trainer's weights, at the same temperature."""
    if not gap.tokens:
        return "sampler against trainer: no dialogue of the present policy to compare"
    if not gap.mean <= tolerances.sampler:
        raise StartupCheckError(
            f"sampler and trainer disagree by {gap.mean:.3g} nats a token on average (at most {gap.peak:.3g}), more "
            f"than {tolerances.sampler:g}: the sampler serves other weights, another temperature, or a coarser type"
        )
    return (
        f"sampler against trainer: mean gap {gap.mean:.2e}, max {gap.peak:.2e} nats "
        f"(mean within {tolerances.sampler:g})"
    )


def sampler_gap(scored: Sequence[ScoredTrajectory], stats: Sequence[TokenStats], reducer: Reducer) -> SamplerGap:
    """The gap over the dialogues that the very policy of `stats` sampled; older ones differ for a good reason."""
    gaps = [
        np.abs(_behaviour(one) - stat.proximal)
        for one, stat in zip(scored, stats, strict=True)
        if one.trajectory.policy_version == stat.policy_version
    ]
    flat = np.concatenate(gaps) if gaps else np.zeros(0)
    total, tokens = reducer.sum([float(flat.sum()), float(flat.size)])
    (peak,) = reducer.max([float(flat.max(initial=0.0))])
    return SamplerGap(mean=total / max(tokens, 1.0), peak=peak, tokens=tokens)


def _behaviour(scored: ScoredTrajectory) -> np.ndarray:
    """Behaviour log-probabilities in sampled order, shape (n,)."""
    rows = scored.trajectory.traces
    return np.array([p for row in rows for p, mine in zip(row.logprobs, row.sampled_mask, strict=True) if mine])


def check_reference(stats: Sequence[TokenStats], tolerances: Tolerances, reducer: Reducer) -> str:
    """Before the first update the policy is its own reference: the KL between them is 0."""
    gap = max((float(np.abs(stat.proximal - stat.reference).max(initial=0.0)) for stat in stats), default=0.0)
    (peak,) = reducer.max([gap])
    if not peak <= tolerances.repeat:
        raise StartupCheckError(
            f"the reference is not the starting policy: log-probabilities differ by up to {peak:.3g} nats before the "
            f"first update (allowed: {tolerances.repeat:g}); after a warm start the reference is the starting adapter"
        )
    return f"reference: KL 0 before the first update (largest gap {peak:.2e} nats)"


def check_first_update(kl: float, max_log_ratio: float, tolerances: Tolerances) -> str:
    """In the first update the policy is its own proximal policy: ratio 1 and KL 0."""
    if not max_log_ratio <= tolerances.repeat:
        raise StartupCheckError(
            f"the first update's ratio is off 1 by up to {max_log_ratio:.3g} nats (KL {kl:.3g}; allowed: "
            f"{tolerances.repeat:g}): the two forwards of the same weights differ (dropout, masks, temperature)"
        )
    return f"first update: ratio 1 within {max_log_ratio:.2e} nats, KL {kl:.2e}"


def check_gradients(model: PolicyCritic, losses: Sequence[LossTerm], batch: Batch, reducer: Reducer) -> str:
    """Every trainable parameter is reached by some loss term whose weight is not 0.

    One forward and backward of the bare model, so that no rank waits for another in it; gradients and random states are
    left as they were. A term that is switched off must not keep a module that then never learns.
    """
    named = [*model.policy_parameters(), *model.critic_parameters()]
    with torch.random.fork_rng(), torch.enable_grad():
        outputs = model(batch)
        active = [term for term in losses if term.weight != 0]
        totals = [term.weight * term(outputs, batch).total for term in active]
        if not totals:
            raise StartupCheckError("every loss term has weight 0; nothing would be trained")
        torch.autograd.backward(torch.stack(totals).sum())
    reached = reducer.max([float(parameter.grad is not None) for _, parameter in named])
    for _, parameter in named:
        parameter.grad = None
    idle = [name for (name, _), hit in zip(named, reached, strict=True) if not hit]
    if idle:
        weights = ", ".join(f"{term.name} {term.weight:g}" for term in losses)
        raise StartupCheckError(
            f"trainable parameters without a gradient: {', '.join(sorted(idle))}; the loss terms are {weights}: give "
            "the term that trains them a weight, or freeze them"
        )
    return f"gradients: all {len(named)} trainable tensors are reached by {', '.join(term.name for term in active)}"
