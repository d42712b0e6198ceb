"""Sentences in other people's words held against what they mean; used by a test and by benchmarks/paraphrases.py.

A line is {"text": ..., "understood": {...}}. `understood` may say `asks` and `acts` (lists), `reads_back` (slot ->
value, or a list of the placeholders used), `recommends`, `sold_out` (a dish), `fault`, `mend`, `faults_named` (empty:
several, so none), `generic`, `order`, `calls` and `nothing`. A sentence is understood when all of that is heard and
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slea_llm import registry
from slea_llm.environments.speech import calls, spoken
from slea_llm.interfaces import Environment

ALL = ("order", "notes")
"""Placeholders that stand for every noted value."""


@cache
def environment_of(name: str, language: str) -> Environment:
    component = registry.load("environment", name)
    environment: Environment = component(component.Config(language=language))
    return environment


def heard(name: str, language: str, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What a reply does while every slot is noted down, in the terms of `understood`; and the noted values."""
    made = [{"name": call.name, "arguments": call.arguments} for call in calls(spoken(text))]
    environment = environment_of(name, language)
    task = environment.task(0)
    episode: Any = environment.start(task)
    notes = episode._progress if name == "order_taking" else episode.notes
    notes.filled = {**_wanted(task.goal), **({"symptom": "known"} if name == "complaint" else {})}
    if name == "order_taking":
        notes.filled.update(time="18:30", phone="555-0101")
    filled = dict(notes.filled)
    if made:
        return {"calls": made}, filled
    acts = episode.agent_says(text).acts
    does = {*acts.get("does", ())}
    found: dict[str, Any] = {
        "asks": {*acts.get("asks", ())},
        "acts": does - {"generic"},
        "reads_back": dict(acts.get("reads_back", {})),
        "recommends": acts.get("suggests", {}).get("dish") or bool(acts.get("recommends")),
        "sold_out": acts.get("regretted", {}).get("dish") or bool(acts.get("regrets")),
        "named": acts.get("named", ()),
        "mend": acts.get("proposes", {}).get("mend"),
        "generic": "generic" in does,
        "order": acts.get("order"),
    }
    return {key: value for key, value in found.items() if value}, filled


def _wanted(goal: Mapping[str, Any]) -> dict[str, str]:
    values: Mapping[str, str] = goal["user"]["values"]
    return dict(values)


def expected(understood: Mapping[str, Any], filled: Mapping[str, str]) -> dict[str, Any]:
    """A label in the terms of `heard`."""
    found: dict[str, Any] = {key: understood[key] for key in understood if key not in ("nothing", "faults_named")}
    for key in ("asks", "acts"):
        if key in found:
            found[key] = set(found[key])
    if isinstance(slots := found.get("reads_back"), list):
        found["reads_back"] = dict(filled) if set(slots) & set(ALL) else {slot: filled[slot] for slot in slots}
    if "fault" in found:
        found["named"] = [found.pop("fault")]
    return found


def understands(name: str, language: str, line: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether a line is understood, and what was heard."""
    found, filled = heard(name, language, line["text"])
    understood = line["understood"]
    wanted, got = expected(understood, filled), dict(found)
    several = "faults_named" in understood and len(got.get("named", ())) != 1
    if several or ("mend" in wanted and "named" not in wanted and got.get("named") == [wanted["mend"]]):
        got.pop("named", None)  # to propose a mend may name its fault; several names name none
    return got == wanted, found


def lines_of(file: Path) -> tuple[str, str, list[Mapping[str, Any]]]:
    """Environment, language and lines of a file `<environment>.<language>.jsonl`."""
    name, language, _ = file.name.split(".")
    return name, language, [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
