"""Augmenter `value_shaping`: the numbers of its forms, double counting, and what its value function learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.augmenters.learnt import explained, returns
from slea_llm.augmenters.value_function import polyak, td_targets
from slea_llm.augmenters.value_shaping import ValueShaping
from slea_llm.credit.maths import gae
from slea_llm.errors import ConfigError, UnsupportedError
from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredTrajectory
from tests.support.shaping import REPLY, Steps, advantages, talk

PHI = [1.0, 3.0, 2.0, 6.0]
EIGHT = 1e-8


def shaping(**options: Any) -> ValueShaping:
    return ValueShaping(ValueShaping.Config(**options))


def turns_of(*rewards: float, **options: Any) -> ScoredTrajectory:
    return talk([REPLY] * len(rewards), rewards=rewards, **options)


def paid(scored: ScoredTrajectory, values: Sequence[float], **options: Any) -> list[float]:
    return list(shaping(**options).shaped(scored, values).values())


def discounted(numbers: Sequence[float], gamma: float) -> float:
    return sum(gamma**t * number for t, number in enumerate(numbers))


ORDER = turns_of(0, 0, 0, 10)


def test_oracle_shaping_telescope() -> None:
    got = paid(ORDER, [*PHI, 5.0], gamma=0.9)  # what V says after the end counts for nothing
    assert got == pytest.approx([1.7, -1.2, 3.4, -6.0], abs=EIGHT)
    assert discounted(got, 0.9) == pytest.approx(-1.0, abs=EIGHT)
    raw = [0, 0, 0, 10]
    assert discounted(raw, 0.9) == pytest.approx(7.29, abs=EIGHT)
    assert discounted([r + f for r, f in zip(raw, got, strict=True)], 0.9) == pytest.approx(6.29, abs=EIGHT)


def test_oracle_shaping_terminal_leak() -> None:
    got = paid(ORDER, [*PHI, 5.0], gamma=0.9, form="unmasked")
    assert got[-1] == pytest.approx(-1.5, abs=EIGHT)
    assert discounted(got, 0.9) == pytest.approx(2.2805, abs=EIGHT)
    assert discounted(got, 0.9) + PHI[0] == pytest.approx(0.9**4 * 5, abs=EIGHT)  # the leak


def test_oracle_shaping_gamma1_and_undiscounted_sum() -> None:
    got = paid(ORDER, [*PHI, 0.0], gamma=1.0)
    assert got == pytest.approx([2.0, -1.0, 4.0, -6.0], abs=EIGHT)
    assert sum(got) == pytest.approx(-1.0, abs=EIGHT)
    assert sum(paid(ORDER, [*PHI, 0.0], gamma=0.9)) == pytest.approx(-2.1, abs=EIGHT)  # not -V(s_0): gammas must agree


@pytest.mark.parametrize(
    ("form", "gamma", "expected"), [("potential", 1.0, 0.0), ("potential", 0.9, -0.38), ("positive", 1.0, 3.0)]
)
def test_oracle_loop_a_b_a(form: Any, gamma: float, expected: float) -> None:
    loop = turns_of(0, 0, termination="budget")
    assert discounted(paid(loop, [2.0, 5.0, 2.0], form=form, gamma=gamma), gamma) == pytest.approx(expected, abs=EIGHT)


def test_oracle_centering_breaks_telescoping() -> None:
    got = paid(ORDER, [*PHI, 0.0], gamma=0.9, form="centred")
    shaped = [r + f for r, f in zip([0, 0, 0, 10], got, strict=True)]
    assert shaped == pytest.approx([-0.275, -3.175, 1.425, 2.025], abs=EIGHT)
    assert discounted(shaped, 0.9) == pytest.approx(-0.502025, abs=EIGHT)


def test_oracle_clip_breaks_telescoping() -> None:
    got = paid(ORDER, [*PHI, 0.0], gamma=0.9, clip=2.0)
    shaped = [r + f for r, f in zip([0, 0, 0, 10], got, strict=True)]
    assert shaped == pytest.approx([1.7, -1.2, 2.0, 2.0], abs=EIGHT)
    assert discounted(shaped, 0.9) == pytest.approx(3.698, abs=EIGHT)


def test_oracle_scaling_by_a_positive_number_is_safe() -> None:
    whole, part = (paid(ORDER, [*PHI, 0.0], gamma=0.9, eta=eta) for eta in (1.0, 0.3))
    assert part == pytest.approx([0.3 * one for one in whole], abs=EIGHT)
    shaped = np.array([r + f for r, f in zip([0, 0, 0, 10], whole, strict=True)])
    expected = [0.72959582, -0.51500881, 1.45919163, 1.71669604]
    np.testing.assert_allclose(shaped / shaped.std(ddof=1), expected, atol=EIGHT)


V = [4.0, 5.0, 6.0, 8.0]
STANDARD = [5.19620749, 4.5148405, 3.801, 2.0]


def credited(values: Sequence[float], potential: Sequence[float], **options: Any) -> list[float]:
    given = shaping(gamma=0.99, **options).shaped(ORDER, [*potential, 0.0])
    return [float(one) for one in advantages(ORDER, given, values, gamma_turn=0.99, lam_turn=0.95)]


def test_oracle_double_counting() -> None:
    assert advantages(ORDER, {}, V, gamma_turn=0.99, lam_turn=0.95).tolist() == pytest.approx(STANDARD, abs=EIGHT)
    shaped = [r + f for r, f in zip([0, 0, 0, 10], paid(ORDER, [*V, 0.0], gamma=0.99), strict=True)]
    assert shaped == pytest.approx([0.95, 0.94, 1.92, 2.0], abs=EIGHT)  # the TD errors of V
    # V as the potential and, not fitted anew, as the critic as well: every number is wrong, two have the wrong sign.
    assert credited(V, V) == pytest.approx([2.07331393, 0.1842785, -1.803, -6.0], abs=EIGHT)
    assert credited([0.0] * 4, V) == pytest.approx(STANDARD, abs=EIGHT)
    phi = [3.0, 4.5, 6.5, 7.0]
    refit = [v - p for v, p in zip(V, phi, strict=True)]
    assert credited(refit, phi) == pytest.approx(STANDARD, abs=EIGHT)
    assert credited(V, phi) == pytest.approx([3.02805656, 0.66247375, -2.3525, -5.0], abs=EIGHT)


def test_oracle_identity_of_shaped_gae_on_1000_draws() -> None:
    """GAE(r + F, V - Phi) = GAE(r, V) for every discount and lambda, whatever the potential."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(1000):
        length = int(rng.integers(1, 9))
        rewards, values, phi = rng.normal(size=(3, length))
        gamma, lam = rng.uniform(size=2)
        given = paid(turns_of(*rewards), [*phi, rng.normal()], gamma=float(gamma))
        row = {"bootstrap": np.zeros(1), "mask": np.ones((1, length), bool)}
        both = (np.full((1, length), one) for one in (gamma, lam))
        gammas, lams = both
        plain = gae(rewards[None], values[None], gammas, lams, **row)
        shaped = gae((rewards + given)[None], (values - phi)[None], gammas, lams, **row)
        worst = max(worst, float(np.abs(plain - shaped).max()))
    assert worst < 1e-12


