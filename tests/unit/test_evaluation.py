"""The panel and its report, on dialogues made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slea_llm.errors import ConfigError, EpisodeError
from slea_llm.evaluation import evaluate, panel, record, report
from slea_llm.interfaces import Environment
from slea_llm.settings import EvaluationSettings
from slea_llm.types import Task, Termination, Trajectory
from tests.support.experience import dialogue


def played(termination: Termination, turns: int, reward: float = 0.0) -> Trajectory:
    rewards = [0.0] * (turns - 1) + [reward]
    return dialogue([[("reply", 1)]] * turns, termination=termination, rewards=rewards).trajectory


def tasks(count: int) -> list[Task]:
    return [Task(id=f"task-{number}", seed=number, goal={}) for number in range(count)]


DIALOGUES = [
    played("success", 5, 10.0),
    played("max_turns", 20),
    played("success", 7, 10.0),
    played("success", 6, 10.0),
    played("error", 2),
]


def test_report_counts_errors_and_leaves_them_out() -> None:
    got = evaluate(lambda given: DIALOGUES[: len(given)], tasks(5))
    assert (got.n, got.successes, got.errors) == (4, 3, 1)
    assert got.success_rate == 0.75
    assert (got.mean_turns_success, got.mean_turns) == (6.0, 9.5)
    assert got.mean_return == 7.5
    assert got.terminations == {"success": 3, "max_turns": 1, "error": 1}
    assert got.interval[0] < 0.75 < got.interval[1]


def test_report_as_text_and_as_json() -> None:
    got = report(DIALOGUES)
    assert got.line() == (
        "success 3/4 = 75.0 % (95 % 30.1 to 95.4), turns 6.00 of successes, 9.50 of all, return 7.50, "
        "errors 1 (success 3, max_turns 1, error 1)"
    )
    values = json.loads(json.dumps(got.to_dict()))
    assert values["successes"] == 3
    assert values["interval"] == pytest.approx([0.3006418, 0.9544127], abs=1e-6)
    assert "turns - of successes" in report([played("failure", 2)]).line()


@pytest.mark.parametrize(
    ("dialogues", "text"),
    [([played("error", 1)], "none of 1 dialogues finished; the first says: broke"), ([], "no task")],
)
def test_nothing_finished_is_an_error_and_not_a_rate_of_zero(dialogues: list[Trajectory], text: str) -> None:
    with pytest.raises(EpisodeError, match=text):
        report(dialogues)


def test_a_lost_dialogue_is_an_error() -> None:
    with pytest.raises(EpisodeError, match="4 dialogues came back for 5 tasks"):
        evaluate(lambda given: DIALOGUES[: len(given) - 1], tasks(5))


def environment(name: Any) -> Environment:
    made = SimpleNamespace(name="toy", task=lambda seed: Task(id=name(seed), seed=seed, goal={}))
    return cast(Environment, made)


def test_panel_is_fixed_and_starts_at_its_seed() -> None:
    settings = EvaluationSettings(tasks=3, panel_seed=500)
    first = panel(environment(lambda seed: f"order-{seed}"), settings)
    seeds: Sequence[int] = [task.seed for task in first]
    assert seeds == [500, 501, 502]
    assert panel(environment(lambda seed: f"order-{seed}"), settings) == first
    with pytest.raises(ConfigError, match="task id 'same'"):
        panel(environment(lambda _: "same"), settings)


def test_a_moment_that_is_evaluated_again_replaces_what_was_said_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "evaluation.jsonl"
    for moment, version in [("before", 0), ("iteration 5", 5), ("iteration 5", 5), ("after", 9)]:
        record(path, report(DIALOGUES[: version or 3]), moment=moment, policy_version=version)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["moment"] for line in lines] == ["before", "iteration 5", "after"]
    assert [path.name for path in path.parent.iterdir()] == ["evaluation.jsonl"]
