"""What a training run's own records show: curves, where its rewards came from, and what looks unhealthy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

POINTS = 400
"""Points of one curve; a longer one is thinned, first and last kept."""
WINDOW = 5
"""Iterations that are averaged at both ends to say whether something rose or fell."""


class Alarm(NamedTuple):
    """Something to look at: the metric, when (iteration), and what it may mean."""

    metric: str
    at: float
    what: str


Curve = Sequence[tuple[float, float]]


def training(metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Curves by metric, evaluations and alarms as JSON values; None without any record."""
    curves = curves_of(metrics)
    if not curves and not evaluations:
        return None
    return {
        "curves": {name: _thinned(curve) for name, curve in sorted(curves.items())},
        "evaluations": [
            {
                key: row.get(key)
                for key in ("moment", "policy_version", "n", "successes", "success_rate", "interval", "mean_turns")
            }
            for row in evaluations
        ],
        "alarms": [list(alarm) for alarm in alarms(curves)],
        "iterations": max((curve[-1][0] for curve in curves.values() if curve), default=0),
    }


def curves_of(metrics: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Metric -> (iteration, value); what is no finite number is left out. Seconds and peaks have their prefix."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for number, record in enumerate(metrics, start=1):
        at = _number(record.get("iteration")) or float(number)
        rows = {
            **_numbers(record.get("metrics"), ""),
            **_numbers(record.get("seconds"), "seconds/"),
            **_numbers(record.get("peak_gib"), "peak_gib/"),
        }
        for name, value in rows.items():
            curves.setdefault(name, []).append((at, value))
    return curves


def alarms(curves: Mapping[str, Curve]) -> list[Alarm]:
    """What looks unhealthy, by the ranges that docs/metrics.md names; a place to start looking, no verdict."""
    found: list[Alarm] = []

    def first(name: str, wrong: Callable[[float], bool], what: str) -> None:
        bad = [(at, value) for at, value in curves.get(name, ()) if wrong(value)]
        if bad:
            found.append(Alarm(name, bad[0][0], f"{what} (in {len(bad)} iterations, first {bad[0][1]:.4g})"))

    first("update/kl", lambda v: v > 0.1, "updates move the policy far: lower the learning rate or set target_kl")
    first("ppo/clip_frac", lambda v: v > 0.3, "most of the gradient is clipped away: lower the learning rate")
    first("ppo/ratio_max", lambda v: v > 100, "single tokens changed more than a hundredfold in one update")
    first("sampler/gap_mean", lambda v: v > 0.1, "sampler and trainer disagree: other weights or another temperature")
    first("episodes/failed", lambda v: v > 0, "dialogues broke; their records say why")
    first("episodes/truncated", lambda v: v > 0.2, "many dialogues were cut: raise max_turns or the token budget")
    for name in curves:
        if name.startswith("credit/unscored/"):
            first(name, lambda v: v > 0.2, "many steps have no score")
        if name.startswith("health/") and not name.endswith("_count"):
            first(name, lambda v: v > 0, "the run raised this alarm itself")
        if name.startswith("grad_norm/"):
            found += _jump(name, curves[name])
        if name.endswith("/explained_variance"):
            found += _worse_critic(name, curves[name])
    return sorted([*found, *_collapse(curves), *_flat_success(curves)], key=lambda alarm: alarm.at)


def _jump(name: str, curve: Curve) -> list[Alarm]:
    values = sorted(value for _, value in curve)
    middle = values[len(values) // 2] if values else 0.0
    bad = [(at, value) for at, value in curve if middle > 0 and value > 100 * middle]
    return [Alarm(name, bad[0][0], f"the gradient norm jumped to {bad[0][1]:.4g} (median {middle:.4g})")] if bad else []


def _worse_critic(name: str, curve: Curve) -> list[Alarm]:
    late = curve[-WINDOW:]
    if len(curve) >= 2 * WINDOW and all(value < -0.5 for _, value in late):
        return [Alarm(name, late[0][0], "the critic is worse than a constant: more critic updates, or a lower rate")]
    return []


def _collapse(curves: Mapping[str, Curve]) -> list[Alarm]:
    """Entropy that fell to a twentieth of where it was."""
    curve = curves.get("entropy/entropy", ())
    if len(curve) < 2 * WINDOW:
        return []
    start = _mean(curve[:WINDOW])
    low = [at for at, value in curve if start > 0 and value < 0.05 * start]
    return [Alarm("entropy/entropy", low[0], "the entropy collapsed: nothing new is tried any more")] if low else []


def _flat_success(curves: Mapping[str, Curve]) -> list[Alarm]:
    """Rewards of the scores that rose while success did not: a sign that the scores are played, not the task."""
    success = curves.get("episodes/success", ())
    if len(success) < 4 * WINDOW:
        return []
    gain = _mean(success[-WINDOW:]) - _mean(success[:WINDOW])
    found = []
    for name, curve in curves.items():
        if name.startswith("credit/share/") and name not in ("credit/share/outcome", "credit/share/reference_kl"):
            rise = _mean(curve[-WINDOW:]) - _mean(curve[:WINDOW])
            if len(curve) >= 4 * WINDOW and rise > 0.1 and gain < 0.02:
                found.append(
                    Alarm(
                        name, curve[-WINDOW][0], f"its share of the rewards rose by {rise:.2f}, success by {gain:+.3f}"
                    )
                )
    return found


def _mean(curve: Curve) -> float:
    return math.fsum(value for _, value in curve) / len(curve) if curve else 0.0


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _numbers(value: Any, prefix: str) -> dict[str, float]:
    rows = value.items() if isinstance(value, Mapping) else ()
    return {f"{prefix}{name}": number for name, item in rows if (number := _number(item)) is not None}


def _thinned(curve: Curve) -> list[list[float]]:
    step = max(1, math.ceil(len(curve) / POINTS))
    kept = [*curve[::step], *([curve[-1]] if (len(curve) - 1) % step else [])]
    return [[at, float(f"{value:.6g}")] for at, value in kept]
