"""Places of a dialogue as rows of numbers, for the learnt augmenters: what was heard and said there, and the state.

A place is where something can be expected of the dialogue: before a turn, or after a step of it. A row holds nothing
that is not known at its place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slea_llm.augmenters.turns import heard
from slea_llm.encoders import SentenceEncoder
from slea_llm.types import ScoredTrajectory, State, Step

Floats = NDArray[np.float64]
Rows = NDArray[np.float32]

FACTS = 128
"""Places of the hashed state."""
NUMBERS = 2
LISTED = 32
"""Items of a list in a state that are looked at."""
LONGEST_VALUE = 16
"""Characters up to which a text in a state counts as a name rather than as free text."""


@dataclass(frozen=True, slots=True)
class Place:
    """`before`: the reply before this turn; `heard`: what the user answered; `now`: what of this turn is said so far.

    `step` is the number of steps of the turn that were taken, `ends` whether no turn follows.
    """

    turn: int
    step: int
    before: str
    heard: str
    now: str
    state: State
    ends: bool = False


def places(scored: ScoredTrajectory, *, steps: bool) -> list[Place]:
    """Before every turn (with `steps` also after every leaf step but the last of a turn), and after the last turn."""
    by_turn: dict[int, list[Step]] = {}
    for leaf in scored.leaves():
        by_turn.setdefault(leaf.turn, []).append(leaf)
    found: list[Place] = []
    before = ""
    for turn in scored.trajectory.turns:
        told, now = heard(turn), ""
        found.append(Place(turn.index, 0, before, told, now, turn.state_before))
        for count, leaf in enumerate(by_turn.get(turn.index, [])[:-1] if steps else [], 1):
            now += leaf.text
            found.append(Place(turn.index, count, before, told, now, turn.state_before))
        before = turn.text
    if found:
        last = scored.trajectory.turns[-1]
        found.append(Place(last.index + 1, 0, before, "", "", last.state_after, ends=True))
    return found


def step_places(scored: ScoredTrajectory) -> dict[tuple[int, int], Place]:
    """`(turn, step)` of every leaf step -> its own place, where `now` is the text of the step itself."""
    turns = {turn.index: turn for turn in scored.trajectory.turns}
    spoken = ["", *(turn.text for turn in scored.trajectory.turns)]
    before = dict(zip(turns, spoken, strict=False))
    counts: dict[int, int] = {}
    found: dict[tuple[int, int], Place] = {}
    for leaf in scored.leaves():
        turn = turns[leaf.turn]
        counts[leaf.turn] = counts.get(leaf.turn, 0) + 1
        found[leaf.turn, leaf.index] = Place(
            turn.index, counts[leaf.turn], before[leaf.turn], heard(turn), leaf.text, turn.state_before
        )
    return found


def row_size(encoder: SentenceEncoder) -> int:
    """Numbers in a row of `rows`."""
    return 3 * encoder.dimension + FACTS + NUMBERS


def rows(found: Sequence[Place], encoder: SentenceEncoder) -> Rows:
    """(places, row_size): the vectors of `before`, `heard` and `now`, the hashed state, and where the place lies."""
    texts = [text for place in found for text in (place.before, place.heard, place.now)]
    vectors = encoder.encode(texts).reshape(len(found), 3 * encoder.dimension)
    facts = np.stack([_hashed(place.state) for place in found]) if found else np.zeros((0, FACTS), np.float32)
    numbers = np.array([[place.turn / 10, float(place.step > 0)] for place in found], np.float32)
    return np.concatenate([vectors, facts, numbers.reshape(len(found), NUMBERS)], axis=1, dtype=np.float32)


def _hashed(state: State) -> Rows:
    """Signed feature hashing (Weinberger et al. 2009) of what the state says, each fact 1 or -1."""
    row = np.zeros(FACTS, np.float32)
    for fact in facts(state):
        code = zlib.crc32(fact.encode("utf-8", "surrogatepass"))
        row[(code >> 1) % FACTS] += 1.0 if code & 1 else -1.0
    return row


def facts(state: State) -> Iterator[str]:
    """What a state says: flags, small numbers, short texts, and the names in lists and tables; free text only that it
    is there."""
    for key, value in sorted(state.items()):
        if isinstance(value, bool):
            yield f"{key}={value}"
        elif isinstance(value, int | float):
            yield f"{key}={min(max(round(value), -12), 12)}"
        elif isinstance(value, str):
            yield f"{key}={value if len(value) <= LONGEST_VALUE else 'text'}"
        elif isinstance(value, Mapping | list | tuple):
            names = [str(name) for name in list(value)[:LISTED]]
            yield f"{key}#{min(len(value), LISTED)}"
            yield from (f"{key}:{name}" for name in names if len(name) <= LONGEST_VALUE)
