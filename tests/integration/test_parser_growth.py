"""How parsing grows with the length of a text, on texts that tempt a pattern to try everything."""

from __future__ import annotations

import time

import pytest

from slea_llm.types import Turn
from tests.unit.test_parsers import NAMES, parser_of

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "unit",
    [
        *("<think>", "<tool_call>{", "<|channel|>", "<|start|>", "<|message|>", "<answer>", "<|im_end|>", "<a"),
        *(
            ". ",
            ".",
            "\n",
            " ",
            "…",
            "! ",
            "(",
            "{",
            "[",
            "[1,",
            '{"a":',
            '"',
            "`a ",
            "```\n",
            "\\[",
            "\\(",
            "\\begin{a}",
        ),
        *("1. a\n", "- a\n", "Step 1: a. ", "①a。", "Action: a\n", "Action Input: {\n", "> think: a\n", "**a", "|a|\n"),
        *("what how ", "先再什么", "please tell ", "U.S. ", "://a"),
    ],
)
def test_long_and_broken_texts_take_linear_time(unit: str) -> None:
    """Four times the text takes far less than sixteen times the time, at least once on a busy machine.

    `auto` runs all parsers but the cuts of `react`.
    """
    for name in ("auto", "react"):
        assert any(growth(name, unit) < 8 for _ in range(5)), name


def growth(name: str, unit: str) -> float:
    """How many times as long a text of four times the length takes; small times count as 0.05 s."""
    seconds = []
    for count in (3_000, 12_000):
        turn = Turn(index=0, context=(), text=(unit * count)[:count])
        begin = time.process_time()
        parser_of(NAMES.index(name)).parse(turn, "t", None)
        seconds.append(time.process_time() - begin)
    return seconds[1] / max(seconds[0], 0.05)
