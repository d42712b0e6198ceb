"""Scoring: every leaf step gets a score or a reason, and failures are counted, never scored 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import given, settings

from slea_llm.errors import ConfigError, EvaluatorError
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.scoring import Scorer, summarize
from slea_llm.types import ScoredStep, Step, TokenSpan, TokenTrace, Trajectory, Turn, Verdict, leaf_steps
from tests.strategies import tagged_texts, trajectories

PARSER = TaggedParser(TaggedParser.Config())


def trajectory(*texts: str, tokens: bool = False) -> Trajectory:
    """One turn a text; with tokens each character is a token (its code point) and 0 ends the turn."""
    turns, ids, mask = [], [], []
    for index, text in enumerate(texts):
        ids.append(1)
        mask.append(False)
        span = TokenSpan(0, len(ids), len(ids) + len(text) + 1)
        ids += [*map(ord, text), 0]
        mask += [True] * len(span)
        turns.append(Turn(index=index, context=(), text=text, span=span if tokens else None))
    trace = TokenTrace(token_ids=tuple(ids), sampled_mask=tuple(mask), logprobs=tuple(-0.5 * m for m in mask))
    return Trajectory(
        id="t",
        task={},
        environment="order_taking",
        seed=0,
        policy_version=0,
        turns=tuple(turns),
        traces=(trace,) if tokens else (),
        outcome=None,
        termination="failure",
    )


class Fixed:
    """Gives the leaf steps these scores in turn, or raises what stands in their place."""

    name: ClassVar[str] = "fixed"
    needs: ClassVar[frozenset[str]] = frozenset()
    version = "1"

    def __init__(self, *scores: float | Exception) -> None:
        self.scores = iter(scores)

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:  # noqa: ARG002
        return tuple(self._word(step) for step in leaf_steps(steps))

    def _word(self, step: Step) -> ScoredStep:
        score = next(self.scores)
        if isinstance(score, Exception):
            raise score
        return ScoredStep(turn=step.turn, step=step.index, evaluator="fixed", version="1", score=score)


class Characters:
    """A tokenizer of code points."""

    def decode(self, ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        text = "".join(chr(i) for i in ids if i)
        return text, [min(position, len(text)) for position in range(len(ids))]


def test_br_057_a_scorer_that_raises_is_an_error_with_its_reason_not_a_zero() -> None:
    scorer = Scorer(PARSER, [Fixed(1.0, 0.0, ValueError("no verdict"), 0.5)], max_unscored=0.25)
    scored = [scorer.score(trajectory("reply")) for _ in range(4)]
    assert [s.scores[0].score for s in scored] == [1.0, 0.0, None, 0.5]
    assert scored[2].scores[0].reason == "ValueError: no verdict"
    summary = scorer.check(scored)["fixed"]
    assert summary.mean == 0.5
    assert (summary.steps, summary.unscored) == (4, 1)
    assert summary.reasons == {"ValueError: no verdict": 1}


def test_br_057_too_many_errors_end_the_run() -> None:
    scorer = Scorer(PARSER, [Fixed(1.0, OSError("judge is down"))], max_unscored=0.4)
    scored = [scorer.score(trajectory("a")), scorer.score(trajectory("b"))]
    with pytest.raises(EvaluatorError, match=r"'fixed' left 1 of 2 steps unscored.*0\.5.*OSError: judge is down"):
        scorer.check(scored)


def test_a_failure_leaves_every_leaf_step_of_the_trajectory_with_the_reason() -> None:
    scored = Scorer(PARSER, [Fixed(1.0, KeyError("x"))]).score(trajectory("<think>a</think>b", "c"))
    assert [(word.turn, word.step) for word in scored.scores] == [(0, 0), (0, 1), (1, 0)]
    assert all(word.score is None for word in scored.scores)


def test_a_mistake_in_the_evaluators_code_is_not_taken_for_an_unscored_step() -> None:
    with pytest.raises(TypeError):
        Scorer(PARSER, [Fixed(TypeError("bad call"))]).score(trajectory("a"))


class Partial(Fixed):
    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        return super().score(trajectory, steps)[:1]


class Stray(Fixed):
    def _word(self, step: Step) -> ScoredStep:
        return ScoredStep(turn=step.turn, step=step.index + 7, evaluator="fixed", version="1", score=0.0)


class Double(Fixed):
    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        return super().score(trajectory, steps) * 2


def test_steps_that_an_evaluator_passes_over_are_unscored() -> None:
    scored = Scorer(PARSER, [Partial(1.0, 1.0)]).score(trajectory("<think>a</think>b"))
    assert [word.reason for word in scored.scores] == [None, "the evaluator gave no answer"]


@pytest.mark.parametrize("evaluator", [Stray(), Double(1.0)])
def test_words_about_steps_that_are_not_there_are_an_error(evaluator: Fixed) -> None:
    with pytest.raises(EvaluatorError, match="each leaf step gets one ScoredStep"):
        Scorer(PARSER, [evaluator]).score(trajectory("a"))


def test_names_and_shares_are_checked() -> None:
    with pytest.raises(ConfigError, match="named more than once: fixed"):
        Scorer(PARSER, [Fixed(), Fixed()])
    with pytest.raises(ConfigError, match="max_unscored 2"):
        Scorer(PARSER, [], max_unscored=2)


def test_token_spans_come_from_the_decoder() -> None:
    scored = Scorer(PARSER, [], Characters()).score(trajectory("<think>a</think>b", "c", tokens=True))
    assert [step.tokens for step in scored.steps] == [TokenSpan(0, 1, 17), TokenSpan(0, 17, 19), TokenSpan(0, 20, 22)]


def test_given_starts_come_before_the_decoder() -> None:
    scored = Scorer(PARSER, [], Characters()).score(trajectory("ab", tokens=True), lambda _: [0, 1, 2])
    assert [step.tokens for step in scored.steps] == [TokenSpan(0, 1, 4)]


def test_text_that_the_tokens_do_not_decode_to_is_an_error() -> None:
    class Other(Characters):
        def decode(self, ids: Sequence[int]) -> tuple[str, Sequence[int]]:
            return "other", [0] * len(ids)

    with pytest.raises(EvaluatorError, match="decode to 'other', its text is 'a'"):
        Scorer(PARSER, [], Other()).score(trajectory("a", tokens=True))


def test_without_tokens_steps_have_no_token_spans() -> None:
    scored = Scorer(PARSER, [], Characters()).score(trajectory("a"))
    assert [step.tokens for step in scored.steps] == [None]


def test_an_empty_summary_has_no_mean() -> None:
    assert summarize([]) == {}
    scorer = Scorer(PARSER, [Fixed(ValueError("x"))], max_unscored=1.0)
    summary = scorer.check([scorer.score(trajectory("a"))])["fixed"]
    assert (summary.mean, summary.unscored_share) == (None, 1.0)


@given(dialogue=trajectories(tagged_texts()))
@settings(deadline=None, max_examples=15)
def test_every_leaf_step_gets_exactly_one_word(dialogue: Trajectory) -> None:
    class Zero(Fixed):
        def _word(self, step: Step) -> ScoredStep:
            return ScoredStep(turn=step.turn, step=step.index, evaluator="fixed", version="1", score=0.0)

    scored = Scorer(PARSER, [Zero()]).score(dialogue)
    assert list(scored.scores_of("fixed")) == [(step.turn, step.index) for step in scored.leaves()]
    assert scored.evaluator_versions == {"fixed": "1"}
    for turn in dialogue.turns:
        assert "".join(step.text for step in scored.steps if step.turn == turn.index) == turn.text


class Learnt(Fixed):
    """Counts how it is asked; `broken` names the trajectory on which it fails."""

    def __init__(self, *, is_open: bool, broken: str = "") -> None:
        super().__init__()
        self.gate = Verdict(open=is_open, line="learnt: gate")
        self.broken = broken
        self.asked: list[int] = []

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        self.asked.append(1)
        return self._words(trajectory, steps)

    def score_many(self, pairs: Sequence[tuple[Trajectory, Sequence[Step]]]) -> list[tuple[ScoredStep, ...]]:
        self.asked.append(len(pairs))
        return [self._words(*pair) for pair in pairs]

    def _words(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        if trajectory.id == self.broken:
            raise ValueError("not this one")
        return tuple(
            ScoredStep(turn=step.turn, step=step.index, evaluator=self.name, version="1", score=float(len(step.text)))
            for step in leaf_steps(steps)
        )


def named(*names: str) -> list[Trajectory]:
    return [dataclasses.replace(trajectory("<think>a</think>b", name), id=name) for name in names]


def test_an_evaluator_that_can_is_asked_about_many_at_a_time() -> None:
    learnt = Learnt(is_open=True)
    many = named("a", "bb", "ccc", "dddd", "eeeee")
    scorer = Scorer(PARSER, [learnt])
    together = list(scorer.score_many(many, chunk=2))
    assert learnt.asked == [2, 2, 1]
    assert together == [scorer.score(one) for one in many]


def test_one_trajectory_that_fails_costs_the_others_nothing() -> None:
    scored = list(Scorer(PARSER, [Learnt(is_open=True, broken="bb")]).score_many(named("a", "bb", "ccc")))
    assert [{word.reason for word in one.scores} for one in scored] == [{None}, {"ValueError: not this one"}, {None}]


def test_a_shut_gate_is_written_beside_the_scores() -> None:
    for is_open in (True, False):
        scorer = Scorer(PARSER, [Learnt(is_open=is_open)])
        assert scorer.gates()["fixed"].open is is_open
        scored = scorer.score(trajectory("a"))
        assert scored.shut == (() if is_open else ("fixed",))
        assert scored.scores[0].score == 1.0
