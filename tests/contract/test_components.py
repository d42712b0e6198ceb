"""What every registered parser, evaluator and augmenter must keep. A new row is tested by being there."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm import registry
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredTrajectory, TokenSpan, TokenTrace, Trajectory, Turn
from tests.strategies import tagged_texts
from tests.support.components import build

SLOTS = ("dish", "quantity", "address")
CALL = '<tool_call>{"name": "place_order", "arguments": {}}</tool_call>'
TORCH_FREE = frozenset(
    {
        ("parser", "tagged"),
        ("parser", "markers"),
        ("parser", "react"),
        ("parser", "reply"),
        ("parser", "auto"),
        ("parser", "llm"),
        ("evaluator", "knowledge_base"),
        ("evaluator", "rules"),
        ("evaluator", "tool_use"),
        ("evaluator", "llm_judge"),
        ("augmenter", "slot_progress"),
        ("user", "scripted"),
        ("user", "llm"),
        ("referee", "rules"),
        ("augmenter", "success_backprop"),
        ("augmenter", "repeat_penalty"),
    }
)

PARSERS = sorted(registry.names("parser"))
EVALUATORS = sorted(registry.names("evaluator"))
ROWS = [(kind, name) for kind in ("parser", "evaluator", "augmenter") for name in sorted(registry.names(kind))]


@cache
def parser_of(name: str) -> Any:
    """A parser has no state: one for all examples."""
    return build("parser", name)


def state(filled: int, confirmed: int) -> dict[str, Any]:
    return {
        "language": "en",
        "required": list(SLOTS),
        "filled": dict.fromkeys(SLOTS[:filled], "x"),
        "confirmed": list(SLOTS[:confirmed]),
        "missing": list(SLOTS[filled:]),
        "unconfirmed": list(SLOTS[confirmed:filled]),
        "asked": {slot: 1 for slot in SLOTS[:filled]},
        "placed": False,
    }


def sample(**changes: Any) -> Trajectory:
    """A whole order of four turns, one token a character, the end-of-turn token included."""
    texts = [
        "<think>Need dish.</think>What dish would you like?",
        "<think>Need address and quantity.\nAsk.</think>\nHow many, and where?",
        "<think>Read back the order.</think>{order}. Is that right?",
        f"<think>All confirmed, place it.</think>{CALL}",
    ]
    progress = [(0, 0), (1, 0), (3, 0), (3, 3), (3, 3)]
    turns, mask = [], []
    for index, text in enumerate(texts):
        mask += [False] * 2
        span = TokenSpan(0, len(mask), len(mask) + len(text) + 1)
        mask += [True] * len(span)
        before, after = progress[index : index + 2]
        turns.append(
            Turn(index=index, context=(), text=text, span=span, state_before=state(*before), state_after=state(*after))
        )
    trace = TokenTrace(token_ids=(1,) * len(mask), sampled_mask=tuple(mask), logprobs=(-1.0,) * len(mask))
    values: dict[str, Any] = {
        "id": "sample",
        "task": {},
        "environment": "order_taking",
        "seed": 0,
        "policy_version": 0,
        "turns": tuple(turns),
        "traces": (trace,),
        "outcome": 10.0,
        "termination": "success",
    }
    return Trajectory(**{**values, **changes})


def scored_by(name: str, trajectory: Trajectory) -> ScoredTrajectory:
    scorer = Scorer(build("parser", "tagged"), [build("evaluator", name)])
    return scorer.score(trajectory, lambda turn: range(len(turn.text) + 1) if turn.span else None)


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_component_has_the_name_of_its_row_and_a_frozen_config(kind: str, name: str) -> None:
    component = registry.load(kind, name)
    assert component.name == name
    assert component.__doc__
    assert dataclasses.is_dataclass(component.Config)
    assert vars(component.Config)["__dataclass_params__"].frozen
    if kind != "parser":
        assert isinstance(component.needs, frozenset)


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_component_is_built_from_its_defaults(kind: str, name: str) -> None:
    assert build(kind, name) is not None


def test_torch_free_components_are_loaded_without_torch() -> None:
    code = (
        "import sys\nfrom slea_llm import registry\n"
        f"for kind, name in {sorted(TORCH_FREE)!r}:\n"
        "    component = registry.load(kind, name)\n    component(component.Config())\n"
        "heavy = {'torch', 'numpy', 'transformers', 'vllm'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


@pytest.mark.parametrize("name", PARSERS)
@given(text=tagged_texts(), reason=st.sampled_from(["stop", "length", "abort"]), data=st.data())
@settings(deadline=None, max_examples=50)
def test_leaf_steps_tile_the_text_and_the_tokens(name: str, text: str, reason: Any, data: st.DataObject) -> None:
    parser = parser_of(name)
    starts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    turn = Turn(index=3, context=(), text=text, span=TokenSpan(1, 4, 4 + len(starts)), finish_reason=reason)
    trace = TokenTrace(token_ids=(), sampled_mask=(), logprobs=())
    steps = parser.parse(turn, "t", starts)
    scored = ScoredTrajectory(trajectory=sample(turns=(), traces=(trace,)), steps=steps, scores=(), parser=name)
    leaves = scored.leaves()
    assert [step.index for step in steps] == list(range(len(steps)))
    assert {(step.trajectory_id, step.turn) for step in steps} == {("t", 3)}
    assert all(step.text == text[step.span.start : step.span.end] for step in steps)
    assert "".join(step.text for step in leaves) == text
    tokens = [step.tokens for step in leaves if step.tokens is not None]
    assert len(tokens) == len(leaves)
    assert [span.start for span in tokens] == [4, *(span.end for span in tokens[:-1])]
    assert tokens[-1].end == 4 + len(starts)
    assert parser.parse(turn, "t", starts) == steps
    without = parser.parse(dataclasses.replace(turn, span=None), "t", None)
    assert without == tuple(dataclasses.replace(step, tokens=None) for step in steps)


@pytest.mark.parametrize("name", EVALUATORS)
def test_every_leaf_step_gets_a_score_or_a_reason_and_again_the_same(name: str) -> None:
    evaluator = build("evaluator", name)
    scored = scored_by(name, sample())
    words = evaluator.score(scored.trajectory, scored.steps)
    assert [(word.turn, word.step) for word in words] == [(leaf.turn, leaf.index) for leaf in scored.leaves()]
    assert {(word.evaluator, word.version) for word in words} == {(name, evaluator.version)}
    assert words == evaluator.score(scored.trajectory, scored.steps)
    assert evaluator.version == build("evaluator", name).version


@pytest.mark.parametrize("name", EVALUATORS)
def test_an_evaluator_bears_a_dialogue_without_turns_and_states_that_it_does_not_know(name: str) -> None:
    evaluator = build("evaluator", name)
    assert evaluator.score(sample(turns=(), traces=()), ()) == ()
    bare = sample(turns=(Turn(index=0, context=(), text="hi"),), traces=())
    (word,) = scored_by(name, bare).scores
    assert (word.score is None) != (word.reason is None)
