"""Names lead to components; unknown names to the nearest known one."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from slea_llm import registry
from slea_llm.errors import ConfigError


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in registry.KINDS for name in registry.ROWS[kind]])
def test_every_row_can_be_loaded(kind: str, name: str) -> None:
    component = registry.load(kind, name)
    assert component.Config is not None


def test_unknown_names_and_kinds_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tagged'"):
        registry.load("parser", "taged")
    with pytest.raises(ConfigError, match="did you mean 'parser'"):
        registry.names("parsers")


def test_an_entry_point_that_takes_a_name_in_use_is_passed_over_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str) -> list[EntryPoint]:
        pairs = [
            ("tagged", "theirs:Tagged"),
            ("mine", "mine:Parser"),
            ("mine", "yours:Parser"),
            ("mine", "mine:Parser"),
        ]
        return [EntryPoint(name=name, value=value, group=group) for name, value in pairs]

    monkeypatch.setattr(registry, "entry_points", points)
    with pytest.warns(UserWarning, match="is passed over") as caught:
        names = registry.names("parser")
    assert (names["tagged"], names["mine"]) == (registry.ROWS["parser"]["tagged"], "mine:Parser")
    assert [str(one.message).partition(" is passed")[0] for one in caught] == [
        "parser 'tagged' of theirs:Tagged",
        "parser 'mine' of yours:Parser",
    ]
