"""Where labels come from: people, outcomes, rules, and counts of continuations; and the examples made of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from slea_llm.annotations import check_keys
from slea_llm.encoders import SentenceEncoder
from slea_llm.errors import ConfigError, nearest
from slea_llm.evaluators.attribution import monte_carlo_label
from slea_llm.evaluators.reward_model_features import Encoding, Prefixes, prefixes
from slea_llm.fitting.training import Example
from slea_llm.interfaces import StepEvaluator
from slea_llm.storage import read_json_lines
from slea_llm.types import Step, Trajectory, leaf_steps

Source = Literal["hand", "override", "heuristic", "mc_soft", "mc_hard", "outcome"]
SOURCES: tuple[str, ...] = get_args(Source)

HEAD_OF: Mapping[str, int] = {"hand": 0, "override": 0, "heuristic": 0, "mc_hard": 0, "mc_soft": 1, "outcome": 1}
"""0: was it a good step. 1: the chance of success after it; a share of continuations estimates just that."""

DEFAULT_WEIGHT: Mapping[str, float] = {
    "hand": 1.0,
    "override": 3.0,  # somebody saw a shortcut and said so: a hard example
    "heuristic": 0.3,
    "mc_soft": 1.0,
    "mc_hard": 1.0,
    "outcome": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabel:
    """A target in [0, 1] for one leaf step of one trajectory, with its weight (above 0).

    Without `step` it is about the last leaf step of the turn, without `turn` about the last one of the dialogue.
    """

    trajectory: str
    turn: int | None
    step: int | None
    source: Source
    target: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        place = f"label of {self.trajectory!r} step {self.turn}.{self.step}"
        if self.source not in SOURCES:
            raise ConfigError(
                f"{place}: source {self.source!r} is not one of {', '.join(SOURCES)}{nearest(self.source, SOURCES)}"
            )
        if not (math.isfinite(self.target) and 0.0 <= self.target <= 1.0):
            raise ConfigError(f"{place}: {self.target} is not in [0, 1]")
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise ConfigError(f"{place}: weight {self.weight} must be above 0")


def read_labels(path: Path) -> list[StepLabel]:
    """Labels of a file of annotations (`slea_llm.annotations`): `label` in [0, 1], `successes` and `n`, or `override`.

    An override above 0 says that the step is good, another that it is bad. `source` (default `hand`; with counts
    `mc_soft`) and `weight` may stand beside. Raises ConfigError naming the line.
    """
    found = []
    for line in read_json_lines(path):
        place = f"{path}, line {line.number}"
        row = line.value
        check_keys(row, place)
        try:
            found.append(_label(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{place}: {type(error).__name__}: {error}; needed: trajectory, turn, step, label or counts"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
    return found


def _label(row: Mapping[str, Any]) -> StepLabel:
    if "override" in row:
        return _override(row)
    counted = "successes" in row or "n" in row
    if counted == ("label" in row):
        raise ValueError("give label, or successes and n")
    source = row.get("source", "mc_soft" if counted else "hand")
    if counted:
        counts = monte_carlo_label(row["successes"], row["n"])
        target = float(counts.hard if source == "mc_hard" else counts.soft)
    else:
        target = float(row["label"])
    weight = float(row.get("weight", DEFAULT_WEIGHT.get(source, 1.0)))
    return StepLabel(
        trajectory=str(row["trajectory"]),
        turn=_number(row, "turn"),
        step=_number(row, "step"),
        source=source,
        target=target,
        weight=weight,
    )


def _override(row: Mapping[str, Any]) -> StepLabel:
    return StepLabel(
        trajectory=str(row["trajectory"]),
        turn=_number(row, "turn"),
        step=_number(row, "step"),
        source="override",
        target=float(float(row["override"]) > 0),
        weight=float(row.get("weight", DEFAULT_WEIGHT["override"])),
    )


def _number(row: Mapping[str, Any], key: str) -> int | None:
    return None if row.get(key) is None else int(row[key])


def outcome_labels(trajectory: Trajectory, steps: Sequence[Step]) -> list[StepLabel]:
    """The outcome of the dialogue at every step; none for one that broke, was cut, or whose log says no outcome."""
    if trajectory.failed or trajectory.truncated or trajectory.termination == "unknown":
        return []
    target = float(trajectory.success)
    return [
        StepLabel(trajectory=trajectory.id, turn=step.turn, step=step.index, source="outcome", target=target)
        for step in leaf_steps(steps)
    ]


def heuristic_labels(
    evaluator: StepEvaluator,
    trajectory: Trajectory,
    steps: Sequence[Step],
    *,
    weight: float = DEFAULT_WEIGHT["heuristic"],
) -> list[StepLabel]:
    """A cold start: steps that a rule scores above 0 are good, below 0 bad; 0 and unscored say nothing."""
    return [
        StepLabel(
            trajectory=trajectory.id,
            turn=word.turn,
            step=word.step,
            source="heuristic",
            target=float(word.score > 0),
            weight=weight,
        )
        for word in evaluator.score(trajectory, steps)
        if word.score
    ]


def examples(
    parsed: Sequence[tuple[Trajectory, Sequence[Step]]],
    labels: Iterable[StepLabel],
    encoder: SentenceEncoder,
    encoding: Encoding,
) -> list[Example]:
    """One example a trajectory that has any label.

    A step with several labels of one head gets their weighted mean. Raises ConfigError for a label whose trajectory or
    step is not there, and for trajectories that share an id.
    """
    by_id = {trajectory.id: (trajectory, leaf_steps(steps)) for trajectory, steps in parsed}
    if len(by_id) != len(parsed):
        twice = Counter(trajectory.id for trajectory, _ in parsed).most_common(1)[0][0]
        raise ConfigError(f"trajectory id {twice!r} occurs more than once; labels could not be told apart")
    places = {
        name: {(step.turn, step.index): place + 1 for place, step in enumerate(leaves)}
        for name, (_, leaves) in by_id.items()
    }
    tables: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for label in labels:
        if label.trajectory not in places:
            raise ConfigError(
                f"label for trajectory {label.trajectory!r}, which is not in the logs"
                f"{nearest(label.trajectory, places)}"
            )
        place = _find(label, places[label.trajectory])
        if place is None:
            raise ConfigError(
                f"label for step {label.turn}.{label.step} of trajectory {label.trajectory!r}, which has no such leaf; "
                "cut the logs with the parser that the labels were made with"
            )
        size = len(places[label.trajectory]) + 1
        sums, weights = tables.setdefault(label.trajectory, (np.zeros((size, 2)), np.zeros((size, 2))))
        sums[place, HEAD_OF[label.source]] += label.weight * label.target
        weights[place, HEAD_OF[label.source]] += label.weight
    kept = [by_id[name] for name in by_id if name in tables]
    rows = prefixes(kept, encoder, encoding)
    return [_example(trajectory, row, *tables[trajectory.id]) for (trajectory, _), row in zip(kept, rows, strict=True)]


def _find(label: StepLabel, places: Mapping[tuple[int, int], int]) -> int | None:
    """The place of the step that a label is about: the last that fits, since what it leaves out means the last."""
    fits = [
        place
        for (turn, step), place in places.items()
        if label.turn in (None, turn) and (label.step is None or label.step == step)
    ]
    return max(fits, default=None)


def _example(trajectory: Trajectory, row: Prefixes, sums: np.ndarray, weights: np.ndarray) -> Example:
    targets = np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)
    settled = not trajectory.truncated and trajectory.termination not in ("error", "unknown")
    if weights[1:, 1].any() and settled:
        # Before the first step stands the same dialogue: its outcome is what a start is worth.
        targets[0, 1], weights[0, 1] = float(trajectory.success), float(weights[1:, 1].max())
    return Example(
        trajectory=trajectory.id,
        group=group_of(trajectory),
        prefixes=row,
        targets=targets,
        weights=weights,
    )


def group_of(trajectory: Trajectory) -> str:
    """What must stay on one side of a split: the task (a conversation), where the log names it, else the trajectory."""
    task = trajectory.task.get("id") or trajectory.task.get("seed")
    return f"{trajectory.environment}/{task}" if task is not None else trajectory.id
