"""Learning curves of a study: every seed thin, the interquartile mean of an arm thick."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from measures import iqms, reached
from protocol import Study
from runs import Result
from tables import windowed


def draw(results: Sequence[Result], *, study: Study, path: Path, threshold: float = 0.8) -> None:
    """Success over the last window of dialogues against dialogues played, as SVG or PNG.

    A dot marks where a seed reached the threshold, a cross at its end a seed that never did.
    """
    matplotlib.use("agg")
    from matplotlib import pyplot

    window = study.protocol.window
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, arm in enumerate(study.arms):
        runs = [run for run in results if run.arm == arm.name]
        if not runs:
            continue
        colour = f"C{number % 10}"
        line = ("-", "--", ":")[number // 10 % 3]
        curves = []
        got = 0
        for run in runs:
            played = np.cumsum([point.played for point in run.curve])
            success = windowed(run.curve, window)
            curves.append((played, success))
            axes.plot(played, success, line, color=colour, alpha=0.2, linewidth=0.8)
            place = reached(run.curve, threshold, window=window)
            got += place is not None
            at = len(success) - 1 if place is None else place
            axes.plot(played[at], success[at], "x" if place is None else ".", color=colour, alpha=0.6, markersize=5)
        shared = min(len(played) for played, _ in curves)
        means = iqms(np.array([success[:shared] for _, success in curves]).T)
        label = f"{arm.name}: {got} of {len(runs)} seeds to {threshold:.0%}"
        axes.plot(curves[0][0][:shared], means, line, color=colour, linewidth=2, label=label)
    axes.axhline(threshold, color="0.6", linewidth=0.8)
    axes.set(xlabel="dialogues", ylabel=f"success of the last {window}", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
