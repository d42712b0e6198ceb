"""Credit by the definition, token by token and without arrays: what the fast form is compared with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredTrajectory, Step, TokenStats

Tokens = list[tuple[int, int]]
"""(turn, step) of every sampled token."""


def owners(scored: ScoredTrajectory) -> Tokens:
    """Walk rows and positions, and look up which leaf step holds each sampled token."""
    owned: Tokens = []
    for row, trace in enumerate(scored.trajectory.traces):
        for position, sampled in enumerate(trace.sampled_mask):
            if sampled:
                (holder,) = [step for step in scored.leaves() if _holds(step, row, position)]
                owned.append((holder.turn, holder.index))
    return owned


def outermost(scored: ScoredTrajectory) -> Tokens:
    """(turn, step) of the step that refines no other, for every sampled token."""
    found: Tokens = []
    for turn, index in owners(scored):
        by_index = {step.index: step for step in scored.steps if step.turn == turn}
        while (parent := by_index[index].parent) is not None:
            index = parent
        found.append((turn, index))
    return found


def _holds(step: Step, row: int, position: int) -> bool:
    return step.tokens is not None and step.tokens.row == row and step.tokens.start <= position < step.tokens.end


def slow_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    owned: Tokens,
    outer: Tokens,
    stream: StreamSettings,
    *,
    bootstrap: float,
    unit: str,
    lam: float | None = None,
) -> tuple[list[float], list[float]]:
    """Advantages and targets of one dialogue in one stream, by recursion over its units."""
    turns = [turn for turn, _ in owned]
    keys = {"token": range(len(owned)), "substep": owned, "step": outer, "turn": turns}[unit]
    units: list[list[int]] = []
    for token, key in enumerate(keys):
        if not units or key != keys[units[-1][-1]]:
            units.append([])
        units[-1].append(token)
    advantage, following = 0.0, bootstrap
    advantages, targets = [0.0] * len(owned), [0.0] * len(owned)
    for tokens in reversed(units):
        last = tokens[-1]
        if last + 1 == len(owned) or owned[last + 1][0] != owned[last][0]:
            gamma, decay = stream.gamma_turn, stream.lam_turn
        elif outer[last + 1] != outer[last]:
            gamma, decay = stream.gamma_step, stream.lam_step
        elif owned[last + 1] != owned[last]:
            gamma = stream.gamma_step if stream.gamma_substep is None else stream.gamma_substep
            decay = stream.lam_step if stream.lam_substep is None else stream.lam_substep
        else:
            gamma, decay = stream.gamma_token, stream.lam_token
        value = values[tokens[0]]
        delta = sum(rewards[token] for token in tokens) + gamma * following - value
        advantage = delta + gamma * (decay if lam is None else lam) * advantage
        following = value
        for token in tokens:
            advantages[token], targets[token] = advantage, advantage + value
    return advantages, targets


def slow_whiten(numbers: Sequence[float]) -> list[float]:
    """Population z-scores; zeros when all are equal."""
    if not numbers or (spread := statistics.pstdev(numbers)) <= 1e-8 * max(1.0, abs(statistics.fmean(numbers))):
        return [0.0] * len(numbers)
    mean = statistics.fmean(numbers)
    return [(number - mean) / spread for number in numbers]


def slow_rewards(scored: ScoredTrajectory, stats: TokenStats, source: str, kl_coef: float) -> list[float]:
    """What one part pays every sampled token."""
    owned = owners(scored)
    paid = [0.0] * len(owned)
    if source == "reference_kl":
        return [-kl_coef * float(p - r) for p, r in zip(stats.proximal, stats.reference, strict=True)]
    if source == "outcome":
        for turn in scored.trajectory.turns:
            paid[max(token for token, (number, _) in enumerate(owned) if number == turn.index)] += turn.reward
        return paid
    for score in scored.scores:
        if score.evaluator == source and score.score is not None:
            # The last token of the steps up to this one: its own, or the one that swallowed its text.
            holders = [t for t, (turn, step) in enumerate(owned) if turn == score.turn and step <= score.step]
            paid[max(holders)] += score.score
    return paid


def slow_credit(
    scored: Sequence[ScoredTrajectory],
    stats: Sequence[TokenStats],
    streams: Mapping[str, StreamSettings],
    *,
    unit: str,
    kl_coef: float = 0.0,
    lam_critic: float | None = None,
) -> tuple[list[list[float]], list[dict[str, list[float]]]]:
    """Final advantages and returns by stream of every dialogue."""
    total = {(i, t): 0.0 for i, one in enumerate(scored) for t in range(len(owners(one)))}
    any_stream: set[tuple[int, int]] = set()
    returns: list[dict[str, list[float]]] = [{} for _ in scored]
    for name, stream in streams.items():
        raw: dict[tuple[int, int], float] = {}
        for index, (one, stat) in enumerate(zip(scored, stats, strict=True)):
            owned, outer = owners(one), outermost(one)
            paid = [slow_rewards(one, stat, source, kl_coef) for source in stream.sources]
            rewards = [sum(parts) for parts in zip(*paid, strict=True)]
            values = [float(value) for value in stat.values[name]]
            end = values[-1] if one.trajectory.termination in ("max_turns", "budget") else 0.0
            common = {"bootstrap": end, "unit": unit}
            advantages, targets = slow_advantages(rewards, values, owned, outer, stream, **common)  # type: ignore[arg-type]
            if lam_critic is not None:
                _, targets = slow_advantages(rewards, values, owned, outer, stream, lam=lam_critic, **common)  # type: ignore[arg-type]
            steps = {(step.turn, step.index): step for step in one.leaves()}
            for token, key in enumerate(owned):
                missing = any(
                    (s.turn, s.step) == key and s.score is None and s.evaluator in stream.sources for s in one.scores
                )
                if missing:
                    same = [_unit(owned, outer, t, unit) == _unit(owned, outer, token, unit) for t in range(len(owned))]
                    first = same.index(True)
                    targets[token] = values[first]
                elif not stream.kinds or steps[key].kind in stream.kinds:
                    raw[index, token] = advantages[token]
            returns[index][name] = targets
        shares = dict(zip(raw, slow_whiten(list(raw.values())), strict=True)) if stream.whiten else raw
        any_stream |= raw.keys()
        for key, share in shares.items():
            total[key] += stream.weight * share
    kept = [key for key in total if key in any_stream]
    final = dict(zip(kept, slow_whiten([total[key] for key in kept]), strict=True))
    return [[final.get((i, t), 0.0) for t in range(len(owners(one)))] for i, one in enumerate(scored)], returns


def _unit(owned: Tokens, outer: Tokens, token: int, unit: str) -> object:
    return {"token": token, "substep": owned[token], "step": outer[token], "turn": owned[token][0]}[unit]
