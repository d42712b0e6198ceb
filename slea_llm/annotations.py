"""What people say of steps: labels and overrides, each with who said it, when and why, in a JSON-lines file.

A *label* in [0, 1] says how good a step is; it is what scores are measured against and evaluators are fitted to. An
*override* is a score of its own, such as -10 for a shortcut; it takes the place of what evaluators say of that step.

    {"trajectory": "t-17", "turn": 3, "step": 0, "label": 0, "by": "ada", "at": "2026-05-02", "why": "wrong flight"}
    {"trajectory": "t-23", "override": -10, "by": "ada", "at": "2026-05-02", "why": "asks again to fill the form"}
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slea_llm.errors import ConfigError, nearest
from slea_llm.storage import read_json_lines
from slea_llm.types import ScoredStep, ScoredTrajectory, Step, leaf_steps

LABEL_KEYS = ("trajectory", "turn", "step", "label", "successes", "n", "source", "weight", "by", "at", "why")
"""What a line with a label or with counts of continuations may hold; `slea fit-evaluator` reads the counts."""
OVERRIDE_KEYS = ("trajectory", "turn", "step", "override", "weight", "by", "at", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One line. Exactly one of `label` and `override` is set.

    Without `step` it is about the last leaf step of the turn; without `turn` about the last one of the dialogue.
    """

    trajectory: str
    turn: int | None = None
    step: int | None = None
    label: float | None = None
    override: float | None = None
    by: str = ""
    at: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        place = f"annotation of {self.trajectory!r}"
        if (self.label is None) == (self.override is None):
            raise ConfigError(f"{place}: give exactly one of label and override")
        if self.label is not None and not (math.isfinite(self.label) and 0.0 <= self.label <= 1.0):
            raise ConfigError(f"{place}: label {self.label} is not in [0, 1]; a score outside it is an override")
        if self.override is not None and not math.isfinite(self.override):
            raise ConfigError(f"{place}: override {self.override} is not finite")
        if self.override is not None and not (self.by and self.why):
            raise ConfigError(f"{place}: an override replaces a score, so it names who made it (`by`) and `why`")
        if self.turn is None and self.step is not None:
            raise ConfigError(f"{place}: step {self.step} of which turn?")

    def find(self, leaves: Sequence[Step]) -> tuple[int, int] | None:
        """`(turn, step)` of the leaf that it is about, None when there is none."""
        matches = [
            (leaf.turn, leaf.index)
            for leaf in leaves
            if self.turn in (None, leaf.turn) and (self.step is None or self.step == leaf.index)
        ]
        return matches[-1] if matches else None

    def nowhere(self, leaves: Sequence[Step]) -> str:
        """What to tell of one whose step is not there."""
        known = [(leaf.turn, leaf.index) for leaf in leaves]
        place = "its end" if self.turn is None else f"turn {self.turn}, step {self.step}"
        return (
            f"annotation of {self.trajectory!r}: no leaf step at {place}; the leaf steps (turn, step) are "
            f"{known[:20]}{' ...' if len(known) > 20 else ''}. Cut the log with the parser that the annotations "
            "were made with"
        )

    @property
    def source(self) -> str:
        """Who, when and why, in one phrase."""
        return f"{self.by or 'someone'}{f' on {self.at}' if self.at else ''}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """The labels and overrides of one file, by trajectory. `digest` is the SHA-256 of the file."""

    name: str
    digest: str
    by_trajectory: Mapping[str, tuple[Annotation, ...]]

    @classmethod
    def read(cls, path: Path) -> Annotations:
        """Labels and overrides of a file; lines with counts of continuations are for fitting and passed over.

        Raises ConfigError that names the line, and StorageError when the file cannot be read.
        """
        found: dict[str, list[Annotation]] = {}
        for line in read_json_lines(path):
            place = f"{path}, line {line.number}"
            check_keys(line.value, place)
            if "label" not in line.value and "override" not in line.value:
                continue
            try:
                one = _annotation(line.value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{place}: {error}") from error
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
            found.setdefault(one.trajectory, []).append(one)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return cls(name=path.name, digest=digest, by_trajectory={name: tuple(rows) for name, rows in found.items()})

    @property
    def count(self) -> int:
        return sum(len(rows) for rows in self.by_trajectory.values())

    @property
    def repeated(self) -> int:
        """Lines that say another thing of what an earlier line labels or overrides; the later one counts."""
        said: dict[tuple[object, ...], float] = {}
        count = 0
        for one in (row for rows in self.by_trajectory.values() for row in rows):
            key = (one.trajectory, one.turn, one.step, one.label is None)
            value = one.override if one.label is None else one.label
            count += said.setdefault(key, float(value or 0.0)) != value
        return count

    def unknown(self, seen: Iterable[str]) -> str | None:
        """A line about an annotated trajectory that was not seen, or None when all were."""
        known = set(seen)
        missing = sorted(self.by_trajectory.keys() - known)
        if not missing:
            return None
        return (
            f"{len(missing)} annotated trajectories of {self.name} are not in the log, such as "
            f"{missing[0]!r}{nearest(missing[0], known)}"
        )

    def overrule(self, scored: ScoredTrajectory) -> ScoredTrajectory:
        """The same with every overridden step's scores replaced, the old one kept in `parts` and told beside.

        Overrides of steps that are not there are left out; `misplaced` has them.
        """
        by_place = {place: one for place, one in self._placed(scored) if one.override is not None}
        if not by_place:
            return scored
        return dataclasses.replace(
            scored,
            scores=tuple(
                _overruled(word, by_place[word.turn, word.step]) if (word.turn, word.step) in by_place else word
                for word in scored.scores
            ),
        )

    def labels(self, scored: ScoredTrajectory) -> dict[tuple[int, int], float]:
        """`(turn, step) -> label` of one trajectory. Labels of steps that are not there are in `misplaced`."""
        return {place: float(one.label) for place, one in self._placed(scored) if one.label is not None}

    def misplaced(self, scored: ScoredTrajectory) -> list[str]:
        """What is wrong with every label and override of a step that one trajectory does not have."""
        leaves = leaf_steps(scored.steps)
        rows = self.by_trajectory.get(scored.trajectory.id, ())
        return [one.nowhere(leaves) for one in rows if one.find(leaves) is None]

    def _placed(self, scored: ScoredTrajectory) -> Iterator[tuple[tuple[int, int], Annotation]]:
        leaves = leaf_steps(scored.steps)
        for one in self.by_trajectory.get(scored.trajectory.id, ()):
            if (place := one.find(leaves)) is not None:
                yield place, one


def check_keys(row: Any, place: str) -> None:
    """Raise ConfigError unless a line is an object with known keys only."""
    if not isinstance(row, Mapping):
        raise ConfigError(f'{place}: a JSON object is needed, such as {{"trajectory": "t-17", "turn": 3, "label": 0}}')
    allowed = OVERRIDE_KEYS if "override" in row else LABEL_KEYS
    for key in row:
        if key not in allowed:
            raise ConfigError(f"{place}: unknown key {key!r}; one of {', '.join(allowed)}{nearest(str(key), allowed)}")
    if "trajectory" not in row:
        raise ConfigError(f"{place}: trajectory (the id) is missing")


def _annotation(row: Mapping[str, Any]) -> Annotation:
    def number(name: str) -> float | None:
        value = row.get(name)
        if isinstance(value, str):
            raise ConfigError(f"{name} {value!r} must be a number")
        return None if value is None else float(value)

    def place(name: str) -> int | None:
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigError(f"{name} {value!r} must be a whole number from 0")
        return value

    return Annotation(
        trajectory=str(row["trajectory"]),
        turn=place("turn"),
        step=place("step"),
        label=number("label"),
        override=number("override"),
        by=str(row.get("by", "")),
        at=str(row.get("at", "")),
        why=str(row.get("why", "")),
    )


def _overruled(word: ScoredStep, one: Annotation) -> ScoredStep:
    before = f"no score ({word.reason})" if word.score is None else f"{word.score:+.2f}"
    return ScoredStep(
        turn=word.turn,
        step=word.step,
        evaluator=word.evaluator,
        version=word.version,
        score=one.override,
        parts={} if word.score is None else {"before_override": word.score},
        rationale=f"overridden by {one.source} (was {before}{f': {word.rationale}' if word.rationale else ''})",
    )
