"""Parser `react`: Thought, Action, Action Input, Observation in every usual spelling, and calls that are none."""

from __future__ import annotations

import pytest

from slea_llm.errors import ConfigError
from slea_llm.parsers.react import ReactParser
from slea_llm.types import Step, Turn

PARSER = ReactParser(ReactParser.Config(kinds=None))


def parse(text: str, parser: ReactParser = PARSER) -> tuple[Step, ...]:
    return parser.parse(Turn(index=0, context=(), text=text), "t", None)


def cut(text: str) -> list[tuple[str, str | None, str]]:
    return [(step.kind, step.label, step.text) for step in parse(text)]


def test_br_067_a_json_input_of_many_lines_is_whole_and_what_follows_is_reply() -> None:
    text = 'Thought: save it\nAction: write\nAction Input: {\n  "path": "a.txt",\n  "body": {"k": 1}\n}\nthanks'
    thought, action, trailing = parse(text)
    assert (thought.kind, thought.text) == ("thought", "Thought: save it\n")
    call = PARSER.call(action.text)
    assert (action.kind, call.name, call.value) == ("tool_call", "write", {"path": "a.txt", "body": {"k": 1}})
    assert call.malformed is None
    assert (trailing.kind, trailing.label, trailing.text) == ("reply", "trailing", "thanks")


def test_br_070_action_none_is_no_call_and_no_error() -> None:
    thought, action = parse("Thought: no tool fits\nAction: None")
    assert thought.text.removeprefix("Thought:").strip() == "no tool fits"
    assert (action.kind, action.label) == ("thought", "no_action")
    call = PARSER.call(action.text)
    assert call.name is None
    assert call.malformed == "'None' is no tool"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Thought 1: find it\nAction 1: Search[x. y]\nObservation 1: none\nThought 2: go on",
            [
                ("thought", "thought", "Thought 1: find it\n"),
                ("tool_call", "action", "Action 1: Search[x. y]\n"),
                ("thought", "observation", "Observation 1: none\n"),
                ("thought", "thought", "Thought 2: go on"),
            ],
        ),
        (
            "**Thought:** find it\n**Action:** search\n**Action Input:** x\n**Final Answer:** y",
            [
                ("thought", "thought", "**Thought:** find it\n"),
                ("tool_call", "action", "**Action:** search\n**Action Input:** x\n"),
                ("reply", "answer", "**Final Answer:** y"),
            ],
        ),
        (
            "思考：查一下\n行动：搜索\n行动输入：天气\n最终答案：晴",
            [
                ("thought", "thought", "思考：查一下\n"),
                ("tool_call", "action", "行动：搜索\n行动输入：天气\n"),
                ("reply", "answer", "最终答案：晴"),
            ],
        ),
        (
            "Thought: I look. Action: search[x]",
            [("thought", "thought", "Thought: I look."), ("tool_call", "action", " Action: search[x]")],
        ),
        (
            "> think: find it\nOK.\n> go to desk 1\nYou see a pen.\n",
            [
                ("thought", "thought", "> think: find it\n"),
                ("thought", "observation", "OK.\n"),
                ("tool_call", "action", "> go to desk 1\n"),
                ("thought", "observation", "You see a pen.\n"),
            ],
        ),
        (
            "<think>I plan.</think>\nAction: f\nAction Input: {}\n",
            [
                ("thought", "think", "<think>I plan.</think>\n"),
                ("tool_call", "action", "Action: f\nAction Input: {}\n"),
            ],
        ),
        ("No form at all.", [("reply", None, "No form at all.")]),
        ("Action Input: 3", [("thought", "malformed", "Action Input: 3")]),
        (
            'Action: f\nAction Input: {"text": "x\\nThought: y"}',
            [("tool_call", "action", 'Action: f\nAction Input: {"text": "x\\nThought: y"}')],
        ),
        (
            "Let me see.\nAction: f[1]",
            [("thought", "preamble", "Let me see.\n"), ("tool_call", "action", "Action: f[1]")],
        ),
    ],
)
def test_forms(text: str, expected: list[tuple[str, str | None, str]]) -> None:
    assert cut(text) == expected


@pytest.mark.parametrize(
    ("text", "name", "value", "malformed"),
    [
        ("Action: Search[Nick Park]", "Search", "Nick Park", None),
        ("Action: search(query)", "search", "query", None),
        ('Action: f\nAction Input: ```json\n{"a": [1]}\n```', "f", {"a": [1]}, None),
        ('Action:\n```\n{"action": "f", "action_input": {"a": 1}}\n```', "f", {"a": 1}, None),
        ('Action: {"name": "f", "arguments": [2]}', "f", [2], None),
        ('Action: {"a": 1}', None, None, "no key of action, name, tool, tool_name, function names the tool"),
        ("Action: f\nAction Input: {bad", "f", "{bad", "the input is no JSON value"),
        ("Action: f\nAction Input: two words", "f", "two words", None),
        ("Action: `f`", "f", "", None),
        ("Action:", None, None, "'' is no tool"),
        ("Action: N/A", None, None, "'N/A' is no tool"),
        ("> go to desk 1", "go to desk 1", "", None),
    ],
)
def test_calls(text: str, name: str | None, value: object, malformed: str | None) -> None:
    call = PARSER.call(text)
    assert (call.name, call.value, call.malformed) == (name, value, malformed)


@pytest.mark.parametrize(
    "block",
    ["```\n\n```python\n# 1. First. Then\nx = {\n  'a': 1}\n```", "```\n> a\nb\n> c\n```", '{"a": "x",\n\n> b: 1\n}'],
)
def test_code_and_json_after_an_action_or_a_prompt_stay_whole(block: str) -> None:
    for text in (f"Action Input: 2. Action: {block}\n1", f"> think: a\nOK\n> go\nSee {block}\n> go"):
        assert any(block in step.text for step in parse(text))


def test_thoughts_are_split_when_asked_for() -> None:
    parser = ReactParser(ReactParser.Config(kinds=None, split_thoughts=True))
    assert [step.text for step in parse("Thought: I see. I go.\nAction: f[a. b]", parser)] == [
        "Thought: I see.",
        " I go.\n",
        "Action: f[a. b]",
    ]


def test_words_are_configured_and_checked() -> None:
    parser = ReactParser(ReactParser.Config(kinds=None, thought=("Gedanke",), action=("Tat",)))
    assert [step.label for step in parse("Gedanke: a\nTat: f[x]", parser)] == ["thought", "action"]
    with pytest.raises(ConfigError, match="thought word 'a:' is empty or holds a colon"):
        ReactParser.Config(thought=("a:",))
