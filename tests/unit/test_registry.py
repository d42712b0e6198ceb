"""Names lead to components; unknown names to the nearest known one."""

from __future__ import annotations

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
