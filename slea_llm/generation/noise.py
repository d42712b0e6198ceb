"""Sampling noise that depends on the name of a draw alone: a counter-based generator (Philox 4x64-10, Salmon et al.
2011) keyed by a hash of (seed, episode, turn), whose i-th output is the noise of the i-th token of that reply.

Batch order, batch size and earlier draws change nothing, so a run can be repeated and resumed bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def uniforms(key: Sequence[int], count: int) -> np.ndarray:
    """The first `count` uniform numbers of this key: shape (count,), float64, in [0, 1).

    A longer draw of the same key begins with the shorter one. Keys are tuples of integers of any size; two keys that
    differ in a number or in length are independent.
    """
    name = ",".join(str(int(part)) for part in key).encode("ascii")
    digest = hashlib.blake2b(name, digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.asarray(raw >> np.uint64(11), dtype=np.float64) * 2.0**-53
