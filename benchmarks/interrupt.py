"""Interrupt the demo at random moments and look at what lies on the disk: everything must be whole or absent.

    python benchmarks/interrupt.py --times 20

One small pipeline (warm start, training, export with proof, scores) is timed once. Then it is started again and again,
each time in an empty folder, and its whole process group gets SIGINT (Ctrl-C) or, with `--kill`, SIGKILL at a moment
drawn evenly from that time. After every interrupt each file is read with the project's own readers; a run that has a
checkpoint is resumed to its end. Exit code 1 when anything was half-written or could not be resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slea_llm import checkpoint, folders, storage
from slea_llm.errors import SleaError

RECIPE = "recipes/order_taking_tiny.yaml"
SMALL = (
    "warm_start.dialogues=300",
    "warm_start.epochs=1",
    "trainer.iterations=6",
    "trainer.save_every=1",
    "trainer.critic_warmup_iterations=0",
    "trainer.epochs=1",
    "rollout.episodes=16",
    "evaluation.tasks=16",
)
GRACE_SECONDS = 60


class Pipeline:
    """The commands of `make demo`, small, in a folder of their own."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        base = folder / "base"
        changes = [
            *SMALL,
            f"generation.name={engine}",
            f"run.output_dir={folder / 'run'}",
            f"warm_start.output={base}",
            f"model.base={base}",
        ]
        slea = [sys.executable, "-m", "slea_llm"]
        launch = [
            str(Path(sys.executable).with_name("accelerate")), "launch",
            "--config_file", "recipes/accelerate/single.yaml", "-m", "slea_llm",
        ]  # fmt: skip
        self.train = [*launch, "train", RECIPE, *changes]
        logs, scores = str(folder / "run" / "rollouts"), str(folder / "scores")
        self.commands = [
            [*slea, "warm-start", RECIPE, *changes],
            self.train,
            [*slea, "export", str(folder / "run")],
            [*slea, "score", logs, "--recipe", RECIPE, "--output", scores],
        ]

    def run(self, *, until: float | None = None, sent: signal.Signals = signal.SIGINT) -> tuple[str, float]:
        """Run the commands, to the end or until so many seconds have passed; the command that was last, and seconds."""
        started = time.monotonic()
        for command in self.commands:
            name = next(word for word in command if word in ("warm-start", "train", "export", "score"))
            process = self.start(command)
            try:
                left = None if until is None else max(0.0, until - (time.monotonic() - started))
                code = process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, sent)
                process.wait(timeout=GRACE_SECONDS)
                return name, time.monotonic() - started
            if code:
                raise SystemExit(f"{name} ended with exit code {code}; see {self.folder / 'output.log'}")
        return "none", time.monotonic() - started

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "output.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def resume(self) -> str | None:
        """Go on from the newest checkpoint to the end; what went wrong, or None."""
        code = self.start([*self.train, "--resume"]).wait()
        if code:
            return f"resuming ended with exit code {code}"
        lines = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        iterations = [line["iteration"] for line in lines]
        if iterations != list(range(1, len(iterations) + 1)):
            return f"the resumed run logged iterations {iterations}"
        return None


def faults(pipeline: Pipeline, *, killed: bool) -> Iterator[str]:
    """What is half-written below the folder. A process that was killed may leave scratch folders, nothing else."""
    run = pipeline.folder / "run"
    if not killed:
        # An old checkpoint on its way out is renamed first; the next save removes what is left of it.
        left = (path for path in pipeline.folder.rglob("*.partial-*") if not path.name.endswith("-pruned"))
        yield from (f"left behind: {path}" for path in left)
    for whole in (pipeline.folder / "base", *run.glob("export*")):
        if whole.is_dir() and not any(whole.glob("*.safetensors")) and not any(whole.rglob("*.safetensors")):
            yield f"{whole} holds no weights"
    for manifest in pipeline.folder.rglob(folders.MANIFEST):
        if ".partial-" not in str(manifest):
            yield from (
                f"{manifest.parent}: {name} is not what the manifest says"
                for name in folders.changed_files(manifest.parent)
            )
    for path in (run / "checkpoints").glob("step-*"):
        try:
            checkpoint.read(path)
        except SleaError as error:
            yield f"{path}: {error}"
    for path in [
        *run.glob("*.jsonl"),
        *(run / "rollouts").glob("*.jsonl"),
        *(pipeline.folder / "scores").glob("*.scores.jsonl"),
    ]:
        yield from _log_faults(path)


def _log_faults(path: Path) -> Iterator[str]:
    try:
        scored = path.parent.name in ("rollouts", "scores")
        count = sum(1 for _ in (storage.read_scored(path) if scored else storage.read_json_lines(path)))
    except SleaError as error:
        yield f"{path}: {error}"
    else:
        if not count and not scored:
            yield f"{path} is empty"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--kill", action="store_true", help="SIGKILL instead of SIGINT")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sent = signal.SIGKILL if options.kill else signal.SIGINT
    # A shell's background jobs are told to ignore SIGINT, and would hand that on to the commands.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    moments = np.random.default_rng(options.seed)
    broken = 0
    with tempfile.TemporaryDirectory() as scratch:
        whole = Pipeline(_empty(Path(scratch) / "whole"), options.engine)
        _, seconds = whole.run()
        print(f"uninterrupted: {seconds:.1f} s, {list(faults(whole, killed=False)) or 'nothing half-written'}")
        for number in range(options.times):
            pipeline = Pipeline(_empty(Path(scratch) / f"{number}"), options.engine)
            command, after = pipeline.run(until=float(moments.uniform(0.0, seconds)), sent=sent)
            found = list(faults(pipeline, killed=options.kill))
            resumed = "no checkpoint yet"
            if command != "warm-start" and checkpoint.latest_complete(
                pipeline.folder / "run" / "checkpoints", report=print
            ):
                problem = pipeline.resume()
                resumed = problem or "resumed to the end"
                found += [problem] if problem else []
            broken += bool(found)
            print(
                f"{number + 1:2d}. {sent.name} after {after:5.1f} s in {command}: {found or 'whole'}; {resumed}",
                flush=True,
            )
            shutil.rmtree(pipeline.folder)
    print(f"{options.times - broken} of {options.times} left everything whole")
    return 1 if broken else 0


def _empty(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
