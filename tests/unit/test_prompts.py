"""Prompt files: strict fields, one file a name, a hash of the text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slea_llm import assets, prompts
from slea_llm.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(assets, "roots", lambda kind: (tmp_path / kind, tmp_path / "wheel" / kind))
    (tmp_path / "prompts").mkdir()
    return tmp_path / "prompts"


def test_fields_are_replaced_and_single_braces_stay() -> None:
    prompt = prompts.parse("p", {"text": 'Ask {{ who }} and {{who}}: {"a": {order}}'})
    assert prompt.fields == {"who"}
    assert prompt.render(who="Ann") == 'Ask Ann and Ann: {"a": {order}}'


@given(st.text())
def test_value_is_taken_as_it_is(value: str) -> None:
    assert prompts.parse("p", {"text": "<{{a}}>"}).render(a=value + "{{b}}") == f"<{value}{{{{b}}}}>"


def test_missing_and_unknown_fields_are_refused() -> None:
    prompt = prompts.parse("p", {"text": "{{slots}} {{call}}"})
    with pytest.raises(ConfigError, match="needs a value for call"):
        prompt.render(slots="x")
    with pytest.raises(ConfigError, match=r"no field 'slot'.*did you mean 'slots'"):
        prompt.render(slots="x", call="y", slot="z")


def test_markdown_and_yaml(folder: Path) -> None:
    (folder / "one.md").write_text("Say {{x}}.\n", encoding="utf-8")
    (folder / "two.yaml").write_text("description: a test\ntext: |\n  Say {{x}}.\n", encoding="utf-8")
    one, two = prompts.load("one"), prompts.load("two")
    assert (one.text, two.text, two.description) == ("Say {{x}}.", "Say {{x}}.", "a test")
    assert one.digest == two.digest == hashlib.sha256(b"Say {{x}}.").hexdigest()


def test_digest_tells_texts_apart() -> None:
    assert prompts.parse("p", {"text": "a"}).digest != prompts.parse("p", {"text": "b"}).digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text: [", "not YAML"),
        ("- a", "mapping"),
        ("text: 3", "mapping"),
        ("txt: a", "'txt'.*'text'"),
        ("text: ''", "no text"),
    ],
)
def test_faulty_file_is_refused(folder: Path, content: str, message: str) -> None:
    (folder / "bad.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        prompts.load("bad")


def test_name_must_lead_to_exactly_one_file(folder: Path) -> None:
    (folder / "both.md").write_text("a", encoding="utf-8")
    (folder / "both.yaml").write_text("text: a", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"both\.yaml"):
        prompts.load("both")
    with pytest.raises(ConfigError, match=r"found none \(did you mean 'both'"):
        prompts.load("booth")


def test_every_shipped_prompt_loads() -> None:
    names = [name for name in assets.names("prompts") if name.endswith(prompts.SUFFIXES)]
    assert names
    for name in names:
        assert prompts.load(name.rpartition(".")[0]).text
