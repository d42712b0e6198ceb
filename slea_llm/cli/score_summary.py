"""What `slea score` prints at the end: measures, what each evaluator said, what to read first."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from slea_llm.annotations import Annotations
from slea_llm.log_measures import LogMeasures, facts
from slea_llm.measures import area_under_curve
from slea_llm.report.review import Standings, length_trend, queue, standing
from slea_llm.score_runs import scored_nothing
from slea_llm.types import ScoredTrajectory

SHOWN = 4
"""Reasons listed at each end of an evaluator's table."""
TO_READ = 3
"""Dialogues that are named as worth reading."""
WORDS = 100
"""Characters of a reason that are printed."""


class ScoreSummary:
    """Running counts over scored dialogues, so that the log is read once and its texts are never held in memory."""

    def __init__(self, evaluators: Sequence[str], annotations: Annotations | None = None) -> None:
        self._evaluators = tuple(evaluators)
        self._annotations = annotations
        self._measures = LogMeasures()
        self._ids = _Texts()
        self._standings = Standings()
        self._said = {name: _Said() for name in evaluators}
        self._labels: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._overridden = 0
        self._misplaced: list[str] = []

    def add(self, scored: ScoredTrajectory) -> None:
        """Count one dialogue."""
        found = facts(scored, self._evaluators[0])
        self._measures.add(found)
        self._ids.append(found.id)
        self._standings.append(standing(found))
        for word in scored.scores:
            self._said[word.evaluator].add(word.score, word.rationale, word.reason)
            self._overridden += word.rationale.startswith("overridden by ")
        if self._annotations is not None:
            labels = self._annotations.labels(scored)
            self._misplaced += self._annotations.misplaced(scored)
            for word in scored.scores:
                label = labels.get((word.turn, word.step))
                if label is not None and word.score is not None:
                    self._labels[word.evaluator].append((word.score, label))

    def counts(self) -> dict[str, Any]:
        """What the run's card keeps."""
        return {
            "dialogues": self._measures.dialogues,
            "broken": self._measures.broken,
            "unknown_outcome": self._measures.unknown,
            "successes": self._measures.successes,
            "steps": self._measures.steps,
            "evaluators": {name: said.counts() for name, said in self._said.items()},
            "overridden": self._overridden,
            "annotations_misplaced": len(self._misplaced),
        }

    def lines(self) -> Iterator[str]:
        yield f"{self._measures.dialogues} dialogues"
        yield from self._measures.lines()
        for name, said in self._said.items():
            yield from said.lines(name)
        if scored_nothing(self.counts()):
            yield "careful: no step was scored; this run is the newest all the same, --runs N reports an earlier one"
        yield from self._hand_lines()
        if (trend := length_trend(self._standings)) is not None and trend.suspicious:
            yield (
                f"careful: the sum of {self._evaluators[0]}'s scores rises with length (rank correlation "
                f"{trend.correlation:.2f} over {trend.n} dialogues): an agent could earn by talking on"
            )
        first = queue(self._standings, limit=TO_READ)
        yield "read first:" if first else "nothing stands out to be read first"
        for review in first:
            reasons = "; ".join(reason.why for reason in review.reasons)
            yield f"  {_short(self._ids[review.place])}: {reasons}"

    def _hand_lines(self) -> Iterator[str]:
        if self._annotations is None:
            return
        file = self._annotations
        yield f"{file.count} labels and overrides of {file.name}; {self._overridden} scores replaced"
        if file.repeated:
            yield f"warning: {file.repeated} of them say another thing of a step than an earlier line; the last counts"
        if self._misplaced:
            yield f"warning: {len(self._misplaced)} of them were left out, the first: {self._misplaced[0]}"
        if (strangers := self._annotations.unknown(self._ids)) is not None:
            yield f"warning: {strangers}"
        for name, pairs in self._labels.items():
            good = [label > 0.5 for _, label in pairs]
            auc = area_under_curve([score for score, _ in pairs], good)
            shown = "unknown: labels of one kind only" if auc is None else f"{auc:.3f}"
            yield f"{name} against {len(pairs)} labels made by hand: AUC {shown} (0.5: no better than chance)"


class _Texts:
    """Many short texts in their bytes and eight more each; a list of them takes five times as much."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("Q")

    def append(self, text: str) -> None:
        self._bytes += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._bytes))

    def __getitem__(self, place: int) -> str:
        start = self._ends[place - 1] if place else 0
        return self._bytes[start : self._ends[place]].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self._ends)))


class _Said:
    """What one evaluator said."""

    def __init__(self) -> None:
        self.scored = self.missing = 0
        self._total = 0.0
        self._by_reason: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self._why_not: Counter[str] = Counter()

    def add(self, score: float | None, rationale: str, reason: str | None) -> None:
        if score is None:
            self.missing += 1
            self._why_not[str(reason)] += 1
            return
        self.scored += 1
        self._total += score
        if len(self._by_reason) < 10_000 or rationale in self._by_reason:  # free texts of a judge are all different
            count, total = self._by_reason[rationale]
            self._by_reason[rationale] = (count + 1, total + score)

    def counts(self) -> dict[str, Any]:
        return {
            "scored": self.scored,
            "unscored": self.missing,
            "mean": self._total / self.scored if self.scored else None,
            "why_not": dict(self._why_not.most_common(10)),
        }

    def lines(self, name: str) -> Iterator[str]:
        """Share of unscored steps, then the reasons with the highest and the lowest mean score."""
        mean = f", mean {self._total / self.scored:+.3f}" if self.scored else ""
        yield f"{name}: {self.scored} steps scored{mean}, {self.missing} not scored"
        for reason, count in self._why_not.most_common(SHOWN):
            yield f"  none   x{count:<6} {_short(reason)}"
        ranked = sorted(self._by_reason.items(), key=lambda item: item[1][1] / item[1][0], reverse=True)
        shown = ranked if len(ranked) <= 2 * SHOWN else [*ranked[:SHOWN], *ranked[-SHOWN:]]
        for reason, (count, total) in shown:
            yield f"  {total / count:+.2f}  x{count:<6} {_short(reason) or '(no reason given)'}"


def _short(text: str) -> str:
    """On one line, without control characters: it comes from a log and goes to a terminal."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= WORDS else f"{line[: WORDS - 1]}\u2026"
