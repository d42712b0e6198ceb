"""Which kinds of step score high and which low: by what they do, by the tool they call, by the evaluator's reason."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from slea_llm.types import ScoredStep, Step

MOST_KINDS = 5_000
"""Different patterns of one table that are counted; a judge writes another reason for every step."""
SHOWN = 120
"""Patterns of one table that go into the report: the highest and the lowest by mean, half each."""

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.){1,100})"')
_ACTION = re.compile(r"Action\s*\d*\s*[:：]\s*([\w.-]{1,100})")
_WORD = re.compile(r"[\w.-]{1,100}")


def act_of(step: Step) -> str:
    """What a parser says that a step does: `asks_information` of `auto:reply/asks_information(date)`; else its kind."""
    act = (step.label or "").partition("(")[0].rpartition("/")[2].rpartition(":")[2]
    return f"{step.kind}: {act}" if act and act != step.kind else step.kind


def tool_of(step: Step) -> str | None:
    """The tool that a call names; None for other steps."""
    if step.kind != "tool_call":
        return None
    match = _NAME.search(step.text) or _ACTION.search(step.text)
    if match:
        return match[1]
    word = _WORD.search(re.sub(r"</?\w+>", "", step.text))
    return word[0] if word else "(nothing)"


@dataclass(slots=True)
class Tally:
    """Count, mean and standard error of the scores of a pattern, and how the dialogues that hold it ended."""

    steps: int = 0
    total: float = 0.0
    squares: float = 0.0
    ended: int = 0
    won: int = 0
    advantage: float = 0.0
    credited: int = 0
    example: tuple[int, int, int] | None = None

    def row(self, name: str) -> list[Any]:
        """Name, steps, mean score, its standard error, share of successes, mean advantage, place of an example."""
        mean = self.total / self.steps
        spread = max(self.squares / self.steps - mean * mean, 0.0)
        error = math.sqrt(spread / (self.steps - 1)) if self.steps > 1 else None
        return [
            name,
            self.steps,
            round(mean, 4),
            None if error is None else round(error, 4),
            round(self.won / self.ended, 4) if self.ended else None,
            round(self.advantage / self.credited, 4) if self.credited else None,
            self.example,
        ]


@dataclass(slots=True)
class Patterns:
    """Tallies of the scored steps of one evaluator; `left_out` counts steps whose pattern came after MOST_KINDS."""

    by_act: dict[str, Tally] = field(default_factory=dict)
    by_tool: dict[str, Tally] = field(default_factory=dict)
    by_reason: dict[str, Tally] = field(default_factory=dict)
    left_out: int = 0

    def add(self, step: Step, word: ScoredStep, place: int, *, success: bool | None, advantage: float | None) -> None:
        """Count a scored step of dialogue number `place`; a word without a score is not counted."""
        if word.score is None:
            return
        found = [(act_of(step), self.by_act), (tool_of(step), self.by_tool), (word.rationale or None, self.by_reason)]
        for name, table in found:
            if name is None:
                continue
            if name not in table and len(table) >= MOST_KINDS:
                self.left_out += 1
                continue
            tally = table.setdefault(name, Tally())
            tally.steps += 1
            tally.total += word.score
            tally.squares += word.score * word.score
            if success is not None:
                tally.ended += 1
                tally.won += success
            if advantage is not None:
                tally.credited += 1
                tally.advantage += advantage
            tally.example = tally.example or (place, step.turn, step.index)

    def tables(self) -> dict[str, list[list[Any]]]:
        """Table -> its rows, highest mean first; of a long table the two ends."""
        found = {}
        for name, table in (("act", self.by_act), ("tool", self.by_tool), ("reason", self.by_reason)):
            rows = sorted((tally.row(key) for key, tally in table.items()), key=lambda row: (-row[2], -row[1]))
            found[name] = rows if len(rows) <= SHOWN else rows[: SHOWN // 2] + rows[-SHOWN // 2 :]
        return found
