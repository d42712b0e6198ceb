"""Values into words."""

from __future__ import annotations

import pytest

from slea_llm.wording import fragments

FORMS = {"a": ["a={a}"], "b": ["b={b}"], "a+b": ["{a}/{b}"], "c": ["first {c}", "last {c}"]}


def test_longest_group_wins_and_order_is_kept() -> None:
    assert fragments(FORMS, {"c": "3", "b": "2", "a": "1"}, lambda forms: forms[-1]) == ["last 3", "1/2"]
    assert fragments(FORMS, {"b": "2"}, lambda forms: forms[0]) == ["b=2"]
    assert fragments(FORMS, {}, lambda forms: forms[0]) == []


def test_value_is_not_read_for_fields() -> None:
    assert fragments(FORMS, {"a": "{b}"}, lambda forms: forms[0]) == ["a={b}"]


def test_value_without_form_is_named() -> None:
    with pytest.raises(KeyError, match="no wording for d"):
        fragments(FORMS, {"d": "4"}, lambda forms: forms[0])
