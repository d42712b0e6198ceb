"""Learn the order task by TorchRL's discrete SAC from augmented experience, and draw the curves.

    python examples/discrete_sac/order_run.py --seeds 5

Collect, score, augment, keep, learn: every iteration plays a few dialogues with today's policy, scores them, puts them
into the project's replay buffer, and credits them together with what the buffer draws; SAC learns from the transitions.
An arm is a scoring recipe of `recipes/`; nothing else differs between arms. Runs that the output folder has are not run
again.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torchrl
from order_acts import Orders, one_token
from order_sac import Sac, SacSettings, transitions

from slea_llm.buffer import ReplayBuffer
from slea_llm.cli import compose
from slea_llm.config import ScoringRecipe, load_scoring_recipe
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import ReplaySettings

HERE = Path(__file__).resolve().parent
ARMS = ("outcome", "slot_progress", "all")
PANEL_SEED, TASKS = 1_000_000, 100_000
"""First task of the unseen ones; those that are played to learn lie below it, so many for each seed."""

REPLAY = ReplaySettings(share=0.75, capacity=4096, max_age=10**6, priority="error")
"""SAC learns from any policy's transitions, so nothing is too old for it; capacity alone bounds the age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long, and how often."""

    dialogues: int = 800
    """Played to learn."""
    each: int = 8
    """Dialogues of an iteration."""
    updates: int = 24
    """Of SAC, an iteration."""
    panel: int = 100
    """Unseen tasks."""
    every: int = 5
    """Iterations between looks at the panel."""
    replay: ReplaySettings = REPLAY

    @property
    def iterations(self) -> int:
        return self.dialogues // self.each


