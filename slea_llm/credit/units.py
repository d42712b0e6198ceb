"""The sampled tokens of many trajectories laid end to end and cut into credit units, and what streams pay them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slea_llm.credit.maths import Bools, Floats, Ints
from slea_llm.credit.placement import Layout, known_tokens
from slea_llm.errors import ConfigError, CreditError, nearest
from slea_llm.settings import StreamSettings
from slea_llm.types import STEP_KINDS, ScoredTrajectory, TokenStats

Unit = Literal["token", "substep", "step", "turn"]
UNITS: tuple[Unit, ...] = ("token", "substep", "step", "turn")
"""From fine to coarse. `substep`: leaf steps; `step`: steps that refine no other; the same where nothing is refined."""
Counting = Literal["token", "unit", "dialogue"]
COUNTINGS: tuple[Counting, ...] = ("token", "unit", "dialogue")
Rewards = Mapping[str, Mapping[str, np.ndarray]]
"""`[stream][part]`, (n,) each, of one trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The sampled tokens of all trajectories laid end to end (N), cut into credit units (U).

    `sizes` (B,) tokens of each trajectory; `kinds` (N,) index into STEP_KINDS; `starts` and `lengths` (U,) of the
    units; `level` (U,) what ends with a unit's last token, as an index into UNITS; `row`, `column` (U,) its place in
    the padded arrays.
    """

    sizes: Ints
    kinds: NDArray[np.int8]
    starts: Ints
    lengths: Ints
    level: NDArray[np.int8]
    row: Ints
    column: Ints

    @classmethod
    def of(cls, layouts: Sequence[Layout], unit: Unit) -> Tokens:
        sizes = np.array([layout.tokens for layout in layouts], dtype=np.intp)
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)
        total = int(offsets[-1])
        pairs = list(zip(layouts, offsets.tolist(), strict=False))
        # Of every leaf with tokens: start, end, kind, turn and outermost step (numbered over all trajectories).
        leaves = np.array(
            [
                (base + s.start, base + s.end, STEP_KINDS.index(s.kind), number, s.key[0], s.outermost)
                for number, (lay, base) in enumerate(pairs)
                for s in lay.steps
                if s.end > s.start
            ],
            dtype=np.intp,
        ).reshape(-1, 6)
        turn_ends = _changes(leaves[:, 3:5])
        step_ends = _changes(leaves[:, 3:6])
        ending = np.full(total, UNITS.index("token"), dtype=np.int8)
        ending[leaves[:, 1] - 1] = UNITS.index("substep")
        ending[leaves[step_ends, 1] - 1] = UNITS.index("step")
        ending[leaves[turn_ends, 1] - 1] = UNITS.index("turn")
        last = np.flatnonzero(ending >= UNITS.index(unit))
        starts = np.concatenate(([0], last[:-1] + 1)).astype(np.intp) if total else np.zeros(0, dtype=np.intp)
        lengths = np.diff(np.append(starts, total))
        row = np.searchsorted(offsets, starts, side="right") - 1
        first = np.searchsorted(row, np.arange(len(layouts)))
        return cls(
            sizes=sizes,
            kinds=np.repeat(leaves[:, 2], leaves[:, 1] - leaves[:, 0]).astype(np.int8),
            starts=starts,
            lengths=lengths,
            level=ending[last],
            row=row,
            column=np.arange(len(starts), dtype=np.intp) - first[row],
        )

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    @property
    def ends(self) -> Ints:
        """(U,) the last token of every unit."""
        return self.starts + self.lengths - 1

    @property
    def live(self) -> Bools:
        """(trajectories, longest trajectory in units): false in the padding."""
        return self.padded(np.ones(len(self.starts))) > 0.0

    def padded(self, unit_numbers: Floats) -> Floats:
        """(U,) -> (trajectories, longest trajectory in units), zeros in the padding."""
        shape = (len(self.sizes), int(self.column.max(initial=-1)) + 1)
        padded = np.zeros(shape, dtype=unit_numbers.dtype)
        padded[self.row, self.column] = unit_numbers
        return padded

    def spread(self, unit_numbers: Floats) -> Floats:
        """(U,) -> (N,): every token of a unit gets the unit's number."""
        return np.repeat(unit_numbers, self.lengths)

    def gathered(self, token_numbers: Floats) -> Floats:
        """(N,) -> (U,): the sum over the tokens of each unit."""
        return np.add.reduceat(token_numbers, self.starts) if len(self.starts) else np.zeros(0)

    def split(self, token_numbers: NDArray[np.generic]) -> list[NDArray[np.generic]]:
        """(N,) -> one array a trajectory."""
        return np.split(token_numbers, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []

    def shares(self, mask: Bools, by: Counting) -> Floats:
        """(N,) what a token of the mask counts for, so that every token, unit or dialogue counts once."""
        if by == "token":
            return np.ones(self.total)
        owner = np.repeat(np.arange(len(self.starts)) if by == "unit" else self.row, self.lengths)
        counts = np.bincount(owner, mask, minlength=1)
        return 1.0 / np.maximum(counts, 1.0)[owner]

    def transitions(self, stream: StreamSettings) -> tuple[Floats, Floats]:
        """gamma and lambda (U,) of the transition after every unit."""
        gamma = stream.gamma_step if stream.gamma_substep is None else stream.gamma_substep
        lam = stream.lam_step if stream.lam_substep is None else stream.lam_substep
        return (
            np.array([stream.gamma_token, gamma, stream.gamma_step, stream.gamma_turn])[self.level],
            np.array([stream.lam_token, lam, stream.lam_step, stream.lam_turn])[self.level],
        )


def _changes(keys: Ints) -> Bools:
    """(L,) true at the last of every run of equal rows."""
    return np.concatenate(((keys[1:] != keys[:-1]).any(axis=1), np.ones(min(len(keys), 1), dtype=bool)))


def check_inner(unit: Unit, streams: Mapping[str, StreamSettings]) -> None:
    """Raise ConfigError for a discount or lambda that acts inside a unit, where nothing is estimated."""
    inner = UNITS[: UNITS.index(unit)]
    for name, stream in streams.items():
        for field in (f"{kind}_{level}" for level in inner for kind in ("gamma", "lam")):
            if (value := getattr(stream, field)) not in (None, 1.0):
                raise ConfigError(
                    f"stream {name!r}: {field} is {value}, but with credit unit {unit!r} nothing is "
                    "estimated inside a unit; set it to 1 or choose a finer unit"
                )


def checked_pairs(scored: Sequence[ScoredTrajectory], rewards: Sequence[Rewards], stats: Sequence[TokenStats]) -> None:
    """Raise CreditError unless there is one of each for every trajectory, and none of them failed."""
    if not len(scored) == len(rewards) == len(stats):
        raise CreditError(f"{len(scored)} trajectories, {len(rewards)} rewards and {len(stats)} stats do not pair")
    for one in scored:
        if one.trajectory.failed:
            raise CreditError(f"trajectory {one.trajectory.id} failed ({one.trajectory.error}); it earns no credit")


def stream_rewards(name: str, stream: StreamSettings, rewards: Sequence[Rewards], layouts: Sequence[Layout]) -> Floats:
    """(N,): what the parts of one stream pay every token, summed."""
    return _joined([_reward(part, name, stream, lay) for part, lay in zip(rewards, layouts, strict=True)])


def stream_values(name: str, stats: Sequence[TokenStats], layouts: Sequence[Layout]) -> tuple[Floats, Floats]:
    """Of one head: the values before every token (N,), and after the last token of every trajectory (B,)."""
    values = [_values(one, name, lay) for one, lay in zip(stats, layouts, strict=True)]
    return _joined([one[:-1] for one in values]), np.array([one[-1] for one in values], dtype=np.float64)


def values_after(name: str, stats: Sequence[TokenStats], layouts: Sequence[Layout]) -> Floats:
    """(N,): the value of one head after every token, before anything else is said."""
    found = []
    for one, layout in zip(stats, layouts, strict=True):
        if name not in one.after:
            raise CreditError(
                f"trajectory {layout.trajectory_id}: the critic says nothing after a token for head {name!r}; it does "
                f"for {', '.join(sorted(one.after)) or 'none'}{nearest(name, one.after)}"
            )
        found.append(_checked(one.after[name], layout.tokens, f"values after tokens of {name!r}", layout))
    return _joined(found)


def stream_known(stream: StreamSettings, scored: Sequence[ScoredTrajectory], layouts: Sequence[Layout]) -> Bools:
    """(N,) false on the tokens of steps that an evaluator of this stream was to score and did not."""
    pairs = zip(scored, layouts, strict=True)
    return np.concatenate([np.zeros(0, bool), *(known_tokens(*pair, stream.sources) for pair in pairs)])


def of_kinds(kinds: NDArray[np.int8], stream: StreamSettings) -> Bools:
    """(N,) true on the tokens of the step kinds that a stream applies to."""
    if not stream.kinds:
        return np.ones(len(kinds), dtype=bool)
    return np.isin(kinds, [STEP_KINDS.index(kind) for kind in stream.kinds])


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _reward(rewards: Rewards, name: str, stream: StreamSettings, layout: Layout) -> Floats:
    """What the parts of one stream pay one trajectory, summed, (n,)."""
    total = np.zeros(layout.tokens)
    for source in stream.sources:
        part = rewards.get(name, {}).get(source)
        if part is None:
            raise CreditError(f"trajectory {layout.trajectory_id}: no rewards of part {source!r} in stream {name!r}")
        total += _checked(part, layout.tokens, f"rewards of part {source!r}", layout)
    return total


def _values(stats: TokenStats, name: str, layout: Layout) -> Floats:
    if name not in stats.values:
        raise CreditError(
            f"trajectory {layout.trajectory_id}: the critic has no head for stream {name!r}; "
            f"it has {', '.join(sorted(stats.values)) or 'none'}{nearest(name, stats.values)}"
        )
    return _checked(stats.values[name], layout.tokens + 1, f"values of stream {name!r}", layout)


def _checked(array: np.ndarray, size: int, what: str, layout: Layout) -> Floats:
    numbers = np.asarray(array, dtype=np.float64)
    if numbers.shape != (size,):
        raise CreditError(f"trajectory {layout.trajectory_id}: {what} have shape {numbers.shape}, should be ({size},)")
    if not np.isfinite(numbers).all():
        place = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise CreditError(f"trajectory {layout.trajectory_id}: {what} hold {numbers[place]} at token {place}")
    return numbers
