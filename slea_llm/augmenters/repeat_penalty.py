"""Failure analysis by rules: charge the steps that ask for what is settled, ask the same again, or lead nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from slea_llm.augmenters.turns import changed, names_in, said, speaking_steps
from slea_llm.checks import check_choices, check_least
from slea_llm.errors import ConfigError, CreditError
from slea_llm.types import ScoredTrajectory, State, Turn


class RepeatPenalty:
    """A negative reward on the last spoken step of every turn that one of these rules charges, once a turn:

    - it asks for a slot that was settled before the turn, by the state's count of questions;
    - it says what the turn before said, although the answer to that had changed the state, or for the third time;
    - the state has not changed for `stall_turns` turns.

    A dialogue never loses more than `bound`. This is a reward, so it moves the best policy: it belongs in a stream with
    a critic of its own targets, never into a potential. Charging failed dialogues alone (the default) says what went
    wrong; it does not forbid a repetition that helped.
    """

    name: ClassVar[str] = "repeat_penalty"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        penalty: float = 0.5
        """Charged for a turn, 0 or more."""
        bound: float = 1.0
        """The most that a dialogue can lose; the size of the reward of a failure by default."""
        dialogues: Literal["failures", "all"] = "failures"
        """Which dialogues are charged. One that was cut, or that the user left, did not succeed either."""
        settled: str = "confirmed"
        """Key of the public state that lists the settled slots; `filled` is stricter."""
        asked: str = "asked"
        """Key of the public state that counts questions by slot. Empty: the first rule is off."""
        again: bool = True
        """Whether saying the same again is charged."""
        stall_turns: int = 4
        """Turns without a change of state from which each is charged; numbers in the state do not count. 0: off."""

        def __post_init__(self) -> None:
            check_choices(self, dialogues=("failures", "all"))
            check_least(self, penalty=0, bound=0, stall_turns=0)
            if self.asked and not self.settled:
                raise ConfigError("settled '' names no key of the state; give one, or set asked to '' as well")

    def __init__(self, config: Config) -> None:
        self.config = config

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> reward` below 0 for the charged steps alone.

        Raises CreditError when a state lacks a key that the settings name.
        """
        del progress
        trajectory = scored.trajectory
        if trajectory.failed or (trajectory.success and self.config.dialogues == "failures"):
            return {}
        speaking, left = speaking_steps(scored), self.config.bound
        charged: dict[tuple[int, int], float] = {}
        for turn in self.repeats(scored):
            amount = min(self.config.penalty, left)
            if amount > 0.0 and turn in speaking:
                charged[speaking[turn]] = -amount
                left -= amount
        return charged

    def repeats(self, scored: ScoredTrajectory) -> list[int]:
        """The turns that a rule charges, in order, however the dialogue ended."""
        turns = scored.trajectory.turns
        texts = [" ".join(text.casefold().split()) for text in said(scored).values()]
        moved = [changed(turn.state_before, turn.state_after) for turn in turns]
        return [
            turn.index
            for place, turn in enumerate(turns)
            if self._asks_again(scored, turn)
            or (self.config.again and _said_again(texts, moved, place))
            or (self.config.stall_turns and not any(_last(moved, place, self.config.stall_turns, missing=True)))
        ]

    def _asks_again(self, scored: ScoredTrajectory, turn: Turn) -> bool:
        if not self.config.asked:
            return False
        before, after = (self._counts(state, scored, turn) for state in (turn.state_before, turn.state_after))
        asked = {slot for slot, count in after.items() if count > before.get(slot, 0)}
        if not asked:
            return False
        settled = names_in(turn.state_before, self.config.settled, part=self.name, scored=scored, turn=turn.index)
        return bool(asked & settled)

    def _counts(self, state: State, scored: ScoredTrajectory, turn: Turn) -> Mapping[str, float]:
        counts = state.get(self.config.asked)
        if not isinstance(counts, Mapping):
            raise CreditError(
                f"{self.name}: a state of turn {turn.index} in trajectory {scored.trajectory.id!r} has no table "
                f"{self.config.asked!r} of questions by slot; set asked to '' to leave that rule out"
            )
        return counts


def _said_again(texts: Sequence[str], moved: Sequence[bool], place: int) -> bool:
    """Whether a turn says what the one before said, which was answered; or what the two before said."""
    if place == 0 or not texts[place] or texts[place] != texts[place - 1]:
        return False
    return moved[place - 1] or (place > 1 and texts[place - 2] == texts[place])


def _last(flags: Sequence[bool], place: int, count: int, *, missing: bool) -> list[bool]:
    """The flags of the last `count` places up to this one; `missing` for those before the first."""
    return [flags[at] if at >= 0 else missing for at in range(place - count + 1, place + 1)]
