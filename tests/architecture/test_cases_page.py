"""docs/cases.md names tests that exist, and every test that carries the id of a known failure is on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "cases.md"


def names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def written() -> set[tuple[str, str]]:
    """(file below tests/, function) of every test."""
    return {(path.relative_to(TESTS).as_posix(), name) for path in TESTS.rglob("*.py") for name in names(path)}


def test_the_page_and_the_tests_agree() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", page))
    assert named <= written(), "tests that do not exist"
    carriers = {(file, name) for file, name in written() if "_br_" in name}
    assert carriers <= named, "tests of known failures that the page lacks"


def test_every_row_names_tests_that_carry_its_id() -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| BR-")]
    assert len(rows) > 40
    assert len({row[1] for row in rows}) == len(rows), "a case has one row"
    for row in rows:
        number = row[1].strip().removeprefix("BR-")
        tests = re.findall(r"::(\w+)`", row[4])
        assert tests, row[1]
        assert all(f"br_{number}" in test for test in tests), row[1]
