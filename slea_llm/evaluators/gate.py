"""What a learnt evaluator must reach on held-out dialogues before its scores may move training."""

from __future__ import annotations

from typing import Final

MIN_AUC: Final = 0.70
MAX_ECE: Final = 0.10
MIN_OF_EACH: Final = 10
"""Successes, and failures, that must have been seen: on fewer an AUC is luck."""


def too_few(successes: int, failures: int) -> str:
    """Why so many dialogues prove nothing; empty when they are enough."""
    fewest = min(successes, failures)
    return f"{fewest} dialogues of one outcome, {MIN_OF_EACH} are needed" if fewest < MIN_OF_EACH else ""
