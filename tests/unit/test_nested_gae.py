"""The recursion itself: hand-worked numbers, identities, masks and whitening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slea_llm.credit.maths import gae, length_adaptive_lambda, whiten
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.errors import ConfigError
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import StreamSettings
from tests.support.experience import on_ranks

Floats = NDArray[np.float64]
TOLERANCE = 1e-6


def advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    gamma: float | Sequence[float] = 1.0,
    lam: float | Sequence[float] = 1.0,
    *,
    bootstrap: float = 0.0,
    mask: Sequence[int] | None = None,
) -> Floats:
    """One trajectory through `gae`."""
    n = len(rewards)
    row = [np.broadcast_to(np.asarray(part, np.float64), (n,))[None] for part in (rewards, values, gamma, lam)]
    live = np.ones((1, n), bool) if mask is None else np.array([mask], bool)
    found: Floats = gae(*row, bootstrap=np.array([bootstrap]), mask=live)[0]
    return found


def close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1, 1, [0.5, 0.4, 0.3]),
        (1, 0.95, [0.46575, 0.385, 0.3]),
        (0.99, 0.95, [0.44682858, 0.37515, 0.3]),
        (0.99, 0.9, [0.4150273, 0.3603, 0.3]),
        (0.9, 0, [0.04, 0.03, 0.3]),
        (0.95, 1, [0.4025, 0.35, 0.3]),
    ],
)
def test_end_reward(gamma: float, lam: float, expected: list[float]) -> None:
    close(advantages([0, 0, 1], [0.5, 0.6, 0.7], gamma, lam), expected)


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(1, [5.70299, 4.801, 3.9, 2]), (0.95, [5.19620749, 4.5148405, 3.801, 2]), (0, [0.95, 0.94, 1.92, 2])],
)
def test_order_task(lam: float, expected: list[float]) -> None:
    values = [4, 5, 6, 8]
    got = advantages([0, 0, 0, 10], values, 0.99, lam)
    close(got, expected)
    if lam == 1:
        close(got + values, [9.70299, 9.801, 9.9, 10])  # Monte Carlo returns


def test_monte_carlo_and_td0_targets_are_its_two_ends() -> None:
    rewards, values = [0.0, 0.0, 10.0], [4.0, 5.0, 6.0]
    close(advantages(rewards, values, 0.99, 1) + values, [9.801, 9.9, 10])
    close(advantages(rewards, values, 0.99, 0) + values, [4.95, 5.94, 10])


def test_a_cut_dialogue_bootstraps() -> None:
    got = advantages([0, 0, 0], [0.5, 0.6, 0.7], 0.99, 0.95, bootstrap=0.8)
    close(got, [0.2628442, 0.179526, 0.092])


def test_br_015_value_after_the_cut_is_not_zero() -> None:
    close(advantages([0, 0, 0], [0.5, 0.6, 0.7], bootstrap=0.8), [0.3, 0.2, 0.1])
    close(advantages([0, 0, 0], [0.5, 0.6, 0.7]), [-0.5, -0.6, -0.7])  # a failure is another thing


def test_two_episodes_in_one_row_or_in_two() -> None:
    expected = [0.4702, 0.4, 0.57515, 0.3]
    stop = [0.99, 0.0, 0.99, 0.99]
    close(advantages([0, 1, 0, 1], [0.5, 0.6, 0.4, 0.7], stop, 0.95), expected)
    first = advantages([0, 1], [0.5, 0.6], 0.99, 0.95)
    second = advantages([0, 1], [0.4, 0.7], 0.99, 0.95)
    close([*first, *second], expected)


def test_br_023_no_leak_over_the_border_and_a_bootstrap_at_the_cut() -> None:
    rewards, values = np.array([[0, 1.0], [0, 0]]), np.array([[0.2, 0.4], [0.3, 0.5]])
    gamma, lam = np.full((2, 2), 0.9), np.full((2, 2), 0.95)
    got = gae(rewards, values, gamma, lam, bootstrap=np.array([0.0, 0.6]), mask=np.ones((2, 2), bool))
    close(got.ravel(), [0.673, 0.6, 0.1842, 0.04])


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1, 1, [0.8, 0.7, 0.5, 0.4]),
        (1, 0.95, [0.7232, 0.656, 0.48, 0.4]),
        (0.99, 0.95, [0.69630833, 0.6372231, 0.4702, 0.4]),
    ],
)
@pytest.mark.parametrize("unsampled", [9.0, 1e30, float("nan")])
def test_tokens_that_were_not_sampled_reach_nothing(
    gamma: float, lam: float, expected: list[float], unsampled: float
) -> None:
    rewards = [0, 0, unsampled, unsampled, 0, 1]
    values = [0.2, 0.3, unsampled, unsampled, 0.5, 0.6]
    got = advantages(rewards, values, gamma, lam, mask=[1, 1, 0, 0, 1, 1])
    close(got[[0, 1, 4, 5]], expected)
    close(got[2:4], 0)


def test_masked_reward_to_go() -> None:
    close(advantages([0, 0, 1], [0, 0, 0], 0.5, 1, mask=[1, 0, 1])[[0, 2]], [0.5, 1])


def test_turn_level() -> None:
    got = advantages([0, 1], [0.2, 0.5], 0.99, 0.95)
    close(got, [0.76525, 0.5])
    close(got + np.array([0.2, 0.5]), [0.96525, 1])


VALUES = [0.20, 0.25, 0.30, 0.28, 0.50, 0.55, 0.60, 0.70]
"""Two turns of two steps of two tokens."""
END = [0.0] * 7 + [1.0]


def nested(turn: tuple[float, float], step: tuple[float, float]) -> tuple[list[float], list[float]]:
    inside, step_end, turn_end = (1.0, 1.0), step, turn
    order = [inside, step_end, inside, turn_end] * 2
    return [gamma for gamma, _ in order], [lam for _, lam in order]


def test_multi_level_is_the_turn_advantage_corrected_by_what_is_known_by_now() -> None:
    got = advantages(END, VALUES, *nested((0.99, 0.95), (1, 1)))
    close(got, [0.76525, 0.71525, 0.66525, 0.68525, 0.5, 0.45, 0.4, 0.3])
    turn = np.repeat([0.76525, 0.5], 4)
    first = np.repeat([VALUES[0], VALUES[4]], 4)
    close(got, turn + first - VALUES)


def test_multi_level_with_a_step_lambda() -> None:
    got = advantages(END, VALUES, *nested((0.99, 0.95), (1, 0.95)))
    close(got, [0.714118, 0.664118, 0.64644, 0.66644, 0.48, 0.43, 0.4, 0.3])


def test_multi_level_with_step_rewards() -> None:
    got = advantages([0, 0.1, 0, -0.2, 0, 0.3, 0, 1], VALUES, *nested((0.99, 0.95), (1, 1)))
    close(got, [0.9474, 0.8974, 0.7474, 0.7674, 0.8, 0.75, 0.4, 0.3])


def test_flat_decay() -> None:
    got = advantages(END, VALUES, 0.99, 0.95)
    close(got, [0.57722344, 0.56323598, 0.54889524, 0.6078631, 0.41771727, 0.39682857, 0.37515, 0.3])


def bi_level(rewards: Sequence[float], values: Sequence[float], ends: Sequence[int], gamma_high: float) -> Floats:
    """The two-pass form of VAGEN: turns by their ends first, then the tokens of each turn towards its turn's return."""
    at_ends = [values[end] for end in ends]
    turn_returns = advantages([rewards[end] for end in ends], at_ends, gamma_high, 1) + at_ends
    parts, start = [], 0
    for end, target in zip(ends, turn_returns, strict=True):
        inside = [0.0] * (end - start) + [float(target)]
        parts.append(advantages(inside, values[start : end + 1]))
        start = end + 1
    return np.concatenate(parts)


