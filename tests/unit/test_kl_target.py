"""The weight of the KL to the reference follows its target, and nothing moves it without one."""

from __future__ import annotations

import math

import pytest

from slea_llm.errors import ConfigError
from slea_llm.losses.reference_kl import ReferenceKlConfig, ReferenceKlLoss

HORIZON = 10_000 / 256
"""Updates of 256 dialogues in a horizon of 10,000 of them."""


def term(**options: float) -> ReferenceKlLoss:
    return ReferenceKlLoss(ReferenceKlConfig(**options))  # type: ignore[arg-type]


def test_it_follows_the_formula() -> None:
    held = term(weight=0.1, target=6.0, horizon=HORIZON)
    held.adapt({"reference_kl/k3": 9.0})
    assert held.weight == pytest.approx(0.100512, abs=1e-12)
    held.adapt({"reference_kl/k3": 6.6})  # inside the bounds it answers to the error itself
    assert held.weight == pytest.approx(0.100512 * (1 + 0.1 / HORIZON), abs=1e-12)
    held.adapt({"reference_kl/k3": 0.0})
    assert held.weight == pytest.approx(0.100512 * (1 + 0.1 / HORIZON) * (1 - 0.2 / HORIZON), abs=1e-12)


def test_at_the_target_it_rests_and_it_never_turns_negative() -> None:
    held = term(weight=0.1, target=0.5, horizon=1.0)
    held.adapt({"reference_kl/k3": 0.5})
    assert held.weight == 0.1
    for _ in range(1000):
        held.adapt({"reference_kl/k3": 0.0})
    assert 0.0 < held.weight < 1e-9


def test_without_a_target_nothing_moves() -> None:
    plain = term(weight=0.003)
    plain.adapt({"reference_kl/k3": 99.0})
    plain.restore({"weight": 9.0})  # the recipe's weight may be changed between runs
    assert plain.weight == 0.003


def test_its_state_is_the_weight() -> None:
    held, again = (term(weight=0.1, target=0.5) for _ in range(2))
    held.adapt({"reference_kl/k3": 9.0})
    again.restore(held.state())
    assert again.weight == held.weight > 0.1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"target": -1.0}, "target -1.0 must be 0 or above"),
        ({"target": math.nan}, "target nan must be 0 or above"),
        ({"target": 0.1, "horizon": 0.0}, "horizon 0.0 above 0"),
        ({"target": 0.1, "weight": 0.0}, "needs a weight above 0"),
    ],
)
def test_what_cannot_hold_a_target_is_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        term(**options)
