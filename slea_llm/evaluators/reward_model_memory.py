"""What the reward model remembers of judged steps: rates by type, by text, and by text in its surroundings.

A step that was judged before, here or elsewhere, is the best evidence there is on it. The rates are smoothed towards
what they back off to, and while a model is fitted no example sees the judgements of its own group.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slea_llm.evaluators.reward_model_features import Prefixes

HEADS = 2
LEVELS = ("type", "text", "text_in_state", "text_here")
MEMORY = tuple(
    f"{head}_{name}"
    for head in ("label", "success")
    for level in LEVELS
    for name in (f"rate_{level}", f"count_{level}")
)
"""Numbers of one position: log-odds of the smoothed rate and log(1 + weight) of its judgements, by head and level."""

PRIOR = 2.0
"""Judgements that a rate is credited with at the rate of what it backs off to."""
MAX_KEYS = 100_000
"""Keys that are kept, those with the most judgements first."""

Tally = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One trajectory's judgements: `targets` and `weights` (P, 2) beside its positions."""

    group: str
    prefixes: Prefixes
    targets: NDArray[np.float64]
    weights: NDArray[np.float64]


class Memory:
    """Key -> (label sum, label weight, success sum, success weight)."""

    def __init__(self, tallies: Mapping[int, Tally]) -> None:
        self._tallies = dict(tallies)

    @classmethod
    def of(cls, judged: Iterable[Judged]) -> Memory:
        tallies: dict[int, Tally] = {}
        for one in judged:
            for key, tally in _entries(one):
                if key in tallies:
                    tallies[key] = tallies[key] + tally
                else:
                    tallies[key] = tally
        return cls(tallies)

    def __len__(self) -> int:
        return len(self._tallies)

    def attached(self, prefixes: Prefixes, *, without: Memory | None = None) -> Prefixes:
        """The positions with their numbers beside the evidence: (P, E + len(MEMORY)). `without` is left out of all."""
        rows = np.zeros((len(prefixes), len(MEMORY)), np.float32)
        base = self._tally(_BASE, without)
        for place in range(1, len(prefixes)):
            tallies = [self._tally(key, without) for key in _keys(prefixes, place)]
            rows[place] = [number for head in range(HEADS) for number in _numbers(head, base, tallies)]
        return prefixes.with_evidence(np.concatenate([prefixes.evidence, rows], axis=1))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """`keys` (n,) int64 ascending and `tallies` (n, 4) float64, at most MAX_KEYS of them."""
        ranked = sorted(self._tallies, key=lambda key: (-float(self._tallies[key][1::2].sum()), key))[:MAX_KEYS]
        kept = sorted(ranked)
        tallies = np.array([self._tallies[key] for key in kept], np.float64).reshape(len(kept), 2 * HEADS)
        return {"keys": np.array(kept, np.int64), "tallies": tallies}

    @classmethod
    def from_arrays(cls, keys: NDArray[np.generic], tallies: NDArray[np.generic]) -> Memory:
        """Raises ValueError for shapes that `arrays` does not give."""
        if keys.ndim != 1 or tallies.shape != (len(keys), 2 * HEADS):
            raise ValueError(f"a memory of keys {keys.shape} and tallies {tallies.shape} is none")
        return cls({int(key): np.asarray(row, np.float64) for key, row in zip(keys, tallies, strict=True)})

    def _tally(self, key: int, without: Memory | None) -> Tally:
        found = self._tallies.get(key, _NONE)
        if without is not None and key in without._tallies:
            found = found - without._tallies[key]
        return found


_NONE: Tally = np.zeros(2 * HEADS)


def attached_apart(judged: Sequence[Judged]) -> tuple[Memory, list[Prefixes]]:
    """The memory of all, and each one's positions as remembered by the other groups alone."""
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(one.group, []).append(one)
    own = {name: Memory.of(members) for name, members in groups.items()}
    memory = Memory.of(judged)
    return memory, [memory.attached(one.prefixes, without=own[one.group]) for one in judged]


def _entries(one: Judged) -> Iterable[tuple[int, Tally]]:
    for place in range(1, len(one.prefixes)):
        weight, target = one.weights[place], one.targets[place]
        if weight.any():
            tally = np.array([target[0] * weight[0], weight[0], target[1] * weight[1], weight[1]])
            yield _BASE, tally
            for key in _keys(one.prefixes, place):
                yield key, tally


def _keys(prefixes: Prefixes, place: int) -> tuple[int, int, int, int]:
    text = prefixes.texts[place]
    return (
        _key("type", prefixes.types[place]),
        _key("text", text),
        _key("text_in_state", f"{prefixes.states[place]}\0{text}"),
        _key("text_here", f"{prefixes.contexts[place]}\0{text}"),
    )


def _key(level: str, name: str) -> int:
    digest = hashlib.blake2b(f"{level}\0{name}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


_BASE = _key("base", "")


def _numbers(head: int, base: Tally, tallies: Sequence[Tally]) -> Iterable[float]:
    """Rate and count of each level, each rate smoothed towards that of the level before it."""
    weight = float(base[2 * head + 1])
    rate = float(base[2 * head]) / weight if weight > 1e-9 else 0.5
    for tally in tallies:
        total, seen = float(tally[2 * head]), max(0.0, float(tally[2 * head + 1]))
        rate = min(max((total + PRIOR * rate) / (seen + PRIOR), 1e-3), 1.0 - 1e-3)
        yield math.log(rate / (1.0 - rate))
        yield math.log1p(seen)