def test_oracle_article_one_step_advantage_and_critic_target() -> None:
    """The sum of step rewards as the critic's target forgets what comes after: 0.5 instead of 5.45."""
    steps: Steps = (("thought", "a"), ("reply", "b"))
    one = talk([steps, REPLY], rewards=[0.0, 0.0])
    got = advantages(one, {(0, 0): -0.2, (0, 1): -0.5}, [1.0, 1.0, 0.8], gamma_turn=0.99, lam_turn=0.0)
    assert got[0] == pytest.approx(-0.908, abs=EIGHT)
    ended = talk([steps], rewards=[0.0])
    got = advantages(ended, {(0, 0): -0.2, (0, 1): -0.5}, [1.0, 1.0], gamma_turn=0.99)
    assert got[0] == pytest.approx(-1.7, abs=EIGHT)
    assert td_targets([0.5], [0.0, 5.0], [0.99], lam=0.0, cut=True) == pytest.approx([5.45], abs=EIGHT)


def test_oracle_mc_returns_and_td0_targets() -> None:
    rewards, gammas = [0.0, 0.0, 10.0], [0.99] * 3
    assert td_targets(rewards, [4, 5, 6, 9], gammas, lam=1.0, cut=False) == pytest.approx([9.801, 9.9, 10.0], abs=EIGHT)
    assert td_targets(rewards, [4, 5, 6, 9], gammas, lam=0.0, cut=False) == pytest.approx([4.95, 5.94, 10.0], abs=EIGHT)
    assert returns(turns_of(*rewards), gamma=0.99) == pytest.approx([9.801, 9.9, 10.0], abs=EIGHT)
    # Cut from outside: the value after the cut is part of every target.
    assert td_targets([0, 0], [4, 5, 6], [0.5] * 2, lam=1.0, cut=True) == pytest.approx([1.5, 3.0], abs=EIGHT)


def test_oracle_polyak() -> None:
    target, online = {"w": np.zeros(1, np.float32)}, {"w": np.ones(1, np.float32)}
    seen = {}
    for step in range(1, 1001):
        target = polyak(target, online, 0.005)
        seen[step] = float(target["w"][0])
    assert [seen[1], seen[100], seen[1000]] == pytest.approx([0.005, 0.39422956, 0.99334603], abs=1e-5)


