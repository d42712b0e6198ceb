"""The formulas of credit for single steps: plain numbers in, plain numbers out. Values are success probabilities.

Each function names its source; tests hold all of them to numbers worked out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

Residual = Literal["uniform", "last"]


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def redistribute(
    predictions: Sequence[float], outcome: float, *, start: float = 0.0, residual: Residual = "uniform"
) -> list[float]:
    """RUDDER (Arjona-Medina et al. 2019): h_t = g_t - g_(t-1) with g_(-1) = start, plus what g_(T-1) lacks.

    `predictions[t]` is the return expected after step t. What is lacking is spread evenly or added to the last step, so
    that the h always sum to `outcome - start`. Return-equivalent for a discount of 1 and a start of 0 only.
    """
    _require(len(predictions) > 0, "there is no step to give the return to")
    steps = progress([start, *predictions])
    lacking = outcome - predictions[-1]
    if residual == "last":
        return [*steps[:-1], steps[-1] + lacking]
    return [step + lacking / len(steps) for step in steps]


def progress(values: Sequence[float]) -> list[float]:
    """v_(k+1) - v_k: n values give n - 1 differences, which sum to the last value minus the first."""
    return [after - before for before, after in pairwise(values)]


def rudder_loss(predictions: Sequence[Sequence[float]], returns: Sequence[float], *, auxiliary: float = 0.5) -> float:
    """Mean over dialogues of (g_(T-1) - R)^2 + auxiliary * mean_t (g_t - R)^2. Errors are squared before the mean."""
    _require(len(predictions) == len(returns) > 0, f"{len(predictions)} dialogues and {len(returns)} returns")
    main = fmean((row[-1] - wanted) ** 2 for row, wanted in zip(predictions, returns, strict=True))
    every = fmean(
        fmean((value - wanted) ** 2 for value in row) for row, wanted in zip(predictions, returns, strict=True)
    )
    return main + auxiliary * every


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """What a success says about a step: `lift` = h / pi, `q` = P(success | state, step), `advantage` = q - V(state)."""

    lift: float
    q: float
    advantage: float


def hindsight(
    policy: float, backward: float, value: float, *, lift_range: tuple[float, float] | None = None
) -> Hindsight:
    """Hindsight credit for a binary outcome (Harutyunyan et al. 2019).

    `policy` pi(step | state), `backward` h(step | state, success), `value` V = P(success | state). By Bayes
    q = V h / pi, so q (1 - pi / h) = q - V. `lift_range` clips the lift; q is then what the clipped lift says, at
    most 1.
    """
    _require(0 < policy <= 1 and 0 <= backward <= 1, f"pi {policy} and h {backward} are not probabilities, pi above 0")
    _require(0 <= value <= 1, f"value {value} is not a probability")
    lift = backward / policy
    if lift_range is not None:
        lift = min(max(lift, lift_range[0]), lift_range[1])
    q = min(value * lift, 1.0)
    return Hindsight(lift=lift, q=q, advantage=q - value)


def policy_mean_advantages(values: Sequence[float], policy: Sequence[float]) -> list[float]:
    """COMA (Foerster et al. 2018): Q(s, a) - sum_a' pi(a' | s) Q(s, a'), whose mean under pi is 0."""
    _require(len(values) == len(policy) > 0, f"{len(values)} values and {len(policy)} probabilities do not pair")
    _require(math.isclose(sum(policy), 1.0, abs_tol=1e-6), f"the probabilities sum to {sum(policy)}, not to 1")
    baseline = sum(p * q for p, q in zip(policy, values, strict=True))
    return [q - baseline for q in values]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """y_j - mean of the others = K / (K - 1) * (y_j - mean), for K >= 2 alternatives."""
    count = len(values)
    _require(count >= 2, f"{count} alternative(s); leaving one out needs 2 or more")
    mean = fmean(values)
    return [count / (count - 1) * (value - mean) for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of actual minus alternative, and its standard error over pairs, and as if the arms were independent."""

    mean: float
    paired_se: float
    unpaired_se: float


def paired_difference(actual: Sequence[float], alternative: Sequence[float]) -> Difference:
    """Two arms of continuations that ran the same seeds, in the order of the seeds; at least 2 pairs."""
    _require(len(actual) == len(alternative) >= 2, f"{len(actual)} and {len(alternative)} ends are not 2 or more pairs")
    count = len(actual)
    gaps = [one - other for one, other in zip(actual, alternative, strict=True)]
    return Difference(
        mean=fmean(gaps),
        paired_se=stdev(gaps) / math.sqrt(count),
        unpaired_se=math.sqrt((stdev(actual) ** 2 + stdev(alternative) ** 2) / count),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonteCarloLabel:
    """What n continuations say of a prefix (Wang et al. 2024, Math-Shepherd): share of successes, any success."""

    soft: float
    hard: int
    se: float


def monte_carlo_label(successes: int, n: int) -> MonteCarloLabel:
    """`se` = sqrt(p (1 - p) / n). Raises ValueError unless 0 <= successes <= n and n > 0."""
    _require(n > 0 and 0 <= successes <= n, f"{successes} successes of {n} is not a proportion")
    soft = successes / n
    return MonteCarloLabel(soft=soft, hard=int(successes > 0), se=math.sqrt(soft * (1 - soft) / n))


def monte_carlo_advantages(values: Sequence[float], outcome: float) -> list[float]:
    """VinePPO (Kazemnejad et al. 2024): V(s_(k+1)) - V(s_k) at discount 1; the last step meets the outcome itself."""
    _require(len(values) > 0, "there is no step")
    return progress([*values, outcome])
