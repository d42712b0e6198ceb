"""How likely it is that a failure was the user's fault, from all that is seen, with learnt weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import yaml

from slea_llm import assets
from slea_llm.blame.evidence import evidence
from slea_llm.blame.exchanges import Evidence
from slea_llm.blame.faults import KINDS, Fault, of_user
from slea_llm.blame.view import Line, View

STRONG = frozenset(
    {
        "switches_often",
        "unanswered>=3",
        "evades>=3",
        "already_open>=2",
        "says_again>=3",
        "tells_other>=3",
        "gives_back>=2",
        "objects_open>=3",
        "demands_same_again",
        "thanks_for_question>=2",
    }
)
DOUBTS = frozenset(
    {
        "any_serious",
        "unanswered",
        "evades",
        "says_again",
        "gives_back",
        "accepts_other",
        "accepts_report",
        "objects_idly",
        "turns_back",
        "turns_away",
        "switches_twice",
        "demands_again",
        "insists",
        "thanks_for_question",
        "farewell_to_question",
    }
)
"""Without any of these, a user that has told its whole goal did its part."""
OF_FORM = frozenset(list(KINDS)[: list(KINDS).index("contradicts_goal")])
"""Faults that show in a line by itself, whatever the goal."""
PAIRED = ("untold_specific", "untold_vague", "accepts_other", "untold_asked", "accepts_lost")
"""Evidence that says another thing where the user is content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A logistic regression: `bias` and a weight for each feature; others count nothing."""

    bias: float
    weights: Mapping[str, float]
    threshold: float

    def chance(self, values: Mapping[str, float]) -> float:
        """The probability that the user is to blame, for features of `features`."""
        total = self.bias + sum(self.weights.get(name, 0.0) * value for name, value in values.items())
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, total))))

    def blames(self, values: Mapping[str, float]) -> bool:
        """Whether the user is to blame. A kind of fault that the fit has never met stands as the rules have it."""
        new = any(name.startswith(("serious:", "suspect:")) and name not in self.weights for name in values)
        return new or self.chance(values) >= self.threshold


@cache
def shipped() -> Weights:
    """`data/referee/weights.yaml`."""
    value = yaml.safe_load(assets.find("data", "referee/weights.yaml").read_text(encoding="utf-8"))
    return Weights(
        bias=float(value["bias"]),
        weights={str(name): float(one) for name, one in value["weights"].items()},
        threshold=float(value["threshold"]),
    )


def features(seen: View, faults: Sequence[Fault], found: Sequence[Evidence]) -> dict[str, float]:
    """Name -> strength: the evidence by name and by how often, the rules' faults by kind and weight, and pairs."""
    counts: dict[str, float] = {}
    for one in found:
        counts[one.name] = counts.get(one.name, 0.0) + one.strength
    values = dict.fromkeys(counts, 1.0)
    if "untold_share" in counts:
        values["untold_share"] = counts["untold_share"]
    for name, count in counts.items():
        values |= {f"{name}>={least}": 1.0 for least in (2, 3) if count >= least}
    for fault in faults:
        if fault.party == "user" and fault.weight in ("serious", "suspect"):
            values[f"{fault.weight}:{fault.kind}"] = 1.0
            if fault.weight == "serious":
                values["any_serious"] = 1.0
                values["serious:of form" if fault.kind in OF_FORM else "serious:of goal"] = 1.0
    if STRONG & values.keys():
        values["any_serious"] = values["any_strong"] = 1.0
    if seen.left:
        values["user_left"] = 1.0
    if "all_told" in values and not DOUBTS & values.keys():
        values["did_its_part"] = 1.0
    for mood, name in product(("content_at_end", "never_objects"), PAIRED):
        if mood in values and name in values:
            values[f"{mood}*{name}"] = 1.0
    return values


def weighed(seen: View, faults: Sequence[Fault]) -> tuple[Fault | None, Line | None]:
    """The fault by which a failure is laid to the user; else None, with the agent's line that speaks most against that.

    `faults` are those of the rules. The fault is the first serious one of the user's, or the weightiest evidence.
    """
    found = evidence(seen)
    weights = shipped()
    ranked = sorted(found, key=lambda one: weights.weights.get(one.name, 0.0), reverse=True)
    if not weights.blames(features(seen, faults, found)):
        agent = [
            one.line for one in reversed(ranked) if one.line.side == "agent" and weights.weights.get(one.name, 0.0) < 0
        ]
        return None, next(iter(agent), None)
    serious = next((one for one in faults if one.party == "user" and one.weight == "serious"), None)
    if serious is not None:
        return serious, None
    best = next((one for one in ranked if one.kind), None)
    if best is not None:
        return of_user(best.kind, best.line, note=best.note), None
    return next((one for one in faults if one.party == "user"), None), None
