"""The one place where numbers per sampled token become padded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slea_llm.demonstrations import is_tokenised
from slea_llm.errors import ConfigError, nearest
from slea_llm.tensors import Batch
from slea_llm.types import AugmentedExperience, TokenTrace


@dataclass(frozen=True, slots=True)
class _Grid:
    """Rows of all experiences, padded on the right. A boolean mask over it runs in sampled order."""

    ids: np.ndarray  # (B, T) int64
    attended: np.ndarray  # (B, T) bool
    sampled: np.ndarray  # (B, T) bool
    behaviour: np.ndarray  # (B, T) float64
    trajectory: np.ndarray  # (B,) int64

    def behind(self, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of the places right after the sampled tokens that are flagged, in sampled order."""
        rows, columns = np.nonzero(self.sampled)
        return rows[flags], columns[flags] + 1


def collate(
    experiences: Sequence[AugmentedExperience], *, streams: Sequence[str], pad_id: int, dtype: torch.dtype
) -> Batch:
    """All rows of these experiences as one Batch of `dtype`, in their order, padded on the right to the longest.

    Where a value is read after the last token of a row, every row has room for one attended filler token more.
    `trajectory` numbers the experiences from 0. What is padding is said by masks alone: `pad_id` may be a token that
    is also sampled. Raises ValueError when an experience holds another count of numbers than of sampled tokens, and
    ConfigError when it lacks one of the streams.
    """
    if not experiences:
        raise ValueError("an empty list of experiences cannot be made a batch")
    for experience in experiences:
        _check(experience, streams)
    grid = _grid(experiences, pad_id)

    def spread(pick: Callable[[AugmentedExperience], np.ndarray]) -> np.ndarray:
        """(B, T): the numbers of every experience at its sampled tokens, 0 elsewhere."""
        values = np.concatenate([pick(experience) for experience in experiences])
        out = np.zeros(grid.sampled.shape, dtype=values.dtype)
        out[grid.sampled] = values
        return out

    def stack(pick: Callable[[AugmentedExperience, str], np.ndarray]) -> np.ndarray:
        """(B, T, S): the same, a column a stream."""
        return np.stack([spread(lambda one, stream=stream: pick(one, stream)) for stream in streams], axis=-1)  # type: ignore[misc]

    def real(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(dtype)

    value_mask = spread(lambda one: one.value_mask.astype(bool))
    returns = stack(lambda one, stream: one.returns.get(stream, np.zeros(len(one.advantages))))
    old_values = stack(lambda one, stream: one.stats.values[stream][:-1])
    head_mask = _read_after(experiences, streams, grid, value_mask, returns, old_values)
    policy_mask = spread(lambda one: one.policy_mask.astype(bool))
    imitated = spread(_imitated)
    imitated[~grid.sampled] = np.nan
    counts = np.array([np.count_nonzero(experience.policy_mask) for experience in experiences])
    return Batch(
        input_ids=torch.from_numpy(grid.ids),
        attention_mask=torch.from_numpy(grid.attended),
        policy_mask=torch.from_numpy(policy_mask),
        imitation_mask=torch.from_numpy(~np.isnan(imitated)),
        imitation_weights=real(np.nan_to_num(imitated)),
        prototypes=real(np.concatenate([_shares(experience) for experience in experiences])),
        value_mask=torch.from_numpy(value_mask),
        behaviour_logprobs=real(grid.behaviour),
        proximal_logprobs=real(spread(lambda one: one.stats.proximal)),
        reference_logprobs=real(spread(lambda one: one.stats.reference)),
        advantages=real(spread(lambda one: one.advantages)),
        weights=real(spread(lambda one: one.weights)),
        returns=real(returns),
        old_values=real(old_values),
        trajectory=torch.from_numpy(grid.trajectory),
        trajectory_tokens=real(counts[grid.trajectory]),
        head_mask=None if head_mask is None else torch.from_numpy(head_mask),
    )


def _read_after(
    experiences: Sequence[AugmentedExperience],
    streams: Sequence[str],
    grid: _Grid,
    value_mask: np.ndarray,
    returns: np.ndarray,
    old_values: np.ndarray,
) -> np.ndarray | None:
    """Enter what is read after tokens into the arrays, in place; which head is supervised where, (B, T, S).

    None when nothing is: then every head is supervised wherever `value_mask` says.
    """
    reading = [one for one in experiences if one.after_mask is not None]  # others carry no credit and no such values
    if not reading:
        return None
    before = np.array([any(stream in one.returns for one in reading) for stream in streams])
    head_mask: np.ndarray = value_mask[..., None] & before
    flags = np.concatenate([_flags(one) for one in experiences])
    rows, columns = grid.behind(flags)
    value_mask[rows, columns] = True
    grid.attended[rows, columns] = True  # the filler token of a row that ends here, if it does
    for column, stream in enumerate(streams):
        if any(stream in one.after_returns for one in reading):
            target = np.concatenate([one.after_returns[stream][_flags(one)] for one in reading])
            said = np.concatenate([one.stats.after[stream][_flags(one)] for one in reading])
            returns[rows, columns, column], old_values[rows, columns, column] = target, said
            head_mask[rows, columns, column] = True
    return head_mask


def _flags(experience: AugmentedExperience) -> np.ndarray:
    """(n,) bool: after which sampled tokens a value is read."""
    none = np.zeros(len(experience.advantages), dtype=bool)
    return none if experience.after_mask is None else experience.after_mask.astype(bool)


def microbatches(experiences: Sequence[AugmentedExperience], *, trajectories: int) -> list[list[AugmentedExperience]]:
    """Groups of at most `trajectories` experiences of similar length, the shortest first.

    A trajectory's rows are never parted. Every loss is a sum over units, so neither grouping nor order changes an
    update; less padding is all they are for.
    """
    by_length = sorted(experiences, key=lambda one: max(len(trace) for trace in one.scored.trajectory.traces))
    return [by_length[start : start + trajectories] for start in range(0, len(by_length), trajectories)]


def blank(*, streams: int, pad_id: int, dtype: torch.dtype) -> Batch:
    """One short row with every loss mask false: what a rank runs that has fewer micro-batches than another.

    It goes through the same modules as a real batch and adds zeros to every gradient, so that collectives match.
    """
    shape = (1, 2)
    off = torch.zeros(shape, dtype=torch.bool)
    zeros = torch.zeros(shape, dtype=dtype)
    by_stream = torch.zeros((*shape, streams), dtype=dtype)
    return Batch(
        input_ids=torch.full(shape, pad_id),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        policy_mask=off,
        imitation_mask=off,
        imitation_weights=zeros,
        prototypes=torch.zeros(1, dtype=dtype),
        value_mask=off,
        behaviour_logprobs=zeros,
        proximal_logprobs=zeros,
        reference_logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        returns=by_stream,
        old_values=by_stream,
        trajectory=torch.zeros(1, dtype=torch.int64),
        trajectory_tokens=torch.zeros(1, dtype=dtype),
    )


def _imitated(experience: AugmentedExperience) -> np.ndarray:
    """(n,) weight of the tokens that are imitated, NaN elsewhere."""
    return np.full(len(experience.weights), np.nan) if experience.imitation is None else experience.imitation


def _shares(experience: AugmentedExperience) -> np.ndarray:
    """(rows,) share among the prototypes of a state; 0 for the rows of a dialogue."""
    none = np.zeros(len(experience.scored.trajectory.traces))
    return none if experience.prototypes is None else experience.prototypes


def _grid(experiences: Sequence[AugmentedExperience], pad_id: int) -> _Grid:
    traces: list[TokenTrace] = []
    owners: list[int] = []
    for number, experience in enumerate(experiences):
        traces.extend(experience.scored.trajectory.traces)
        owners.extend([number] * len(experience.scored.trajectory.traces))
    # Where a value is read after the last token of a row, it is read at the place behind it.
    filler = int(any(_flags(one).any() for one in experiences))
    shape = (len(traces), max(len(trace) for trace in traces) + filler)
    grid = _Grid(
        ids=np.full(shape, pad_id, dtype=np.int64),
        attended=np.zeros(shape, dtype=bool),
        sampled=np.zeros(shape, dtype=bool),
        behaviour=np.zeros(shape),
        trajectory=np.array(owners, dtype=np.int64),
    )
    for row, trace in enumerate(traces):
        length = len(trace)
        grid.ids[row, :length] = trace.token_ids
        grid.attended[row, :length] = True
        grid.sampled[row, :length] = trace.sampled_mask
        grid.behaviour[row, :length] = trace.logprobs
    if grid.sampled[:, 0].any():
        row = int(np.flatnonzero(grid.sampled[:, 0])[0])
        name = experiences[owners[row]].scored.trajectory.id
        raise ValueError(f"trajectory {name}: the first token of a row is sampled, but nothing predicts it")
    grid.behaviour[~grid.sampled] = 0.0
    return grid


def _check(experience: AugmentedExperience, streams: Sequence[str]) -> None:
    trajectory = experience.scored.trajectory
    expected = trajectory.sampled_tokens
    if not expected:
        raise ValueError(f"trajectory {trajectory.id} has no sampled token and cannot enter an update")
    counts = {
        "proximal": len(experience.stats.proximal),
        "reference": len(experience.stats.reference),
        "advantages": len(experience.advantages),
        "weights": len(experience.weights),
        "value_mask": len(experience.value_mask),
        "policy_mask": len(experience.policy_mask),
        "imitation": len(_imitated(experience)),
        "after_mask": len(_flags(experience)),
    }
    if is_tokenised(trajectory) and experience.policy_mask.any():
        raise ValueError(
            f"trajectory {trajectory.id} was tokenised from text: no policy sampled its tokens, so that it may be "
            "imitated and never stand in a ratio"
        )
    targets = {**experience.after_returns, **experience.returns}
    for stream in streams:
        for name, numbers in (("returns", targets), ("values", experience.stats.values)):
            if stream not in numbers:
                raise ConfigError(f"trajectory {trajectory.id} has no {name} of {stream!r}{nearest(stream, numbers)}")
        counts[f"returns of {stream!r}"] = len(targets[stream])
        counts[f"values of {stream!r}"] = len(experience.stats.values[stream]) - 1
    odd = [f"{name} {count}" for name, count in counts.items() if count != expected]
    if odd:
        raise ValueError(f"trajectory {trajectory.id} has {expected} sampled tokens, but counts of {', '.join(odd)}")
