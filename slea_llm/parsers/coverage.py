"""How far parsers cut texts into steps, and how far they agree."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from slea_llm.parsers.faults import faults
from slea_llm.parsers.sentences import sentence_cuts
from slea_llm.types import Step, Turn, leaf_steps

UNNAMED = frozenset({"reply", "thought", "preamble", "paragraph"})
"""Forms that say only where a step stands, not what marked it."""


class Label(NamedTuple):
    """The parts of a step's label: `auto` writes `parser:form/does`, the others `form/does` or `form`."""

    parser: str | None
    form: str | None
    does: str | None

    @classmethod
    def of(cls, step: Step) -> Label:
        parser, colon, rest = (
            (step.label or "").partition(":") if ":" in (step.label or "") else ("", "", step.label or "")
        )
        form, slash, does = rest.partition("/")
        return cls(parser if colon else None, form or None, does if slash else None)


def is_unparsed(step: Step) -> bool:
    """Whether a leaf step that nothing marked holds more than one sentence or line: it could have been cut further."""
    if step.kind == "tool_call":
        return False
    form = Label.of(step).form
    marked = form is not None and form not in UNNAMED and "<" not in step.text[:20]
    return not marked and bool(sentence_cuts(step.text))


def borders(steps: Sequence[Step]) -> set[int]:
    """Where the leaf steps of one turn begin, the first one left out; blanks in front of a step do not count."""
    return {
        step.span.start + len(step.text) - len(step.text.lstrip()) for step in leaf_steps(steps) if step.span.start > 0
    }


def agreement(found: set[int], other: set[int]) -> tuple[int, int]:
    """Common borders twice, and borders of both: their quotient is the boundary F1, 1 where neither has any."""
    return 2 * len(found & other), len(found) + len(other)


class ParserCoverage:
    """Running counts of one parser over turns."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.characters = self.unparsed = self.parents = 0
        self.forms: Counter[str] = Counter()
        self.does: Counter[str] = Counter()
        self.picked: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    def add(self, turn: Turn, steps: Sequence[Step]) -> None:
        """Count the steps of one turn."""
        self.faults.update(faults(turn, steps))
        leaves = leaf_steps(steps)
        self.steps.append(len(leaves))
        self.parents += len(steps) - len(leaves)
        for leaf in leaves:
            label = Label.of(leaf)
            self.characters += len(leaf.text)
            self.unparsed += len(leaf.text) if is_unparsed(leaf) else 0
            self.forms[label.form or leaf.kind] += 1
            if label.does:
                self.does[label.does.partition("(")[0]] += 1
        if leaves and (parser := Label.of(leaves[0]).parser):
            self.picked[parser] += 1

    @property
    def unparsed_share(self) -> float:
        """Share of characters in [0, 1] that stand in unparsed steps."""
        return self.unparsed / self.characters if self.characters else 0.0

    @property
    def mean_steps(self) -> float:
        return statistics.fmean(self.steps) if self.steps else 0.0


class Coverage:
    """Running counts of several parsers over the same turns."""

    def __init__(self, parsers: Sequence[str]) -> None:
        self.by_parser: dict[str, ParserCoverage] = {name: ParserCoverage() for name in parsers}
        self.turns = 0
        self._agreed: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))

    def add(self, turn: Turn, steps: Mapping[str, Sequence[Step]]) -> None:
        """Count what every parser made of one turn. Raises ValueError where leaf steps do not cover the text."""
        self.turns += 1
        for name, found in steps.items():
            if "".join(leaf.text for leaf in leaf_steps(found)) != turn.text:
                raise ValueError(f"the leaf steps of parser {name!r} do not rebuild turn {turn.index}")
            self.by_parser[name].add(turn, found)
        starts = {name: borders(found) for name, found in steps.items()}
        for one, other in combinations(steps, 2):
            common, both = agreement(starts[one], starts[other])
            before = self._agreed[one, other]
            self._agreed[one, other] = (before[0] + common, before[1] + both)

    def disagreement(self) -> dict[tuple[str, str], float]:
        """For each pair, 1 minus the boundary F1 of their leaf steps over all turns; 0 where neither cuts at all."""
        return {pair: 1 - common / both if both else 0.0 for pair, (common, both) in self._agreed.items()}
