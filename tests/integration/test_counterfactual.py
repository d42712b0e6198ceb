"""Continuations and what is made of them, on a dialogue whose values are known."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slea_llm.continuations import BranchingPlay, ScriptPlayer
from slea_llm.errors import CheckpointError, ConfigError, EpisodeError, EvaluatorError
from slea_llm.evaluators.counterfactual import Counterfactual
from slea_llm.evaluators.monte_carlo import monte_carlo_labels
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.storage import read_scored, write_scored
from slea_llm.types import Continued, ReplyPrefix, ScoredStep, ScoredTrajectory, Task, Trajectory
from tests.support.dialogue_mdp import FactsAgent, FactsEnvironment, FactsUser, exact, value

pytestmark = pytest.mark.integration

ENVIRONMENT, USER = FactsEnvironment(), FactsUser()
SCORER = Scorer(TaggedParser(TaggedParser.Config()), [])


def recorded(seed: int) -> ScoredTrajectory:
    task = ENVIRONMENT.task(seed)
    return SCORER.score(play(ENVIRONMENT, USER, ENVIRONMENT.expert(task), task, seed=seed, max_turns=12))


def branching(make: Any = FactsAgent) -> BranchingPlay:
    return BranchingPlay(ENVIRONMENT, USER, ScriptPlayer(make), max_turns=12)


def evaluator(pairs: int = 64, budget: float = 1.0, continuations: Any = None) -> Counterfactual:
    config = Counterfactual.Config(pairs=pairs, budget=budget)
    return Counterfactual(config, continuations=continuations or branching())


def known_values(scored: ScoredTrajectory) -> dict[tuple[int, int], tuple[float, float]]:
    """(turn, step) -> P(success) before and after it."""
    found = {}
    for turn in scored.trajectory.turns:
        before, thought, reply = exact(turn.index, len(turn.state_before["known"]), turn.text)
        found[turn.index, 0], found[turn.index, 1] = (before, thought), (thought, reply)
    return found


def said(evaluator: Counterfactual, scored: ScoredTrajectory) -> dict[tuple[int, int], ScoredStep]:
    return {(word.turn, word.step): word for word in evaluator.score(scored.trajectory, scored.steps)}


def test_the_values_of_the_toy_are_those_of_its_dialogues() -> None:
    """The exact value against dialogues that no code under test continued."""
    n = 1000
    tasks = [ENVIRONMENT.task(seed) for seed in range(n)]
    share = (
        sum(play(ENVIRONMENT, USER, ENVIRONMENT.expert(one), one, seed=one.seed, max_turns=12).success for one in tasks)
        / n
    )
    assert share == pytest.approx(value(0, 0), abs=4 * math.sqrt(0.25 / n))
    assert 0.2 < value(0, 0) < 0.8


def test_scores_agree_with_the_exact_advantages_within_their_standard_error() -> None:
    judge, errors, exactly = evaluator(pairs=48), [], 0
    for seed in range(14):
        scored = recorded(seed)
        truth = known_values(scored)
        for place, word in said(judge, scored).items():
            assert word.score is not None
            before, after = truth[place]
            if word.parts["se"] == 0.0:
                exactly += 1
                # All pairs agreed: by the rule of three the difference is below 3 / 48 with 95 %, below 7 / 48 surely.
                assert abs(word.score - (after - before)) < 7 / 48
            else:
                errors.append((word.score - (after - before)) / word.parts["se"])
            assert word.parts["after"] - word.parts["before"] == pytest.approx(word.score)
    assert len(errors) > 60
    assert exactly < len(errors)
    assert abs(sum(errors) / len(errors)) < 0.5
    assert 0.6 < sum(error**2 for error in errors) / len(errors) < 1.6
    assert sum(abs(error) < 2 for error in errors) / len(errors) > 0.9


def test_more_pairs_come_closer() -> None:
    def distance(pairs: int) -> float:
        judge, total, count = evaluator(pairs=pairs), 0.0, 0
        for seed in range(4):
            scored = recorded(seed)
            truth = known_values(scored)
            for place, word in said(judge, scored).items():
                assert word.score is not None
                total += (word.score - truth[place][1] + truth[place][0]) ** 2
                count += 1
        return math.sqrt(total / count)

    assert distance(64) < 0.5 * distance(4)


def test_monte_carlo_labels_agree_with_exact_values() -> None:
    """Soft labels within their standard error of the exact value, hard ones as often as 1 - (1 - p)^n says."""
    n, squares, hard, expected = 32, [], 0, 0.0
    for seed in range(16):
        scored = recorded(seed)
        labels = monte_carlo_labels(scored.trajectory, scored.steps, branching(), n=n, seed=3)
        assert list(labels) == [(step.turn, step.index) for step in scored.leaves()]
        for place, label in labels.items():
            p = known_values(scored)[place][1]
            hard, expected = hard + label.hard, expected + 1 - (1 - p) ** n
            if p in (0.0, 1.0):
                assert (label.soft, label.se) == (p, 0.0)
            else:
                squares.append((label.soft - p) ** 2 / (p * (1 - p) / n))
                assert abs(label.soft - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert 0.7 < sum(squares) / len(squares) < 1.4
    assert abs(hard - expected) < 6


def test_the_baseline_is_the_mean_of_the_policy_not_a_worse_step() -> None:
    """Scores of what the policy does by chance have mean 0: the judged step gains nothing by being there."""
    judge, scores = evaluator(pairs=32), []
    for seed in range(40):
        first = said(judge, recorded(1000 + seed))[0, 0].score
        assert first is not None
        scores.append(first)
    assert abs(sum(scores) / len(scores)) < 0.06
    assert max(scores) > 0.0 > min(scores)


def test_equal_seeds_give_equal_continuations() -> None:
    scored = recorded(5)
    assert said(evaluator(), scored) == said(evaluator(), scored)
    other = Counterfactual(Counterfactual.Config(pairs=64, budget=1.0, seed=1), continuations=branching())
    assert said(evaluator(), scored) != said(other, scored)


def test_after_the_whole_dialogue_all_continuations_end_as_it_did() -> None:
    for seed in range(6):
        scored = recorded(seed)
        last = scored.trajectory.turns[-1]
        (ends,) = branching().branch(
            scored.trajectory, [ReplyPrefix(turn=last.index, characters=len(last.text))], range(5)
        )
        assert ends.successes == (scored.trajectory.success,) * 5


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.37])
def test_the_budget_is_never_exceeded_and_nearly_used(budget: float) -> None:
    judge, steps, scored_steps = evaluator(pairs=2, budget=budget), 0, 0
    for seed in range(60):
        words = said(judge, recorded(seed)).values()
        steps += len(words)
        scored_steps += sum(word.score is not None for word in words)
        assert scored_steps <= budget * steps
        assert all(word.reason == f"not tried: the budget is {budget:g} of all steps" for word in words if word.reason)
    assert scored_steps > budget * steps - 1


def test_a_dialogue_that_broke_has_no_counterfactual() -> None:
    scored = recorded(0)
    broken = dataclasses.replace(scored.trajectory, termination="error", error="KeyError: x", outcome=None)
    words = evaluator().score(broken, scored.steps)
    assert {(word.score, word.reason) for word in words} == {(None, "the dialogue broke: KeyError: x")}


def changed(trajectory: Trajectory, **changes: Any) -> Trajectory:
    turns = (dataclasses.replace(trajectory.turns[0], **changes), *trajectory.turns[1:])
    return dataclasses.replace(trajectory, turns=turns)


def lengthy() -> ScoredTrajectory:
    return next(scored for seed in range(50) if len((scored := recorded(seed)).trajectory.turns) >= 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: dataclasses.replace(t, provenance={}), "says no seed of its user"),
        (lambda t: dataclasses.replace(t, task={"id": "x"}), r"a task with the keys \['id'\]"),
        (lambda t: changed(t, state_before={"known": ["size"]}), "differs before turn 0"),
        (lambda t: changed(t, context=t.turns[0].context[1:]), "differs before turn 0"),
        (lambda t: changed(t, text="<think>I know enough.</think>Here is what you need."), "ended after 1 replies"),
    ],
)
def test_what_cannot_be_restored_is_unscored_with_the_reason(change: Any, reason: str) -> None:
    scored = lengthy()
    trajectory = change(scored.trajectory)
    with pytest.raises(EpisodeError, match=reason):
        branching().branch(trajectory, [ReplyPrefix(turn=2, characters=0)], [1])
    words = evaluator().score(trajectory, scored.steps)
    assert all(word.score is None and word.reason for word in words)


class Breaking(FactsAgent):
    """Fails in every fourth of its lives."""

    def act(self, state: Any, messages: Sequence[Any]) -> str:
        if self.seed % 4 == 0:
            raise ConnectionError("the model is gone")
        return super().act(state, messages)


def test_one_broken_continuation_leaves_its_step_without_a_score() -> None:
    scored = recorded(1)
    words = list(evaluator(pairs=32, continuations=branching(Breaking)).score(scored.trajectory, scored.steps))
    assert words[0].score is None
    assert "of 32 continuations broke: ConnectionError: the model is gone" in str(words[0].reason)
    with pytest.raises(EvaluatorError, match="the model is gone"):
        monte_carlo_labels(scored.trajectory, scored.steps, branching(Breaking), n=32, seed=0)


def test_an_agent_that_never_begins_so_cannot_go_on() -> None:
    class Other(FactsAgent):
        def act(self, state: Any, messages: Sequence[Any]) -> str:
            del state, messages
            return "<think>Something else.</think>Well."

    scored = recorded(1)
    first = scored.leaves()[0]
    (ends,) = branching(Other).branch(scored.trajectory, [ReplyPrefix(turn=0, characters=first.span.end)], [1, 2])
    assert "never began its reply with '<think>I should ask.</think>'" in str(ends.reason)


def test_settings_are_checked() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [({"pairs": 1}, "pairs 1"), ({"budget": 0.0}, "budget 0")]
    for settings, text in [*wrong, ({"budget": 1.1}, r"budget 1\.1")]:
        with pytest.raises(ConfigError, match=text):
            Counterfactual.Config(**settings)
    with pytest.raises(EpisodeError, match="nothing to play: 0 prefixes"):
        branching().branch(recorded(0).trajectory, [], [1])
    with pytest.raises(ValueError, match="either how the continuations ended or the reason"):
        Continued()


def test_no_steps_no_words() -> None:
    empty = dataclasses.replace(recorded(0).trajectory, turns=())
    assert evaluator().score(empty, ()) == ()
    assert monte_carlo_labels(empty, (), branching(), n=2, seed=0) == {}


def test_a_user_that_does_not_answer_the_same_way_twice_is_refused() -> None:
    class Fickle(FactsUser):
        def __init__(self) -> None:
            self.started = 0

        def start(self, task: Task, seed: int) -> Any:
            self.started += 1
            return super().start(task, seed + self.started)

    user, task = Fickle(), ENVIRONMENT.task(1)
    found = [play(ENVIRONMENT, user, FactsAgent(task, seed), task, seed=seed, max_turns=12) for seed in range(12)]
    branches = BranchingPlay(ENVIRONMENT, user, ScriptPlayer(FactsAgent), max_turns=12)
    refused = 0
    for trajectory in found:
        try:
            branches.branch(trajectory, [ReplyPrefix(turn=len(trajectory.turns) - 1, characters=0)], [1])
        except EpisodeError:
            refused += 1
    assert refused > 0


def test_a_dialogue_read_from_a_log_is_restored_as_the_one_that_was_played(tmp_path: Path) -> None:
    played = [recorded(seed) for seed in range(4)]
    write_scored(tmp_path / "log.jsonl", played)
    for one, other in zip(played, read_scored(tmp_path / "log.jsonl"), strict=True):
        assert said(evaluator(pairs=4), one) == said(evaluator(pairs=4), other)


def test_a_resumed_run_tries_the_steps_that_one_without_a_stop_tries() -> None:
    def scorer() -> Scorer:
        return Scorer(TaggedParser(TaggedParser.Config()), [evaluator(pairs=2, budget=0.15)])

    played = [recorded(seed).trajectory for seed in range(12)]
    whole = scorer()
    wanted = [whole.score(one).scores for one in played]
    first, second = scorer(), scorer()
    found = [first.score(one).scores for one in played[:7]]
    second.restore(json.loads(json.dumps(first.state())))
    assert [*found, *(second.score(one).scores for one in played[7:])] == wanted
    with pytest.raises(CheckpointError, match="holds nothing of evaluator 'counterfactual'"):
        scorer().restore({})
