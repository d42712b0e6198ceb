"""Learning curves of a study: every seed thin, the interquartile mean of an arm thick."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from measures import Floats, Point, iqm
from runs import Result


def draw(results: Sequence[Result], *, window: int, path: Path) -> None:
    """Success over the last `window` dialogues against dialogues played, as SVG or PNG."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    arms: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        arms[result.arm].append(result)
    for number, (arm, runs) in enumerate(arms.items()):
        curves = [smoothed(run.curve, window) for run in runs]
        for played, success in curves:
            axes.plot(played, success, color=f"C{number}", alpha=0.25, linewidth=0.8)
        shared = min(len(played) for played, _ in curves)
        means = [iqm([success[at] for _, success in curves]) for at in range(shared)]
        axes.plot(curves[0][0][:shared], means, color=f"C{number}", linewidth=2, label=f"{arm} ({len(runs)} seeds)")
    axes.set(xlabel="dialogues", ylabel=f"success of the last {window}", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def smoothed(curve: Sequence[Point], window: int) -> tuple[Floats, Floats]:
    """Dialogues played and the success of the last `window` of them (fewer at the start), an entry an iteration."""
    played = np.cumsum([point.played for point in curve])
    won = np.cumsum([point.successes for point in curve])
    first = np.searchsorted(played, played - window, side="right") - 1
    played_before, won_before = (np.where(first >= 0, total[first], 0) for total in (played, won))
    return played.astype(float), (won - won_before) / (played - played_before)
