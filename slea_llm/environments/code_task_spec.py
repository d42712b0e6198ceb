"""What a function of the code_task environment must do, its test cases, and whether answers are right."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from slea_llm.environments.speech import Speech

SOURCES: tuple[str, ...] = ("http", "csv", "json", "lines")
TARGETS: tuple[str, ...] = ("orders", "readings", "tickets", "dictionary", "list")
BAD: tuple[str, ...] = ("skip", "raise", "zero")
REPEATED: tuple[str, ...] = ("first", "last", "sum")
"""What each value of a slot means, in the order of the data files' choices."""

LIMITS: tuple[int, ...] = tuple(range(2, 61))
"""Smallest amounts that may be asked for."""

TABLES: tuple[str, ...] = TARGETS[:3]

Record: TypeAlias = tuple[int, int | str]
"""An id and an amount; an amount that is a text is bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """`least`: the smallest amount that is kept, after repeated ids were settled."""

    source: str
    target: str
    least: int
    bad: str
    repeated: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test. `records` is None for a source that cannot be read."""

    name: str
    records: tuple[Record, ...] | None


def spec_of(values: Mapping[str, str], speech: Speech) -> Spec:
    """The meaning of what the user wants or told; raises KeyError while a slot is not filled."""
    meaning = {
        slot: meanings[speech.choices(slot).index(values[slot])]
        for slot, meanings in (("source", SOURCES), ("target", TARGETS), ("bad", BAD), ("repeated", REPEATED))
    }
    return Spec(**meaning, least=int("".join(letter for letter in values["keep"] if letter.isdecimal())))


def cases_of(spec: Spec, seed: int) -> list[Case]:
    """The tests of a task: two that anything passes, then one for each thing that the user asked for."""
    rng = random.Random(f"code_task cases/{seed}")  # noqa: S311 (not a secret)
    ids = rng.sample(range(1, 900), 12)
    above = [spec.least + rng.randint(1, 60) for _ in range(4)]
    below = [spec.least - rng.randint(1, 5) for _ in range(2)]
    records: list[Record] = list(zip(ids, above, strict=False))
    mixed: list[Record] = [*records, (ids[4], below[0]), (ids[5], spec.least), (ids[6], below[1])]
    rng.shuffle(mixed)
    again: Record = (records[0][0], above[0] + rng.randint(1, 9))
    return [
        Case(name="plain", records=tuple(records)),
        Case(name="empty", records=()),
        Case(name="least", records=tuple(mixed)),
        Case(name="repeated", records=(*records, again, (ids[7], spec.least), (ids[7], -1))),
        Case(name="bad", records=(*records[:2], (ids[8], rng.choice(("n/a", "", "twelve"))), *records[2:])),
        Case(name="unreadable", records=None),
    ]


def written(spec: Spec, case: Case) -> str:
    """The text that a source holds for a case; one that cannot be read is cut or has no head."""
    records = case.records
    if spec.source in ("http", "json"):
        readable: Sequence[Record] = records if records is not None else ((1, 5), (2, 6))
        whole = json.dumps([{"id": number, "amount": amount} for number, amount in readable])
        return whole if records is not None else whole[:-4]
    if spec.source == "lines":
        return (
            "\n".join(f"id={number} amount={amount}" for number, amount in records or ())
            if records is not None
            else "?"
        )
    table = io.StringIO()
    rows = [("id", "amount"), *records] if records is not None else [("name", "colour"), ("a", "b")]
    csv.writer(table, lineterminator="\n").writerows(rows)
    return table.getvalue()


def driven(spec: Spec, cases: Sequence[Case], seconds: float) -> dict[str, Any]:
    """What the driver in the sandbox reads."""
    texts = [written(spec, case) for case in cases]
    pages = [[500 if case.records is None else 200, text] for case, text in zip(cases, texts, strict=True)]
    http = spec.source == "http"
    return {
        "seconds": seconds,
        "pages": pages if http else [],
        "cases": [
            {
                "source": f"{{address}}/{number}" if http else text,
                "target": f"{case.name}.db" if spec.target in TABLES else "",
                "table": spec.target if spec.target in TABLES else "",
            }
            for number, (case, text) in enumerate(zip(cases, texts, strict=True))
        ],
    }


def kept(spec: Spec, records: Sequence[Record]) -> dict[int, int] | None:
    """Id -> amount of what must be kept; None when the function must raise."""
    found: dict[int, int] = {}
    for number, amount in records:
        if isinstance(amount, str):
            if spec.bad == "raise":
                return None
            if spec.bad == "skip":
                continue
            amount = 0
        if number not in found or spec.repeated == "last":
            found[number] = amount
        elif spec.repeated == "sum":
            found[number] += amount
    return {number: amount for number, amount in found.items() if amount >= spec.least}


def fault(spec: Spec, case: Case, answer: Mapping[str, Any]) -> str | None:
    """What is wrong with an answer, in the words of Python; None when it is right.

    The code under test can write an answer of its own making, so that it may hold anything.
    """
    raised = answer.get("raised", ())
    if not isinstance(raised, list | tuple) or not all(isinstance(name, str) for name in raised):
        return "gave an answer of an unknown form"
    wanted = kept(spec, case.records) if case.records is not None else None
    rows = answer.get("rows")
    if answer.get("hung"):
        return "did not return"
    if wanted is None:
        if "raised" not in answer:
            return f"returned {_short(answer.get('value'))}, should raise"
        if case.records is not None and "ValueError" not in raised:
            return f"raised {answer.get('message')}, should raise ValueError"
        if set(raised) & {"ImportError", "NameError", "SystemExit", "SyntaxError", "TypeError"}:
            return f"raised {answer.get('message')}"
        return f"left rows {_short(rows)} behind" if rows else None
    if "raised" in answer:
        return f"raised {answer.get('message')}"
    pairs = sorted([number, amount] for number, amount in wanted.items())
    if spec.target in TABLES:
        if rows != pairs and not (rows is None and not pairs):
            return f"stored {_short(rows)}, should store {_short(pairs)}"
        right: Any = len(pairs)
    else:
        # JSON has texts as keys.
        right = {str(number): amount for number, amount in pairs} if spec.target == "dictionary" else pairs
    return (
        None
        if _same(answer.get("value"), right)
        else f"returned {_short(answer.get('value'))}, should return {_short(right)}"
    )


def _same(one: Any, other: Any) -> bool:
    """Equal, and of equal types: True is not 1, 2.0 is not 2."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