def test_oracle_value_success_only() -> None:
    """Four of ten dialogues succeed, three turns on: learning from successes alone says 9.70 where 3.88 is right."""
    data = [turns_of(0, 0, 0, 10.0 * (n < 4), termination="success" if n < 4 else "failure") for n in range(10)]
    starts = [returns(one, gamma=0.99)[0] for one in data]
    assert np.mean(starts) == pytest.approx(3.881196, abs=EIGHT)
    assert np.mean([start for start, one in zip(starts, data, strict=True) if one.trajectory.success]) == pytest.approx(
        9.70299, abs=EIGHT
    )


def test_oracle_explained_variance() -> None:
    assert explained(np.array([1.0, 0, 1, 1]), np.array([0.8, 0.3, 0.6, 0.9])) == pytest.approx(0.65333333, abs=EIGHT)
    assert explained(np.ones(3), np.zeros(3)) is None


some_values = st.floats(-10, 10)


@st.composite
def dialogues(draw: st.DrawFn) -> ScoredTrajectory:
    turns = [[("reply", "x")] * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 5)))]
    ending: Any = draw(st.sampled_from(["success", "failure", "user_left", "max_turns", "budget"]))
    return talk(turns, rewards=[draw(some_values) for _ in turns], termination=ending)  # type: ignore[arg-type]


@given(scored=dialogues(), data=st.data(), gamma=st.floats(0, 1), level=st.sampled_from(["turn", "step"]))
@settings(deadline=None, max_examples=60)
def test_a_potential_pays_the_same_whatever_lies_between(
    scored: ScoredTrajectory, data: st.DataObject, gamma: float, level: Any
) -> None:
    part = shaping(gamma=gamma, level=level, eta=0.5)
    count = len(scored.leaves()) if level == "step" else len(scored.trajectory.turns)
    values = data.draw(st.lists(some_values, min_size=count + 1, max_size=count + 1))
    given_rewards = part.shaped(scored, values)
    total = sum(gamma**turn * reward for (turn, _), reward in given_rewards.items())
    end = gamma ** len(scored.trajectory.turns) * values[-1] if scored.trajectory.truncated else 0.0
    assert total == pytest.approx(0.5 * (end - values[0]), abs=1e-9)


@given(values=st.lists(some_values, min_size=5, max_size=5), between=some_values, at=st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_splitting_a_step_changes_no_sum(values: list[float], between: float, at: int) -> None:
    """A turn cut into more steps earns what it earned, whatever V says of the new place."""
    whole = talk([[("reply", "ab")] * 2] * 2)
    turns = [[("reply", "ab"), ("reply", "ab")], [("reply", "ab"), ("reply", "ab")]]
    turns[at // 2][at % 2 : at % 2 + 1] = [("reply", "a"), ("reply", "b")]
    split = talk(turns)  # type: ignore[arg-type]
    part = shaping(level="step")
    plain = part.shaped(whole, values)
    cut = part.shaped(split, [*values[: at + 1], between, *values[at + 1 :]])
    for turn in range(2):
        sums = [sum(pay for (t, _), pay in given.items() if t == turn) for given in (plain, cut)]
        assert sums[0] == pytest.approx(sums[1], abs=1e-9)
    by_turn = [shaping(level="turn").shaped(one, [1.0, 3.0, 2.0]) for one in (whole, split)]
    assert list(by_turn[0].values()) == list(by_turn[1].values())


@pytest.mark.parametrize(
    "options",
    [{"form": "raw"}, {"level": "token"}, {"gamma": 1.1}, {"lam": -0.1}, {"tau": 2.0}, {"eta": -1.0}, {"window": 0},
     {"clip": float("nan")}, {"learn_from": "failures"}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} "):
        ValueShaping.Config(**options)


def test_a_stream_that_would_break_the_potential_is_refused() -> None:
    config = ValueShaping.Config(gamma=0.99)
    assert ValueShaping.fits(config, "s", StreamSettings(sources=("value_shaping",), gamma_turn=0.99)) == []
    with pytest.raises(UnsupportedError, match=r"gamma 0\.99, stream s by gamma_turn 0\.9"):
        ValueShaping.fits(config, "s", StreamSettings(sources=("value_shaping",), gamma_turn=0.9))
    with pytest.raises(UnsupportedError, match=r"gamma_step 0\.95; set it to 1"):
        ValueShaping.fits(config, "s", StreamSettings(sources=("value_shaping",), gamma_step=0.95))
    stream = StreamSettings(sources=("value_shaping",), gamma_turn=0.5)
    for form in ("unmasked", "positive", "centred"):
        (note,) = ValueShaping.fits(ValueShaping.Config(form=form), "s", stream)
        assert "set form to potential" in note
    (note,) = ValueShaping.fits(ValueShaping.Config(clip=10.0), "s", StreamSettings(sources=("value_shaping",)))
    assert "set clip to 0" in note
