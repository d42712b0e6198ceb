"""What every parser keeps on any text: steps tile text and tokens, nothing whole is cut, no step spans two parts."""

from __future__ import annotations

import bisect
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm import registry
from slea_llm.crediting import with_parents
from slea_llm.models.token_codec import TokenCodec
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.types import FinishReason, Step, TokenSpan, Turn, leaf_steps
from tests.strategies import json_objects, texts
from tests.support import tokenizers as kinds

FORMS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<THINKING>", "< think >"),
    *("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>", "<|end|>", "<|im_end|>"),
    *(
        "Thought: ",
        "Action: ",
        "Action Input: ",
        "Observation 2: ",
        "Final Answer: ",
        "Search[x. y]",
        "> think: ",
        "> go",
    ),
    *("1. ", "2. ", "(3) ", "a) ", "Step 1: ", " Step 2: ", "# Plan", "**Result:** ", "- ", "  - ", "| a. | b! |\n"),
    *("第一步：", "步骤2：", "1、", "①", "（2）", "首先，", "其次，", "最后，", "【解析】", "接下来，"),
    *("So it is. ", "Wait, no! ", "v1.2.3 ", "e.g. this ", "https://a.example/b.c ", "pi = 3.14. ", "a.b@c.example "),
    *(
        "`x. y`",
        "```\na. b\n",
        "```",
        '{"a": "b. c',
        '"}',
        "[1. 2]",
        "\\[ x. \\]",
        "...",
        "？",
        "。",
        "\n",
        "\n\n",
        "  ",
        "\t",
    ),
)
NAMES = sorted(name for name in registry.names("parser") if not getattr(registry.load("parser", name), "needs", None))
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in NAMES),
    ("tagged", {"split_thoughts": True}),
    ("react", {"split_thoughts": True}),
    ("markers", {"sentences": True, "whole_up_to": 0}),
)
IDS = [name + ("*" if options else "") for name, options in VARIANTS]


@cache
def parser_of(index: int) -> Any:
    """A parser has no state: one for all examples."""
    name, options = VARIANTS[index]
    component = registry.load("parser", name)
    return component(component.Config(**options))


def replies() -> st.SearchStrategy[str]:
    """Replies in every form that a parser knows, whole and broken, between random Unicode, half characters included."""
    return st.lists(st.sampled_from(FORMS) | texts(6) | st.text(max_size=3), max_size=14).map("".join)


def steps_by(index: int, text: str, reason: FinishReason = "stop") -> tuple[Step, ...]:
    turn = Turn(index=0, context=(), text=text, finish_reason=reason)
    steps: tuple[Step, ...] = parser_of(index).parse(turn, "t", None)
    assert parser_of(index).parse(turn, "t", None) == steps
    return steps


def check_tree(text: str, steps: tuple[Step, ...]) -> None:
    leaves = leaf_steps(steps)
    assert "".join(leaf.text for leaf in leaves) == text
    assert [leaf.span.start for leaf in leaves] == [0, *(leaf.span.end for leaf in leaves[:-1])]
    assert all(leaf.text.strip() for leaf in leaves) or len(leaves) == 1
    assert [step.index for step in steps] == list(range(len(steps)))
    for step in steps:
        assert step.text == text[step.span.start : step.span.end]
        below = [child for child in steps if child.parent == step.index]
        assert len(below) != 1
        if below:
            assert below[0].index > step.index
            assert (below[0].span.start, below[-1].span.end) == (step.span.start, step.span.end)
            assert {child.kind for child in below} == {step.kind}


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=IDS)
@given(text=replies(), reason=st.sampled_from(["stop", "length", "abort"]))
@settings(deadline=None, max_examples=40)
def test_steps_are_a_tree_over_the_text_whatever_it_is(index: int, text: str, reason: FinishReason) -> None:
    check_tree(text, steps_by(index, text, reason))


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=IDS)
@given(text=replies(), reason=st.sampled_from(["stop", "length"]))
@settings(deadline=None, max_examples=25)
def test_no_step_spans_two_parts_of_a_reply(index: int, text: str, reason: FinishReason) -> None:
    """Where thought, reply and call meet, by the parser that reads tags alone, every other parser cuts too."""
    turn = Turn(index=0, context=(), text=text, finish_reason=reason)
    tags = () if VARIANTS[index][0] == "tagged" else ("answer",)
    tagged = TaggedParser(TaggedParser.Config(reply_tags=tags)).parse(turn, "t", None)
    starts = {leaf.span.start for leaf in leaf_steps(steps_by(index, text, reason))}
    assert {step.span.start for step in tagged} <= starts


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=IDS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_no_step_crosses_the_end_of_the_thought(index: int, data: st.DataObject) -> None:
    sides = [data.draw(replies()).replace("<", "(").replace("|>", "|)") for _ in range(2)]
    text = f"{data.draw(st.sampled_from(['<think>', '']))}{sides[0]}</think>{sides[1]}"
    end = len(text) - len(sides[1])
    for leaf in leaf_steps(steps_by(index, text)):
        assert not (leaf.span.start < end < leaf.span.end and text[end : leaf.span.end].strip())


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=IDS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_no_json_value_and_no_code_block_is_cut(index: int, data: st.DataObject) -> None:
    value = {"key": data.draw(json_objects()), "steps": ["1. a\n2. b. C", "Thought: x"], "text": "So. Then! 首先。"}
    block = data.draw(
        st.sampled_from(
            [
                json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 2]))),
                "```python\n# 1. First. Then\nx = {\n  'a': 1.5}\n\nStep 2: print(x)\n```",
            ]
        )
    )
    block = block.replace("<", "(").replace("|>", "|)").replace("`>", "`)")
    before, after = (data.draw(replies()).replace("<", "(").replace("|>", "|)") for _ in range(2))
    text = f"{before}\n{block}\n{after}"
    start = len(before) + 1
    for leaf in leaf_steps(steps_by(index, text))[1:]:
        assert not start < leaf.span.start < start + len(block)


