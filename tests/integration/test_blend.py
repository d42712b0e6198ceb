"""A weighted mean of evaluators, and what becomes of a step that one of them could not score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slea_llm.cli import compose
from slea_llm.config import parse_recipe
from slea_llm.errors import ConfigError, StorageError, UnsupportedError
from slea_llm.evaluators.blend import Blend, Part
from slea_llm.interfaces import LocalReducer
from slea_llm.metrics_log import asking_metrics
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.planning import check
from slea_llm.questions import Usage
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredStep, Step, Trajectory, Verdict
from tests.support.components import build, continuations, fitted_folder, orders

pytestmark = pytest.mark.integration


class Says:
    """Scores step i with the i-th number; None leaves it unscored."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, name: str, *scores: float | None, version: str = "1") -> None:
        self.name, self._scores, self.version = name, scores, version

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        del trajectory
        return tuple(
            ScoredStep(
                turn=step.turn,
                step=step.index,
                evaluator=self.name,
                version=self.version,
                score=score,
                reason="no idea" if score is None else None,
                rationale="" if score is None else "so it seems",
            )
            for step, score in zip(steps, self._scores, strict=False)
        )


def blend(*parts: tuple[Says, float], missing: Any = "unscored") -> Blend:
    by_name: dict[str, Any] = {one.name: one for one, _ in parts}
    config = Blend.Config(
        evaluators=tuple(Part(name=one.name, weight=weight) for one, weight in parts), missing=missing
    )
    return Blend(config, build_evaluator=lambda name, _: by_name[name])


def words(one: Blend, count: int = 2) -> tuple[ScoredStep, ...]:
    scored = orders()[0]
    return one.score(scored.trajectory, scored.steps[:count])


def test_the_score_is_the_weighted_mean_and_says_what_each_part_said() -> None:
    first, second = words(blend((Says("a", 0.2, -1.0), 1.0), (Says("b", 0.6, 1.0), 3.0)))
    assert first.score == pytest.approx((0.2 + 3 * 0.6) / 4)
    assert second.score == pytest.approx(0.5)
    assert first.parts == {"a": 0.2, "b": 0.6}
    assert first.rationale == "a +0.20: so it seems; b +0.60: so it seems"


def test_a_step_that_a_part_left_out_is_unscored_with_its_reason() -> None:
    first, second = words(blend((Says("a", None, 0.5), 1.0), (Says("b", 1.0), 1.0)))
    assert (first.score, first.reason) == (None, "a: no idea")
    assert (second.score, second.reason) == (None, "b: gave no answer")


def test_or_is_scored_by_the_others_and_says_who_is_missing() -> None:
    mixed = blend((Says("a", None, None), 1.0), (Says("b", 1.0, None), 1.0), missing="renormalise")
    first, second = words(mixed)
    assert first.score == 1.0
    assert first.rationale == "b +1.00: so it seems; without a"
    assert first.parts == {"b": 1.0}
    assert (second.score, second.reason) == (None, "a: no idea; b: no idea")


@given(
    scores=st.lists(st.tuples(st.floats(-1, 1), st.floats(0.01, 10)), min_size=2, max_size=5), factor=st.floats(0.1, 10)
)
def test_it_lies_between_its_parts_and_only_the_ratio_of_weights_counts(
    scores: list[tuple[float, float]], factor: float
) -> None:
    def mixed(scale: float) -> float:
        parts = [(Says(f"p{place}", score), weight * scale) for place, (score, weight) in enumerate(scores)]
        (word,) = words(blend(*parts), count=1)
        assert word.score is not None
        return word.score

    values = [score for score, _ in scores]
    assert min(values) - 1e-9 <= mixed(1.0) <= max(values) + 1e-9
    assert mixed(factor) == pytest.approx(mixed(1.0), abs=1e-9)


def test_the_version_follows_the_parts_and_the_weights() -> None:
    one = blend((Says("a", 0.0), 1.0), (Says("b", 0.0), 1.0)).version
    assert one == blend((Says("a", 0.0), 1.0), (Says("b", 0.0), 1.0)).version
    assert one != blend((Says("a", 0.0), 2.0), (Says("b", 0.0), 1.0)).version
    assert one != blend((Says("a", 0.0), 1.0), (Says("b", 0.0, version="2"), 1.0)).version
    assert one != blend((Says("a", 0.0), 1.0), (Says("b", 0.0), 1.0), missing="renormalise").version


def test_several_dialogues_at_once_are_the_same_as_one_by_one() -> None:
    evaluator = build("evaluator", "blend")
    pairs = [(one.trajectory, one.steps) for one in orders()[:6]]
    assert evaluator.score_many(pairs) == [evaluator.score(*pair) for pair in pairs]

    class Batched(Says):
        def score_many(self, trajectories: Sequence[Any]) -> list[tuple[ScoredStep, ...]]:
            asked.append(len(trajectories))
            return [self.score(*pair) for pair in trajectories]

    asked: list[int] = []
    mixed = blend((Batched("a", 0.5, 0.5), 1.0), (Says("b", 0.5, 0.5), 1.0))
    mixed.score_many([(trajectory, steps[:2]) for trajectory, steps in pairs])
    assert asked == [6]


