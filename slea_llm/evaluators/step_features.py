"""Steps of a dialogue as rows of hashed features: what was said, in which public state, after what, with which reply.

Nothing here knows a task. A state is read by its shape (which keys are empty, which are true, which items the step
names), text by words and, where a script has none, by single characters.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slea_llm.types import State, Step, Trajectory, leaf_steps

Rows: TypeAlias = NDArray[np.float64]

_WORD = re.compile(r"[一-鿿぀-ヿ]|[^\W_一-鿿぀-ヿ]+")
_TAG = re.compile(r"</?[^\W\d][\w.-]*[ \t]*>")
CROSSED = 24
"""Tokens of a step, from its start, that are crossed with the facts of the state."""
MAX_ITEMS = 64
"""Items of one list or mapping of a state that a step is searched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One leaf step and what was to be seen when it was taken.

    `before`: the public state before the turn. `heard`: the words of whoever spoke last before the turn. `earlier`:
    kind and text of the step before this one in the same turn, empty for the first. For the last step of a turn
    `answer` and `after` hold what came back; after the last turn of a dialogue they are empty, so that no feature
    tells how it ended.
    """

    turn: int
    position: int
    kind: str
    text: str
    before: State
    heard: str
    earlier: tuple[str, str] = ("", "")
    answer: str = ""
    after: State | None = None
    repeats: float = 0.0


def moments(trajectory: Trajectory, steps: Sequence[Step]) -> list[Moment]:
    """The leaf steps in order. `repeats` in [0, 1] is the largest overlap of words with an earlier step of its kind."""
    leaves = leaf_steps(steps)
    turns = {turn.index: turn for turn in trajectory.turns}
    last_turn = max(turns, default=-1)
    ends = {step.turn: step.index for step in leaves}
    made: list[Moment] = []
    said: dict[str, list[frozenset[str]]] = {}
    for position, step in enumerate(leaves):
        turn, following = turns[step.turn], turns.get(step.turn + 1)
        closes = ends[step.turn] == step.index and step.turn != last_turn
        own = frozenset(words(step.text))
        others = said.setdefault(step.kind, [])
        made.append(
            Moment(
                turn=step.turn,
                position=position,
                kind=step.kind,
                text=step.text,
                before=turn.state_before,
                heard=_last_words(turn.context),
                earlier=(made[-1].kind, made[-1].text) if made and made[-1].turn == step.turn else ("", ""),
                answer=_last_words(following.context) if closes and following is not None else "",
                after=turn.state_after if closes else None,
                repeats=max((_overlap(own, other) for other in others), default=0.0),
            )
        )
        others.append(own)
    return made


def start_of(moment: Moment) -> Moment:
    """The same place before any step was taken: nothing said, nothing answered."""
    return Moment(turn=moment.turn, position=-1, kind="", text="", before=moment.before, heard=moment.heard)


def _last_words(context: Sequence[Any]) -> str:
    return next((message.content for message in reversed(context) if message.role != "system"), "")


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other) if one | other else 0.0


@lru_cache(maxsize=4096)
def words(text: str) -> tuple[str, ...]:
    """Lower-case words without tags; characters of Chinese and Japanese stand alone."""
    plain = unicodedata.normalize("NFKC", _TAG.sub(" ", text)).lower()
    return tuple(_WORD.findall(plain))


def facts(state: State) -> list[str]:
    """What a state says by its shape: `key=yes`, `key=none`, `key=some`, short texts as they are; sorted."""
    found = []
    for key, value in sorted(state.items()):
        if isinstance(value, bool):
            found.append(f"{key}={'yes' if value else 'no'}")
        elif isinstance(value, int | float):
            found.append(f"{key}={'none' if value == 0 else 'few' if abs(value) <= 2 else 'many'}")
        elif isinstance(value, str):
            found.append(f"{key}={value if len(value) <= 16 else 'some'}")
        elif isinstance(value, Mapping | list | tuple):
            found.append(f"{key}={'some' if value else 'none'}")
    return found


def named(state: State, text: str) -> list[str]:
    """`names key` for every list or mapping of the state of which the text names an item; sorted by key."""
    own = set(words(text))
    found = []
    for key, value in sorted(state.items()):
        if isinstance(value, Mapping | list | tuple):
            items = [str(item) for item in list(value)[:MAX_ITEMS]]
            if any(parts and own.issuperset(parts) for parts in map(words, items)):
                found.append(f"names {key}")
    return found


def _said(moment: Moment) -> list[str]:
    """The step as tokens: its kind, its words and pairs of words, and what of the state it names."""
    own = words(moment.text)
    pairs = [f"{one} {other}" for one, other in pairwise(own)]
    return [f"kind {moment.kind}", *own, *pairs, *named(moment.before, moment.text)]


def situation(moment: Moment, size: int) -> Rows:
    """What was to be seen before the step, shape (size,): the state's shape, the last words heard, the last step."""
    kind, text = moment.earlier
    blocks = [
        (facts(moment.before), 1.0),
        ([f"heard {word}" for word in words(moment.heard)], 0.5),
        ([f"earlier {kind}"], 0.5),
        ([f"earlier {name}" for name in named(moment.before, text)], 0.5),
        ([f"earlier {word}" for word in words(text)], 0.7),
    ]
    return sum((weight * hashed(tokens, size) for tokens, weight in blocks), np.zeros(size))


