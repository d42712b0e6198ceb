"""Ranges of settings: what is allowed passes, what is not is named with its bounds."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from slea_llm.checks import check_choices, check_least, check_shares, check_subset
from slea_llm.errors import ConfigError


@pytest.mark.parametrize(("value", "fits"), [(0.0, True), (1, True), (-1e-9, False), (1.001, False), (math.nan, False)])
def test_shares(value: float, fits: bool) -> None:
    settings = SimpleNamespace(vague_share=value)
    if fits:
        check_shares(settings, "vague_share")
    else:
        with pytest.raises(ConfigError, match=r"vague_share .* is not in \[0, 1\]"):
            check_shares(settings, "vague_share")


@pytest.mark.parametrize(
    ("value", "words"),
    [(1, "must be 2 or more"), *((one, "must be finite and 2 or more") for one in (math.nan, math.inf, -math.inf))],
)
def test_least(value: float, words: str) -> None:
    check_least(SimpleNamespace(folds=2, width=10**30), folds=2, width=1)
    with pytest.raises(ConfigError, match=rf"folds {value} {words}: one part is held out$"):
        check_least(SimpleNamespace(folds=value), folds=2, why="one part is held out")
    with pytest.raises(ConfigError, match=f"{words}$"):
        check_least(SimpleNamespace(width=5, folds=value), width=1, folds=2)


def test_choices() -> None:
    check_choices(SimpleNamespace(form="each", read="auto"), form=("spread", "each"), read=("auto",))
    with pytest.raises(ConfigError, match=r"form 'spraed' is not one of spread, each \(did you mean 'spread'\?\)"):
        check_choices(SimpleNamespace(form="spraed"), form=("spread", "each"))


def test_subset() -> None:
    check_subset(SimpleNamespace(sources=("csv", "http"), limits=(5, 9)), sources=("http", "csv"), limits=range(10))
    with pytest.raises(ConfigError, match=r"sources 'cvs' is not one of http, csv \(did you mean 'csv'\?\)"):
        check_subset(SimpleNamespace(sources=("cvs",)), sources=("http", "csv"))
    for values in ((5,), (5, 5), ()):
        with pytest.raises(
            ConfigError, match=rf"limits {re.escape(str(list(values)))} must be 2 or more different ones"
        ):
            check_subset(SimpleNamespace(limits=values), least=2, limits=range(10))
