"""The four features of a step, and the matchers and conditions of knowledge files that need no state."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from slea_llm.errors import ConfigError
from slea_llm.evaluators.knowledge_base import LONGEST_STEP, KnowledgeBase
from slea_llm.evaluators.knowledge_file import read_words
from slea_llm.interfaces import StepParser
from slea_llm.parsers.auto import AutoParser
from slea_llm.parsers.reply import ReplyParser
from slea_llm.types import Message, ScoredStep, Span, Step, Trajectory, Turn
from tests.strategies import texts

WORDS = read_words()
BOTH = {"repeats", "ignores_feedback"}
BASE = """
slots:
  colour: {en: ['\\bcolou?r\\b', '\\bred\\b'], zh: ['颜色']}
  size: {en: ['\\bsize\\b'], zh: ['尺寸']}
heard:
  size: {en: ['\\b\\d+ cm\\b']}
patterns:
"""
ANY = BASE + "  - {name: any, kinds: [reply], cases: [{score: 0.0, rationale: $slot}]}\n"


class Axes:
    """An encoder that a test can see through: one axis a word of its list, so that equal words point one way."""

    def __init__(self, *axes: str) -> None:
        self.axes = axes
        self.calls = 0

    def encode(self, given: Sequence[str]) -> Any:
        import numpy as np

        self.calls += 1
        rows = np.array([[float(axis in text.lower()) for axis in self.axes] for text in given], np.float32)
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def build(tmp_path: Path, text: str, encoder: Any = None, **options: Any) -> KnowledgeBase:
    path = tmp_path / "knowledge.yaml"
    path.write_text(text, encoding="utf-8")
    return KnowledgeBase(KnowledgeBase.Config(file=str(path), features=True, **options), encoder=encoder)


def judge(knowledge: KnowledgeBase, *lines: str, label: str | None = None) -> ScoredStep:
    """The word on the last of the agent's replies; user and agent speak in turn, the user first."""
    turns = tuple(
        Turn(index=index, context=(Message(role="user", content=user),), text=agent)
        for index, (user, agent) in enumerate(zip(lines[::2], lines[1::2], strict=True))
    )
    trajectory = Trajectory(
        id="t",
        task={},
        environment="none",
        seed=0,
        policy_version=0,
        turns=turns,
        traces=(),
        outcome=None,
        termination="failure",
    )
    steps = [
        Step(
            trajectory_id="t",
            turn=turn.index,
            index=0,
            kind="reply",
            text=turn.text,
            span=Span(0, len(turn.text)),
            label=label,
        )
        for turn in turns
    ]
    return knowledge.score(trajectory, steps)[-1]


def features(tmp_path: Path, *lines: str) -> dict[str, bool]:
    parts = judge(build(tmp_path, ANY), *lines).parts
    return {name: bool(value) for name, value in parts.items() if name != "any"}


@pytest.mark.parametrize(
    ("lines", "raised"),
    [
        (("I want a shirt.", "Which colour?"), {"specific", "coherent"}),
        (("I want a shirt.", "A shirt it is."), {"coherent"}),
        (("I want a shirt.", "Bananas grow in Ecuador."), set()),
        (
            ("A shirt.", "Which colour?", "Colour number 5.", "Which colour?"),
            {"specific", "ignores_feedback", "repeats"},
        ),
        (("A shirt.", "Which size?", "I do not know.", "Which colour?"), {"specific"}),
        (
            ("A shirt.", "Press the button.", "I pressed the button already.", "Press the big button now."),
            BOTH,
        ),
        (("A shirt.", "Press the button.", "There is no such thing.", "Try another browser."), {"ignores_feedback"}),
        (("A shirt.", "Press the button.", "Which button?", "The green button below."), set()),
        (("A shirt.", "We have shirts.", "And trousers?", "We have shirts."), BOTH),
        (("想买衬衫。", "请问什么颜色？"), {"specific"}),
        (("想买衬衫。", "重启一下电脑。", "电脑已经重启过了。", "请重启电脑。"), BOTH),
        (("想买衬衫。", "重启一下电脑。", "电脑已经重启过了。", "请问什么颜色？"), {"specific"}),
    ],
)
def test_features_are_read_off_the_dialogue(tmp_path: Path, lines: tuple[str, ...], raised: set[str]) -> None:
    found = {name for name, flag in features(tmp_path, *lines).items() if flag}
    assert found - {"coherent"} == raised - {"coherent"}
    if len(lines) == 2 and lines[0].isascii():
        assert ("coherent" in found) == ("coherent" in raised)


def test_nothing_is_ignored_before_there_was_an_answer(tmp_path: Path) -> None:
    assert not features(tmp_path, "It is all fine, I checked.", "Check it.")["ignores_feedback"]


def test_an_empty_step_ignores_and_repeats_nothing(tmp_path: Path) -> None:
    assert features(tmp_path, "a", "hello there", "b", "...") == {
        "specific": False,
        "ignores_feedback": False,
        "repeats": False,
        "coherent": True,
    }


@given(text=texts(40))
def test_content_words_of_any_text_are_words_that_carry_content(text: str) -> None:
    content = WORDS.content(text)
    assert not content & WORDS.empty
    assert all(1 <= len(word) <= 6 for word in content)
    assert WORDS.content(text + " " + text) >= content


