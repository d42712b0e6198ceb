"""Logged dialogues for tests of scoring and of reports: text alone, as an importer gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slea_llm.evaluators.rules import Rules
from slea_llm.parsers.auto import AutoParser
from slea_llm.scoring import Scorer
from slea_llm.types import Message, ScoredTrajectory, Trajectory, Turn

SCORER = Scorer(AutoParser(AutoParser.Config()), [Rules(Rules.Config())])

Heard = tuple[str, str]
"""Role and text of a message."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def logged(
    name: str,
    *turns: tuple[Sequence[Heard], str],
    success: bool | None = False,
    task: str | None = None,
    closing: Sequence[Heard] = (),
) -> Trajectory:
    """A dialogue of `(messages before, reply)` turns; success is worth 1 on the last turn, None: nobody knows."""
    outcome = None if success is None else float(success)
    return Trajectory(
        id=name,
        task={} if task is None else {"id": task},
        environment="log",
        seed=0,
        policy_version=0,
        turns=tuple(
            Turn(
                index=index,
                context=tuple(_message(one) for one in heard),
                text=text,
                reward=float(outcome or 0.0) if index == len(turns) - 1 else 0.0,
            )
            for index, (heard, text) in enumerate(turns)
        ),
        traces=(),
        outcome=outcome,
        termination="unknown" if success is None else "success" if success else "failure",
        closing=tuple(_message(one) for one in closing),
    )


def _message(heard: Heard) -> Message:
    role, text = heard
    return Message(role="tool" if role == "tool" else "user", content=text)


def booking(name: str, *, success: bool, task: str | None = None, errors: int = 0) -> Trajectory:
    """Look a flight up, meet some errors, book it."""
    turns: list[tuple[Sequence[Heard], str]] = [
        ([("user", "A flight from Rome to Oslo on Friday, please.")], call("search", origin="Rome", goal="Oslo")),
    ]
    heard: list[Heard] = [("tool", '{"flights": ["AZ1"]}')]
    for number in range(errors):
        turns.append((heard, call("hold", flight="AZ1", attempt=number)))
        heard = [("tool", f"Error: flight AZ1 cannot be held ({number})")]
    turns.append((heard, "I found flight AZ1 from Rome to Oslo on Friday. Shall I book it?"))
    turns.append(([("user", "Yes, book it.")], call("book", flight="AZ1")))
    return logged(name, *turns, success=success, task=task, closing=[("tool", '{"booked": true}')])


def scored(*dialogues: Trajectory) -> list[ScoredTrajectory]:
    return [SCORER.score(one) for one in dialogues]
