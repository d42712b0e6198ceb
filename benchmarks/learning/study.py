"""Arms x seeds of the real trainer in parallel processes, and the table and figure that they make.

    python benchmarks/learning/study.py run quick --jobs 2      # plays what is not yet played, then prints the table
    python benchmarks/learning/study.py table full --figure docs/learning.svg

What is compared, and how, stands in protocol.yaml. Every finished run is one small file under results/; runs that were
interrupted go on from their last checkpoint. docs/study.md says how to read it.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from measures import area, dialogues_to, iqm, paired_ratio
from runs import Job, Result, forget, play

from slea_llm.errors import nearest
from slea_llm.measures import wilson

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One row of `studies` in the protocol, with what all studies share."""

    name: str
    arms: Mapping[str, Mapping[str, Any]]
    baseline: str
    seeds: tuple[int, ...]
    iterations: int
    protocol: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, path: Path = HERE / "protocol.yaml") -> Study:
        protocol = yaml.safe_load(path.read_text(encoding="utf-8"))
        studies = protocol["studies"]
        if name not in studies:
            raise SystemExit(f"unknown study {name!r}; one of {', '.join(studies)}{nearest(name, studies)}")
        row = studies[name]
        arms = {arm: {**protocol["common"], **protocol["arms"][arm]} for arm in row["arms"]}
        return cls(
            name=name,
            arms=arms,
            baseline=row["baseline"],
            seeds=tuple(row["seeds"]),
            iterations=row["iterations"],
            protocol=protocol,
        )

    def jobs(self) -> list[Job]:
        """Seed by seed, so that an interrupted study has whole pairs."""
        return [
            Job(
                study=self.name,
                arm=arm,
                seed=seed,
                iterations=self.iterations,
                recipe=self.protocol["recipe"],
                changes=changes,
            )
            for seed in self.seeds
            for arm, changes in self.arms.items()
        ]


def main() -> int:
    arguments = _arguments()
    study = Study.read(arguments.study)
    folder = arguments.results / study.name
    failed = 0
    if arguments.command == "run":
        failed = run(study, folder, work=arguments.work / study.name, jobs=arguments.jobs)
    results = [Result.read(path) for path in sorted(folder.glob("*.json"))]
    if results:
        print("\n".join(table(study, results)))
    if results and arguments.figure is not None:
        from figure import draw

        draw(results, window=study.protocol["window"], path=arguments.figure)
    return 1 if failed else 0


def run(study: Study, folder: Path, *, work: Path, jobs: int) -> int:
    """Play every run that has no result yet, `jobs` at once; how many failed."""
    left = [job for job in study.jobs() if not (folder / f"{job.name}.json").exists()]
    print(f"{study.name}: {len(left)} of {len(study.jobs())} runs to play, {jobs} at once")
    failed = 0
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = {pool.submit(play, job, work): job for job in left}
        for future in as_completed(running):
            job = running[future]
            try:
                result = future.result()
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{job.name}: {error}; see {work / job.name / 'output.log'}", flush=True)
                continue
            result.write(folder / f"{job.name}.json")
            forget(job, work)
            rate = result.after["success_rate"]
            print(
                f"{job.name}: {result.before['success_rate']:.3f} -> {rate:.3f}, {result.cpu_seconds:.0f} CPU s",
                flush=True,
            )
    return failed


def table(study: Study, results: Sequence[Result]) -> list[str]:
    """Markdown: dialogues to each threshold, final success, turns, costs, and the ratios that may be printed."""
    protocol, lines = study.protocol, []
    by_arm = {arm: [one for one in results if one.arm == arm] for arm in study.arms}
    thresholds = protocol["thresholds"]
    head = [
        "arm",
        "seeds",
        *(f"to {threshold:.0%}" for threshold in thresholds),
        "area",
        "sampled",
        "greedy",
        "turns",
        "CPU s",
    ]
    lines += [_row(head), _row(["---"] * len(head))]
    for arm, runs in by_arm.items():
        if runs:
            lines.append(_row([arm, str(len(runs)), *_cells(study, runs)]))
    lines.append("")
    for threshold in thresholds:
        lines += [_ratio_line(study, by_arm, arm, threshold) for arm in by_arm if arm != study.baseline and by_arm[arm]]
    return lines


def _cells(study: Study, runs: Sequence[Result]) -> list[str]:
    cells = []
    for threshold in study.protocol["thresholds"]:
        reached = _reached(study, runs, threshold)
        got = [value for value in reached.values() if value is not None]
        capped = [_capped(run, reached[run.seed]) for run in runs]
        cells.append(f"{'' if len(got) == len(runs) else '>= '}{iqm(capped):,.0f} ({len(got)}/{len(runs)})")
    cells.append(f"{iqm([area(run.curve) for run in runs]):.3f}")
    for panel in ("after", "greedy"):
        won = sum(getattr(run, panel)["successes"] for run in runs)
        played = sum(getattr(run, panel)["n"] for run in runs)
        low, high = wilson(won, played)
        cells.append(f"{won / played:.1%} ({low:.1%} to {high:.1%})")
    cells.append(f"{iqm([run.after['mean_turns_success'] or 0.0 for run in runs]):.2f}")
    cells.append(f"{iqm([run.cpu_seconds for run in runs if not run.resumed] or [0.0]):.0f}")
    return cells


def _ratio_line(study: Study, by_arm: Mapping[str, Sequence[Result]], arm: str, threshold: float) -> str:
    protocol = study.protocol
    runs, base = by_arm[arm], by_arm[study.baseline]
    what = f"{arm} over {study.baseline}, dialogues to {threshold:.0%}"
    theirs = _reached(study, base, threshold)
    got = sum(value is not None for value in theirs.values())
    if not base or got < protocol["reached_share"] * len(base):
        return f"- {what}: no ratio, the baseline got there in {got} of {len(base)} seeds"
    ours = _reached(study, runs, threshold)
    missing = sum(value is None for value in ours.values())
    estimate = paired_ratio(
        {run.seed: _capped(run, ours[run.seed]) for run in runs},
        {run.seed: _capped(run, theirs[run.seed]) for run in base},
        resamples=protocol["resamples"],
        confidence=protocol["confidence"],
    )
    note = f"; {missing} of {len(runs)} seeds did not get there and count as the cap" if missing else ""
    return f"- {what}: {estimate.text()}{note}"


def _reached(study: Study, runs: Sequence[Result], threshold: float) -> dict[int, int | None]:
    return {run.seed: dialogues_to(run.curve, threshold, window=study.protocol["window"]) for run in runs}


def _capped(run: Result, reached: int | None) -> float:
    return float(sum(point.played for point in run.curve) if reached is None else reached)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("study", help="name of a study in protocol.yaml")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each (default 2)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the finished runs")
    parser.add_argument("--work", type=Path, default=Path("runs/study"), help="folder of the runs while they run")
    parser.add_argument("--figure", type=Path, default=None, help="draw the curves into this file")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
