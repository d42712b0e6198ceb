"""The shipped weights of the referee before the faults that strangers planted, and that they can be fitted again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from slea_llm.measures import wilson
from slea_llm.referee import Referee

ROOT = Path(__file__).resolve().parents[2]
SETS = sorted(path for path in (ROOT / "tests/fixtures/planted").iterdir() if path.is_dir())

CONTROLS = {"c": 0.85}
"""Share of controls laid to the agent, by author; 0.9 elsewhere. On `c`, which no fit saw, that is not reached."""


FAULTS_ALONE = ("d",)
"""Authors without controls."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("referee")


@pytest.mark.parametrize("folder", SETS, ids=[path.name for path in SETS])
def test_blame_is_right_for_the_faults_of_every_author(folder: Path, benchmark: Any) -> None:
    rows = list(benchmark.planted(folder))
    rulings = Referee(Referee.Config()).judge_many([one for one, _, _ in rows])
    total = Counter(str(party) for _, party, _ in rows)
    right = Counter(str(party) for (_, party, _), ruling in zip(rows, rulings, strict=True) if ruling.party == party)
    assert (total["user"], total["agent"]) == (200, 0 if folder.name in FAULTS_ALONE else 60)
    assert wilson(right["user"], total["user"])[1] >= 0.95, right
    if total["agent"]:
        assert wilson(right["agent"], total["agent"])[1] >= CONTROLS.get(folder.name, 0.9), right
    assert right["None"] == total["None"], "a clean success is nobody's fault"


def test_the_weights_can_be_fitted_again(tmp_path: Path) -> None:
    out = tmp_path / "weights.yaml"
    folders = [str(path) for path in SETS if path.name in ("first", "a", "b")]
    command = [sys.executable, str(ROOT / "benchmarks/fit_referee.py"), "--planted", *folders, "--out", str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert "b, fitted without it: user faults" in done.stdout
    value = yaml.safe_load(out.read_text(encoding="utf-8"))
    shipped = yaml.safe_load((ROOT / "data/referee/weights.yaml").read_text(encoding="utf-8"))
    assert value.keys() == shipped.keys()
    assert value["card"].keys() == shipped["card"].keys()
