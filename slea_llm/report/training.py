"""What a training run's own records show: curves, where its rewards came from, and what looks unhealthy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slea_llm.health import RULES, Health, Rule
from slea_llm.settings import StreamSettings

POINTS = 400
"""Points of one curve; a longer one is thinned, first and last kept."""


class Alarm(NamedTuple):
    """Something to look at: its name, when it was first raised (iteration), what it means and what mends it."""

    name: str
    at: float
    what: str


Curve = Sequence[tuple[float, float]]


def training(
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    streams: Mapping[str, StreamSettings] | None = None,
) -> dict[str, Any] | None:
    """Curves by metric, evaluations and alarms as JSON values; None without any record."""
    curves = curves_of(metrics)
    if not curves and not evaluations:
        return None
    return {
        "curves": {name: _thinned(curve) for name, curve in sorted(curves.items())},
        "evaluations": [
            {
                **{
                    key: _number(row.get(key))
                    for key in ("policy_version", "n", "successes", "success_rate", "mean_turns")
                },
                "moment": str(row.get("moment", "")),
                "interval": _interval(row.get("interval")),
            }
            for row in evaluations
        ],
        "alarms": [list(alarm) for alarm in alarms(metrics, streams)],
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


def alarms(metrics: Sequence[Mapping[str, Any]], streams: Mapping[str, StreamSettings] | None = None) -> list[Alarm]:
    """The alarms of `slea_llm.health`, each at the iteration in which it was first raised, with what mends it.

    Runs write them down; those of an older version are looked at again here, with the streams of their recipe.
    """
    written = any(isinstance(record.get("alarms"), list) for record in metrics)
    health = Health(streams or {})
    raised: dict[str, list[float]] = {}
    for number, record in enumerate(metrics, start=1):
        at = _number(record.get("iteration")) or float(number)
        if written:
            names = record.get("alarms")
            held = [str(name) for name in names] if isinstance(names, list) else []
        else:
            held = [alarm.name for alarm in health.observe(_numbers(record.get("metrics"), ""))]
        for name in held:
            raised.setdefault(name, []).append(at)
    rules = {rule.name: rule for rule in RULES}
    return sorted((_alarm(name, times, rules.get(name)) for name, times in raised.items()), key=lambda alarm: alarm.at)


def _alarm(name: str, times: Sequence[float], rule: Rule | None) -> Alarm:
    count = f"in {len(times)} iteration{'s' if len(times) > 1 else ''}"
    what = count if rule is None else f"{rule.meaning}. {rule.mend} ({count})"
    return Alarm(name, times[0], what)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _interval(value: Any) -> list[float] | None:
    numbers = [_number(one) for one in value] if isinstance(value, list) else []
    known = [one for one in numbers if one is not None]
    return known if len(known) == len(numbers) == 2 else None


def _numbers(value: Any, prefix: str) -> dict[str, float]:
    rows = value.items() if isinstance(value, Mapping) else ()
    return {f"{prefix}{name}": number for name, item in rows if (number := _number(item)) is not None}


def _thinned(curve: Curve) -> list[list[float]]:
    step = max(1, math.ceil(len(curve) / POINTS))
    kept = [*curve[::step], *([curve[-1]] if (len(curve) - 1) % step else [])]
    return [[at, float(f"{value:.6g}")] for at, value in kept]
