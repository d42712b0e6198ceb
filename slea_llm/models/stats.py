"""What the models say today about sampled tokens: the `TokenStats` that credit is computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slea_llm.models.policy import PolicyCritic
from slea_llm.types import TokenStats, TokenTrace, Trajectory


@dataclass(frozen=True, slots=True)
class _Row:
    trajectory: int
    ids: np.ndarray  # (L,) int64
    sampled: np.ndarray  # (L,) bool


@dataclass(frozen=True, slots=True)
class _RowStats:
    proximal: np.ndarray  # (n,)
    reference: np.ndarray  # (n,)
    values: np.ndarray  # (n, S), before each sampled token
    after: np.ndarray  # (n, S), after each sampled token
    last: np.ndarray  # (S,), after the row's last token


def token_stats(
    model: PolicyCritic,
    trajectories: Sequence[Trajectory],
    *,
    microbatch: int,
    policy_version: int,
    critic_version: int,
    pad_id: int,
    reference: bool = True,
) -> list[TokenStats]:
    """One `TokenStats` a trajectory, in the order given; no gradient.

    Rows run in micro-batches of `microbatch` rows of similar length; results find their trajectory by index, so that
    the order of running never matters. With `reference=False` no reference pass is made and `reference` is NaN
    throughout, so that a use nobody meant does not pass unseen. Run it under the same autocast as the update, or the
    ratio is not 1 at the first one. Raises ValueError for a trajectory without sampled tokens (a logged text).
    """
    rows = [
        _row(index, trace, trajectory.id)
        for index, trajectory in enumerate(trajectories)
        for trace in trajectory.traces
    ]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number].ids))
    done: dict[int, _RowStats] = {}
    for start in range(0, len(order), microbatch):
        chunk = order[start : start + microbatch]
        done.update(zip(chunk, _run(model, [rows[number] for number in chunk], pad_id, reference), strict=True))
    by_trajectory: list[list[_RowStats]] = [[] for _ in trajectories]
    for number, row in enumerate(rows):
        by_trajectory[row.trajectory].append(done[number])
    return [
        _join(parts, trajectory, model.streams, policy_version, critic_version)
        for parts, trajectory in zip(by_trajectory, trajectories, strict=True)
    ]


def sampler_stats(
    trajectories: Sequence[Trajectory], *, streams: Sequence[str], critic_version: int
) -> list[TokenStats]:
    """One `TokenStats` a trajectory from what its sampler said, without a pass: values 0, `reference` NaN."""
    found = []
    for trajectory in trajectories:
        said = [np.asarray(trace.logprobs)[np.asarray(trace.sampled_mask, dtype=bool)] for trace in trajectory.traces]
        proximal = np.concatenate(said)
        found.append(
            TokenStats(
                proximal=proximal,
                reference=np.full_like(proximal, np.nan),
                values={stream: np.zeros(len(proximal) + 1) for stream in streams},
                after={stream: np.zeros(len(proximal)) for stream in streams},
                policy_version=trajectory.policy_version,
                critic_version=critic_version,
            )
        )
    return found


def _row(trajectory: int, trace: TokenTrace, name: str) -> _Row:
    sampled = np.asarray(trace.sampled_mask, dtype=bool)
    if sampled[:1].any():
        raise ValueError(f"trajectory {name}: the first token of a row is sampled, but nothing predicts it")
    return _Row(trajectory, np.asarray(trace.token_ids, dtype=np.int64), sampled)


@torch.no_grad()
def _run(model: PolicyCritic, rows: Sequence[_Row], pad_id: int, reference: bool) -> list[_RowStats]:
    longest = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
    attended = np.zeros((len(rows), longest), dtype=bool)
    sampled = np.zeros((len(rows), longest), dtype=bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = row.ids
        attended[number, : len(row.ids)] = True
        sampled[number, : len(row.ids)] = row.sampled
    device = next(model.parameters()).device
    tensors = [torch.from_numpy(array).to(device) for array in (ids, attended, sampled)]
    logprobs, after = (tensor.cpu().numpy() for tensor in model.policy_pass(*tensors))
    base = model.reference_pass(*tensors).cpu().numpy() if reference else np.full_like(logprobs, np.nan)
    found = []
    for number, row in enumerate(rows):
        at = np.flatnonzero(row.sampled)
        found.append(
            _RowStats(
                proximal=logprobs[number, at],
                reference=base[number, at],
                values=after[number, at - 1],
                after=after[number, at],
                last=after[number, len(row.ids) - 1],
            )
        )
    return found


def _join(
    parts: Sequence[_RowStats], trajectory: Trajectory, streams: Sequence[str], policy_version: int, critic_version: int
) -> TokenStats:
    if not trajectory.sampled_tokens:
        raise ValueError(f"trajectory {trajectory.id} has no sampled token; logged text has no log-probabilities here")
    values = np.concatenate([part.values for part in parts] + [parts[-1].last[None]])
    after = np.concatenate([part.after for part in parts])
    return TokenStats(
        proximal=np.concatenate([part.proximal for part in parts]),
        reference=np.concatenate([part.reference for part in parts]),
        values={stream: np.ascontiguousarray(values[:, column]) for column, stream in enumerate(streams)},
        after={stream: np.ascontiguousarray(after[:, column]) for column, stream in enumerate(streams)},
        policy_version=policy_version,
        critic_version=critic_version,
    )
