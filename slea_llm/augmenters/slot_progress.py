"""Reward the filling of an order's slots, each slot counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from slea_llm.augmenters.potentials import check_potential
from slea_llm.augmenters.turns import names_in
from slea_llm.checks import check_choices, check_least, check_shares
from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredTrajectory, State


class SlotProgress:
    """A reward on the last step of each turn for the slots of the public state that it fills.

    With P(s) = `slot_reward` * |filled slots of s that are required| and coefficient c:

    - `potential`: F_t = c * (gamma * P(s_{t+1}) - P(s_t)), with P = 0 after the last turn of a dialogue that ended by
      itself (a dialogue that was cut keeps gamma * P, as its value is bootstrapped). The discounted sum is -c * P(s_0),
      whatever the agent does, so the best policy stays the best (Ng, Harada and Russell 1999). That needs `gamma` to be
      the turn discount of the stream that this part feeds, and a critic that is fitted to the shaped rewards.
    - `bonus`: c * `slot_reward` for every slot that is filled for the first time in the dialogue, in total never more
      than `bonus_bound`; filling, clearing and filling again earns nothing.
    - `every`: c * `slot_reward` for every slot, required or not, that the turn fills, without a bound: filling and
      clearing the same slot for ever is the best that an agent can do. Kept to be compared with.
    """

    name: ClassVar[str] = "slot_progress"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        form: Literal["potential", "bonus", "every"] = "potential"
        slot_reward: float = 0.5
        """Worth of one slot before the coefficient, above 0."""
        eta: float = 0.2
        """Coefficient of the reward while `schedule` is `constant`, 0 or more."""
        gamma: float = 0.99
        """Of `potential`: must equal `gamma_turn` of the stream that this part feeds; in [0, 1]."""
        bonus_bound: float = 2.0
        """Of `bonus`: most that a dialogue can earn; 0.2 of the reward for success (10) by default."""
        late_turns: int = 0
        """Turns over which a slot's worth falls, as max(0, 1 - turn / late_turns). 0: it does not fall."""
        schedule: Literal["constant", "ramp"] = "constant"
        """`ramp`: the coefficient is `ramp_coefficient` of the share of training done, in place of `eta`."""
        ramp_begin: float = 0.2
        """Share of training before which the coefficient is 0."""
        ramp_start: float = 0.1
        ramp_rise: float = 0.4
        """Added over a whole training's length; 0.4 is 0.01 an iteration in 40 iterations."""
        ramp_max: float = 0.2

        def __post_init__(self) -> None:
            check_choices(self, form=("potential", "bonus", "every"), schedule=("constant", "ramp"))
            check_shares(self, "gamma")
            check_least(self, slot_reward=0, eta=0, bonus_bound=0, late_turns=0)
            check_least(self, ramp_begin=0, ramp_start=0, ramp_rise=0, ramp_max=0)

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def fits(cls, config: Config, name: str, stream: StreamSettings) -> list[str]:
        """What is odd about feeding this stream. Raises UnsupportedError when a potential would not be one in it."""
        if config.form == "potential":
            check_potential(cls.name, config.gamma, name, stream)
        if config.form == "every":
            return [
                f"augmenter {cls.name}, form every: filling and clearing a slot earns without end; set form to "
                "potential or bonus"
            ]
        return []

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> reward`, one entry a turn, on its last leaf step; nothing for a failed dialogue.

        `progress` in [0, 1] is the share of training done. Raises CreditError when a state has no slots.
        """
        trajectory = scored.trajectory
        if trajectory.failed or not trajectory.turns:
            return {}
        filled = [self._filled(scored, turn.index, turn.state_before) for turn in trajectory.turns]
        filled.append(self._filled(scored, trajectory.turns[-1].index, trajectory.turns[-1].state_after))
        coefficient = self.coefficient(progress)
        if self.config.form == "potential":
            rewards = self._potential(filled, bootstrapped=trajectory.truncated)
        elif self.config.form == "every":
            rewards = [self._worth(turn) * len(after - before) for turn, (before, after) in enumerate(pairwise(filled))]
        else:
            rewards = self._bonus(filled, bound=self.config.bonus_bound / coefficient if coefficient else 0.0)
        last_step = {step.turn: step.index for step in scored.leaves()}
        return {
            (turn.index, last_step[turn.index]): coefficient * reward
            for turn, reward in zip(trajectory.turns, rewards, strict=True)
        }

    def coefficient(self, progress: float) -> float:
        """What the reward is multiplied with when this share of training is done."""
        config = self.config
        if config.schedule == "constant":
            return config.eta
        return ramp_coefficient(
            progress,
            begin=config.ramp_begin,
            start=config.ramp_start,
            rise=config.ramp_rise,
            maximum=config.ramp_max,
        )

    def _worth(self, turn: int) -> float:
        """Of one slot in turn `turn`."""
        late = self.config.late_turns
        return self.config.slot_reward * (max(0.0, 1 - turn / late) if late else 1.0)

    def _potential(self, filled: Sequence[frozenset[str]], *, bootstrapped: bool) -> list[float]:
        # The late decay is inside the potential: one that moves with time telescopes as well.
        potentials = [self._worth(turn) * len(slots) for turn, slots in enumerate(filled)]
        if not bootstrapped:
            potentials[-1] = 0.0
        return [self.config.gamma * after - before for before, after in pairwise(potentials)]

    def _bonus(self, filled: Sequence[frozenset[str]], *, bound: float) -> list[float]:
        seen = set(filled[0])
        left = bound
        rewards: list[float] = []
        for turn, slots in enumerate(filled[1:]):
            reward = min(left, self._worth(turn) * len(slots - seen))
            seen |= slots
            left -= reward
            rewards.append(reward)
        return rewards

    def _filled(self, scored: ScoredTrajectory, turn: int, state: State) -> frozenset[str]:
        """Slots that are filled in a state; those alone that are required, but for the form `every`."""
        required, filled = (
            names_in(state, key, part=self.name, scored=scored, turn=turn) for key in ("required", "filled")
        )
        return filled if self.config.form == "every" else required & filled


def ramp_coefficient(at: float, *, begin: float, start: float, rise: float, maximum: float) -> float:
    """0 before `begin`, then `start` and `rise` more for every unit, at most `maximum`; any unit of training time."""
    return 0.0 if at < begin else min(maximum, start + rise * (at - begin))
