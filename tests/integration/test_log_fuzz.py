"""A seeded share of the fuzz of benchmarks/fuzz_logs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.log_fuzz import run

pytestmark = pytest.mark.integration


def test_mutated_records_are_read_or_counted_and_nothing_crashes(tmp_path: Path) -> None:
    fuzz = run(1_500, 7, [], tmp_path)
    assert fuzz.records >= 1_500
    assert fuzz.refused > 0
    assert len(fuzz.trajectories) >= 13
