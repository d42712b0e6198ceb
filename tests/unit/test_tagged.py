"""Parser `tagged`: tags, broken tags, tokens across borders, sentences."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.errors import ConfigError
from slea_llm.parsers.sentences import sentence_cuts
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.types import FinishReason, Step, TokenSpan, Turn
from tests.strategies import tagged_texts

PARSER = TaggedParser(TaggedParser.Config())
SENTENCES = TaggedParser(TaggedParser.Config(split_thoughts=True))


def parse(text: str, finish_reason: FinishReason = "stop", parser: TaggedParser = PARSER) -> tuple[Step, ...]:
    return parser.parse(Turn(index=0, context=(), text=text, finish_reason=finish_reason), "t", None)


def cut(text: str, finish_reason: FinishReason = "stop") -> list[tuple[str, str]]:
    return [(step.kind, step.text) for step in parse(text, finish_reason)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", [("thought", "<think>a</think>"), ("reply", "b")]),
        ("plain", [("reply", "plain")]),
        ("", [("reply", "")]),
        (" \n", [("reply", " \n")]),
        ("<THINKING>a</Thinking> b ", [("thought", "<THINKING>a</Thinking>"), ("reply", " b ")]),
        ("<reasoning>a</reasoning>b", [("thought", "<reasoning>a</reasoning>"), ("reply", "b")]),
        ("<think>a</thinking>b", [("thought", "<think>a</thinking>"), ("reply", "b")]),
        (
            "<think>a</think>\n\n<tool_call>{}</tool_call>\n",
            [("thought", "<think>a</think>\n\n"), ("tool_call", "<tool_call>{}</tool_call>\n")],
        ),
        (
            "ok <tool_call>{}</tool_call> bye",
            [("reply", "ok "), ("tool_call", "<tool_call>{}</tool_call>"), ("reply", " bye")],
        ),
        ("\n<think>a</think>", [("thought", "\n<think>a</think>")]),
        ("<think></think>b", [("thought", "<think></think>"), ("reply", "b")]),
        (
            "<think>a</think>b<think>c</think>d",
            [("thought", "<think>a</think>"), ("reply", "b"), ("thought", "<think>c</think>"), ("reply", "d")],
        ),
    ],
)
def test_whole_tags(text: str, expected: list[tuple[str, str]]) -> None:
    assert cut(text) == expected


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("<think>never closed", "stop", [("thought", "<think>never closed")]),
        ("closed only</think>b", "stop", [("thought", "closed only</think>"), ("reply", "b")]),
        ("a</think>b</think>c", "stop", [("thought", "a</think>"), ("reply", "b</think>c")]),
        (
            "<think>a<think>b</think>c</think>d",
            "stop",
            [("thought", "<think>a<think>b</think>c</think>"), ("reply", "d")],
        ),
        ("<think>a<think>b</think>c", "stop", [("thought", "<think>a<think>b</think>"), ("reply", "c")]),
        ("<think>a<think>b</think>c", "length", [("thought", "<think>a<think>b</think>c")]),
        ("<think>a</thi", "length", [("thought", "<think>a</thi")]),
        ("< think >a</ think >b", "stop", [("thought", "< think >a</ think >"), ("reply", "b")]),
        ("<   think>a<think b>", "stop", [("reply", "<   think>a<think b>")]),
        ("<think>a <tool_call>{}</tool_call>", "stop", [("thought", "<think>a <tool_call>{}</tool_call>")]),
        (
            '<tool_call>{"a": "</think>"}</tool_call>',
            "stop",
            [("tool_call", '<tool_call>{"a": "</think>"}</tool_call>')],
        ),
        ("<tool_call>{", "stop", [("tool_call", "<tool_call>{")]),
        ("a</tool_call>b", "stop", [("reply", "a</tool_call>b")]),
    ],
)
def test_broken_tags(text: str, finish_reason: FinishReason, expected: list[tuple[str, str]]) -> None:
    assert cut(text, finish_reason) == expected


def test_br_071_reasoning_cut_before_its_closing_tag_is_never_the_reply() -> None:
    (step,) = parse("<think>count 1 2", "length")
    assert step.kind == "thought"
    assert step.text.removeprefix("<think>") == "count 1 2"
    assert "</think>" not in step.text


def test_tags_are_configured_and_name_the_step() -> None:
    parser = TaggedParser(TaggedParser.Config(thought_tags=("思考",), tool_tags=("call",)))
    steps = parse("<思考>a</思考><think>b<call>{}</call>", parser=parser)
    assert [(step.kind, step.label) for step in steps] == [("thought", "思考"), ("reply", None), ("tool_call", "call")]


def test_bad_tag_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="'<think>' is not a word"):
        TaggedParser.Config(thought_tags=("<think>",))
    with pytest.raises(ConfigError, match="stand under thought_tags and under tool_tags"):
        TaggedParser.Config(thought_tags=("Call",), tool_tags=("call",))


def test_many_broken_tags_take_linear_time() -> None:
    assert len(parse("<think><tool_call></tool_call>" * 5_000)) == 1
    assert len(parse("<think></think><tool_call></tool_call>" * 5_000)) == 10_000
    assert len(parse("<think><think></think>" * 5_000)) == 1
    assert len(parse("<" + " " * 200_000)) == 1


def test_a_token_across_a_border_belongs_where_its_first_character_starts() -> None:
    text = "<think>a</think>bc"
    #        0    7 8       16 17 18
    starts = [0, 5, 7, 14, 17, 18]  # the token at 14 is "k>b", the last one is the end of the turn
    turn = Turn(index=2, context=(), text=text, span=TokenSpan(1, 10, 16))
    thought, reply = PARSER.parse(turn, "t", starts)
    assert thought.tokens == TokenSpan(1, 10, 14)
    assert reply.tokens == TokenSpan(1, 14, 16)


def test_a_step_without_a_token_start_has_an_empty_token_span() -> None:
    turn = Turn(index=0, context=(), text="<think>a</think>b", span=TokenSpan(0, 3, 5))
    thought, reply = PARSER.parse(turn, "t", [0, 10])
    assert thought.tokens == TokenSpan(0, 3, 5)
    assert reply.tokens == TokenSpan(0, 5, 5)


def test_an_empty_reply_keeps_its_end_token() -> None:
    (step,) = PARSER.parse(Turn(index=0, context=(), text="", span=TokenSpan(0, 3, 4)), "t", [0])
    assert (step.kind, step.tokens) == ("reply", TokenSpan(0, 3, 4))


@pytest.mark.parametrize("starts", [[0], [0, 3, 2], [0, 1, 4], [-1, 0, 1]])
def test_starts_that_do_not_fit_are_an_error(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="token starts"):
        PARSER.parse(Turn(index=0, context=(), text="abc", span=TokenSpan(0, 0, 3)), "t", starts)


def test_starts_without_a_span_are_an_error() -> None:
    with pytest.raises(ValueError, match="no token span"):
        PARSER.parse(Turn(index=0, context=(), text="abc"), "t", [0])


@pytest.mark.parametrize(
    "whole",
    [
        "It costs 3.14 in v1.2.3 at 10.0.0.1",
        "See https://a.example/b.c?d=1.2 and /etc/app.d/x.conf and C:\\a.b",
        "Mail a.b@c.example now",
        "Code `a. b! c` stays",
        "```\na. b\n\nc! d\n```",
        'Call {"name": "a. b", "arguments": {"x": "c! d\\". }"}} now',
        "[1. 2. 3. 4]",
        "Ask e.g. the dish, i.e. the food, vs. nothing, Mr. X",
        "1. Ask the dish",
        "a) b",
    ],
)
def test_what_must_stay_whole_is_not_cut(whole: str) -> None:
    assert sentence_cuts(whole) == []


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("A b. C d! E?", ["A b.", " C d!", " E?"]),
        ("One\nTwo\n\n Three", ["One\n", "Two\n\n", " Three"]),
        ("缺地址。问吧！好吗？行", ["缺地址。", "问吧！", "好吗？", "行"]),
        ("他说“好。”然后走。", ["他说“好。”", "然后走。"]),
        ('He said "go." Then left.', ['He said "go."', " Then left."]),
        ("See https://a.example/b. Then go", ["See https://a.example/b.", " Then go"]),
        ("1. A is told.\n2. B is missing.\n", ["1. A is told.\n", "2. B is missing.\n"]),
        ("Wait... what", ["Wait...", " what"]),
    ],
)
def test_sentences_and_lines(text: str, pieces: list[str]) -> None:
    cuts = [0, *sentence_cuts(text), len(text)]
    assert [text[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)] == pieces  # noqa: RUF007


def test_split_thoughts_keep_their_tags_and_leave_replies_whole() -> None:
    text = "<think>\nNeed dish. Need address.\n</think>\nWhat dish? Where?"
    steps = parse(text, parser=SENTENCES)
    assert [(step.kind, step.text) for step in steps] == [
        ("thought", "<think>\nNeed dish."),
        ("thought", " Need address.\n</think>\n"),
        ("reply", "What dish? Where?"),
    ]
    assert [step.index for step in steps] == [0, 1, 2]


def test_a_token_that_begins_with_the_blank_before_a_word_opens_the_step_of_that_word() -> None:
    """Tokenizers glue a blank to the word after it: ` Ask` decides what the second step is and must be its own."""
    tokens = ["<think>", "Need", " dish", ".", " Ask", " dish", ".", "</think>", " What", "?", ""]
    starts = [len("".join(tokens[:i])) for i in range(len(tokens))]
    turn = Turn(index=0, context=(), text="".join(tokens), span=TokenSpan(0, 7, 7 + len(tokens)))
    spans = [(step.tokens.start - 7, step.tokens.end - 7) for step in SENTENCES.parse(turn, "t", starts) if step.tokens]
    assert spans == [(0, 4), (4, 8), (8, 11)]


@st.composite
def sampled_turns(draw: st.DrawFn) -> tuple[Turn, list[int]]:
    """A turn and the character starts of its tokens, an end-of-turn token among them or not."""
    text = draw(tagged_texts())
    starts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    turn = Turn(
        index=draw(st.integers(0, 9)),
        context=(),
        text=text,
        span=TokenSpan(0, 5, 5 + len(starts)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
    )
    return turn, starts


@pytest.mark.parametrize("parser", [PARSER, SENTENCES], ids=["whole", "sentences"])
@given(sampled=sampled_turns())
@settings(deadline=None, max_examples=60)
def test_steps_tile_text_and_tokens_whatever_the_text(parser: TaggedParser, sampled: tuple[Turn, list[int]]) -> None:
    turn, starts = sampled
    steps = parser.parse(turn, "t", starts)
    assert steps
    assert "".join(step.text for step in steps) == turn.text
    assert [step.span.start for step in steps] == [0, *(step.span.end for step in steps[:-1])]
    assert [step.index for step in steps] == list(range(len(steps)))
    spans = [step.tokens for step in steps if step.tokens is not None]
    assert len(spans) == len(steps)
    assert [5, *(span.end for span in spans)] == [*(span.start for span in spans), 5 + len(starts)]
    borders = [step.span.start for step in steps]
    for position, start in enumerate(starts):
        owner = steps[max(0, bisect.bisect_right(borders, start) - 1)]
        assert owner.tokens is not None
        assert owner.tokens.start <= 5 + position < owner.tokens.end
    assert all(step.text.strip() for step in steps) or len(steps) == 1
    assert parser.parse(turn, "t", starts) == steps


@given(text=tagged_texts())
@settings(deadline=None, max_examples=60)
def test_a_reply_step_never_holds_an_opened_thought(text: str) -> None:
    for step in parse(text):
        if step.kind == "reply":
            assert "<think>" not in step.text.lower()
            assert "<tool_call>" not in step.text.lower()