class Run:
    """One arm with one seed."""

    def __init__(self, recipe: ScoringRecipe, plan: Plan, folder: Path, *, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._scorer, self._crediting = compose.scorer(recipe), compose.crediting(recipe)
        (stream,) = recipe.streams.values()  # SAC has one reward
        self.sac = Sac(SacSettings(), gamma=stream.gamma_turn, seed=seed)
        self._orders = Orders(OrderTaking.Config(), seed=seed)
        self._buffer = ReplayBuffer(plan.replay, folder, seed=seed)

    def close(self) -> None:
        self._buffer.close()

    def iterate(self, number: int) -> dict[str, float]:
        """Play, score, augment, keep and learn once; metrics."""
        plan, streams = self._plan, list(self._crediting.streams)
        progress, reducer = number / plan.iterations, LocalReducer()
        first = self._seed * TASKS + number * plan.each
        played = self._orders.play(
            self.sac.draw, range(first, first + plan.each), policy_version=number, name=f"i{number}"
        )
        if broken := [one for one in played if one.failed]:
            raise RuntimeError(f"{len(broken)} dialogues broke, the first: {broken[0].error}")
        scored = [self._scorer.score(one, one_token) for one in played]
        mixed, metrics = self._buffer.mix(
            scored, iteration=number, policy_version=number, progress=progress, reducer=reducer
        )
        stats = [self.sac.stats(one, streams=streams, version=number) for one in mixed]
        credited = self._crediting.credit(mixed, stats, progress=progress, reducer=reducer)
        weighed, more = self._buffer.weigh(credited, reducer=reducer)
        losses = self.sac.learn(transitions(weighed), updates=plan.updates)
        metrics = metrics | more | self._crediting.summary(mixed, credited, reducer=reducer) | losses
        return {**metrics, "success": sum(one.success for one in played) / len(played)}

    def panel(self) -> tuple[float, float]:
        """Success and mean number of turns on the unseen tasks, taking the likeliest act."""
        tasks = range(PANEL_SEED, PANEL_SEED + self._plan.panel)
        played = self._orders.play(self.sac.best, tasks, policy_version=0, name="panel")
        turns = sum(len(one.turns) for one in played) / len(played)
        return sum(one.success for one in played) / len(played), turns


def learn(arm: str, seed: int, plan: Plan) -> dict[str, Any]:
    """The curve of one arm and seed."""
    recipe = load_scoring_recipe(HERE / "recipes" / f"{arm}.yaml")
    begun, looks, successes = time.process_time(), [], []
    with tempfile.TemporaryDirectory() as folder, closing(Run(recipe, plan, Path(folder), seed=seed)) as run:
        for number in range(plan.iterations):
            if number % plan.every == 0:
                looks.append([number * plan.each, *run.panel()])
            successes.append(run.iterate(number)["success"])
        looks.append([plan.iterations * plan.each, *run.panel()])
    seconds = round(time.process_time() - begun, 1)
    print(
        f"{arm:<14} seed {seed}: success {looks[0][1]:.2f} -> {looks[-1][1]:.2f}, {looks[-1][2]:.1f} turns, {seconds} s"
    )
    return {"arm": arm, "seed": seed, "panel": looks, "training": successes, "cpu_seconds": seconds}


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Success on the panel over dialogues: every seed thin, the mean of an arm thick."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "discrete_sac"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, arm in enumerate(dict.fromkeys(one["arm"] for one in results)):
        runs = [one["panel"] for one in results if one["arm"] == arm]
        played = [look[0] for look in runs[0]]
        for run in runs:
            axes.plot(played, [look[1] for look in run], color=f"C{number}", alpha=0.3, linewidth=0.8)
        mean = [sum(look[1] for look in looks) / len(looks) for looks in zip(*runs, strict=True)]
        axes.plot(played, mean, color=f"C{number}", linewidth=2, label=f"{arm} ({len(runs)} seeds)")
    axes.set(xlabel="dialogues", ylabel="success on unseen tasks", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line an arm: dialogues to 80 % of the panel, seed by seed, and what came of it in the end."""
    lines = []
    for arm in dict.fromkeys(one["arm"] for one in results):
        runs = [one["panel"] for one in results if one["arm"] == arm]
        firsts = [next((int(look[0]) for look in run if look[1] >= 0.8), None) for run in runs]
        last = [run[-1] for run in runs]
        success, turns = (sum(look[place] for look in last) / len(last) for place in (1, 2))
        said = ", ".join("never" if first is None else str(first) for first in sorted(firsts, key=lambda n: n or 10**9))
        lines.append(f"{arm:<14} 80 % after {said} dialogues; at the end {success:.3f} in {turns:.2f} turns")
    return lines


def known(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a file that was written under the same settings and versions."""
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["about"] != about:
        raise SystemExit(f"{path} holds runs with other settings or versions; give another --output or remove it")
    runs: list[dict[str, Any]] = document["runs"]
    return runs


def write(path: Path, about: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """One run a line; the file is whole at every moment."""
    lines = ",\n".join(json.dumps(one) for one in results)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{{"about": {json.dumps(about)},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dialogues", type=int, default=Plan().dialogues)
    parser.add_argument("--output", type=Path, default=Path("runs/discrete_sac"), help="receives curve.json and .svg")
    arguments = parser.parse_args()
    if not (1 <= arguments.seeds <= PANEL_SEED // TASKS and 1 <= arguments.dialogues <= TASKS):
        parser.error(f"1 to {PANEL_SEED // TASKS} seeds and 1 to {TASKS} dialogues keep clear of the unseen tasks")
    torch.set_num_threads(1)
    plan = Plan(dialogues=arguments.dialogues)
    versions = {"torch": torch.__version__, "torchrl": torchrl.__version__, "python": platform.python_version()}
    about = {"plan": asdict(plan), "sac": asdict(SacSettings()), "versions": versions}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "curve.json"
    results = known(path, about)
    there = {(one["arm"], one["seed"]) for one in results}
    for seed in range(arguments.seeds):
        for arm in arguments.arms:
            if (arm, seed) not in there:
                results.append(learn(arm, seed, plan))
                write(path, about, results)
    order = sorted(results, key=lambda one: (ARMS.index(one["arm"]), one["seed"]))
    write(path, about, order)
    draw(order, arguments.output / "curve.svg")
    print("\n".join(table(order)))


if __name__ == "__main__":
    main()