def test_bi_level_and_what_it_loses_when_borders_are_read_off_rewards() -> None:
    values = [round(0.1 * number, 1) for number in range(1, 11)]
    paid = [0.0] * 4 + [1.0] + [0.0] * 4 + [1.0]
    close(bi_level(paid, values, [4, 9], 0.95), [1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0])
    unpaid = [0.0] * 9 + [1.0]
    close(bi_level(unpaid, values, [4, 9], 0.95), [0.85, 0.75, 0.65, 0.55, 0.45, 0.4, 0.3, 0.2, 0.1, 0])
    lost = [place for place, reward in enumerate(unpaid) if reward]
    close(bi_level(unpaid, values, lost, 0.95), [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0])


@pytest.mark.parametrize(
    ("gamma", "lam", "tokens", "expected"),
    [(0.99, 0.95, 10, 0.54148696), (0.99, 0.95, 200, 4.7e-6), (1, 0.95, 200, 3.505e-5), (0.99, 1, 200, 0.13397967)],
)
def test_how_much_of_an_end_reward_is_left(gamma: float, lam: float, tokens: int, expected: float) -> None:
    rewards = [0.0] * tokens + [1.0]
    close(advantages(rewards, [0.0] * (tokens + 1), gamma, lam)[0], expected, 1e-8)