def test_a_part_whose_gate_is_shut_shuts_the_gate_of_the_blend() -> None:
    class Learnt(Says):
        gate = Verdict(open=True, line="a: gate open")

    open_ = blend((Learnt("a", 0.5), 1.0), (Says("b", 0.5), 1.0))
    assert open_.gate == Verdict(open=True, line="blend: gate open, 1 of 2 parts are learnt")
    shut = build("evaluator", "blend", evaluators=[{"name": "knowledge_base"}, {"name": "hindsight"}])
    assert not shut.gate.open
    assert "blend: gate shut, weight 0: hindsight: gate shut, weight 0: " in shut.gate.line


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([Part(name="a")], "a blend of 1 evaluator"),
        ([Part(name="a"), Part(name="a")], "names a twice"),
        ([Part(name="a"), Part(name="blend")], "cannot be a part of a blend"),
        ([Part(name="a"), Part(name="b", weight=0.0)], r"weight 0\.0 of 'b'"),
        ([Part(name="a"), Part(name="b", weight=float("nan"))], "weight nan of 'b'"),
    ],
)
def test_what_is_no_blend_is_refused(parts: list[Part], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Blend.Config(evaluators=tuple(parts))


# --- how a recipe gets there -------------------------------------------------------------------------------------


def recipe(*evaluators: Mapping[str, Any]) -> Any:
    document = {"model": {"base": "x"}, "environment": {"name": "order_taking"}, "evaluators": list(evaluators)}
    if evaluators:
        names = [evaluator["name"] for evaluator in evaluators]
        document["streams"] = {"outcome": {"sources": ["outcome"]}, "steps": {"sources": names, "gamma_turn": 0.0}}
    return parse_recipe(document)


def mixed(**part: Any) -> dict[str, Any]:
    return {"name": "blend", "evaluators": [{"name": "knowledge_base"}, part], "missing": "renormalise"}


def test_a_recipe_blends_evaluators_with_needs_of_their_own() -> None:
    wanted = recipe(mixed(name="counterfactual", weight=2.0, options={"pairs": 4, "budget": 0.5}))
    check(wanted)
    scorer: Scorer = compose.scorer(wanted, available={"continuations": continuations()})
    scored = scorer.score(orders()[1].trajectory)
    parts = [set(word.parts) for word in scored.scores]
    remembered = scorer.state()
    assert remembered == {"blend": {"counterfactual": {"seen": len(parts), "scored": len(parts) // 2}}}
    scorer.restore(remembered)
    assert {"knowledge_base", "counterfactual"} in parts
    assert {"knowledge_base"} in parts


def test_an_evaluator_without_its_needs_is_refused() -> None:
    """Offline scoring has no environment to play on in; a part of a blend is no way around that."""
    for wanted in (recipe({"name": "counterfactual"}), recipe(mixed(name="counterfactual"))):
        with pytest.raises(UnsupportedError, match="evaluator 'counterfactual' needs continuations"):
            compose.scorer(wanted)


def test_the_plan_refuses_what_a_training_run_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    from slea_llm.evaluators.counterfactual import Counterfactual

    check(recipe({"name": "counterfactual"}))
    monkeypatch.setattr(Counterfactual, "needs", frozenset({"continuations", "oracle"}))
    for wanted in (recipe({"name": "counterfactual"}), recipe(mixed(name="counterfactual"))):
        with pytest.raises(UnsupportedError, match="needs oracle, which a training run does not give"):
            check(wanted)


@pytest.mark.parametrize("name", ["return_decomposition", "hindsight", "counterfactual_prediction"])
def test_the_plan_refuses_a_learnt_evaluator_without_weights(name: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluator '{name}' has no model"):
        check(recipe({"name": name}))
    for wanted in (recipe({"name": name, "model": "nowhere"}), recipe(mixed(name=name, options={"model": "nowhere"}))):
        with pytest.raises(StorageError, match=f"nowhere holds no fitted {name}"):
            check(wanted)
    check(recipe({"name": name, "model": fitted_folder(name)}))


def test_the_blend_of_the_contract_is_built_from_fitted_parts() -> None:
    scored = orders()[0]
    found = build("evaluator", "blend").score(scored.trajectory, scored.steps)
    assert all(word.score is not None and set(word.parts) == {"knowledge_base", "hindsight"} for word in found)


class Asks(Says):
    """Scores, and counts a question for each step."""

    usage = Usage()

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        self.usage = self.usage.plus(questions=len(steps), requests=len(steps), prompt_tokens=9, cost=0.5)
        return super().score(trajectory, steps)


def test_what_chat_models_cost_is_told_by_component_also_inside_a_blend() -> None:
    judge = Asks("judge", *[0.1] * 99)
    scorer = Scorer(TaggedParser(TaggedParser.Config()), [blend((judge, 1.0), (Says("b", *[0.3] * 99), 1.0))])
    before = scorer.usages()
    assert before == {"blend/judge": Usage()}
    list(scorer.score_many([orders()[0].trajectory]))
    steps = len(orders()[0].steps)
    now = scorer.usages()["blend/judge"]
    assert now == Usage(questions=steps, requests=steps, prompt_tokens=9, cost=0.5)
    list(scorer.score_many([orders()[0].trajectory]))
    assert scorer.usages()["blend/judge"].since(now) == now


class TwoRanks(LocalReducer):
    """As if another rank had the same numbers."""

    def sum(self, values: Sequence[float]) -> list[float]:
        return [2.0 * value for value in values]


def test_costs_are_summed_over_ranks() -> None:
    found = asking_metrics({"judge": Usage(requests=3, cost=0.25)}, reducer=TwoRanks())
    assert {name: value for name, value in found.items() if value} == {
        "asking/judge/requests": 6.0,
        "asking/judge/cost": 0.5,
    }
    assert asking_metrics({}, reducer=TwoRanks()) == {}
