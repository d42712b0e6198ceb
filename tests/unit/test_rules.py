"""General rules: each fires where it should, the first that applies decides, what is not in the log costs nothing."""

from __future__ import annotations

import pytest

from slea_llm.errors import ConfigError
from slea_llm.evaluators.rules import Rules
from slea_llm.evaluators.tool_results import answers, error_in
from slea_llm.types import ScoredTrajectory
from tests.support.logged import booking, call, logged, scored


def words(one: ScoredTrajectory) -> list[tuple[float | None, str]]:
    return [(word.score, next(iter(word.parts))) for word in one.scores]


def test_calls_are_judged_by_their_answers() -> None:
    (one,) = scored(booking("a", success=True, errors=1))
    assert words(one) == [(0.2, "result"), (-0.4, "tool_error"), (0.0, "neutral"), (0.0, "neutral"), (0.2, "result")]
    assert "flight AZ1 cannot be held (0)" in one.scores[1].rationale


def test_the_same_call_again_is_a_repeat_unless_it_is_answered_otherwise() -> None:
    look = call("status", id=7)
    (one,) = scored(
        logged(
            "a",
            ([("user", "Where is order 7?")], look),
            ([("tool", "packed")], look),
            ([("tool", "packed")], look),
            ([("tool", "on its way")], "Order 7 is on its way."),
        )
    )
    assert [rule for _, rule in words(one)] == ["result", "same_call", "result", "neutral"]


def test_a_call_without_an_answer_is_neutral_and_a_broken_one_is_not() -> None:
    (one,) = scored(logged("a", ([("user", "Go.")], call("go")), ([], "<tool_call>{go</tool_call>")))
    assert words(one) == [(0.0, "unanswered"), (-0.5, "broken_call")]


def test_repeats_and_replies_that_take_up_nothing() -> None:
    (one,) = scored(
        logged(
            "a",
            ([("user", "My router blinks red.")], "Which model of router do you have?"),
            ([("user", "Model QX-90.")], "Which model of router do you have?"),
            ([("user", "I told you: QX-90!")], "Weather improves tomorrow."),
            ([("user", "yes")], "Wonderful."),
        )
    )
    assert [rule for _, rule in words(one)] == ["neutral", "repeats", "ignores", "neutral"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("Error: no such user", "Error: no such user"),
        ('{"error": "not found"}', "error: not found"),
        ('{"error": null, "rows": 3}', None),
        ('{"success": false}', "success: False"),
        ('{"exit_code": 2, "output": ""}', "exit_code: 2"),
        ("Traceback (most recent call last):\n  ...\nValueError: x", "Traceback (most recent call last):"),
        ("exit code 0", None),
        ("returned exit code 137", "returned exit code 137"),
        ("bash: foo: command not found", "bash: foo: command not found"),
        ("错误：没有这个用户", "错误：没有这个用户"),
        ("no errors were found", None),
        ("The terror of the seas", None),
        ("", None),
        ("{" * 50_000, None),
    ],
)
def test_what_is_an_error(answer: str, error: str | None) -> None:
    assert error_in(answer) == error


def test_answers_pair_with_calls_in_order_and_after_the_last_reply() -> None:
    (one,) = scored(
        logged(
            "a",
            ([("user", "Both.")], call("one") + call("two")),
            ([("tool", "1"), ("tool", "2")], call("three")),
            closing=[("tool", "3")],
        )
    )
    assert list(answers(one.trajectory, one.steps).values()) == ["1", "2", "3"]


def test_a_score_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tool_error -2\.0 is not in \[-1, 1\]"):
        Rules.Config(tool_error=-2.0)