def test_eight_turns_keep_most_of_it() -> None:
    gammas = ([1.0] * 24 + [0.99]) * 8 + [1.0]
    close(advantages([0.0] * 200 + [1.0], [0.0] * 201, gammas, 1)[0], 0.92274469)


def test_length_adaptive_lambda() -> None:
    close(length_adaptive_lambda(np.array([100, 200, 1000]), 0.05), [0.8, 0.9, 0.98])
    close(length_adaptive_lambda(np.array([0, 1, 20]), 0.05), 0)


def test_double_counting_a_td_error() -> None:
    """A TD error as reward counts the critic twice, unless the critic that it came from is left out."""
    values, gamma, lam = [4, 5, 6, 8], 0.99, 0.95
    delta = advantages([0, 0, 0, 10], values, gamma, 0)
    close(delta, [0.95, 0.94, 1.92, 2])
    close(advantages(delta.tolist(), values, gamma, lam), [2.07331393, 0.1842785, -1.803, -6])
    close(advantages(delta.tolist(), [0] * 4, gamma, lam), [5.19620749, 4.5148405, 3.801, 2])


def test_shaping_changes_no_advantage_when_the_critic_is_fitted_to_it() -> None:
    """gae(r + F, V - Phi) = gae(r, V) for every discount and lambda, with Phi 0 at the end: 1,000 draws."""
    rng = np.random.default_rng(7)
    trajectories, length = 1000, 12
    rewards, values, potential = rng.normal(size=(3, trajectories, length))
    gammas, lams = rng.uniform(size=(2, trajectories, length))
    mask = np.arange(length) < rng.integers(1, length + 1, (trajectories, 1))
    after = np.where(np.roll(mask, -1, axis=1) & (np.arange(length) < length - 1), np.roll(potential, -1, axis=1), 0.0)
    shaped = rewards + gammas * after - potential
    done = np.zeros(trajectories)
    plain = gae(rewards, values, gammas, lams, bootstrap=done, mask=mask)
    fitted = gae(shaped, values - potential, gammas, lams, bootstrap=done, mask=mask)
    close(fitted, plain, 1e-12)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_padding_and_neighbours_change_nothing(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    width = max(lengths) + data.draw(st.integers(0, 3))
    mask = np.arange(width) < np.array(lengths)[:, None]
    arrays = [np.where(mask, rng.uniform(size=mask.shape), np.nan) for _ in range(4)]
    ends = rng.normal(size=len(lengths))
    together = gae(*arrays, bootstrap=ends, mask=mask)
    for index, length in enumerate(lengths):
        rewards, values, gammas, lams = (array[index, :length].tolist() for array in arrays)
        alone = advantages(rewards, values, gammas, lams, bootstrap=float(ends[index]))
        np.testing.assert_array_equal(together[index, :length], alone)
        np.testing.assert_array_equal(together[index, length:], 0)


def whitened(values: Any, mask: Any) -> Floats:
    return whiten([np.asarray(values, np.float64)], [np.asarray(mask, bool)], LocalReducer())[0]


def test_whiten_is_the_population_z_score() -> None:
    unbiased = np.array([-1.161895, -0.38729833, 0.38729833, 1.161895])
    close(whitened([1, 2, 3, 4], [1, 1, 1, 1]), unbiased * np.sqrt(4 / 3))


def test_whatever_is_cut_is_cut_before_or_after_whitening_and_the_order_matters() -> None:
    raw, all_of_them, unbiased = [-150.0, -20.0, 0.0, 5.0, 300.0], [1] * 5, np.sqrt(5 / 4)
    cut = np.clip(raw, -10.0, 10.0)
    close(cut, [-10.0, -10.0, 0.0, 5.0, 10.0])
    z = np.array([-1.07086055, -0.2843528, -0.16335161, -0.13310131, 1.65166627])
    of_cut = np.array([-1.00623059, -1.00623059, 0.1118034, 0.67082039, 1.22983739])
    close(whitened(raw, all_of_them), z * unbiased)
    close(whitened(cut.tolist(), all_of_them), of_cut * unbiased)


@pytest.mark.parametrize("padding", [99.0, -50.0, 0.0, float("nan")])
def test_br_017_pads_are_in_no_statistic(padding: float) -> None:
    got = whitened([[1, 2, padding], [3, padding, padding]], [[1, 1, 0], [1, 0, 0]])
    close(got[[0, 0, 1], [0, 1, 0]], [-1.224745, 0, 1.224745])
    close(got[[0, 1, 1], [2, 1, 2]], 0)


@pytest.mark.parametrize(
    ("values", "mask"), [([0.3, 0.4], [0, 0]), ([0.7], [1]), ([0.1 + 0.2, 0.3, 0.3], [1, 1, 1]), ([], [])]
)
def test_br_019_br_021_nothing_one_or_equal_numbers_give_zero(values: list[float], mask: list[int]) -> None:
    np.testing.assert_array_equal(whitened(values, mask), np.zeros(len(values)))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-8000, 8000).map(lambda n: n / 8), min_size=1, max_size=30), st.integers(0, 30))
def test_whitening_twice_is_once_and_ranks_make_no_difference(numbers: list[float], cut: int) -> None:
    values = np.array(numbers, np.float64)
    mask = np.ones(len(values), bool)
    once = whitened(values, mask)
    close(whitened(once, mask), once, 1e-12)
    shards = [values[:cut], values[cut:]]

    def work(reducer: Any) -> Floats:
        shard = shards[reducer.rank]
        return whiten([shard], [np.ones(len(shard), bool)], reducer)[0]

    close(np.concatenate(on_ranks(work)), once, 1e-12)


@pytest.mark.parametrize(
    ("config", "stream", "text"),
    [
        ({"unit": "word"}, {}, "word"),
        ({"lam_critic": 1.5}, {}, "lam_critic 1.5"),
        ({"clip": -1.0}, {}, "clip"),
        ({"unit": "turn", "length_alpha": 0.05}, {}, "length_alpha"),
        ({"unit": "turn"}, {"gamma_step": 0.0}, "gamma_step is 0.0"),
        ({"unit": "step"}, {"lam_token": 0.95}, "lam_token is 0.95"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(config: dict[str, Any], stream: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        NestedGae(NestedGae.Config(**config), streams={"outcome": StreamSettings(sources=("outcome",), **stream)})
