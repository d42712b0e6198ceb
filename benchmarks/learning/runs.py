"""One run of an arm: real warm start, real trainer, real evaluation, each a process of its own with one thread."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measures import Point

from slea_llm import checkpoint
from slea_llm.storage import atomic_write, read_trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An arm under a seed. `changes` are dotted settings over the recipe."""

    study: str
    arm: str
    seed: int
    iterations: int
    recipe: str
    changes: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What is kept of a finished run."""

    study: str
    arm: str
    seed: int
    changes: Mapping[str, Any]
    curve: tuple[Point, ...]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    greedy: Mapping[str, Any]
    cpu_seconds: float
    """Of the training, evaluation before and after included; of its last part alone where it was `resumed`."""
    resumed: bool
    version: str

    def write(self, path: Path) -> None:
        """One line for every iteration, so that a committed file can be read and compared."""
        head = {name: value for name, value in asdict(self).items() if name != "curve"}
        points = [[point.played, point.successes, round(point.turns, 3)] for point in self.curve]
        text = json.dumps({**head, "curve": "CURVE"}, indent=1, sort_keys=True)
        lines = ",\n  ".join(json.dumps(point) for point in points)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.replace('"CURVE"', f"[\n  {lines}]") + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        document = json.loads(path.read_text(encoding="utf-8"))
        curve = [Point(played=played, successes=won, turns=turns) for played, won, turns in document.pop("curve")]
        return cls(curve=tuple(curve), **document)


def play(job: Job, work: Path) -> Result:
    """Warm start (once a seed), train, evaluate by sampling and greedily; goes on where an earlier try was stopped.

    Raises CalledProcessError when a command fails; its output stays in `work/<name>/output.log`.
    """
    base, run = work / f"warm-{job.seed}", work / job.name
    run.mkdir(parents=True, exist_ok=True)
    common = [*_settings(job.changes), f"run.seed={job.seed}", f"warm_start.output={base}", f"model.base={base}"]
    with _locked(work / f"warm-{job.seed}.lock"):
        if not base.is_dir():
            _slea(["warm-start", job.recipe, *common], run)
    settings = [*common, f"run.output_dir={run / 'train'}", f"trainer.iterations={job.iterations}"]
    resumed = checkpoint.latest_complete(run / "train" / "checkpoints", report=lambda _: None) is not None
    spent = _slea(["train", job.recipe, "--resume" if resumed else "--fresh", *settings], run)
    _slea(["export", str(run / "train"), "--overwrite", "--allow-unchanged"], run)
    log = run / "greedy.jsonl"
    log.unlink(missing_ok=True)
    adapter = ["--adapter", str(run / "train" / "export" / "adapter"), "--log", str(log)]
    _slea(["evaluate", job.recipe, *adapter, *settings, "evaluation.temperature=0"], run)
    metrics = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    panels = [json.loads(line) for line in (run / "train" / "evaluation.jsonl").read_text().splitlines()]
    greedy = [one.success for one in read_trajectories(log)]
    return Result(
        study=job.study,
        arm=job.arm,
        seed=job.seed,
        changes=dict(job.changes),
        curve=tuple(_point(line["metrics"]) for line in metrics),
        before=next(panel for panel in panels if panel["moment"] == "before"),
        after=next(panel for panel in panels if panel["moment"] == "after"),
        greedy={"n": len(greedy), "successes": sum(greedy)},
        cpu_seconds=round(spent, 1),
        resumed=resumed,
        version=version("slea-llm"),
    )


def forget(job: Job, work: Path) -> None:
    """Remove the folder of a run whose result is kept."""
    shutil.rmtree(work / job.name, ignore_errors=True)


def _point(metrics: Mapping[str, float]) -> Point:
    played = round(metrics["episodes/played"])
    return Point(played=played, successes=round(metrics["episodes/success"] * played), turns=metrics["episodes/turns"])


def _settings(changes: Mapping[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in changes.items()]


def _slea(arguments: Sequence[str], run: Path) -> float:
    """Run one command; its CPU seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "slea_llm", *arguments]
    with (run / "output.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
