"""code_task: what a function must do, its test cases, and which answers are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.environments.code_task import CodeTask
from slea_llm.environments.code_task_spec import (
    BAD,
    REPEATED,
    SOURCES,
    TARGETS,
    Case,
    Spec,
    cases_of,
    fault,
    kept,
    written,
)
from slea_llm.errors import ConfigError

SPECS = st.builds(
    Spec,
    source=st.sampled_from(SOURCES),
    target=st.sampled_from(TARGETS),
    least=st.integers(2, 60),
    bad=st.sampled_from(BAD),
    repeated=st.sampled_from(REPEATED),
)


@settings(max_examples=200, deadline=None)
@given(SPECS, st.integers(0, 10**6))
def test_each_wish_has_a_test_that_tells_it_from_the_others(spec: Spec, seed: int) -> None:
    """A function that does another thing with bad amounts, repeated ids or the limit gives other records."""
    cases = {case.name: case.records or () for case in cases_of(spec, seed)}
    for name, others in (
        ("bad", [replace(spec, bad=other) for other in BAD if other != spec.bad]),
        ("repeated", [replace(spec, repeated=other) for other in REPEATED if other != spec.repeated]),
        ("least", [replace(spec, least=spec.least + by) for by in (-5, 1)]),
    ):
        for other in others:
            same = kept(spec, cases[name]) == kept(other, cases[name])
            # A bad amount counted as 0 is below every limit: the same as one that was skipped.
            assert same == ({spec.bad, other.bad} == {"skip", "zero"} and name == "bad")


def test_kept_by_hand() -> None:
    records = ((1, 9), (2, "x"), (1, 4), (3, 5), (2, 6))
    wanted = {
        ("skip", "first"): {1: 9, 3: 5, 2: 6},
        ("skip", "last"): {3: 5, 2: 6},
        ("skip", "sum"): {1: 13, 3: 5, 2: 6},
        ("zero", "first"): {1: 9, 3: 5},
        ("zero", "sum"): {1: 13, 3: 5, 2: 6},
        ("raise", "first"): None,
    }
    for (bad, repeated), right in wanted.items():
        assert kept(Spec(source="csv", target="list", least=5, bad=bad, repeated=repeated), records) == right


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("json", '[{"id": 3, "amount": 7}, {"id": 4, "amount": "x"}]'),
        ("csv", "id,amount\n3,7\n4,x\n"),
        ("lines", "id=3 amount=7\nid=4 amount=x"),
    ],
)
def test_what_a_source_holds(source: str, text: str) -> None:
    spec = Spec(source=source, target="list", least=5, bad="skip", repeated="first")
    assert written(spec, Case(name="two", records=((3, 7), (4, "x")))) == text
    none, unreadable = (written(spec, Case(name="c", records=records)) for records in ((), None))
    assert none == {"json": "[]", "csv": "id,amount\n", "lines": ""}[source]
    assert unreadable not in (none, text)


def test_rows_are_compared_with_what_was_stored() -> None:
    spec = Spec(source="json", target="orders", least=5, bad="raise", repeated="first")
    case = Case(name="plain", records=((1, 5), (2, 9), (3, 1)))
    assert fault(spec, case, {"value": 2, "rows": [[1, 5], [2, 9]]}) is None
    assert "stored [[1, 5]]" in str(fault(spec, case, {"value": 2, "rows": [[1, 5]]}))
    assert "returned true" in str(fault(spec, Case(name="p", records=((1, 5),)), {"value": True, "rows": [[1, 5]]}))
    left = {"raised": ["ValueError", "Exception"], "message": "ValueError", "rows": [[1, 5]]}
    assert "left rows" in str(fault(spec, Case(name="bad", records=((1, 5), (2, "x"))), left))
    assert "should raise ValueError" in str(
        fault(
            spec, Case(name="bad", records=((2, "x"),)), {"raised": ["KeyError"], "message": "KeyError", "rows": None}
        )
    )


def test_settings_out_of_range() -> None:
    for name, value in (
        ("max_turns", 4),
        ("submissions", 0),
        ("vague_share", 2.0),
        ("case_seconds", 0),
        ("memory_mib", 1),
    ):
        with pytest.raises(ConfigError, match=name):
            CodeTask.Config(**{name: value})  # type: ignore[arg-type]
