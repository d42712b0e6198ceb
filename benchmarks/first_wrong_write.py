"""Does a score mean anything offline? Rank the turns of failed dialogues, lowest score first: where is the guilty one?

    python benchmarks/first_wrong_write.py DATA

DATA holds labels/tau_first_wrong_write.json (failures with the turn of their first wrong database write) and the log
that it speaks of, logs/tau_bench. Evaluators are fitted on the outcomes of dialogues of other tasks (or, with
`--held-out dialogue`, of other dialogues) and never see a label; a turn's score is the lowest of its steps'. Reciprocal
ranks are means over the order of ties, intervals are of 5000 bootstrap draws over tasks. Beside them what needs no
judgement: chance, later turns first, and turns that call a tool which writes, in order.

A second table asks what writes in order cannot answer: does the score of a wrong write lie below that of a write in a
dialogue that succeeded? It holds the area under the ROC curve (0.5: no better than chance) over these turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import table

from slea_llm import registry
from slea_llm.encoders import load_encoder
from slea_llm.evaluators import counterfactual, hindsight, return_decomposition, tool_use_outcomes
from slea_llm.evaluators.counterfactual import CounterfactualPrediction
from slea_llm.evaluators.hindsight import HindsightEvaluator
from slea_llm.evaluators.return_decomposition import ReturnDecomposition
from slea_llm.evaluators.reward_model import RewardModel
from slea_llm.evaluators.ridge import fold_of
from slea_llm.evaluators.rules import Rules
from slea_llm.evaluators.tool_checks import ToolWords, checked_calls
from slea_llm.evaluators.tool_use import ToolUse
from slea_llm.evaluators.tool_use_outcomes import ToolUseOutcomes
from slea_llm.fitting import labels
from slea_llm.fitting.evaluator import FitSettings, fit_evaluator
from slea_llm.fitting.evaluator import FittedEvaluator as FittedReward
from slea_llm.interfaces import StepEvaluator
from slea_llm.logs.reading import LogReader
from slea_llm.measures import area_under_curve
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredTrajectory

FOLDS = 5


def fit_reward_model(data: Sequence[ScoredTrajectory], *, seed: int) -> FittedReward:
    """The reward model of `slea fit-evaluator`, on the outcome of every dialogue as the label of its steps."""
    found = [label for one in data for label in labels.outcome_labels(one.trajectory, one.steps)]
    parsed = [(one.trajectory, one.steps) for one in data]
    rows = labels.examples(parsed, found, load_encoder(ENCODER), "apart")
    return fit_evaluator(rows, found, encoder=ENCODER, encoding="apart", settings=FitSettings(folds=2), seed=seed)


ENCODER = "use-multilingual"
FITTED: Mapping[str, tuple[Callable[..., Any], Any]] = {
    "reward_model": (fit_reward_model, RewardModel),
    "return_decomposition": (return_decomposition.fit, ReturnDecomposition),
    "hindsight": (hindsight.fit, HindsightEvaluator),
    "counterfactual_prediction": (counterfactual.fit_prediction, CounterfactualPrediction),
    "tool_use_outcomes": (tool_use_outcomes.fit, ToolUseOutcomes),
}
UNFITTED: Mapping[str, StepEvaluator] = {"rules": Rules(Rules.Config()), "tool_use": ToolUse(ToolUse.Config())}


class Case:
    """One labelled failure: its dialogue, the turn of the first wrong write, and all turns that write."""

    def __init__(self, row: Mapping[str, Any], scored: ScoredTrajectory) -> None:
        turns = scored.trajectory.turns
        if len(turns) != row["assistant_turns"]:
            raise SystemExit(f"{scored.trajectory.id}: {len(turns)} turns, the labels say {row['assistant_turns']}")
        self.scored = scored
        self.task = str(row["task_id"])
        self.turns = len(turns)
        self.guilty = int(row["first_wrong_write_turn"])
        self.writes = tuple(row["write_turns"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--parser", default="tagged", help="tagged: a reply or a call is one step; auto: sentences")
    parser.add_argument(
        "--held-out",
        choices=["task", "dialogue"],
        default="task",
        help="whether the fit sees other trials of the task (default: it does not)",
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cutter = registry.load("parser", arguments.parser)
    scorer = Scorer(cutter(cutter.Config()), [])
    scored = [scorer.score(one) for one in LogReader(*sorted((arguments.data / "logs/tau_bench").glob("*.json")))]
    cases = read_cases(arguments.data / "labels/tau_first_wrong_write.json", scored)
    rows = [
        ["chance", *shown(cases, [np.zeros(case.turns) for case in cases])],
        ["later turns first", *shown(cases, [-np.arange(case.turns, dtype=float) for case in cases])],
        ["writes in order", *shown(cases, [writes_in_order(case) for case in cases])],
    ]
    right = right_writes(scored)
    every = [*cases, *right]
    found = {name: [turn_scores(case.scored, one) for case in every] for name, one in UNFITTED.items()}
    found |= {
        name: held_out(every, scored, fit, cls, by=arguments.held_out, seed=arguments.seed)
        for name, (fit, cls) in FITTED.items()
    }
    # Both judge a step against what else is usual there, in differences of success probability: equal weights.
    pair = zip(found["hindsight"], found["counterfactual_prediction"], strict=True)
    found["blend of these two"] = [(one + other) / 2.0 for one, other in pair]
    rows += [[name, *shown(cases, turns[: len(cases)])] for name, turns in found.items()]
    print(f"{len(cases)} failures of {len({case.task for case in cases})} tasks, {len(scored)} dialogues in the log")
    print(table(["order of the turns", "mean reciprocal rank", "95 %", "over chance", "over later first"], rows))
    count = sum(len(case.writes) for case in right)
    print(f"\n{len(cases)} wrong writes, and {count} writes of {len(right)} dialogues that succeeded")
    print(table(["score of a write", "AUC", "95 %"], [[name, *told(cases, right, one)] for name, one in found.items()]))


def read_cases(path: Path, scored: Sequence[ScoredTrajectory]) -> list[Case]:
    rows = json.loads(path.read_text("utf-8"))["trajectories"]
    by_trial = {trial_of(one): one for one in scored}
    return [Case(row, by_trial[str(row["task_id"]), str(row["trial"])]) for row in rows]


def right_writes(scored: Sequence[ScoredTrajectory]) -> list[Case]:
    """The dialogues that succeeded with a call that changed something, and all turns with such a call."""
    words, found = ToolWords.read(), []
    for one in scored:
        if one.trajectory.success:
            calls = checked_calls(one.trajectory, one.steps, words)
            turns = sorted({turn for (turn, _), call in calls.items() if call.effect == "changes" and not call.failed})
            if turns:
                row = {
                    "task_id": trial_of(one)[0],
                    "assistant_turns": len(one.trajectory.turns),
                    "first_wrong_write_turn": turns[0],
                    "write_turns": turns,
                }
                found.append(Case(row, one))
    return found


def told(cases: Sequence[Case], right: Sequence[Case], scores: Sequence[np.ndarray]) -> list[str]:
    """AUC of wrong writes below right ones, with the interval over tasks."""
    rows = [(case.task, False, float(one[case.guilty])) for case, one in zip(cases, scores, strict=False)]
    rows += [
        (case.task, True, float(one[turn]))
        for case, one in zip(right, scores[len(cases) :], strict=True)
        for turn in case.writes
    ]
    tasks = sorted({task for task, _, _ in rows})
    by_task = {task: [row for row in rows if row[0] == task] for task in tasks}
    rng, draws = np.random.default_rng(0), []
    for _ in range(1000):
        part = [row for place in rng.integers(0, len(tasks), len(tasks)) for row in by_task[tasks[place]]]
        auc = area_under_curve([score for _, _, score in part], [good for _, good, _ in part])
        draws += [] if auc is None else [auc]
    low, high = np.percentile(draws, [2.5, 97.5])
    whole = area_under_curve([score for _, _, score in rows], [good for _, good, _ in rows])
    return ["unknown" if whole is None else f"{whole:.3f}", f"{low:.3f} to {high:.3f}"]


def trial_of(one: ScoredTrajectory) -> tuple[str, str]:
    """Task and trial; the reader names a trajectory `task/trial`."""
    task, _, trial = one.trajectory.id.partition("/")
    return task, trial


def held_out(
    cases: Sequence[Case],
    scored: Sequence[ScoredTrajectory],
    fit: Callable[..., Any],
    cls: Any,
    *,
    by: str,
    seed: int,
) -> list[np.ndarray]:
    """Scores of the turns of every case by an evaluator fitted on dialogues of other tasks, or on other dialogues."""

    def fold_of_one(one: ScoredTrajectory) -> int:
        return fold_of(trial_of(one)[0] if by == "task" else one.trajectory.id, folds=FOLDS, seed=seed)

    found: dict[int, np.ndarray] = {}
    for fold in range(FOLDS):
        rest = [one for one in scored if fold_of_one(one) != fold]
        held = [place for place, case in enumerate(cases) if fold_of_one(case.scored) == fold]
        if not held:
            continue
        with tempfile.TemporaryDirectory() as folder:
            fit(rest, seed=seed).save(Path(folder) / "model")
            evaluator = cls(cls.Config(model=str(Path(folder) / "model")))
            found.update({place: turn_scores(cases[place].scored, evaluator) for place in held})
    return [found[place] for place in range(len(cases))]


def turn_scores(scored: ScoredTrajectory, evaluator: StepEvaluator) -> np.ndarray:
    """The lowest score among the steps of each turn, shape (turns,); a turn without any scored step comes last."""
    lowest = {turn.index: np.inf for turn in scored.trajectory.turns}
    for word in evaluator.score(scored.trajectory, scored.steps):
        if word.score is not None:
            lowest[word.turn] = min(lowest[word.turn], word.score)
    return np.array([lowest[turn.index] for turn in scored.trajectory.turns])


def writes_in_order(case: Case) -> np.ndarray:
    return np.array([turn if turn in case.writes else case.turns + turn for turn in range(case.turns)], dtype=float)


def reciprocal_rank(scores: np.ndarray, guilty: int) -> float:
    """Mean of 1 / rank of the guilty turn, lowest first, over all orders of the turns that tie with it."""
    before, ties = int((scores < scores[guilty]).sum()), int((scores == scores[guilty]).sum())
    return float(np.mean(1.0 / (before + np.arange(1, ties + 1))))


def shown(cases: Sequence[Case], scores: Sequence[np.ndarray]) -> list[str]:
    """Mean reciprocal rank with its interval, and the intervals of its difference to chance and to later-first."""
    ranks = np.array([reciprocal_rank(one, case.guilty) for case, one in zip(cases, scores, strict=True)])
    chance = np.array([reciprocal_rank(np.zeros(case.turns), case.guilty) for case in cases])
    later = np.array([reciprocal_rank(-np.arange(case.turns), case.guilty) for case in cases])
    return [f"{ranks.mean():.3f}", *(bounds(cases, values) for values in (ranks, ranks - chance, ranks - later))]


def bounds(cases: Sequence[Case], values: np.ndarray) -> str:
    """Percentile interval of the mean, tasks drawn with replacement: trials of one task are no independent cases."""
    tasks = sorted({case.task for case in cases})
    members = [np.array([place for place, case in enumerate(cases) if case.task == task]) for task in tasks]
    sums = np.array([values[own].sum() for own in members])
    sizes = np.array([len(own) for own in members])
    draws = np.random.default_rng(0).integers(0, len(tasks), (5000, len(tasks)))
    means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{low:+.3f} to {high:+.3f}"


if __name__ == "__main__":
    main()
