"""Lambda: oracles of its forms, its place in the loss, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.augmenters.weighting import StepWeighting, check_weights, power_weights, softmax_weights
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.errors import ConfigError, CreditError, UnsupportedError
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import StreamSettings, WeightSettings
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats, Verdict
from tests.support.experience import dialogue, on_ranks, stats_of

STREAMS = {"outcome": StreamSettings(sources=("outcome",), gamma_turn=1.0, lam_turn=1.0)}


class Says:
    """Weighs steps as it is told."""

    name: ClassVar[str] = "says"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, weights: Mapping[tuple[int, int], float], *, gate: bool = True) -> None:
        self._weights = weights
        self.gate = Verdict(open=gate, line="")

    def weights(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:  # noqa: ARG002
        return self._weights


class Adds(Says):
    """Another one."""

    name: ClassVar[str] = "adds"


def one_step_turns(*lengths: int, reward: float = 1.0, **options: Any) -> ScoredTrajectory:
    return dialogue([[("reply", n)] for n in lengths], rewards=[0.0] * (len(lengths) - 1) + [reward], **options)


def weighting(*weighers: Says, **options: Any) -> StepWeighting:
    return StepWeighting(WeightSettings(sources=tuple(one.name for one in weighers), **options), weighers)


def credit(
    scored: Sequence[ScoredTrajectory], weighers: Sequence[Says], reducer: Any = None, **options: Any
) -> tuple[AugmentedExperience, ...]:
    chosen = WeightSettings(sources=tuple(one.name for one in weighers), **options)
    crediting = Crediting(
        STREAMS, weighers, NestedGae(NestedGae.Config(), streams=STREAMS), evaluators=(), weights=chosen
    )
    stats: list[TokenStats] = [stats_of(one, {"outcome": [0.0] * one.trajectory.sampled_tokens}) for one in scored]
    return crediting.credit(scored, stats, progress=0.0, reducer=reducer or LocalReducer())


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [0.72989542, 1.62441213, 0.98525576, 0.66043669]),
        (0.5, [4 * p for p in (0.11636185, 0.57634401, 0.21202511, 0.09526902)]),
        (0.1, [4 * p for p in (0.00033307, 0.9928546, 0.0066898, 0.00012253)]),
    ],
)
def test_oracle_softmax_lambda(temperature: float, expected: list[float]) -> None:
    assert softmax_weights([0.2, 1, 0.5, 0.1], temperature=temperature) == pytest.approx(expected, abs=1e-7)


def test_oracle_credit_weights_mean1_clip() -> None:
    raw = {(turn, 0): weight for turn, weight in enumerate([0.2, 1, 0.5, 0.1])}
    got = weighting(Says(raw), temperature=1.0, floor=0.0).for_loss(one_step_turns(1, 1, 1, 1), 0.0)
    assert list(got.values()) == pytest.approx([0.72989542, 1.62441213, 0.98525576, 0.66043669], abs=1e-8)
    sharp = weighting(Says(raw), temperature=0.1, floor=0.0).for_loss(one_step_turns(1, 1, 1, 1), 0.0)
    assert list(sharp.values()) == [0.5, 2.0, 0.5, 0.5]


def test_oracle_info_density() -> None:
    expected = [1.72472246, 0.46150213, 1.35227327, 0.46150213]
    assert power_weights([0.9, 0.1, 0.6, 0.05], power=0.6, floor=0.1) == pytest.approx(expected, abs=1e-8)
    raw = {(turn, 0): weight for turn, weight in enumerate([0.9, 0.1, 0.6, 0.05])}
    got = weighting(Says(raw), clip=(0.0, 5.0)).for_loss(one_step_turns(1, 1, 1, 1), 0.0)
    assert list(got.values()) == pytest.approx(expected, abs=1e-8)


def test_oracle_lambda_twice() -> None:
    """What is drawn by lambda and multiplied by lambda counts its square: P of the sampler is not what is trained."""
    raw = [0.5, 1.0, 2.0]
    drawn = np.array(raw) / sum(raw)
    np.testing.assert_allclose(drawn, [0.14285714, 0.28571429, 0.57142857], atol=1e-8)
    twice = drawn * raw / (drawn @ raw)
    np.testing.assert_allclose(twice, [0.04761905, 0.19047619, 0.76190476], atol=1e-8)
    with pytest.raises(UnsupportedError, match="counts lambda squared"):
        check_weights(WeightSettings(sources=("says",), use=("loss", "sampler")), ["says"], [])


def test_the_priority_is_the_mean_raw_weight_and_has_no_power_yet() -> None:
    lambdas = weighting(Says({(0, 0): 4.0, (1, 0): 0.0}), use=("sampler",))
    assert lambdas.priority(one_step_turns(1, 3), 0.0) == pytest.approx((4.0 + 0.1) / 2)
    assert lambdas.in_sampler
    assert not lambdas.in_loss
    assert weighting(Says({}), use=("sampler",)).priority(dialogue([]), 0.0) == 1.0


def test_weights_multiply_the_policy_loss_with_mean_one_over_all_tokens() -> None:
    scored = [one_step_turns(1, 5, name="a"), one_step_turns(2, 2, name="b", reward=0.0)]
    got = credit(scored, [Says({(0, 0): 1.0, (1, 0): 3.0})], power=1.0, clip=(0.0, 9.0))
    tokens = np.concatenate([one.weights for one in got])
    assert tokens.mean() == pytest.approx(1.0, abs=1e-12)
    assert tokens[1] == pytest.approx(3 * tokens[0])
    equal = credit(scored, [Says({})])
    for one, plain in zip(equal, credit(scored, []), strict=True):
        np.testing.assert_array_equal(one.weights, plain.weights)  # equal weights are no weights, to the bit


def test_weights_in_the_sampler_leave_the_loss_alone() -> None:
    (got,) = credit([one_step_turns(1, 5)], [Says({(0, 0): 9.0})], use=("sampler",))
    assert set(got.weights) == {1.0}


def test_the_mean_is_taken_over_all_ranks() -> None:
    scored = [one_step_turns(1, 5, name="a"), one_step_turns(2, 2, name="b", reward=0.0)]
    weighers = [Says({(0, 0): 0.2, (1, 0): 1.0})]
    together = credit(scored, weighers)
    apart = on_ranks(lambda reducer: credit(scored[reducer.rank : reducer.rank + 1], weighers, reducer))
    for (one,), other in zip(apart, together, strict=True):
        np.testing.assert_allclose(one.weights, other.weights, rtol=0, atol=1e-12)


def test_sources_are_multiplied_and_a_shut_gate_weighs_nothing() -> None:
    scored = one_step_turns(1, 1)
    both = weighting(Says({(0, 0): 2.0}), Adds({(0, 0): 3.0}))
    assert both.raw(scored, 0.0) == {(0, 0): 6.0, (1, 0): 1.0}
    shut = weighting(Says({(0, 0): 2.0}), Adds({(0, 0): 3.0}, gate=False))
    assert shut.raw(scored, 0.0) == {(0, 0): 2.0, (1, 0): 1.0}


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(CreditError, match=r"says weighs step \(0, 0\)"):
        weighting(Says({(0, 0): weight})).raw(one_step_turns(1), 0.0)
    with pytest.raises(CreditError, match="which is no leaf step"):
        weighting(Says({(7, 0): 1.0})).raw(one_step_turns(1), 0.0)


def test_names_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown source 'sayz'.*did you mean 'says'"):
        check_weights(WeightSettings(sources=("sayz",)), ["says"], [])
    with pytest.raises(ConfigError, match="pays rewards and weighs no steps"):
        check_weights(WeightSettings(sources=("slots",)), [], ["slots"])
    with pytest.raises(ConfigError, match=r"'says' weighs steps; name it in weights\.sources"):
        check_weights(WeightSettings(), ["says"], [])
    check_weights(WeightSettings(), ["says"], ["says"])  # one that also pays may be there for that alone


@pytest.mark.parametrize(
    "options",
    [{"power": 1.1}, {"floor": -1.0}, {"temperature": -0.1}, {"clip": (1.1, 2.0)}, {"clip": (0.5, 0.9)}, {"use": ()},
     {"sources": ("a", "a")}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} .*allowed"):
        WeightSettings(**options)


@given(
    values=st.lists(st.floats(0, 1e6, allow_subnormal=True), min_size=1, max_size=12),
    power=st.floats(0, 1),
    floor=st.floats(0, 2),
    temperature=st.floats(0.01, 1e3),
)
@settings(deadline=None, max_examples=80)
def test_both_forms_have_mean_one_and_keep_the_order(
    values: list[float], power: float, floor: float, temperature: float
) -> None:
    for got in (power_weights(values, power=power, floor=floor), softmax_weights(values, temperature=temperature)):
        assert sum(got) / len(got) == pytest.approx(1.0, abs=1e-9)
        assert all(weight >= 0.0 for weight in got)
        order = sorted(range(len(values)), key=values.__getitem__)
        assert all(got[a] <= got[b] * (1 + 1e-12) for a, b in pairwise(order))


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WeightSettings().floor = 0.0  # type: ignore[misc]
