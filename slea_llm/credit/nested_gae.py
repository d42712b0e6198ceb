"""Generalised advantage estimation with a discount and a lambda of its own for every transition.

Token-, sub-step-, step- and turn-level PPO and outcome-only PPO are settings of it (docs/credit.md). Schulman et al.
2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16, with gamma and lambda
indexed by the transition; streams as the two heads of Burda et al. 2018 ("Random Network Distillation").
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from slea_llm.credit.maths import Bools, Floats, gae, length_adaptive_lambda, whiten
from slea_llm.credit.placement import Layout, lay_out
from slea_llm.credit.units import (
    COUNTINGS,
    UNITS,
    Counting,
    Rewards,
    Tokens,
    Unit,
    check_inner,
    checked_pairs,
    of_kinds,
    stream_known,
    stream_rewards,
    stream_values,
    values_after,
)
from slea_llm.errors import ConfigError
from slea_llm.interfaces import Reducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats

Q_HEAD = "_q"
"""Added to the name of a stream it names the head that judges a step once it is taken."""


class _Estimate(NamedTuple):
    """One stream, spread over the tokens of each unit, (N,) each; `own` is what the critic itself says before it."""

    advantage: Floats
    target: Floats
    own: Floats


class NestedGae:
    """GAE over tokens nested in sub-steps, steps and turns, one recursion a reward stream.

    A stream's advantages are whitened over the tokens that it applies to, weighted and summed; the sum is whitened
    once more over the tokens that any stream applies to. Whitening runs over all ranks.
    """

    name: ClassVar[str] = "nested_gae"
    needs: ClassVar[frozenset[str]] = frozenset({"streams"})
    reads_critic: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        unit: Unit = "token"
        """Where the critic is read and supervised; with `substep` (leaf steps), `step` (steps that refine no other) and
        `turn` a unit's tokens share one advantage."""
        conditional: Literal["none", "after_state", "q_head"] = "none"
        """The value of what follows a unit. `none`: that of the context before the next one, the user's answer
        included. `after_state`: the critic is also read right after a turn, so that A = r + gamma V(after) - V(before)
        holds nothing of the user's luck (biased as far as V(after) is wrong, at every lambda). `q_head`: another head
        a stream reads the unit's last token and learns its return, A = Q(before, unit) - V(before); it needs a unit
        above the token."""
        lam_critic: float | None = None
        """Lambda of the critic's targets, at every transition. None: the stream's own; 1: Monte Carlo returns."""
        length_alpha: float = 0.0
        """Above 0: inside a step lambda is 1 - 1 / (alpha * tokens of the dialogue). 0: the stream's lam_token."""
        whiten_final: bool = True
        """Whiten the weighted sum of the streams once more."""
        whiten_by: Counting = "token"
        """What counts once in the mean and deviation of every whitening. `dialogue`: however long it is; then equally
        good short and long dialogues are equally good on average (docs/credit.md has the numbers)."""
        clip: float = 0.0
        """Bound on the absolute final advantage. 0: none."""

    def __init__(self, config: Config, *, streams: Mapping[str, StreamSettings]) -> None:
        """Raises ConfigError for a setting out of range or one that the unit would ignore."""
        self.config = config
        self.streams = dict(streams)
        self._check_config()
        digest = hashlib.sha256(repr((config, sorted(self.streams.items()))).encode()).hexdigest()[:12]
        self.version = f"{self.name}:{digest}"

    @property
    def heads(self) -> tuple[str, ...]:
        """The value heads that it reads: one a stream, and with `q_head` a second one."""
        more = [name + Q_HEAD for name in self.streams] if self.config.conditional == "q_head" else []
        return (*self.streams, *more)

    def _check_config(self) -> None:
        config = self.config
        if config.unit not in UNITS:
            raise ConfigError(f"credit unit {config.unit!r} is not one of {', '.join(UNITS)}")
        if config.lam_critic is not None and not 0.0 <= config.lam_critic <= 1.0:
            raise ConfigError(f"lam_critic {config.lam_critic} is outside [0, 1]")
        if config.clip < 0.0 or config.length_alpha < 0.0:
            raise ConfigError(f"clip {config.clip} and length_alpha {config.length_alpha} must be 0 or above")
        if config.length_alpha > 0.0 and config.unit != "token":
            raise ConfigError(f"length_alpha acts on tokens only; set it to 0 or unit {config.unit!r} to 'token'")
        if config.whiten_by not in COUNTINGS:
            raise ConfigError(f"whiten_by {config.whiten_by!r} is not one of {', '.join(COUNTINGS)}")
        if config.conditional not in ("none", "after_state", "q_head"):
            raise ConfigError(f"conditional {config.conditional!r} is not one of none, after_state, q_head")
        if config.conditional == "q_head" and config.unit == "token":
            raise ConfigError("conditional 'q_head' judges a whole unit; set unit to substep, step or turn")
        if len(set(self.heads)) < len(self.heads):
            raise ConfigError(f"two heads of {', '.join(self.heads)} have one name; rename a stream")
        check_inner(config.unit, self.streams)

    def assign(
        self,
        scored: Sequence[ScoredTrajectory],
        rewards: Sequence[Rewards],
        stats: Sequence[TokenStats],
        reducer: Reducer,
        *,
        progress: float = 0.0,
    ) -> tuple[AugmentedExperience, ...]:
        """Credit of these trajectories; every rank calls it, also one that holds none.

        `progress` in [0, 1], the share of training done, sets the weights of streams that fade.

        Raises CreditError for a failed trajectory and for rewards or values that do not fit the sampled tokens.
        """
        checked_pairs(scored, rewards, stats)
        layouts = [lay_out(one) for one in scored]
        tokens = Tokens.of(layouts, self.config.unit)
        cut = np.array([one.trajectory.truncated for one in scored], dtype=bool)
        raw, returns, applies, after = {}, {}, {}, {}
        for name, stream in self.streams.items():
            known = stream_known(stream, scored, layouts)
            reward = stream_rewards(name, stream, rewards, layouts)
            estimate = self._estimate(name, stream, tokens, reward, layouts, stats, cut)
            # Without a score there is nothing to learn from: the critic's target is its own word.
            returns[name] = np.where(known, estimate.target, estimate.own)
            raw[name] = estimate.advantage
            applies[name] = known & of_kinds(tokens.kinds, stream)
            if self.config.conditional == "q_head":
                head = name + Q_HEAD
                after[head] = np.where(known, estimate.target, values_after(head, stats, layouts))
            elif self.config.conditional == "after_state":
                own, nothing = values_after(name, stats, layouts), np.zeros(min(len(known), 1))
                after[name] = np.where(np.append(known[1:], nothing > 0), np.append(estimate.target[1:], nothing), own)
        weights = {name: stream.weight_at(progress) for name, stream in self.streams.items()}
        advantages, mask = self._combine(raw, applies, weights, tokens, reducer)
        return self._experiences(scored, rewards, stats, tokens, advantages, mask, returns, after)

    def _estimate(
        self,
        name: str,
        stream: StreamSettings,
        tokens: Tokens,
        reward: Floats,
        layouts: Sequence[Layout],
        stats: Sequence[TokenStats],
        cut: Bools,
    ) -> _Estimate:
        before, last = stream_values(name, stats, layouts)
        bootstrap = np.where(cut, last, 0.0)
        value, paid = before[tokens.starts], tokens.gathered(reward)
        gammas, lams = tokens.transitions(stream)
        if self.config.length_alpha > 0.0:
            adaptive = length_adaptive_lambda(tokens.sizes, self.config.length_alpha)[tokens.row]
            lams = np.where(tokens.level == UNITS.index("token"), adaptive, lams)
        live = tokens.live

        def estimate(paid: Floats, lambdas: Floats) -> Floats:
            arrays = (tokens.padded(part) for part in (paid, value, gammas, lambdas))
            return gae(*arrays, bootstrap=bootstrap, mask=live)[tokens.row, tokens.column]

        plain = estimate(paid, lams)
        critic = self.config.lam_critic
        target = (plain if critic is None else estimate(paid, np.full_like(lams, critic))) + value
        advantage = plain
        if self.config.conditional == "q_head":
            advantage = values_after(name + Q_HEAD, stats, layouts)[tokens.ends] - value
        elif self.config.conditional == "after_state":
            # The next value is moved to where nobody has answered yet, so that what the answer changed is left out.
            answered = np.append(value[1:], value[:1]) - values_after(name, stats, layouts)[tokens.ends]
            advantage = estimate(paid - np.where(_answered(tokens), gammas * answered, 0.0), lams)
        return _Estimate(tokens.spread(advantage), tokens.spread(target), tokens.spread(value))

    def _combine(
        self,
        raw: Mapping[str, Floats],
        applies: Mapping[str, Bools],
        weights: Mapping[str, float],
        tokens: Tokens,
        reducer: Reducer,
    ) -> tuple[Floats, Bools]:
        """The one advantage of every token, and where any stream gave one."""
        by = self.config.whiten_by
        whitened = [name for name, stream in self.streams.items() if stream.whiten]
        parts = {name: np.where(applies[name], raw[name], 0.0) for name in self.streams}
        masks = [applies[name] for name in whitened]
        white = whiten([raw[name] for name in whitened], masks, reducer, [tokens.shares(mask, by) for mask in masks])
        parts.update(zip(whitened, white, strict=True))
        mask = np.zeros(tokens.total, dtype=bool)
        advantages = np.zeros(tokens.total)
        for name, stream in self.streams.items():
            if stream.fade_until and not weights[name]:
                continue  # what has faded away claims no tokens either
            mask |= applies[name]
            advantages += weights[name] * parts[name]
        if self.config.whiten_final:
            if len(whitened) == len(self.streams) == 1 and weights[whitened[0]] > 0.0:
                advantages = parts[whitened[0]]  # whitened already: once more would change no more than its last digit
            else:
                (advantages,) = whiten([advantages], [mask], reducer, [tokens.shares(mask, by)])
        if self.config.clip > 0.0:
            advantages = np.clip(advantages, -self.config.clip, self.config.clip)
        return advantages, mask

    def _experiences(
        self,
        scored: Sequence[ScoredTrajectory],
        rewards: Sequence[Rewards],
        stats: Sequence[TokenStats],
        tokens: Tokens,
        advantages: Floats,
        mask: Bools,
        returns: Mapping[str, Floats],
        after: Mapping[str, Floats],
    ) -> tuple[AugmentedExperience, ...]:
        read, read_after = np.zeros(tokens.total, dtype=bool), np.zeros(tokens.total, dtype=bool)
        read[tokens.starts] = True
        if self.config.conditional == "q_head":
            read_after[tokens.ends] = True
        elif self.config.conditional == "after_state":
            # Within a turn the value after a unit is the one before the next, which is supervised already.
            read_after[tokens.ends[_answered(tokens)]] = True
        split_returns = {name: tokens.split(target) for name, target in returns.items()}
        split_after = {name: tokens.split(target) for name, target in after.items()}
        arrays = (tokens.split(array) for array in (advantages, mask, read, read_after))
        split = zip(scored, rewards, stats, *arrays, strict=True)
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
                after_returns={name: targets[index] for name, targets in split_after.items()},
                after_mask=after_mask if split_after else None,
            )
            for index, (one, reward, stat, advantage, policy_mask, value_mask, after_mask) in enumerate(split)
        )


def _answered(tokens: Tokens) -> Bools:
    """(U,) true for the last unit of every turn but the last: somebody answers, and the agent speaks again."""
    followed = np.append(tokens.row[1:] == tokens.row[:-1], np.zeros(min(len(tokens.row), 1), dtype=bool))
    ends_a_turn: Bools = tokens.level == UNITS.index("turn")
    return followed & ends_a_turn
