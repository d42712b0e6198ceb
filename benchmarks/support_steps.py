"""How outcomes alone value the steps of technical support: asking for the error against advice that fits any case.

    python benchmarks/support_steps.py --dialogues 600 --error-rate 0.35

Plays tech_support with an expert that errs, fits return_decomposition on outcomes alone (no knowledge base, no state)
and scores the steps of other dialogues. Prints, for every kind of reply, the mean score and a 95 % interval over
dialogues, and the share of dialogues that succeed after such a first reply.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slea_llm.environments.speech import Speech, spoken
from slea_llm.environments.tech_support import TechSupport
from slea_llm.evaluators import return_decomposition
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredTrajectory
from slea_llm.users.scripted import ScriptedUser

KINDS = ("asks for the error", "asks for another fact", "names a fault and its mend", "generic advice", "small talk")


def kind_of(reply: str, speech: Speech) -> str:
    """Which sentence of the expert's wording a reply is."""
    agents = speech.agents
    if reply in agents["ask"]["error"]["replies"]:
        return KINDS[0]
    if any(reply in entry["replies"] for entry in agents["ask"].values()):
        return KINDS[1]
    if any(reply in entry["replies"] for entry in agents["mend"].values()):
        return KINDS[2]
    return KINDS[3] if reply in agents["generic"]["replies"] else KINDS[4]


def dialogues(count: int, error_rate: float, *, first: int, language: str) -> list[ScoredTrajectory]:
    environment = TechSupport(TechSupport.Config(language=language))  # type: ignore[arg-type]
    user, scorer = ScriptedUser(ScriptedUser.Config()), Scorer(TaggedParser(TaggedParser.Config()), [])
    found = []
    for seed in range(first, first + count):
        task = environment.task(seed)
        expert = environment.expert(task, error_rate=error_rate)
        found.append(scorer.score(play(environment, user, expert, task, seed=seed, max_turns=10)))
    return found


def interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the mean, dialogues drawn anew as wholes."""
    rng = np.random.default_rng(0)
    sums = np.array([(sum(group), len(group)) for group in groups if group], dtype=np.float64)
    draws = sums[rng.integers(0, len(sums), (1000, len(sums)))].sum(axis=1)
    low, high = np.percentile(draws[:, 0] / draws[:, 1], [2.5, 97.5])
    return float(low), float(high)


def difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Difference of two means and its 95 % interval, dialogues drawn anew as wholes."""
    rng = np.random.default_rng(0)
    rows = np.array([(sum(a), len(a), sum(b), len(b)) for a, b in zip(one, other, strict=True)], dtype=np.float64)
    draws = rows[rng.integers(0, len(rows), (1000, len(rows)))].sum(axis=1)
    low, high = np.percentile(draws[:, 0] / draws[:, 1] - draws[:, 2] / draws[:, 3], [2.5, 97.5])
    whole = rows.sum(axis=0)
    return float(whole[0] / whole[1] - whole[2] / whole[3]), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogues", type=int, default=600)
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--error-rate", type=float, default=0.35)
    parser.add_argument("--language", choices=("en", "zh"), default="en")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    speech = Speech("tech_support", arguments.language)
    seen = dialogues(arguments.dialogues, arguments.error_rate, first=0, language=arguments.language)
    held_out = dialogues(arguments.held_out, arguments.error_rate, first=500_000, language=arguments.language)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "fitted"
        return_decomposition.fit(seen, seed=arguments.seed).save(folder)
        evaluator = return_decomposition.ReturnDecomposition(
            return_decomposition.ReturnDecomposition.Config(model=str(folder))
        )
        scored = [(one, evaluator.score(one.trajectory, one.steps)) for one in held_out]
    wins = sum(one.trajectory.success for one in held_out)
    print(f"{len(seen)} dialogues to fit, {len(held_out)} held out, {wins} of them succeed")
    values: dict[str, list[list[float]]] = {kind: [[] for _ in held_out] for kind in KINDS}
    firsts: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for number, (one, scores) in enumerate(scored):
        by_step = {(word.turn, word.step): word.score for word in scores}
        for step in one.leaves():
            if step.kind != "reply":
                continue
            kind = kind_of(spoken(step.text), speech)
            if (score := by_step[step.turn, step.index]) is not None:
                values[kind][number].append(score)
            if step.turn == 0:
                firsts[kind].append(one.trajectory.success)
    for kind in KINDS:
        flat = [score for group in values[kind] for score in group]
        if not flat:
            continue
        low, high = interval(values[kind])
        after = f"{np.mean(firsts[kind]):.2f} of {len(firsts[kind])}" if firsts[kind] else "-"
        print(
            f"{kind:<28} {np.mean(flat):+.3f} ({low:+.3f} to {high:+.3f}) of {len(flat):4d}; success after it: {after}"
        )
    apart = difference(values[KINDS[0]], values[KINDS[3]])
    print(f"asks for the error above generic advice by {apart[0]:+.3f} ({apart[1]:+.3f} to {apart[2]:+.3f})")


if __name__ == "__main__":
    main()
