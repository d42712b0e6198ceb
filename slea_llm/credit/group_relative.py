"""Advantages without a critic: a dialogue against others of its task, a step against others from the same state.

Outcome groups: GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025, no division), RLOO (Ahmadian et al. 2024). State
groups: GiGPO (Feng et al. 2025) and SLEA-RL (Wang and Jiang, arXiv 2603.18079), `episode + w * step`. A stream of its
own for the turns, compared by their number: MT-GRPO (Zeng et al. 2025).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np

from slea_llm.checks import check_choices
from slea_llm.credit.maths import FLAT, Bools, Floats, Ints, gae, whiten
from slea_llm.credit.placement import Layout, lay_out
from slea_llm.credit.units import (
    Rewards,
    Tokens,
    check_inner,
    checked_pairs,
    of_kinds,
    stream_known,
    stream_rewards,
)
from slea_llm.errors import ConfigError, CreditError
from slea_llm.interfaces import Reducer
from slea_llm.settings import StreamSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats, Turn

STD_FLOOR = 1e-6
"""Added to a standard deviation, as the published implementations do."""
Scale = Literal["none", "unbiased", "population"]
State = Literal["state", "observation", "turn"]
CHOICES: Mapping[str, tuple[str, ...]] = {
    "baseline": ("mean", "leave_one_out"),
    "scale": ("none", "unbiased", "population"),
    "unit": ("step", "turn"),
    "state": ("state", "observation", "turn"),
    "episode_mean": ("trajectories", "turns"),
}


class GroupRelative:
    """Advantage = sum over streams of weight * (episode part + step_weight * step part); no critic is read.

    Episode part: the return of a dialogue minus the mean of its group, which is all dialogues of its task. Step part:
    the discounted return from a step on minus the mean of its state group, which is the steps taken in the same state
    by dialogues of that task. A unit without a score adds nothing to the returns that it is a part of, so that where
    scores are negative an evaluator that often fails pays for it. Groups of one, and groups that earned alike, give 0.
    A stream with gamma_turn 0 judges single steps: it has no episode part and its step part counts in full. Groups must
    not be parted over ranks.
    """

    name: ClassVar[str] = "group_relative"
    needs: ClassVar[frozenset[str]] = frozenset({"streams"})
    reads_critic: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        baseline: Literal["mean", "leave_one_out"] = "mean"
        """`leave_one_out`: the mean of the others, which is n / (n - 1) times the difference to that of all."""
        scale: Scale = "none"
        """Divide by the standard deviation of the group plus 1e-6, the `unbiased` one (GRPO) or that of the
        `population`. It makes easy and hard tasks weigh the same, and small differences large."""
        step_weight: float = 0.0
        """w, 0 or above: what the step part counts beside the episode part. 0: outcome groups alone; 1: as in SLEA."""
        unit: Literal["step", "turn"] = "step"
        """What the step part credits: leaf steps, which are compared at the same place of a reply, or whole replies, as
        published."""
        state: State = "state"
        """What makes two replies comparable: the environment's public state before them, the words that they answer
        (`observation`), or only the number of the `turn`."""
        similarity: float = 1.0
        """In (0, 1]. 1: states must be equal; below: they belong together when the similarity of their texts
        (difflib's ratio) to the first of a group reaches it; 0.85 in SLEA-RL."""
        episode_mean: Literal["trajectories", "turns"] = "trajectories"
        """Over what the group's mean and deviation are taken. `turns`: as in GiGPO's code, a dialogue counts once for
        every turn, so that long ones pull the mean towards themselves."""
        whiten_final: bool = False
        """Whiten the sum over all tokens and ranks once more."""
        clip: float = 0.0
        """Bound on the absolute final advantage. 0: none."""

    def __init__(self, config: Config, *, streams: Mapping[str, StreamSettings]) -> None:
        """Raises ConfigError for a setting out of range, and for one of a stream that only a critic would read."""
        self.config = config
        self.streams = dict(streams)
        self._check_config()
        digest = hashlib.sha256(repr((config, sorted(self.streams.items()))).encode()).hexdigest()[:12]
        self.version = f"{self.name}:{digest}"

    def _check_config(self) -> None:
        config = self.config
        check_choices(config, **CHOICES)
        if not 0.0 < config.similarity <= 1.0:
            raise ConfigError(f"similarity {config.similarity} is not in (0, 1]")
        if config.similarity < 1.0 and config.state == "turn":
            raise ConfigError("similarity compares states, but state is 'turn'; set it to 1")
        if not (config.step_weight >= 0.0 and config.clip >= 0.0):
            raise ConfigError(f"step_weight {config.step_weight} and clip {config.clip} must be 0 or above")
        unread = ("gamma_token", "lam_token", "lam_substep", "lam_step", "lam_turn", "whiten")
        default = {field.name: field.default for field in fields(StreamSettings)}
        for name, stream in self.streams.items():
            for key in unread:
                if (value := getattr(stream, key)) != default[key]:
                    raise ConfigError(
                        f"stream {name!r}: {key} is {value}, but {self.name} has no critic, no lambda and whitens no "
                        f"stream (its groups do that); take {key} out"
                    )
        check_inner("substep" if config.unit == "step" else "turn", self.streams)

    def assign(
        self,
        scored: Sequence[ScoredTrajectory],
        rewards: Sequence[Rewards],
        stats: Sequence[TokenStats],
        reducer: Reducer,
        *,
        progress: float = 0.0,
    ) -> tuple[AugmentedExperience, ...]:
        """Credit of these trajectories; every rank calls it, also one that holds none, with whole groups.

        `progress` in [0, 1], the share of training done, sets the weights of streams that fade. Raises CreditError for
        a failed trajectory and for rewards that do not fit, and where states are compared that are not told.
        """
        checked_pairs(scored, rewards, stats)
        layouts = [lay_out(one) for one in scored]
        # Leaf steps are what is compared; `turn` joins those of a reply.
        tokens = Tokens.of(layouts, "substep" if self.config.unit == "step" else "turn")
        groups = _numbered(_task_key(one) for one in scored)
        compared = self.config.step_weight > 0 or any(_judges(stream) for stream in self.streams.values())
        states = self._state_groups(scored, layouts, groups, tokens) if compared else None
        advantages, mask = np.zeros(tokens.total), np.zeros(tokens.total, dtype=bool)
        for name, stream in self.streams.items():
            weight = stream.weight_at(progress)
            if stream.fade_until and not weight:
                continue  # what has faded away claims no tokens either
            known = stream_known(stream, scored, layouts)
            applies = known & of_kinds(tokens.kinds, stream)
            paid = tokens.gathered(stream_rewards(name, stream, rewards, layouts))
            heard = np.logical_or.reduceat(known, tokens.starts) if tokens.total else known
            part = np.zeros(len(paid))
            if not _judges(stream):
                part += self._episodes(paid, heard, groups, scored, tokens)[tokens.row]
            if states is not None:
                part += (1.0 if _judges(stream) else self.config.step_weight) * self._steps(
                    stream, paid, heard, states, tokens
                )
            mask |= applies
            advantages += weight * np.where(applies, tokens.spread(part), 0.0)
        if self.config.whiten_final:
            (advantages,) = whiten([advantages], [mask], reducer)
        if self.config.clip > 0.0:
            advantages = np.clip(advantages, -self.config.clip, self.config.clip)
        return self._experiences(scored, rewards, stats, tokens, advantages, mask)

    def _episodes(
        self, paid: Floats, heard: Bools, groups: Ints, scored: Sequence[ScoredTrajectory], tokens: Tokens
    ) -> Floats:
        """(B,) what each dialogue earned against its group; 0 for one of which the stream knows nothing."""
        count = len(scored)
        known = np.bincount(tokens.row, heard, minlength=count) > 0
        returns = np.bincount(tokens.row, paid, minlength=count).astype(np.float64)
        weights = np.ones(count)
        if self.config.episode_mean == "turns":
            weights = np.array([float(len(one.trajectory.turns)) for one in scored])
        return self._against_group(returns, np.where(known, weights, 0.0), groups)

    def _steps(self, stream: StreamSettings, paid: Floats, heard: Bools, states: Ints, tokens: Tokens) -> Floats:
        """(U,) the discounted return from each unit on against its state group."""
        gammas, _ = tokens.transitions(stream)
        arrays = (tokens.padded(part) for part in (paid, np.zeros_like(paid), gammas, np.ones_like(gammas)))
        returns = gae(*arrays, bootstrap=np.zeros(len(tokens.sizes)), mask=tokens.live)[tokens.row, tokens.column]
        return self._against_group(returns, heard.astype(np.float64), states)

    def _against_group(self, numbers: Floats, weights: Floats, groups: Ints) -> Floats:
        """Each number against those of its group; numbers of weight 0 are in no statistic and get 0."""
        size = int(groups.max(initial=-1)) + 1
        total = np.maximum(np.bincount(groups, weights, minlength=size), 1.0)
        mean = np.bincount(groups, weights * numbers, minlength=size) / total
        difference = numbers - mean[groups]
        deviation = np.sqrt(np.bincount(groups, weights * np.square(difference), minlength=size) / total)
        # Numbers that are all equal, a single one among them, differ from their mean by rounding alone.
        counts = (weights > 0) & (deviation > FLAT * np.maximum(1.0, np.abs(mean)))[groups]
        if self.config.baseline == "leave_one_out":
            # With weights: the mean of the others, W / (W - w) times the difference to the mean of all.
            others = np.maximum(total[groups] - weights, FLAT)
            difference = difference * total[groups] / others
        if self.config.scale != "none":
            if self.config.scale == "unbiased":
                deviation = deviation * np.sqrt(total / np.maximum(total - 1.0, 1.0))
            difference = difference / (deviation + STD_FLOOR)[groups]
        return np.where(counts, difference, 0.0)

    def _state_groups(
        self, scored: Sequence[ScoredTrajectory], layouts: Sequence[Layout], groups: Ints, tokens: Tokens
    ) -> Ints:
        """(U,) a number for every unit, equal for those that are compared."""
        texts = [[self._state(one, turn) for turn in one.trajectory.turns] for one in scored]
        if self.config.similarity < 1.0:
            texts = _clustered(texts, groups, self.config.similarity)
        keys: list[Hashable] = []
        for one, layout, group, states in zip(scored, layouts, groups.tolist(), texts, strict=True):
            state = {turn.index: text for turn, text in zip(one.trajectory.turns, states, strict=True)}
            if self.config.unit == "turn":
                keys += [(group, state[turn.turn]) for turn in layout.turns if turn.end > turn.start]
                continue
            places: Counter[int] = Counter()
            for step in layout.steps:
                if step.end > step.start:
                    keys.append((group, state[step.key[0]], places[step.key[0]], step.kind))
                    places[step.key[0]] += 1
        if len(keys) != len(tokens.starts):
            raise CreditError(f"{len(keys)} states for {len(tokens.starts)} units; a turn or step has no place")
        return _numbered(keys)

    def _state(self, scored: ScoredTrajectory, turn: Turn) -> str:
        """What a reply is an answer to, as text."""
        if self.config.state == "turn":
            return str(turn.index)
        if self.config.state == "observation":
            return "\n".join(f"{message.role}: {message.content}" for message in turn.context)
        if not turn.state_before:
            raise CreditError(
                f"trajectory {scored.trajectory.id}: the environment tells no public state before turn {turn.index}; "
                "set credit.state to observation or turn"
            )
        return json.dumps(turn.state_before, sort_keys=True, ensure_ascii=False, default=str)

    def _experiences(
        self,
        scored: Sequence[ScoredTrajectory],
        rewards: Sequence[Rewards],
        stats: Sequence[TokenStats],
        tokens: Tokens,
        advantages: Floats,
        mask: Bools,
    ) -> tuple[AugmentedExperience, ...]:
        split = zip(scored, rewards, stats, tokens.split(advantages), tokens.split(mask), strict=True)
        return tuple(
            AugmentedExperience(
                scored=one,
                stats=stat,
                rewards=reward,
                advantages=advantage,
                returns={name: np.zeros(len(advantage)) for name in self.streams},
                weights=np.ones(len(advantage)),
                value_mask=np.zeros(len(advantage), dtype=bool),
                policy_mask=policy_mask,
                unit=self.config.unit,
                versions={"credit": self.version},
            )
            for one, reward, stat, advantage, policy_mask in split
        )


def _judges(stream: StreamSettings) -> bool:
    """Whether what a stream pays is a word on one step alone."""
    return stream.gamma_turn == 0.0


def _task_key(scored: ScoredTrajectory) -> str:
    trajectory = scored.trajectory
    return json.dumps([trajectory.environment, trajectory.task], sort_keys=True, ensure_ascii=False, default=str)


def _numbered(keys: Iterator[Hashable] | Sequence[Hashable]) -> Ints:
    """A number for every key, equal for equal ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)


def _clustered(texts: Sequence[Sequence[str]], groups: Ints, similarity: float) -> list[list[str]]:
    """Every text replaced by the first of its group's texts that is similar enough, the most frequent ones first.

    The order of the dialogues does not matter. A text that is like none before it opens a cluster of its own.
    """
    found: list[list[str]] = [[] for _ in texts]
    for group in range(int(groups.max(initial=-1)) + 1):
        members = np.flatnonzero(groups == group).tolist()
        counts = Counter(text for member in members for text in texts[member])
        prototypes: dict[str, str] = {}
        for text, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            firsts = dict.fromkeys(prototypes.values())
            prototypes[text] = next((first for first in firsts if _similar(text, first, similarity)), text)
        for member in members:
            found[member] = [prototypes[text] for text in texts[member]]
    return found


def _similar(text: str, first: str, threshold: float) -> bool:
    matcher = difflib.SequenceMatcher(None, text, first, autojunk=False)
    # The two quick ratios are upper bounds.
    return (
        matcher.real_quick_ratio() >= threshold and matcher.quick_ratio() >= threshold and matcher.ratio() >= threshold
    )
