"""The scripted agents of the code_task environment: the code that the expert writes, and how it errs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slea_llm.environments.agents import Move, track_missing
from slea_llm.environments.code_task_spec import REPEATED, TABLES, Spec, spec_of
from slea_llm.environments.speech import Speech, call_text
from slea_llm.types import State

SUBMIT = "submit_code"

_READ: Mapping[str, str] = {
    "http": """
    with urllib.request.urlopen(source, timeout=10) as response:
        pairs = [(record["id"], record["amount"]) for record in json.load(response)]
""",
    "json": """
    pairs = [(record["id"], record["amount"]) for record in json.loads(source)]
""",
    "csv": """
    pairs = [(row["id"], row["amount"]) for row in csv.DictReader(io.StringIO(source))]
    if not pairs and source.split() != ["id,amount"]:
        raise ValueError("not a table of id and amount")
""",
    "lines": """
    pairs = [tuple(part.partition("=")[2] for part in line.split(" ")) for line in source.splitlines()]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("not lines of id and amount")
""",
}
_IMPORTS: Mapping[str, str] = {
    "http": "import json\nimport urllib.request",
    "json": "import json",
    "csv": "import csv\nimport io",
    "lines": "",
}
_BAD: Mapping[str, str] = {"skip": "continue", "raise": "raise", "zero": "amount = 0"}
_REPEATED: Mapping[str, str] = {
    "first": "found.setdefault(number, amount)",
    "last": "found[number] = amount",
    "sum": "found[number] = found.get(number, 0) + amount",
}
_GIVE: Mapping[str, str] = {
    "dictionary": "    return kept\n",
    "list": "    return sorted([number, amount] for number, amount in kept.items())\n",
}
_STORE = """
    with closing(sqlite3.connect(target)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS <table> (id INTEGER PRIMARY KEY, amount INTEGER)")
        connection.executemany("INSERT INTO <table> VALUES (?, ?)", kept.items())
    return len(kept)
"""


def code_of(spec: Spec) -> str:
    """A solution, with a timeout, values as parameters and one transaction."""
    store = spec.target in TABLES
    imports = [_IMPORTS[spec.source], "import sqlite3\nfrom contextlib import closing" if store else ""]
    head = "\n".join(line for line in imports if line)
    give = _STORE.replace("<table>", spec.target).lstrip("\n") if store else _GIVE[spec.target]
    return f"""{head}


def solve(source: str, target: str):
{_READ[spec.source].strip(chr(10))}
    found = {{}}
    for number, amount in pairs:
        number = int(number)
        try:
            amount = int(amount)
        except ValueError:
            {_BAD[spec.bad]}
        {_REPEATED[spec.repeated]}
    kept = {{number: amount for number, amount in found.items() if amount >= {spec.least}}}
{give}""".lstrip("\n")


def careless(code: str) -> str:
    """The same with what beginners do: errors swallowed, no timeout."""
    lines = code.split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith("def solve")) + 1
    body = [f"    {line}" if line else line for line in lines[start:]]
    whole = [*lines[:start], "    try:", *body, "    except Exception: pass", ""]
    return "\n".join(whole).replace(", timeout=10", "")


def plan(state: State, speech: Speech) -> Move:
    """Ask, read back until all is agreed, submit."""
    if state["missing"]:
        return Move(name=f"ask.{state['missing'][0]}")
    if state["unconfirmed"]:
        return Move(name="read_back")
    return _submit(code_of(spec_of(state["filled"], speech)))


def errors(state: State, rng: random.Random, speech: Speech) -> Sequence[Move]:
    """Slips to choose from: each kind once."""
    moves = [Move(name="small_talk")]
    if state["filled"]:
        moves.append(Move(name=f"ask.{rng.choice(list(state['filled']))}"))
    if state["missing"]:
        return moves
    spec = spec_of(state["filled"], speech)
    others = [other for other in REPEATED if other != spec.repeated]
    wrong: list[Any] = [careless(code_of(spec)), code_of(replace(spec, repeated=rng.choice(others)))]
    return [*moves, *(_submit(code) for code in wrong)]


def track(state: State, speech: Speech) -> str:
    """What is missing; once something was submitted, how many tests it passed."""
    if state["submissions"]:
        return str(speech.agents["tracks"]["tested"]).format(passed=state["passed"], tests=state["tests"])
    return track_missing(state, speech)


def _submit(code: str) -> Move:
    return Move(name="submit", call=call_text(SUBMIT, {"code": code}))
