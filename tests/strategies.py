"""Hypothesis strategies for the records that cross rooms. A new record type joins here."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from slea_llm.types import (
    ROLES,
    STEP_KINDS,
    TERMINATIONS,
    Message,
    ScoredStep,
    ScoredTrajectory,
    Span,
    Step,
    TokenSpan,
    TokenTrace,
    ToolCall,
    Trajectory,
    Turn,
)

TAGS = (
    "<think>",
    "</think>",
    "<Thinking>",
    "</thinking>",
    "<tool_call>",
    "</tool_call>",
    "<reflection>",
    "</thi",
    "< ",
)
PROSE = ("Need address. ", "v1.2.3 ", "你好。", '{"name": "place_order"}', "\n", "  ", "a", "`x. y`", "\U0001f680")


def texts(max_size: int = 20) -> st.SearchStrategy[str]:
    """Any Unicode that UTF-8 can hold."""
    return st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=max_size)


def tagged_texts() -> st.SearchStrategy[str]:
    """Replies with tags in every order, whole and broken, between prose and random Unicode."""
    return st.lists(st.sampled_from(TAGS + PROSE) | texts(6), max_size=12).map("".join)


def json_values() -> st.SearchStrategy[Any]:
    """Values that strict JSON holds."""
    leaves = st.none() | st.booleans() | st.integers() | numbers() | texts(8)
    flat = leaves | st.lists(leaves, max_size=2) | st.dictionaries(texts(4), leaves, max_size=2)
    return flat | st.dictionaries(texts(4), flat, max_size=2)


def json_objects() -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(texts(6), json_values(), max_size=2)


def numbers() -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, allow_infinity=False)


def tool_calls() -> st.SearchStrategy[tuple[ToolCall, ...]]:
    calls = st.builds(ToolCall, id=texts(4), name=texts(4), arguments=texts(8))
    return st.lists(calls, max_size=2).map(tuple)


def messages() -> st.SearchStrategy[Message]:
    return st.builds(
        Message,
        role=st.sampled_from(ROLES),
        content=texts(),
        tool_calls=tool_calls(),
        tool_call_id=st.none() | texts(4),
        name=st.none() | texts(4),
    )


@st.composite
def token_rows(draw: st.DrawFn, turns: int) -> tuple[tuple[TokenTrace, ...], tuple[TokenSpan | None, ...]]:
    """Rows of tokens and one span a turn: no tokens at all, one row for the dialogue, or one row a turn."""
    form = draw(st.sampled_from(["none", "kept", "rebuilt"]))
    if form == "none" or turns == 0:
        return (), (None,) * turns
    masks: list[list[bool]] = [[]] if form == "kept" else []
    spans: list[TokenSpan | None] = []
    for _ in range(turns):
        if form == "rebuilt":
            masks.append([])
        row = masks[-1]
        row += [False] * draw(st.integers(0, 3))
        start = len(row)
        row += [True] * draw(st.integers(0, 4))
        spans.append(TokenSpan(len(masks) - 1, start, len(row)))
    logprobs = st.floats(min_value=-50, max_value=0)
    traces = tuple(
        TokenTrace(
            token_ids=tuple(draw(st.lists(st.integers(0, 200_000), min_size=len(mask), max_size=len(mask)))),
            sampled_mask=tuple(mask),
            logprobs=tuple(draw(logprobs) if sampled else 0.0 for sampled in mask),
        )
        for mask in masks
    )
    return traces, tuple(spans)


@st.composite
def trajectories(draw: st.DrawFn, text: st.SearchStrategy[str] | None = None) -> Trajectory:
    """`text` draws the replies; any Unicode by default."""
    count = draw(st.integers(0, 3))
    traces, spans = draw(token_rows(count))
    turns = tuple(
        Turn(
            index=index,
            context=tuple(draw(st.lists(messages(), max_size=2))),
            text=draw(texts() if text is None else text),
            span=spans[index],
            finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
            reward=draw(numbers()),
            state_before=draw(json_objects()),
            state_after=draw(json_objects()),
            tool_calls=draw(tool_calls()),
        )
        for index in range(count)
    )
    termination = draw(st.sampled_from(TERMINATIONS))
    failed = termination == "error"
    return Trajectory(
        id=draw(texts(8)),
        task=draw(json_objects()),
        environment=draw(texts(8)),
        seed=draw(st.integers(0, 2**63)),
        policy_version=draw(st.integers(0, 1000)),
        turns=turns,
        traces=traces,
        outcome=None if failed else draw(st.none() | numbers()),
        termination=termination,  # type: ignore[arg-type]
        error=draw(texts(8)) if failed else None,
        provenance=draw(json_objects()),
        closing=tuple(draw(st.lists(messages(), max_size=2))),
    )


@st.composite
def scored_steps(draw: st.DrawFn, step: Step, evaluator: str = "rules") -> ScoredStep:
    score = draw(st.none() | numbers())
    return ScoredStep(
        turn=step.turn,
        step=step.index,
        evaluator=evaluator,
        version=draw(texts(4)),
        score=score,
        reason=draw(texts(6)) if score is None else None,
        parts=draw(st.dictionaries(texts(4), numbers(), max_size=2)),
        rationale=draw(texts(8)),
    )


@st.composite
def steps_of(draw: st.DrawFn, trajectory_id: str, turn: Turn) -> tuple[Step, ...]:
    """Steps that tile the text of a turn and its tokens."""
    cuts = sorted(draw(st.sets(st.integers(0, len(turn.text)), max_size=3)) | {0, len(turn.text)})
    pairs = list(pairwise(cuts)) or [(0, 0)]
    tokens: list[TokenSpan | None] = [None] * len(pairs)
    if turn.span is not None:
        inner = draw(
            st.lists(st.integers(turn.span.start, turn.span.end), min_size=len(pairs) - 1, max_size=len(pairs) - 1)
        )
        borders = [turn.span.start, *sorted(inner), turn.span.end]
        tokens = [TokenSpan(turn.span.row, a, b) for a, b in pairwise(borders)]
    return tuple(
        Step(
            trajectory_id=trajectory_id,
            turn=turn.index,
            index=index,
            kind=draw(st.sampled_from(STEP_KINDS)),
            text=turn.text[start:end],
            span=Span(start, end),
            tokens=tokens[index],
            label=draw(st.none() | texts(4)),
        )
        for index, (start, end) in enumerate(pairs)
    )


@st.composite
def scored_trajectories(draw: st.DrawFn) -> ScoredTrajectory:
    trajectory = draw(trajectories())
    steps = tuple(step for turn in trajectory.turns for step in draw(steps_of(trajectory.id, turn)))
    return ScoredTrajectory(
        trajectory=trajectory,
        steps=steps,
        scores=tuple(draw(scored_steps(step)) for step in steps),
        parser=draw(texts(4)),
        evaluator_versions=draw(st.dictionaries(texts(4), texts(4), max_size=2)),
        shut=tuple(draw(st.lists(texts(4), max_size=2))),
    )