WHOLE = (
    *("3.14 and v1.2.3 at 10.0.0.1", "https://a.example/b.c?d=1.2", "/etc/app.d/x.conf", "C:\\a.b\\c", "a.b@c.example"),
    *("e.g. this, i.e. that", "Dr. J. R. Smith et al. of the U.S. Army", "5! = 120", "approx. 3 kg, cf. Fig. 2"),
    *("`a. b`", "\\[ a. \\] b", "$$ a. b $$ c", "<<1+1=2. 5>>2.5", "\\begin{align} a. b \\end{align}"),
    *('{"a": "b. c", "d": ["e! f"]}', "[[1. 2], [3. 4]]"),
)


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=IDS)
def test_numbers_names_code_and_json_stay_whole(index: int, whole: str) -> None:
    (step,) = leaf_steps(steps_by(index, f"It says {whole} and no more"))
    assert whole in step.text


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=IDS)
def test_tables_stay_whole(index: int) -> None:
    table = "| a. | 1. b! |\n|---|---|\n| c? | Step 1: d. |"
    assert any(table in leaf.text for leaf in leaf_steps(steps_by(index, f"Look.\n{table}\n\nThen go.")))


TOKENIZERS = {**kinds.all_kinds(), "word_piece": kinds.word_piece()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=replies().map(lambda text: text.encode("utf-8", "replace").decode()), data=st.data())
@settings(deadline=None, max_examples=25)
def test_every_token_of_a_real_tokenizer_belongs_to_one_leaf_step(kind: str, text: str, data: st.DataObject) -> None:
    """A token belongs where its first character starts; a parent's span is the union of its parts'."""
    index = data.draw(st.integers(0, len(VARIANTS) - 1))
    encoding = TOKENIZERS[kind].backend_tokenizer.encode(text, add_special_tokens=False)
    if kind == "word_piece":  # loses white space: its own offsets say where a token starts
        starts = [start for start, _ in encoding.offsets] + [len(text)]
    else:
        text, found = TokenCodec(TOKENIZERS[kind]).decode(encoding.ids)
        starts = [*found, len(text)]
    turn = Turn(index=0, context=(), text=text, span=TokenSpan(0, 7, 7 + len(starts)))
    steps: tuple[Step, ...] = parser_of(index).parse(turn, "t", starts)
    check_tree(text, steps)
    leaves = leaf_steps(steps)
    spans = [leaf.tokens for leaf in leaves if leaf.tokens is not None]
    assert len(spans) == len(leaves)
    assert [7, *(span.end for span in spans)] == [*(span.start for span in spans), 7 + len(starts)]
    borders = [leaf.span.start for leaf in leaves]
    for position, start in enumerate(starts):
        span = spans[max(0, bisect.bisect_right(borders, start) - 1)]
        assert span.start <= 7 + position < span.end
    for step in steps:
        below = [child.tokens for child in steps if child.parent == step.index and child.tokens is not None]
        if below and step.tokens is not None:
            assert (below[0].start, below[-1].end) == (step.tokens.start, step.tokens.end)


@given(text=replies(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_credit_of_a_parent_is_the_sum_of_its_childrens_and_a_flat_turn_is_unchanged(
    text: str, data: st.DataObject
) -> None:
    steps = steps_by(NAMES.index("markers"), text)
    leaves = leaf_steps(steps)
    values = {(0, leaf.index): float(data.draw(st.integers(-9, 9))) for leaf in leaves}
    credit = with_parents(steps, values)
    assert credit.keys() == {(0, step.index) for step in steps}
    for step in steps:
        below = [credit[0, child.index] for child in steps if child.parent == step.index]
        assert credit[0, step.index] == (sum(below) if below else values[0, step.index])
    assert sum(credit[0, step.index] for step in steps if step.parent is None) == sum(values.values())
    assert with_parents(leaves, values) == values


def test_a_parent_with_a_child_without_a_value_has_none() -> None:
    text = "First I look at the order. Then I ask for the dish. So I am done."
    steps = steps_by(NAMES.index("markers"), text)
    assert [step.parent for step in steps] == [None, 0, 0, 0]
    assert with_parents(steps, {(0, 1): 1.0, (0, 3): 2.0}) == {(0, 1): 1.0, (0, 3): 2.0}
    assert with_parents(steps, {(0, 1): 1.0, (0, 2): 0.5, (0, 3): 2.0})[0, 0] == pytest.approx(3.5)
