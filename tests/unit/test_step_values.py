"""The table of step values: mean advantages by text, merged over processes, most and least valued first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slea_llm.interfaces import LocalReducer
from slea_llm.step_values import StepValues, ValuedCrediting, said
from slea_llm.types import AugmentedExperience, ScoredTrajectory, Span, Step, TokenSpan, TokenTrace, Trajectory, Turn


def experience(steps: dict[str, list[float]]) -> AugmentedExperience:
    """One turn of steps, each with the advantages of its tokens."""
    made: list[Step] = []
    advantages: list[float] = []
    at = 0
    for index, (text, values) in enumerate(steps.items()):
        tokens = TokenSpan(0, len(advantages), len(advantages) + len(values))
        span = Span(at, at + len(text))
        made.append(Step(trajectory_id="t", turn=0, index=index, kind="reply", text=text, span=span, tokens=tokens))
        advantages += values
        at += len(text)
    n = len(advantages)
    turn = Turn(index=0, context=(), text="".join(steps), span=TokenSpan(0, 0, n))
    trajectory = Trajectory(
        id="t",
        task={},
        environment="x",
        seed=0,
        policy_version=0,
        turns=(turn,),
        traces=(TokenTrace(token_ids=(1,) * n, sampled_mask=(True,) * n, logprobs=(-1.0,) * n),),
        outcome=0.0,
        termination="success",
    )
    scored = ScoredTrajectory(trajectory=trajectory, steps=tuple(made), scores=(), parser="p")
    rest: Any = {name: np.zeros(n) for name in ("weights", "value_mask", "policy_mask")}
    stats: Any = SimpleNamespace()
    credit = np.array(advantages)
    return AugmentedExperience(scored=scored, stats=stats, rewards={}, advantages=credit, returns={}, **rest)


def test_mean_of_a_step_is_that_of_its_tokens_and_means_are_over_steps() -> None:
    values = StepValues()
    values.add(experience({"<think>Ask.</think>": [1.0, 3.0], "Number 12?": [-1.0]}))
    values.add(experience({"<think>Ask.</think>": [6.0], "Number 7?": [-2.0, -4.0]}))
    ask, number = values.values(least=2)
    assert (ask.text, ask.count, ask.mean) == ("Ask.", 2, 4.0)
    assert ask.error == pytest.approx(2.0 / 2**0.5)
    assert (number.text, number.count, number.mean) == ("Number #?", 2, -2.0)
    assert values.values(least=3) == []


def test_a_step_without_a_token_is_valued_where_it_earns() -> None:
    values = StepValues()
    values.add(experience({"a": [1.0, 5.0], "b": []}))
    assert {one.text: one.mean for one in values.values(least=1)} == {"a": 3.0, "b": 5.0}


def test_merged_sums_are_those_of_all() -> None:
    one, other, both = StepValues(), StepValues(), StepValues()
    for values in (one, both):
        values.add(experience({"x": [1.0], "y": [2.0]}))
    for values in (other, both):
        values.add(experience({"x": [5.0], "z": [0.0]}))
    one.merge(other.sums)
    assert one.values(1) == both.values(1)


def test_lines_show_both_ends_and_no_text_twice() -> None:
    values = StepValues()
    assert values.lines() == ["step values: no text of a step was said 5 times"]
    values.add(experience({name: [float(place)] for place, name in enumerate("abcde")}))
    lines = values.lines(rows=5, least=1)
    assert [line.split()[-1] for line in lines if " x  " in line] == ["e", "d", "c", "a", "b"]
    assert [line.strip() for line in lines if line.endswith(":")] == ["most valued:", "least valued:"]


def test_long_texts_are_cut_to_a_line() -> None:
    text = said(Step(trajectory_id="t", turn=0, index=0, kind="reply", text="word\n" * 50, span=Span(0, 250)))
    assert len(text) == 72
    assert text.endswith("...")


def test_crediting_goes_through_unchanged() -> None:
    made = (experience({"a": [2.0]}),)
    inner: Any = SimpleNamespace(
        streams={"outcome": None},
        heads=("outcome",),
        credit=lambda scored, stats, *, progress, reducer: made,  # noqa: ARG005
        summary=lambda scored, experiences, *, reducer: {"n": float(len(experiences))},  # noqa: ARG005
    )
    values = StepValues()
    crediting = ValuedCrediting(inner, values)
    assert crediting.credit((), (), progress=0.0, reducer=LocalReducer()) is made
    assert crediting.summary((), made, reducer=LocalReducer()) == {"n": 1.0}
    assert values.sums == {"a": (1, 2.0, 4.0)}
