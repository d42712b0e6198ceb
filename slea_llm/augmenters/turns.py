"""What several augmenters read off a dialogue: its steps by turn, what the user said, what a public state holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slea_llm.errors import CreditError
from slea_llm.types import ScoredTrajectory, State, Turn


def steps_by_turn(scored: ScoredTrajectory) -> dict[int, list[tuple[int, int]]]:
    """Turn -> the keys `(turn, step)` of its leaf steps, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for step in scored.leaves():
        found.setdefault(step.turn, []).append((step.turn, step.index))
    return found


def speaking_steps(scored: ScoredTrajectory) -> dict[int, tuple[int, int]]:
    """Turn -> the key of its last leaf step that is said or called; of its last one when all of it is thought."""
    found: dict[int, tuple[int, int]] = {}
    spoken: set[int] = set()
    for step in scored.leaves():
        if step.kind != "thought" or step.turn not in spoken:
            found[step.turn] = (step.turn, step.index)
        if step.kind != "thought":
            spoken.add(step.turn)
    return found


def said(scored: ScoredTrajectory) -> dict[int, str]:
    """Turn -> what was said in it, thoughts left out."""
    found = {turn.index: "" for turn in scored.trajectory.turns}
    for step in scored.leaves():
        if step.kind != "thought":
            found[step.turn] += step.text
    return found


def heard(turn: Turn) -> str:
    """What the user said before this reply, since the one before."""
    return "\n".join(message.content for message in turn.context if message.role == "user")


def names_in(state: State, key: str, *, part: str, scored: ScoredTrajectory, turn: int) -> frozenset[str]:
    """What a list or mapping of the state holds. Raises CreditError, naming `part` and the place, when it is none."""
    held = state.get(key)
    if not isinstance(held, Mapping | list | tuple):
        raise CreditError(
            f"{part}: a state of turn {turn} in trajectory {scored.trajectory.id!r} has no list {key!r}; this "
            "augmenter fits environments whose public state names it"
        )
    return frozenset(map(str, held))


def changed(before: State, after: State) -> bool:
    """Whether a state says something else than before. Numbers and tables of numbers are passed over: clocks and
    counters move without anything being settled."""
    return any(
        before.get(key) != after.get(key)
        for key in before.keys() | after.keys()
        if not (_counts(before.get(key)) or _counts(after.get(key)))
    )


def _counts(value: Any) -> bool:
    if isinstance(value, Mapping) and value:
        return all(_counts(one) for one in value.values())
    return isinstance(value, int | float) and not isinstance(value, bool)
