"""Parsers `reply` and `auto`, the words for what a step does, harmony messages, faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slea_llm.parsers.auto import AutoParser
from slea_llm.parsers.coverage import Label, is_unparsed
from slea_llm.parsers.faults import faults, read_call
from slea_llm.parsers.reply import ReplyParser
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.types import FinishReason, Step, Turn

AUTO = AutoParser(AutoParser.Config())
REPLY = ReplyParser(ReplyParser.Config())
TAGGED = TaggedParser(TaggedParser.Config(reply_tags=("answer",)))


def turn(text: str, reason: FinishReason = "stop") -> Turn:
    return Turn(index=0, context=(), text=text, finish_reason=reason)


def does(text: str) -> list[str | None]:
    return [Label.of(step).does for step in REPLY.parse(turn(text), "t", None)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (
            "The drum does not spin and makes a noise: a fault of the motor. Could you tell me the order number and "
            "the purchase channel? We can arrange an on-site inspection. I am very sorry for the inconvenience.",
            [
                "identifies_problem",
                "asks_information(order_number, purchase_channel)",
                "proposes(inspection)",
                "soothes",
            ],
        ),
        (
            "洗衣机不脱水且有异响，应是电机故障。请提供订单号和购买渠道。我们可以安排师傅上门检测。非常抱歉给您带来不便。",
            [
                "identifies_problem",
                "asks_information(order_number, purchase_channel)",
                "proposes(inspection)",
                "soothes",
            ],
        ),
        ("What is your budget? When would you like to travel?", ["asks_information(budget, date)"]),
        ("您的预算是多少？哪天出发？", ["asks_information(budget, date)"]),
        ("What dish would you like, and what is the address?", ["asks_information(address, dish)"]),
        ("A pizza to Long Street. Is that right?", ["states", "confirms"]),
        ("Unfortunately we cannot do that.", ["refuses"]),
    ],
)
def test_a_plain_reply_implies_steps(text: str, steps: list[str]) -> None:
    assert does(text) == steps


@pytest.mark.parametrize(
    ("before", "after", "label"),
    [
        ({"filled": {}}, {"filled": {"budget": 5}}, "reply/asks_information(budget)"),
        ({"filled": {"budget": 5}}, {"filled": {"budget": 5}}, "reply/asks_information"),
        ({}, {"filled": {"budget": 5}}, "reply/asks_information"),
    ],
)
def test_what_a_bare_question_asked_for_shows_in_what_the_answer_filled(
    before: dict[str, object], after: dict[str, object], label: str
) -> None:
    asked = Turn(index=0, context=(), text="And what about that?", state_before=before, state_after=after)
    assert [step.label for step in REPLY.parse(asked, "t", None)] == [label]
    named = replace(asked, text="What is the address?")
    assert [step.label for step in REPLY.parse(named, "t", None)] == ["reply/asks_information(address)"]


def test_neighbours_that_do_the_same_stay_apart_when_asked_for() -> None:
    apart = ReplyParser(ReplyParser.Config(join=False))
    assert len(apart.parse(turn("What is your budget? When would you like to travel?"), "t", None)) == 2


@pytest.mark.parametrize(
    ("text", "picked"),
    [
        ("Thought: a\nAction: f[x]", "react"),
        ("Action: search[x. y]", "react"),
        ("<think>First a. Then b.</think>What dish?", "markers"),
        ("Here it is:\n1. a\n2. b", "markers"),
        ("What dish would you like?", "reply"),
        ("<tool_call>{}</tool_call>", "tagged"),
        ("", "reply"),
    ],
)
def test_auto_says_what_it_picked(text: str, picked: str) -> None:
    steps = AUTO.parse(turn(text), "t", None)
    assert {Label.of(step).parser for step in steps} == {picked}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
            [("thought", "analysis"), ("reply", "final")],
        ),
        (
            "<|channel|>analysis<|message|>Use it.<|end|><|start|>assistant to=functions.f<|channel|>commentary "
            '<|constrain|>json<|message|>{"a": "</think>"}<|call|>'
            "<|start|>functions.f<|message|>1<|end|><|start|>assistant",
            [("thought", "analysis"), ("tool_call", "call"), ("thought", "observation")],
        ),
        ("<|channel|>commentary to=f <|message|>{}<|call|>", [("tool_call", "call")]),
        ("<|channel|>commentary<|message|>I will look.<|end|>", [("reply", "commentary")]),
        ("<|channel|>final<|message|><think>x</think>Hi.", [("thought", "think"), ("reply", "final")]),
        ("Hm.<|channel|>final<|message|>Hi.", [("reply", None), ("reply", "final")]),
        ("<|channel|>analysis", [("reply", None)]),
    ],
)
def test_harmony_messages(text: str, expected: list[tuple[str, str | None]]) -> None:
    steps = TAGGED.parse(turn(text), "t", None)
    assert [(step.kind, step.label) for step in steps] == expected
    assert "".join(step.text for step in steps) == text


def test_reply_tags_cut_a_reply_and_end_marks_make_no_step() -> None:
    text = "<think>a</think>\nSo: <answer>b</answer> c<|im_end|><|endoftext|>"
    assert [(step.kind, step.label, step.text) for step in TAGGED.parse(turn(text), "t", None)] == [
        ("thought", "think", "<think>a</think>\n"),
        ("reply", None, "So: "),
        ("reply", "answer", "<answer>b</answer>"),
        ("reply", None, " c<|im_end|><|endoftext|>"),
    ]
    (step,) = TAGGED.parse(turn("<tool_call>{}</tool_call><|im_end|>"), "t", None)
    assert step.kind == "tool_call"


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("<think>a</think>b", "stop", []),
        ("<think>a", "stop", ["thought never closed"]),
        ("<think>a", "length", ["thought cut short"]),
        ("a</think>b", "stop", []),
        ("<think>a</think>b</think>", "stop", ["thought closed more often than opened"]),
        ("a<|im_end|><|endoftext|>", "stop", ["repeated end mark"]),
        ("a<|im_end|>b", "stop", ["text after the end mark"]),
        ("<tool_call>{'name': 'f'}</tool_call>", "stop", ["call is a Python literal, not JSON"]),
        ('<tool_call>{"name": "f"}</tool_call>', "stop", []),
        ("<tool_call>f(x)</tool_call>", "stop", ["call is no JSON object"]),
        ("<tool_call>[1]</tool_call>", "stop", ["call is no JSON object"]),
        ('<tool_call>{"a": 1}</tool_call>', "stop", ["call without a name"]),
        ("Thought: a\nAction: None", "stop", ["action without a call"]),
    ],
)
def test_faults_are_named(text: str, reason: FinishReason, expected: list[str]) -> None:
    assert faults(turn(text, reason), AUTO.parse(turn(text, reason), "t", None)) == expected


def test_a_call_is_read() -> None:
    assert read_call('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>') == (
        {"name": "f", "arguments": {"a": 1}},
        None,
    )
    assert read_call("<tool_call>" + "(" * 30_000) == (None, "call is no JSON object")


def test_labels_are_read_back_and_what_could_be_cut_further_is_unparsed() -> None:
    def step(label: str | None, text: str) -> Step:
        return replace(TAGGED.parse(turn(text), "t", None)[0], label=label)

    assert Label.of(step("react:action/calls_tool", "x")) == ("react", "action", "calls_tool")
    assert Label.of(step("numbered_dot", "x")) == (None, "numbered_dot", None)
    assert Label.of(step(None, "x")) == (None, None, None)
    assert is_unparsed(step("paragraph", "One is. Two is."))
    assert not is_unparsed(step("paragraph", "One is."))
    assert not is_unparsed(step("numbered_dot", "1. One is. Two is."))
