"""Fits the weights by which the referee lays a failure to the user or the agent, and says how well they carry over.

python benchmarks/fit_referee.py --planted FOLDER FOLDER ... [--human FOLDER] [--scripted N] [--out FILE]

Each `--planted` folder is the work of one author, in the form of `benchmarks/referee.py`. The figure to believe is that
of each folder by weights that were fitted without it. Its clean dialogues, those between people and those of scripted
users are judged as failures, which are the agent's. Dialogues without two slots to hold them against are left out,
and those that a decisive fault settles are not fitted on.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from referee import dialogue, human, planted, scripted

from slea_llm.blame.evidence import evidence
from slea_llm.blame.view import view
from slea_llm.blame.weighing import Weights, features
from slea_llm.referee import rule_faults
from slea_llm.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One failed dialogue: its features, whether the user is to blame, how much it counts in the fit."""

    values: dict[str, float]
    user: bool
    kind: str
    weight: float
    settled: bool


def row(trajectory: Trajectory, *, user: bool, kind: str, weight: float) -> Row | None:
    """The row of a dialogue judged as a failure; None for one without a goal."""
    if trajectory.success:
        trajectory = replace(trajectory, termination="failure", outcome=0.0)
    seen = view(trajectory)
    if len(seen.wanted) < 2:
        return None
    faults = rule_faults(seen)
    settled = any(one.weight == "decisive" and one.party == "user" for one in faults)
    return Row(values=features(seen, faults, evidence(seen)), user=user, kind=kind, weight=weight, settled=settled)


def fit(rows: Sequence[Row], *, l2: float) -> Weights:
    """Logistic regression by Newton's method, with a Gaussian prior on all weights but the bias."""
    rows = [one for one in rows if not one.settled]
    names = sorted({name for one in rows for name in one.values})
    inputs = np.array([[*(one.values.get(name, 0.0) for name in names), 1.0] for one in rows])
    labels = np.array([float(one.user) for one in rows])
    counts = np.array([one.weight for one in rows])
    prior = np.full(len(names) + 1, l2)
    prior[-1] = 1e-6
    found = np.zeros(len(names) + 1)
    for _ in range(100):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ found, -50, 50)))
        slope = inputs.T @ (counts * (chance - labels)) + prior * found
        curve = (inputs * (counts * np.maximum(chance * (1 - chance), 1e-9))[:, None]).T @ inputs + np.diag(prior)
        step = np.linalg.solve(curve, slope)
        found -= step
        if np.abs(step).max() < 1e-8:
            break
    return Weights(
        bias=float(found[-1]),
        weights={name: float(value) for name, value in zip(names, found, strict=False)},
        threshold=0.5,
    )


def right(rows: Iterable[Row], weights: Weights, threshold: float) -> tuple[Counter[str], Counter[str]]:
    """How many dialogues of each kind the weights judge rightly, and how many there are."""
    good: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for one in rows:
        says = one.settled or replace(weights, threshold=threshold).blames(one.values)
        total[one.kind] += 1
        good[one.kind] += says == one.user
    return good, total


def told(name: str, rows: Sequence[Row], weights: Weights, threshold: float) -> str:
    """One line: user faults, all that is the agent's by kind, and the kinds of faults with misses."""
    good, total = right(rows, weights, threshold)
    users = {one.kind for one in rows if one.user}
    agents = ", ".join(f"{kind} {good[kind]}/{total[kind]}" for kind in sorted(total.keys() - users))
    missed = ", ".join(f"{kind} {good[kind]}/{total[kind]}" for kind in sorted(users) if good[kind] < total[kind])
    faults = f"user faults {sum(good[kind] for kind in users)}/{sum(total[kind] for kind in users)}"
    return f"{name}: {'; '.join(part for part in (faults if users else '', agents, missed) if part)}"


def planted_rows(folder: Path) -> list[Row]:
    """The dialogues of one author; a control counts half as much again, for there are fewer."""
    made = [
        row(one, user=party == "user", kind=kind, weight=1.5 if party == "agent" else 1.0)
        for one, party, kind in planted(folder)
    ]
    return [one for one in made if one is not None]


def other_rows(folder: Path | None, count: int) -> list[Row]:
    """Dialogues between people, judged as failures, and failures of scripted users."""
    made: list[Row | None] = []
    for name, messages, goal, language in human(folder) if folder else ():
        one = dialogue(name, messages, goal=goal, language=language, ending="failure")
        made.append(row(one, user=False, kind="people", weight=2.0))
    made += [row(one, user=False, kind="scripted", weight=2.0) for one in scripted(count) if not one.success]
    return [one for one in made if one is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=Path, nargs="+", required=True)
    parser.add_argument("--human", type=Path)
    parser.add_argument("--scripted", type=int, default=0)
    parser.add_argument("--l2", type=float, default=4.0)
    parser.add_argument("--threshold", type=float, default=0.3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sets = {folder.name: planted_rows(folder) for folder in arguments.planted}
    extra = other_rows(arguments.human, arguments.scripted)
    everything = [one for rows in sets.values() for one in rows]
    lines = []
    for held, rows in sets.items():
        rest = [one for name, more in sets.items() if name != held for one in more]
        weights = fit([*rest, *extra], l2=arguments.l2)
        lines.append(told(f"{held}, fitted without it", rows, weights, arguments.threshold))
    for half in (0, 1) if extra else ():
        weights = fit([*everything, *extra[half::2]], l2=arguments.l2)
        name = f"people and scripts, half {half + 1}, fitted without it"
        lines.append(told(name, extra[1 - half :: 2], weights, arguments.threshold))
    weights = fit([*everything, *extra], l2=arguments.l2)
    lines.append(told("all, fitted with them", [*everything, *extra], weights, arguments.threshold))
    print("\n".join(lines))
    if arguments.out:
        sizes = {name: len(rows) for name, rows in sets.items()} | dict(Counter(one.kind for one in extra))
        value = {
            "card": {
                "date": datetime.now(tz=UTC).date().isoformat(),
                "fitted_on": {name: f"{size} dialogues" for name, size in sizes.items()},
                "by": f"benchmarks/fit_referee.py: logistic regression, l2 {arguments.l2} on all weights but the bias",
                "threshold": "chosen by hand on the figures below, which are a little too good for that",
                "figures": lines,
            },
            "bias": round(weights.bias, 3),
            "threshold": arguments.threshold,
            "weights": {
                name: round(one, 3) for name, one in sorted(weights.weights.items()) if abs(one) >= 0.001 or ":" in name
            },
        }
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
