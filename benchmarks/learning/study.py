"""Arms x seeds of the real trainer in parallel processes, and the tables and figures that they make.

    python benchmarks/learning/study.py tune token_gae streams  # the search that every arm gets alike
    python benchmarks/learning/study.py run quick --jobs 2      # plays what is not yet played, then prints the tables
    python benchmarks/learning/study.py table full --figure docs/learning.svg
    python benchmarks/learning/study.py document                # the tables of docs/study.md

What is compared, and how, stands in protocol.yaml. Every finished run is one small file under results/ or tuning/; runs
that were interrupted go on from their last checkpoint. docs/study.md says how to read it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import FrameType
from typing import Any

from document import block, documented
from protocol import HERE, PLUGINS, PROTOCOL, Job, Protocol, Study, known
from runs import Commands, Result, Run
from tables import Tables, pooled, tables
from tuning import TUNING, check_digests, kept, read_results, study_jobs, tuning_jobs, tuning_table

from slea_llm import planning
from slea_llm.errors import SleaError
from slea_llm.storage import atomic_write

ROOT = HERE.parents[1]
RESULTS = HERE / "results"


def main() -> int:
    arguments = _arguments()
    for name, value in vars(arguments).items():
        if isinstance(value, Path):
            setattr(arguments, name, value.resolve())
    os.chdir(ROOT)  # recipes are named from there
    sys.path.append(str(PLUGINS))
    protocol = Protocol.read(arguments.protocol)
    return int(arguments.do(protocol, arguments))


def run(protocol: Protocol, arguments: argparse.Namespace) -> int:
    study = protocol.study(arguments.study)
    folder = arguments.results / study.folder
    jobs = study_jobs(study, arguments.tuning)
    for name in arguments.arms:
        known(name, {arm.name: arm for arm in study.arms}, f"arm of {study.name}")
    wanted = [
        job
        for job in jobs
        if (not arguments.arms or job.arm in arguments.arms) and (not arguments.seeds or job.seed in arguments.seeds)
    ]
    if not wanted:
        raise SystemExit(f"none of the seeds {arguments.seeds} is of {study.name}; it has {study.seeds}")
    if untuned := sorted({study.protocol.arm(job.arm).tuning for job in wanted if study.tuned and job.tuned is None}):
        raise SystemExit(
            f"nothing was searched for {', '.join(untuned)}, beside arms that are tuned; run `tune` with them"
        )
    failed = _play(wanted, folder, work=arguments.work / study.folder, at_once=arguments.jobs)
    table(protocol, arguments)
    return 1 if failed else 0


def table(protocol: Protocol, arguments: argparse.Namespace) -> int:
    study = protocol.study(arguments.study)
    results = _finished(study, arguments)
    if not results:
        print(f"{study.name}: no run is finished yet")
        return 0
    print("\n".join(tables(study, results)))
    if arguments.figure is not None:
        from figure import draw

        draw(results, study=study, path=arguments.figure)
    return 0


def pool(protocol: Protocol, arguments: argparse.Namespace) -> int:
    known(arguments.arm, protocol.arms, "arm")
    studies = [protocol.study(name) for name in arguments.studies]
    print("\n".join(pooled([Tables.of(study, _finished(study, arguments)) for study in studies], arguments.arm)))
    return 0


def _finished(study: Study, arguments: argparse.Namespace) -> list[Result]:
    """The kept runs of a study, none of which was made with other settings than it has now."""
    folder, jobs = arguments.results / study.folder, study_jobs(study, arguments.tuning)
    results = read_results(folder)
    check_digests(results, jobs, folder)
    return [found for job in jobs if (found := kept(job, results))]


def tune(protocol: Protocol, arguments: argparse.Namespace) -> int:
    failed = 0
    for name in arguments.arms:
        jobs = tuning_jobs(protocol, protocol.arm(name))
        failed += _play(jobs, arguments.tuning / name, work=arguments.work / "tuning", at_once=arguments.jobs)
    print("\n".join(tuning_table(protocol, arguments.tuning)))
    return 1 if failed else 0


def tuned(protocol: Protocol, arguments: argparse.Namespace) -> int:
    print("\n".join(tuning_table(protocol, arguments.tuning)))
    return 0


def document(protocol: Protocol, arguments: argparse.Namespace) -> int:
    """Write the tables of a page anew from the kept runs."""
    before = arguments.page.read_text(encoding="utf-8")
    after = page(before, protocol, arguments)
    with atomic_write(arguments.page) as file:
        file.write(after)
    print(f"{arguments.page}: {'as it was' if after == before else 'written anew'}")
    return 0


def page(text: str, protocol: Protocol, arguments: argparse.Namespace) -> str:
    """A page with the tables that the kept runs give."""

    def found(name: str) -> list[str]:
        study = protocol.study(name)
        return block(study, _finished(study, arguments))

    return documented(text, tuned=lambda: tuning_table(protocol, arguments.tuning), table=found)


def plan(protocol: Protocol, arguments: argparse.Namespace) -> int:
    """Check every run of every study as `slea plan` does, and say how many there are."""
    for name in protocol.studies:
        jobs = study_jobs(protocol.study(name), arguments.tuning)
        for job in {job.arm: job for job in jobs}.values():
            for note in planning.check(job.resolved()):
                print(f"{name}, {job.arm}: {note}")
        print(f"{name}: {len(jobs)} runs")
    return 0


def _play(jobs: Sequence[Job], folder: Path, *, work: Path, at_once: int) -> int:
    """Play every run that has no result yet; how many failed. Ctrl-C and SIGTERM end what runs, to be gone on with."""
    results = read_results(folder)
    check_digests(results, jobs, folder)
    left = [job for job in jobs if kept(job, results) is None]
    print(f"{len(left)} of {len(jobs)} runs to play, {at_once} at once, in {work}", flush=True)
    commands = Commands()

    def stop(number: int, _frame: FrameType | None) -> None:
        commands.stop()
        raise SystemExit(128 + number)

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    pool = ThreadPoolExecutor(max_workers=at_once)
    try:
        runs = {
            pool.submit((run := Run(job, work, commands, results=folder)).play): run for job in spread(left, at_once)
        }
        return sum(_failed(future, runs[future]) for future in as_completed(runs))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for one, handler in before.items():
            signal.signal(one, handler)


def spread(jobs: Sequence[Job], at_once: int) -> list[Job]:
    """The jobs with so many seeds side by side: those of one seed wait for the same warm start."""
    seeds = list(dict.fromkeys(job.seed for job in jobs))
    arms = list(dict.fromkeys(job.arm for job in jobs))
    return sorted(jobs, key=lambda job: (seeds.index(job.seed) // at_once, arms.index(job.arm)))


def _failed(future: Any, run: Run) -> bool:
    """Whether a run failed; says so, or what it gave."""
    try:
        result: Result = future.result()
    except (subprocess.CalledProcessError, SleaError, OSError, ValueError, LookupError) as error:
        # Named and counted; the others go on, and the next call tries this one again.
        print(f"{run.folder.name} failed: {error!r}; see {run.folder / 'output.log'}", flush=True)
        return True
    rates = [f"{panel['success_rate']:.3f}" for panel in (result.before, result.after) if panel]
    rates = rates or [f"{point.successes / point.played:.3f}" for point in (result.curve[0], result.curve[-1])]
    print(f"{run.folder.name}: {' -> '.join(rates)}, {result.cpu_seconds:.0f} CPU s", flush=True)
    return False


def _arguments() -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--protocol", type=Path, default=PROTOCOL, help="what is compared, and how")
    common.add_argument("--results", type=Path, default=RESULTS, help="folder of the finished runs")
    common.add_argument("--tuning", type=Path, default=TUNING, help="folder of the finished runs of the search")
    playing = argparse.ArgumentParser(add_help=False)
    playing.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each (default 2)")
    playing.add_argument("--work", type=Path, default=ROOT / "runs" / "study", help="folder of the runs while they run")
    showing = argparse.ArgumentParser(add_help=False)
    showing.add_argument("study", help="name of a study in protocol.yaml")
    showing.add_argument("--figure", type=Path, default=None, help="draw the curves into this file")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", parents=[showing, playing, common], help="play what is not yet played")
    one.add_argument("--arms", nargs="+", default=(), help="only these")
    one.add_argument("--seeds", nargs="+", type=int, default=(), help="only these")
    one.set_defaults(do=run)
    one = commands.add_parser("table", parents=[showing, common], help="the tables of a study")
    one.set_defaults(do=table)
    one = commands.add_parser("pool", parents=[common], help="ratios of an arm over several studies at once")
    one.add_argument("arm")
    one.add_argument("studies", nargs="+")
    one.set_defaults(do=pool)
    one = commands.add_parser("tune", parents=[playing, common], help="search the values of arms")
    one.add_argument("arms", nargs="+")
    one.set_defaults(do=tune)
    one = commands.add_parser("tuned", parents=[common], help="what the search gave")
    one.set_defaults(do=tuned)
    one = commands.add_parser("document", parents=[common], help="write the tables of docs/study.md anew")
    one.add_argument("--page", type=Path, default=ROOT / "docs" / "study.md", help="another page with such marks")
    one.set_defaults(do=document)
    one = commands.add_parser("plan", parents=[common], help="check every arm of every study; runs nothing")
    one.set_defaults(do=plan)
    arguments = parser.parse_args()
    if getattr(arguments, "jobs", 1) < 1:
        parser.error(f"--jobs {arguments.jobs} is below 1")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