def utterance(moment: Moment, size: int) -> Rows:
    """What was said, shape (size,), whatever the state but for what of it the step names."""
    names = [f"kind {moment.kind}", *named(moment.before, moment.text)]
    return 0.7 * hashed(_said(moment), size) + 0.7 * hashed(names, size)


@dataclass(frozen=True, slots=True)
class Place:
    """What all steps that could be taken at one place share."""

    facts: tuple[str, ...]
    situation: Rows

    @classmethod
    def of(cls, moment: Moment, size: int) -> Place:
        return cls(tuple(facts(moment.before)), situation(moment, size))


def row(moment: Moment, size: int, *, feedback: bool, place: Place | None = None) -> Rows:
    """A step in its state as one row, shape (2 * size + 6,): situation, then step, crosses of both, and what came back.

    With `feedback` the answer and the state after the turn are read too; without, the row holds what could be known
    when the step was taken. `place` saves working it out again for another step at the same place.
    """
    place = place or Place.of(moment, size)
    said = _said(moment)
    second = hashed(said, size) + crossed(place.facts, said[:CROSSED], size)
    if feedback and moment.after is not None:
        second += hashed([f"now {fact}" for fact in facts(moment.after)], size)
        second += 0.5 * hashed([f"answer {word}" for word in words(moment.answer)], size)
    numbers = np.array(
        [
            1.0,
            np.log1p(moment.position + 1),
            np.log1p(moment.turn),
            np.log1p(len(words(moment.text))) / 4.0,
            moment.repeats,
            float(moment.repeats > 0.8),
        ]
    )
    return np.concatenate([place.situation, second, numbers])


def hashed(tokens: Iterable[str], size: int) -> Rows:
    """Signed feature hashing (Weinberger et al. 2009) of a bag of tokens, shape (size,), of length 1 unless empty."""
    return _folded(_codes(tokens), size)


def crossed(ones: Iterable[str], others: Iterable[str], size: int) -> Rows:
    """The same for every pair of a token of the one bag and a token of the other."""
    mixed = _codes(ones)[:, None] * _ODD_ONE + _codes(others)[None, :] * _ODD_OTHER  # modulo 2^64
    return _folded((mixed ^ (mixed >> np.uint64(29))).ravel(), size)


_ODD_ONE, _ODD_OTHER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
"""Odd multipliers (the golden ratio's, and a prime of xxHash) that spread pairs of codes over 64 bits."""


def _codes(tokens: Iterable[str]) -> NDArray[np.uint64]:
    return np.array([zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in tokens], dtype=np.uint64)


def _folded(codes: NDArray[np.uint64], size: int) -> Rows:
    signs = np.where(codes & np.uint64(1), 1.0, -1.0)
    places = ((codes >> np.uint64(1)) % np.uint64(size)).astype(np.int64)
    vector = np.bincount(places, signs, minlength=size).astype(np.float64)
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm > 0 else vector
