"""The light model of the parser `reply`: fitted to examples, it overrules the rules where it is surer than they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.encoders import HashingEncoder
from slea_llm.errors import ConfigError
from slea_llm.parsers import act_model
from slea_llm.parsers.act_model import ActModel
from slea_llm.parsers.coverage import Label
from slea_llm.parsers.reply import ReplyParser
from slea_llm.parsers.vocabulary import Kinds
from slea_llm.types import Turn

ASKS = [f"your {thing} please" for thing in ("address", "name", "number", "date", "size")]
TELLS = [f"the shop {does} today" for does in ("opens", "closes", "moves", "sells", "waits")]
EXAMPLES = {"asks_information": {"en": ASKS}, "states": {"en": TELLS}}


def examples(folder: Path, document: object = EXAMPLES) -> str:
    path = folder / "examples.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    return str(path)


def does(parser: ReplyParser, text: str) -> list[str | None]:
    return [Label.of(step).does for step in parser.parse(Turn(index=0, context=(), text=text), "t", None)]


def test_the_model_names_what_the_rules_do_not_know(tmp_path: Path) -> None:
    text = "The shop opens today. Your address please."
    rules = ReplyParser(ReplyParser.Config())
    assert does(rules, text) == ["states(address)"]
    both = ReplyParser(ReplyParser.Config(model="hashing", examples=examples(tmp_path), odds=1.0))
    assert does(both, text) == ["states", "asks_information(address)"]
    assert does(both, text) == does(both, text)
    # A kind without examples is left to the rules, thoughts and calls too.
    assert does(both, "I am so sorry.") == does(rules, "I am so sorry.") == ["soothes"]
    shy = ReplyParser(ReplyParser.Config(model="hashing", examples=examples(tmp_path), odds=1e9))
    assert does(shy, text) == does(rules, text)


def test_what_was_left_out_is_predicted_as_by_a_fit_without_it() -> None:
    """The hat matrix against ten fits that really leave one out."""
    rng = np.random.default_rng(0)
    rows, kind = rng.normal(size=(10, 6)), np.arange(10) % 3
    goal, weight = np.eye(3)[kind], rng.uniform(0.5, 2.0, 10)
    quick = act_model._left_out(rows, goal, weight, 0.7)
    for out in range(10):
        keep = np.arange(10) != out
        slow = rows[out] @ (rows[keep].T @ act_model._dual(rows[keep], goal[keep], weight[keep], 0.7))
        np.testing.assert_allclose(quick[out], slow, atol=1e-9)


def test_held_out_says_what_to_expect() -> None:
    model = ActModel({"asks": ASKS, "tells": TELLS}, HashingEncoder())
    assert model.held_out == 1.0
    mixed = [*ASKS[:3], *TELLS[:2]], [*ASKS[3:], *TELLS[2:]]
    assert ActModel({"a": mixed[0], "b": mixed[1]}, HashingEncoder()).held_out < 0.8


@given(texts=st.lists(st.text(max_size=20), max_size=5), odds=st.floats(1.0, 100.0))
@settings(deadline=None, max_examples=30)
def test_any_text_gets_a_known_kind(texts: list[str], odds: float) -> None:
    model = ActModel({"asks": ASKS, "tells": TELLS}, HashingEncoder())
    for rule in ("asks", "tells"):
        found = model.overrule(texts, [rule] * len(texts), odds=odds)
        assert len(found) == len(texts)
        assert set(found) <= {"asks", "tells"}
    assert model.overrule(texts, ["soothes"] * len(texts), odds=odds) == ["soothes"] * len(texts)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"asks_informaton": {"en": ASKS}, "states": {"en": TELLS}}, "did you mean 'asks_information'"),
        ({"asks_information": {"en": ASKS[:3]}, "states": {"en": TELLS}}, "examples of asks_information"),
        ({"asks_information": {"en": ASKS}}, "two kinds or more"),
        ({"asks_information": ASKS, "states": {"en": TELLS}}, "lists of sentences by language"),
        ({"asks_information": {"en": [*ASKS, 7]}, "states": {"en": TELLS}}, "lists of sentences by language"),
        (["asks"], "holds list"),
    ],
)
def test_faulty_examples_are_refused(tmp_path: Path, document: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ReplyParser(ReplyParser.Config(model="hashing", examples=examples(tmp_path, document)))


def test_faulty_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"odds 0\.5"):
        ReplyParser.Config(odds=0.5)
    path = tmp_path / "torn.yaml"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        ReplyParser(ReplyParser.Config(model="hashing", examples=str(path)))


def test_the_examples_that_ship_are_of_the_vocabulary_and_in_two_languages() -> None:
    known = [kind.name for kind in Kinds.read("steps/kinds.yaml").kinds if "reply" in kind.of]
    model = ActModel.read("steps/reply_examples.yaml", HashingEncoder(), known)
    assert len(model.names) == 10
    path = Path(__file__).resolve().parents[2] / "data" / "steps" / "reply_examples.yaml"
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert all(set(languages) == {"en", "zh"} for languages in document.values())
    texts = [text for languages in document.values() for sentences in languages.values() for text in sentences]
    assert len(texts) == len(set(texts))
