"""YAML in which no key is given twice; elsewhere the last of them wins without a word."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # many times faster, not in every build
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load(source: str | bytes) -> Any:
    """What a document holds, of plain types alone. Raises yaml.YAMLError with line and column."""
    return yaml.load(source, _Loader)  # noqa: S506 (a SafeLoader)