def test_what_was_heard_decides_so_far_and_since_the_last_reply(tmp_path: Path) -> None:
    cases = """  - name: ask
    kinds: [reply]
    regex: {en: ['.*\\?']}
    cases:
      - {when: {slot_heard_now: $slot}, score: -1.0, rationale: just told}
      - {when: {slot_heard: $slot}, score: -0.5, rationale: told}
      - {when: {slot_unheard: $slot}, score: 1.0, rationale: new}
      - {when: {slot_unheard: [size, colour]}, score: 0.25, rationale: nothing told}
      - {score: 0.0, rationale: mixed}
"""
    knowledge = build(tmp_path, BASE + cases)
    assert judge(knowledge, "Hi", "What size?").rationale == "new"
    assert judge(knowledge, "The size matters", "What size?").rationale == "new", "named is not told"
    assert judge(knowledge, "It is 30 cm", "What size?").rationale == "just told"
    assert judge(knowledge, "It is 30 cm", "Oh.", "Yes", "What size?").rationale == "told"
    assert judge(knowledge, "It is 30 cm", "Oh.", "Yes", "What size and colour?").rationale == "mixed"
    assert judge(knowledge, "Hi", "Who?").rationale == "nothing told"


def test_a_pattern_by_label_matches_what_the_parser_called_it(tmp_path: Path) -> None:
    cases = "  - {name: ask, kinds: [reply], labels: [asks_information], cases: [{score: 1.0, rationale: $slot}]}\n"
    knowledge = build(tmp_path, BASE + cases)
    assert judge(knowledge, "Hi", "Size?", label="asks_information").rationale == "size"
    assert judge(knowledge, "Hi", "Size?", label="auto:reply/asks_information(size, dates)").score == 1.0
    assert judge(knowledge, "Hi", "Size?", label="proposes").rationale == "no pattern"
    assert judge(knowledge, "Hi", "Size?").rationale == "no pattern"


@pytest.mark.parametrize("parser", [ReplyParser(ReplyParser.Config()), AutoParser(AutoParser.Config())])
def test_labels_are_those_of_the_real_parsers(tmp_path: Path, parser: StepParser) -> None:
    cases = "  - {name: ask, kinds: [reply], labels: [asks_information], cases: [{score: 1.0, rationale: $slot}]}\n"
    knowledge = build(tmp_path, BASE + cases)
    turn = Turn(index=0, context=(), text="I am so sorry about that. Could you tell me the size and the date?")
    trajectory = Trajectory(
        id="t",
        task={},
        environment="none",
        seed=0,
        policy_version=0,
        turns=(turn,),
        traces=(),
        outcome=None,
        termination="failure",
    )
    found = knowledge.score(trajectory, parser.parse(turn, "t", None))
    assert [word.rationale for word in found] == ["no pattern", "size"]


SIMILAR = """  - name: like
    kinds: [reply]
    regex: {en: ['exactly this']}
    similar: {en: ['restart the server', 'begin'], zh: ['重启']}
    at_least: 0.7
    cases: [{score: -1.0, rationale: like an example}]
"""


def test_a_pattern_by_example_matches_what_is_near_enough(tmp_path: Path) -> None:
    encoder = Axes("restart", "server", "begin", "重启", "other")
    knowledge = build(tmp_path, BASE + SIMILAR, encoder)
    assert judge(knowledge, "Hi", "Restart this server!").score == -1.0
    assert judge(knowledge, "Hi", "Restart.").score == -1.0, "cosine 0.707"
    assert judge(knowledge, "Hi", "Restart the other.").score == 0.0, "cosine 0.5"
    assert judge(knowledge, "Hi", "请重启。").score == -1.0
    assert judge(knowledge, "Hi", "exactly this").score == -1.0, "a regex is as good"
    assert encoder.calls == 1 + 5, "examples are encoded once, the steps of a dialogue together"


def test_a_real_encoder_brings_paraphrases_near(tmp_path: Path) -> None:
    if importlib.util.find_spec("slea_llm.encoders") is None:
        pytest.skip("no sentence encoders in this build")
    path = tmp_path / "knowledge.yaml"
    path.write_text(BASE + SIMILAR, encoding="utf-8")
    knowledge = KnowledgeBase(KnowledgeBase.Config(file=str(path), encoder="hashing"))
    assert judge(knowledge, "Hi", "Restart the server now").score == -1.0
    assert judge(knowledge, "Hi", "What colour would you like?").score == 0.0


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        ("labels: asks", "labels 'asks' is not a list"),
        ("at_least: 2", r"at_least 2 is not a number in \[-1, 1\]"),
        ("similar: [a]", "language: "),
        ("simila: {en: [a]}", "did you mean 'similar'"),
    ],
)
def test_a_faulty_matcher_is_refused(tmp_path: Path, faulty: str, message: str) -> None:
    pattern = f"  - {{name: x, kinds: [reply], {faulty}, cases: [{{score: 0, rationale: r}}]}}\n"
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, BASE + pattern, Axes("a"))


def test_of_a_very_long_step_both_ends_are_read(tmp_path: Path) -> None:
    cases = "  - {name: end, kinds: [reply], regex: {en: ['a.*z']}, cases: [{score: 1.0, rationale: r}]}\n"
    knowledge = build(tmp_path, BASE + cases)
    assert judge(knowledge, "Hi", "a" + "." * 3 * LONGEST_STEP + "z").score == 1.0
    long = "." * LONGEST_STEP
    assert judge(knowledge, "Hi", f"{long}a z{long}").score == 0.0


def test_the_worked_example_of_the_documentation_does_what_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "evaluators.md").read_text(encoding="utf-8")
    example = page.split("```yaml\ndescription: Renting")[1].split("```")[0]
    example = f"description: Renting{example}"
    knowledge = build(tmp_path, example, Axes("bike", "take", "red"))
    assert judge(knowledge, "I want to rent a bike.", "Which day?").rationale == "asks for what is needed: day"
    assert judge(knowledge, "Tomorrow, please.", "Which day?").score == -1.0
    assert judge(knowledge, "Hello.", "Here is a bike.").rationale == "offers before day and size are known"
    assert judge(knowledge, "Tomorrow; I am 180 cm.", "Here is a bike.").score == 0.5
