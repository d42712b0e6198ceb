"""Each alarm on both sides of its threshold, what is remembered, and what is said once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slea_llm.health import RULES, WINDOW, Health
from slea_llm.settings import StreamSettings

STREAMS = {"s": StreamSettings(sources=("outcome", "judge"))}
CALM = {
    "credit/s/advantage_max": 2.0,
    "credit/s/advantage_std": 0.4,
    "credit/s/reward_max": 1.0,
    "credit/s/explained_variance": 0.3,
    "credit/idle": 0.1,
    "credit/clipped": 0.0,
    "credit/share/outcome": 0.5,
    "credit/share/judge": 0.5,
    "credit/paid/judge": 1.0,
    "ppo/clip_frac": 0.1,
    "ppo/ratio": 1.0,
    "update/kl": 0.01,
    "update/entropy": 1.0,
    "reference_kl/k3": 0.1,
    "grad_norm/policy": 1.0,
    "episodes/success": 0.5,
    "episodes/played": 32.0,
}


def names_after(changes: Mapping[str, float], *, iterations: int = WINDOW, calm: int = 3) -> list[str]:
    """Alarms after some calm iterations and then these metrics for a while."""
    health = Health(STREAMS)
    alarms = []
    for iteration in range(calm + iterations):
        alarms = health.observe({**CALM, **(changes if iteration >= calm else {})})
    return [alarm.name for alarm in alarms]


def test_calm_is_silent() -> None:
    assert names_after({}) == []


@pytest.mark.parametrize(
    ("name", "fine", "bad"),
    [
        ("advantage_range", {"credit/s/advantage_max": 10.0}, {"credit/s/advantage_max": 10.5}),
        ("advantage_clip", {"credit/clipped": 0.01}, {"credit/clipped": 0.011}),
        ("no_signal", {"credit/idle": 0.9}, {"credit/idle": 0.95}),
        (
            "drowned_outcome",
            {"credit/share/outcome": 0.06, "credit/share/judge": 0.94},
            {"credit/share/outcome": 0.04, "credit/share/judge": 0.96},
        ),
        (
            "explained_variance",
            {"credit/s/explained_variance": -9.0, "credit/s/advantage_std": 0.4},
            {"credit/s/explained_variance": -0.6, "credit/s/advantage_std": 0.6},
        ),
        ("ppo_clip", {"ppo/clip_frac": 0.3}, {"ppo/clip_frac": 0.31}),
        ("ratio", {"ppo/ratio": 1.09}, {"ppo/ratio": 0.89}),
        ("update_kl", {"update/kl": 0.1}, {"update/kl": 0.11}),
        ("reference_kl", {"reference_kl/k3": 2.0}, {"reference_kl/k3": 2.1}),
        ("entropy", {"update/entropy": 0.1}, {"update/entropy": 0.09}),
    ],
)
def test_each_threshold_has_two_sides(name: str, fine: Mapping[str, float], bad: Mapping[str, float]) -> None:
    assert names_after(fine) == []
    assert names_after(bad) == [name]


@pytest.mark.parametrize(("jump", "expected"), [(100.0, []), (101.0, ["gradient"])])
def test_a_gradient_is_compared_with_its_usual_size(jump: float, expected: Sequence[str]) -> None:
    assert names_after({"grad_norm/policy": jump}, iterations=1) == expected
    assert names_after({"grad_norm/policy": jump}, iterations=9) == []  # by now it is usual


def test_one_odd_iteration_is_no_alarm() -> None:
    once = {"ppo/clip_frac": 0.9, "update/kl": 5.0, "credit/idle": 1.0, "credit/s/explained_variance": -9.0}
    assert names_after({**once, "credit/s/advantage_std": 2.0}, iterations=1) == []


def test_metrics_that_a_run_does_not_have_are_no_alarm() -> None:
    health = Health(STREAMS)
    for _ in range(WINDOW):
        assert health.observe({"episodes/success": 0.0, "episodes/played": 8.0}) == []


def hacking(success: Sequence[float], paid: Sequence[float], played: float = 32.0) -> list[str]:
    health = Health(STREAMS)
    alarms: Sequence[Any] = ()
    for rate, amount in zip(success, paid, strict=True):
        alarms = health.observe(
            {**CALM, "episodes/success": rate, "credit/paid/judge": amount, "episodes/played": played}
        )
    return [alarm.name for alarm in alarms]


def test_a_score_that_rises_while_success_falls() -> None:
    half = WINDOW // 2
    rising, falling = [1.0] * half + [2.0] * half, [0.6] * half + [0.2] * half
    assert hacking(falling, rising) == ["reward_hacking", "reward_without_success", "success"]
    assert hacking(falling[::-1], rising) == []  # both rise: that is what a score is for
    assert hacking(falling, rising[::-1]) == ["success"]  # both fall: another trouble
    assert hacking([0.5] * WINDOW, rising) == ["reward_without_success"]
    assert hacking([0.95] * WINDOW, rising) == []  # no rise is to be expected
    assert hacking([0.5] * half + [0.55] * half, rising) == []
    assert hacking([0.5] * WINDOW, [0.0] * half + [2.0] * half) == []  # it has only begun to pay
    assert hacking(falling[1:], rising[1:]) == []  # too short to tell


def test_a_score_that_stays_while_success_falls() -> None:
    half = WINDOW // 2
    health = Health(STREAMS)
    for rate in [0.8] * half + [0.4] * half:
        alarms = health.observe({**CALM, "episodes/success": rate, "credit/paid/judge": 12.0, "episodes/played": 32.0})
    (alarm,) = alarms
    assert (alarm.name, alarm.seen) == (
        "success", "success fell from 80% to 40%, and judge still pays 12.00 a dialogue"
    )  # fmt: skip


def test_chance_is_no_hacking() -> None:
    """Success of 4 dialogues an iteration may fall by a quarter by chance alone; of 128 it does not."""
    half = WINDOW // 2
    rising, falling = [1.0] * half + [2.0] * half, [0.6] * half + [0.4] * half
    assert hacking(falling, rising, played=4.0) == ["reward_without_success"]
    assert hacking(falling, rising, played=128.0) == ["reward_hacking", "reward_without_success", "success"]


def test_what_is_said_is_said_once_and_remembered_over_a_checkpoint() -> None:
    bad = {**CALM, "ppo/ratio": 2.0}
    health = Health(STREAMS)
    (first,) = health.observe(bad)
    assert first.first
    assert first.line().startswith("alarm ratio: the mean ratio to the proximal policy is 2.00; ")
    state = json.loads(json.dumps(health.state()))
    resumed = Health(STREAMS)
    resumed.restore(state)
    for one in (health, resumed):
        assert [alarm.first for alarm in one.observe(bad)] == [False]
    assert resumed.state() == health.state()


def test_names_are_distinct_and_every_rule_says_what_to_do() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.meaning and rule.mend for rule in RULES)
