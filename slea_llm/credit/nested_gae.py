"""Generalised advantage estimation with a discount and a lambda of its own for every transition.

Token-, step- and turn-level PPO and outcome-only PPO are settings of it (docs/credit.md). Schulman et al. 2016,
"High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16, with gamma and lambda
indexed by the transition; streams as the two heads of Burda et al. 2018 ("Random Network Distillation").
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from slea_llm.credit.placement import Layout, known_tokens, lay_out
from slea_llm.errors import ConfigError, CreditError, nearest
from slea_llm.interfaces import Reducer
from slea_llm.settings import StreamSettings
from slea_llm.types import STEP_KINDS, AugmentedExperience, ScoredTrajectory, TokenStats

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]

FLAT = 1e-8
"""Standard deviation, relative to max(1, |mean|), at or below which numbers count as all equal."""

_TOKEN, _STEP, _TURN = 0, 1, 2  # what ends with a token: nothing, a step, a turn


def gae(rewards: Floats, values: Floats, gammas: Floats, lams: Floats, *, bootstrap: Floats, mask: Bools) -> Floats:
    """Advantages of padded trajectories, scanned backwards, all trajectories at once.

    Every array has shape (trajectories, tokens) but `bootstrap` (trajectories,), the value after the last token: 0
    where the dialogue terminated, the critic's word where it was cut. `gammas[:, i]` and `lams[:, i]` belong to the
    transition from token i to the next unmasked one. Masked positions (padding, tokens that were not sampled) are
    stepped over: whatever they hold reaches nothing, and their advantage is 0. With i' the next unmasked token:

        delta_i = r_i + gamma_i V_i' - V_i,    A_i = delta_i + gamma_i lam_i A_i'.

    >>> row = lambda *numbers: np.array([numbers], dtype=float)
    >>> gae(row(0, 0, 1), row(.5, .6, .7), row(1, 1, 1), row(.95, .95, .95),
    ...     bootstrap=np.zeros(1), mask=np.ones((1, 3), bool)).round(5).tolist()
    [[0.46575, 0.385, 0.3]]
    """
    count, length = values.shape
    # Columns are walked one by one: laid out by token each of them is contiguous. Masked slots are emptied first, so
    # that not even a NaN in the padding survives.
    live = np.ascontiguousarray(mask.T)
    reward, value, gamma, lam = (
        np.where(live, np.asarray(array, dtype=np.float64).T, 0.0) for array in (rewards, values, gammas, lams)
    )
    decay = gamma * lam
    advantages = np.zeros((length, count))
    following_value = np.asarray(bootstrap, dtype=np.float64)
    following_advantage = np.zeros(count)
    for index in range(length - 1, -1, -1):
        delta = reward[index] + gamma[index] * following_value - value[index]
        here = live[index]
        following_advantage = np.where(here, delta + decay[index] * following_advantage, following_advantage)
        following_value = np.where(here, value[index], following_value)
        advantages[index] = following_advantage
    return np.where(mask, advantages.T, 0.0)


def whiten(arrays: Sequence[Floats], masks: Sequence[Bools], reducer: Reducer) -> list[Floats]:
    """Each array to mean 0 and population standard deviation 1 over its mask, over all ranks; 0 outside the mask.

    Numbers that are all equal, a single number among them, become 0. No epsilon is added to the deviation, so that
    whitening twice is whitening once. Two sums across ranks whatever the number of arrays, also from an empty rank.
    """
    picked = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
    sums = reducer.sum([number for part in picked for number in (float(part.size), float(part.sum()))])
    counts = [max(count, 1.0) for count in sums[0::2]]
    means = [total / count for total, count in zip(sums[1::2], counts, strict=True)]
    # Corrected two-pass form (Chan et al. 1983): what rounding left of the mean is taken out with the deviations.
    deviations = [part - mean for part, mean in zip(picked, means, strict=True)]
    rests = reducer.sum([number for part in deviations for number in (float(part.sum()), float(np.square(part).sum()))])
    whitened = []
    for index, (array, mask, part) in enumerate(zip(arrays, masks, deviations, strict=True)):
        rest, square = rests[2 * index] / counts[index], rests[2 * index + 1] / counts[index]
        deviation = math.sqrt(max(square - rest * rest, 0.0))
        result = np.zeros_like(array)
        if deviation > FLAT * max(1.0, abs(means[index])):
            result[mask] = (part - rest) / deviation
        whitened.append(result)
    return whitened


def length_adaptive_lambda(tokens: Ints, alpha: float) -> Floats:
    """lambda = 1 - 1 / (alpha * tokens), at least 0 (VAPO, Yue et al. 2025)."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(tokens, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The sampled tokens of all trajectories laid end to end (N), cut into credit units (U).

    `sizes` (B,) tokens of each trajectory; `kinds` (N,) index into STEP_KINDS; `starts` and `lengths` (U,) of the
    units; `level` (U,) what ends with a unit's last token; `row`, `column` (U,) its place in the padded arrays.
    """

    sizes: Ints
    kinds: NDArray[np.int8]
    starts: Ints
    lengths: Ints
    level: NDArray[np.int8]
    row: Ints
    column: Ints

    @classmethod
    def of(cls, layouts: Sequence[Layout], unit: str) -> _Tokens:
        sizes = np.array([layout.tokens for layout in layouts], dtype=np.intp)
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)
        total = int(offsets[-1])
        pairs = list(zip(layouts, offsets.tolist(), strict=False))
        steps = np.array(
            [(base + s.start, base + s.end, STEP_KINDS.index(s.kind)) for lay, base in pairs for s in lay.steps],
            dtype=np.intp,
        ).reshape(-1, 3)
        turns = np.array(
            [(base + t.start, base + t.end) for lay, base in pairs for t in lay.turns], dtype=np.intp
        ).reshape(-1, 2)
        steps, turns = steps[steps[:, 1] > steps[:, 0]], turns[turns[:, 1] > turns[:, 0]]
        ending = np.full(total, _TOKEN, dtype=np.int8)
        ending[steps[:, 1] - 1] = _STEP
        ending[turns[:, 1] - 1] = _TURN
        starts = {"token": np.arange(total, dtype=np.intp), "step": steps[:, 0], "turn": turns[:, 0]}[unit]
        lengths = np.diff(np.append(starts, total))
        row = np.searchsorted(offsets, starts, side="right") - 1
        first = np.searchsorted(row, np.arange(len(layouts)))
        return cls(
            sizes=sizes,
            kinds=np.repeat(steps[:, 2], steps[:, 1] - steps[:, 0]).astype(np.int8),
            starts=starts,
            lengths=lengths,
            level=ending[starts + lengths - 1],
            row=row,
            column=np.arange(len(starts), dtype=np.intp) - first[row],
        )

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

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


class NestedGae:
    """GAE over tokens nested in steps nested in turns, one recursion a reward stream.

    A stream's advantages are whitened over the tokens that it applies to, weighted and summed; the sum is whitened
    once more over the tokens that any stream applies to. Whitening runs over all ranks.
    """

    name: ClassVar[str] = "nested_gae"
    needs: ClassVar[frozenset[str]] = frozenset({"streams"})

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        unit: Literal["token", "step", "turn"] = "token"
        """Where the critic is read and supervised; with `step` and `turn` a unit's tokens share one advantage."""
        lam_critic: float | None = None
        """Lambda of the critic's targets, at every transition. None: the stream's own; 1: Monte Carlo returns."""
        length_alpha: float = 0.0
        """Above 0: inside a step lambda is 1 - 1 / (alpha * tokens of the dialogue). 0: the stream's lam_token."""
        whiten_final: bool = True
        """Whiten the weighted sum of the streams once more."""
        clip: float = 0.0
        """Bound on the absolute final advantage. 0: none."""

    def __init__(self, config: Config, *, streams: Mapping[str, StreamSettings]) -> None:
        """Raises ConfigError for a setting out of range or one that the unit would ignore."""
        self.config = config
        self.streams = dict(streams)
        self._check_config()
        digest = hashlib.sha256(repr((config, sorted(self.streams.items()))).encode()).hexdigest()[:12]
        self.version = f"{self.name}:{digest}"

    def _check_config(self) -> None:
        config = self.config
        if config.unit not in ("token", "step", "turn"):
            raise ConfigError(f"credit unit {config.unit!r} is not one of token, step, turn")
        if config.lam_critic is not None and not 0.0 <= config.lam_critic <= 1.0:
            raise ConfigError(f"lam_critic {config.lam_critic} is outside [0, 1]")
        if config.clip < 0.0 or config.length_alpha < 0.0:
            raise ConfigError(f"clip {config.clip} and length_alpha {config.length_alpha} must be 0 or above")
        if config.length_alpha > 0.0 and config.unit != "token":
            raise ConfigError(f"length_alpha acts on tokens only; set it to 0 or unit {config.unit!r} to 'token'")
        inner = {"token": (), "step": ("token",), "turn": ("token", "step")}[config.unit]
        for name, stream in self.streams.items():
            for field in (f"{kind}_{level}" for level in inner for kind in ("gamma", "lam")):
                if (value := getattr(stream, field)) != 1.0:
                    raise ConfigError(
                        f"stream {name!r}: {field} is {value}, but with credit unit {config.unit!r} nothing is "
                        f"estimated inside a unit; set it to 1 or choose a finer unit"
                    )

    def assign(
        self,
        scored: Sequence[ScoredTrajectory],
        rewards: Sequence[Mapping[str, Mapping[str, np.ndarray]]],
        stats: Sequence[TokenStats],
        reducer: Reducer,
        *,
        progress: float = 0.0,
    ) -> tuple[AugmentedExperience, ...]:
        """Credit of these trajectories; every rank calls it, also one that holds none.

        `progress` in [0, 1], the share of training done, sets the weights of streams that fade.

        Raises CreditError for a failed trajectory and for rewards or values that do not fit the sampled tokens.
        """
        if not len(scored) == len(rewards) == len(stats):
            raise CreditError(f"{len(scored)} trajectories, {len(rewards)} rewards and {len(stats)} stats do not pair")
        for one in scored:
            if one.trajectory.failed:
                raise CreditError(f"trajectory {one.trajectory.id} failed ({one.trajectory.error}); it earns no credit")
        layouts = [lay_out(one) for one in scored]
        tokens = _Tokens.of(layouts, self.config.unit)
        raw, returns, applies = {}, {}, {}
        for name, stream in self.streams.items():
            reward = _joined([_reward(part, name, stream, lay) for part, lay in zip(rewards, layouts, strict=True)])
            values = [_values(one, name, lay) for one, lay in zip(stats, layouts, strict=True)]
            ends = zip(scored, values, strict=True)
            cut = np.array([value[-1] if one.trajectory.truncated else 0.0 for one, value in ends], dtype=np.float64)
            value = _joined([one[:-1] for one in values])
            pairs = zip(scored, layouts, strict=True)
            known = np.concatenate([np.zeros(0, bool), *(known_tokens(*pair, stream.sources) for pair in pairs)])
            advantage, target = self._estimate(stream, tokens, reward, value, cut)
            # Without a score there is nothing to learn from: the critic's target is its own word.
            returns[name] = np.where(known, target, tokens.spread(value[tokens.starts]))
            raw[name] = advantage
            applies[name] = known & _of_kinds(tokens.kinds, stream)
        weights = {name: stream.weight_at(progress) for name, stream in self.streams.items()}
        advantages, mask = self._combine(raw, applies, weights, tokens.total, reducer)
        return self._experiences(scored, rewards, stats, tokens, advantages, mask, returns)

    def _estimate(
        self, stream: StreamSettings, tokens: _Tokens, reward: Floats, value: Floats, cut: Floats
    ) -> tuple[Floats, Floats]:
        """Advantages and critic targets (N,) of one stream, spread over the tokens of each unit."""
        unit_value = value[tokens.starts]
        gammas = np.array([stream.gamma_token, stream.gamma_step, stream.gamma_turn])[tokens.level]
        lams = np.array([stream.lam_token, stream.lam_step, stream.lam_turn])[tokens.level]
        if self.config.length_alpha > 0.0:
            adaptive = length_adaptive_lambda(tokens.sizes, self.config.length_alpha)[tokens.row]
            lams = np.where(tokens.level == _TOKEN, adaptive, lams)
        mask = tokens.padded(np.ones(len(tokens.starts))) > 0.0

        def estimate(lambdas: Floats) -> Floats:
            arrays = (tokens.padded(part) for part in (tokens.gathered(reward), unit_value, gammas, lambdas))
            return gae(*arrays, bootstrap=cut, mask=mask)[tokens.row, tokens.column]

        advantage = estimate(lams)
        critic = self.config.lam_critic
        target = advantage if critic is None else estimate(np.full_like(lams, critic))
        return tokens.spread(advantage), tokens.spread(target + unit_value)

    def _combine(
        self,
        raw: Mapping[str, Floats],
        applies: Mapping[str, Bools],
        weights: Mapping[str, float],
        total: int,
        reducer: Reducer,
    ) -> tuple[Floats, Bools]:
        """The one advantage of every token, and where any stream gave one."""
        whitened = [name for name, stream in self.streams.items() if stream.whiten]
        parts = {name: np.where(applies[name], raw[name], 0.0) for name in self.streams}
        white = whiten([raw[name] for name in whitened], [applies[name] for name in whitened], reducer)
        parts.update(zip(whitened, white, strict=True))
        mask = np.zeros(total, dtype=bool)
        advantages = np.zeros(total)
        for name, stream in self.streams.items():
            if stream.fade_until and not weights[name]:
                continue  # what has faded away claims no tokens either
            mask |= applies[name]
            advantages += weights[name] * parts[name]
        if self.config.whiten_final:
            (advantages,) = whiten([advantages], [mask], reducer)
        if self.config.clip > 0.0:
            advantages = np.clip(advantages, -self.config.clip, self.config.clip)
        return advantages, mask

    def _experiences(
        self,
        scored: Sequence[ScoredTrajectory],
        rewards: Sequence[Mapping[str, Mapping[str, np.ndarray]]],
        stats: Sequence[TokenStats],
        tokens: _Tokens,
        advantages: Floats,
        mask: Bools,
        returns: Mapping[str, Floats],
    ) -> tuple[AugmentedExperience, ...]:
        read = np.zeros(tokens.total, dtype=bool)
        read[tokens.starts] = True
        split_returns = {name: tokens.split(target) for name, target in returns.items()}
        split = zip(
            scored, rewards, stats, tokens.split(advantages), tokens.split(mask), tokens.split(read), strict=True
        )
        return tuple(
            AugmentedExperience(
                scored=one,
                stats=stat,
                rewards=reward,
                advantages=advantage,
                returns={name: targets[index] for name, targets in split_returns.items()},
                weights=np.ones(len(advantage)),
                value_mask=value_mask,
                policy_mask=policy_mask,
                unit=self.config.unit,
                versions={"credit": self.version},
            )
            for index, (one, reward, stat, advantage, policy_mask, value_mask) in enumerate(split)
        )


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _reward(
    rewards: Mapping[str, Mapping[str, np.ndarray]], name: str, stream: StreamSettings, layout: Layout
) -> Floats:
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


def _of_kinds(kinds: NDArray[np.int8], stream: StreamSettings) -> Bools:
    if not stream.kinds:
        return np.ones(len(kinds), dtype=bool)
    return np.isin(kinds, [STEP_KINDS.index(kind) for kind in stream.kinds])
