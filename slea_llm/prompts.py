"""Prompt files: text with named fields, filled strictly, and a content hash that runs record.

A field is written `{{name}}`, so that single braces (JSON, placeholders) stay as they are. A `.md` file is the text
itself; a `.yaml` file is a mapping with `text` and, if wished, `description`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import yaml

from slea_llm import assets, strict_yaml
from slea_llm.errors import ConfigError, nearest

FIELD = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
SUFFIXES: tuple[str, ...] = (".md", ".yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A loaded prompt. `digest` is the SHA-256 (hex) of its text, so that two runs can be told apart by it."""

    name: str
    text: str
    description: str = ""

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(FIELD.findall(self.text))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def render(self, **values: str) -> str:
        """The text with every field replaced; what a value holds is not read again for fields.

        Raises ConfigError when a field gets no value, or a value names no field.
        """
        if missing := sorted(self.fields - values.keys()):
            raise ConfigError(f"prompt {self.name!r} needs a value for {', '.join(missing)}")
        if unknown := sorted(values.keys() - self.fields):
            known = ", ".join(sorted(self.fields)) or "none"
            raise ConfigError(
                f"prompt {self.name!r} has no field {unknown[0]!r}; its fields: {known}"
                f"{nearest(unknown[0], self.fields)}"
            )
        return FIELD.sub(lambda match: values[match.group(1)], self.text)


def load(name: str, *, fields: Collection[str] | None = None) -> Prompt:
    """The prompt `prompts/<name>.md` or `prompts/<name>.yaml`; raises ConfigError unless there is exactly one.

    With `fields` it must have just these, so that a prompt of another component is refused before it is filled.
    """
    prompt = _load(name)
    if fields is not None and prompt.fields != set(fields):
        raise ConfigError(
            f"prompt {name!r} has the fields {', '.join(sorted(prompt.fields)) or 'none'}; what asks by it fills "
            f"{', '.join(sorted(fields)) or 'none'}"
        )
    return prompt


def _load(name: str) -> Prompt:
    files = [name + suffix for suffix in SUFFIXES if name + suffix in assets.names("prompts")]
    if len(files) != 1:
        known = sorted({path.rpartition(".")[0] for path in assets.names("prompts") if path.endswith(SUFFIXES)})
        raise ConfigError(
            f"prompt {name!r} is one file with the ending {' or '.join(SUFFIXES)}; found {files or 'none'}"
            f"{nearest(name, known)}"
        )
    source = assets.find("prompts", files[0]).read_text(encoding="utf-8")
    if files[0].endswith(".md"):
        return parse(name, {"text": source})
    try:
        document = strict_yaml.load(source)
    except yaml.YAMLError as error:
        raise ConfigError(f"prompt {name!r} is not YAML: {error}") from error
    return parse(name, document)


def parse(name: str, document: Any) -> Prompt:
    """A prompt from its mapping; raises ConfigError for another shape, an unknown key or an empty text."""
    keys = ("text", "description")
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise ConfigError(f"prompt {name!r} must be a mapping of texts with the keys {', '.join(keys)}")
    if unknown := sorted(str(key) for key in document.keys() - set(keys)):
        raise ConfigError(f"prompt {name!r}: unknown key {unknown[0]!r}{nearest(unknown[0], keys)}")
    text = document.get("text", "").strip()
    if not text:
        raise ConfigError(f"prompt {name!r} has no text")
    return Prompt(name=name, text=text, description=document.get("description", ""))
