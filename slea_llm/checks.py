"""Ranges of settings. Each check raises ConfigError with the field, its value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from slea_llm.errors import ConfigError, nearest


def check_shares(config: object, *names: str) -> None:
    """These fields lie in [0, 1]."""
    for name in names:
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ConfigError(f"{name} {getattr(config, name)} is not in [0, 1]")


def check_scores(config: Any) -> None:
    """Every field of this dataclass is a score: a number in [-1, 1]."""
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if not (math.isfinite(value) and abs(value) <= 1):
            raise ConfigError(f"{one.name} {value} is not in [-1, 1]")


def check_least(config: object, why: str = "", **least: float) -> None:
    """`field=bound`: each field is a finite number, its bound or more. `why` is said after the fault."""
    for name, bound in least.items():
        value = getattr(config, name)
        if not bound <= value < math.inf:
            finite = "" if math.isfinite(value) else "finite and "
            raise ConfigError(f"{name} {value} must be {finite}{bound} or more{why and ': '}{why}")


def check_most(config: object, **most: float) -> None:
    """`field=bound`: each field is its bound or less."""
    for name, bound in most.items():
        value = getattr(config, name)
        if not value <= bound:
            raise ConfigError(f"{name} {value} must be {bound} or less")


def check_choices(config: object, **allowed: Collection[str]) -> None:
    """`field=names`: each field is one of its names."""
    for name, known in allowed.items():
        if getattr(config, name) not in known:
            value = getattr(config, name)
            raise ConfigError(f"{name} {value!r} is not one of {', '.join(known)}{nearest(value, known)}")


def check_subset(config: object, *, least: int = 1, **allowed: Collection[str] | Collection[int]) -> None:
    """`field=values`: each field is a list of different ones of its values, `least` of them or more."""
    for name, known in allowed.items():
        values = getattr(config, name)
        if wrong := [one for one in values if one not in known]:
            names = [str(one) for one in known]
            raise ConfigError(f"{name} {wrong[0]!r} is not one of {', '.join(names)}{nearest(str(wrong[0]), names)}")
        if len(set(values)) < max(least, len(values)):
            raise ConfigError(f"{name} {list(values)} must be {least} or more different ones")
