"""`slea score` killed outright in the middle, gone on with, and the same in the end as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slea_llm import score_runs
from slea_llm.storage import write_trajectories
from tests.support.logged import booking

pytestmark = pytest.mark.integration

DIALOGUES = 400
DEADLINE_S = 120


def slea(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slea_llm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    return said


@pytest.mark.timeout(400)
def test_kill_9_in_mid_scoring_then_resume_is_the_unbroken_run(tmp_path: Path) -> None:
    log = tmp_path / "mine.jsonl"
    write_trajectories(
        log, [booking(f"d{number}", success=number % 3 == 0, task=f"t{number % 50}") for number in range(DIALOGUES)]
    )
    whole, broken = tmp_path / "whole.scores", tmp_path / "broken.scores"
    finish(slea("score", str(log), "--output", str(whole)))

    process = slea("score", str(log), "--output", str(broken))
    scores = broken / "run-0001.scores.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    # Killed as soon as something is written, which is long before the end: the file is then far smaller than the whole.
    while not (scores.exists() and scores.stat().st_size > 1_000):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = scores.stat().st_size
    assert left < (whole / scores.name).stat().st_size
    assert score_runs.unfinished(broken) is not None
    with scores.open("ab") as file:  # what a kill in the middle of a write leaves
        file.write(b'{"trajectory":{"id":"d')

    said = finish(slea("score", str(log), "--output", str(broken), "--resume"))
    assert "dialogues are scored already, going on after them" in said
    for name in (scores.name, "run-0001.credit.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    cards = [score_runs.latest(folder).card for folder in (whole, broken)]
    assert cards[0].counts == cards[1].counts
    assert not cards[0].same_work(cards[1])
