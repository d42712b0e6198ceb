"""A report of 10,000 dialogues: every one is counted, as many as there is room for are shown whole, and it says so."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slea_llm.report import page
from slea_llm.report.sources import Scored, Source
from slea_llm.types import ScoredTrajectory
from tests.support.logged import call, logged, scored

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

DIALOGUES = 10_000
WORDS = ("flight", "hotel", "booking", "refund", "Rome", "Oslo", "Friday", "seat", "baggage", "price", "card", "policy")


def template(number: int) -> ScoredTrajectory:
    """About 6 kB of text in ten turns."""
    rng = random.Random(number)  # noqa: S311

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count)).capitalize() + "."

    turns = [([("user", text(20))], text(30))]
    for _ in range(5):
        turns.append(([("user", text(20))], call(rng.choice(["search", "book"]), query=text(6))))
        turns.append(([("tool", text(50) if rng.random() < 0.8 else f"Error: {text(5)}")], text(30)))
    (one,) = scored(logged(f"t{number}", *turns, success=rng.random() < 0.4, task="t"))
    return one


def many(templates: list[ScoredTrajectory]) -> Iterator[Scored]:
    for number in range(DIALOGUES):
        one = templates[number % len(templates)]
        trajectory = dataclasses.replace(one.trajectory, id=f"dialogue-{number}", task={"id": f"task-{number // 4}"})
        steps = tuple(dataclasses.replace(step, trajectory_id=trajectory.id) for step in one.steps)
        yield dataclasses.replace(one, trajectory=trajectory, steps=steps), None


def test_ten_thousand_dialogues_make_a_file_below_ten_megabytes(tmp_path: Path) -> None:
    templates = [template(number) for number in range(20)]
    html = page.make(
        [Source(name="large", read=lambda: many(templates))],
        evaluator=None,
        title="large",
        made="2026-05-02",
        mend=page.mender(),
        dialogues=2_000,
    )
    size = len(html.encode("utf-8"))
    (tmp_path / "large.html").write_text(html, encoding="utf-8")
    assert size < 10_000_000
    match = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    shown = json.loads(match[1])["sets"][0]
    assert shown["total"] == shown["measures"]["dialogues"] == len(shown["rows"]) == DIALOGUES
    assert 300 < len(shown["details"]) < DIALOGUES
    assert sum(row[13] is not None for row in shown["rows"]) == len(shown["details"])
