"""Where the CPU seconds of training go: by part of an iteration, per 1,000 dialogues, and the costliest functions.

The real `slea train` in this process, with the recipe's own trainer, sampler and scoring, evaluations left out. Parts
are timed by wrapping the functions named below; a part's seconds are its own, without those of parts that it calls.

    slea warm-start recipes/order_taking_tiny.yaml
    OMP_NUM_THREADS=1 python benchmarks/profile_training.py                       # as the learning study runs it
    OMP_NUM_THREADS=2 python benchmarks/profile_training.py generation.name=vllm  # as the demo does
    OMP_NUM_THREADS=1 python benchmarks/profile_training.py --tool functions      # and cProfile; or: --tool operators
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from common import set_quiet, table

PARTS: tuple[tuple[str, str, str], ...] = (
    ("replies: decode and prefill", "slea_llm.generation.transformers", "ModelCore.advance"),
    ("replies: decode and prefill", "slea_llm.generation.vllm", "EngineCore.advance"),
    ("dialogues: user, environment, tokens", "slea_llm.rollout", "Rollout.run"),
    ("referee", "slea_llm.referee", "Referee.marked"),
    ("parse and score", "slea_llm.collection", "OnlineCollector._score"),
    ("log of dialogues", "slea_llm.storage", "ScoredLog.append"),
    ("log-probabilities and values", "slea_llm.trainer", "Trainer._stats"),
    ("credit", "slea_llm.trainer", "Trainer._credit"),
    ("update: collate", "slea_llm.trainer", "Trainer._collate"),
    ("update: forward", "slea_llm.models.policy", "PolicyCritic.forward"),
    ("update: losses", "slea_llm.updates", "Updater._loss"),
    ("update: backward", "accelerate", "Accelerator.backward"),
    ("update: clip", "slea_llm.updates", "Updater._clip"),
    ("update: AdamW", "accelerate.optimizer", "AcceleratedOptimizer.step"),
    ("update: rest", "slea_llm.trainer", "Trainer._update"),
    ("weights to the sampler", "slea_llm.trainer", "Trainer._load_sampler"),
    ("metrics line", "slea_llm.trainer", "Trainer._record"),
    ("checkpoint", "slea_llm.trainer", "Trainer.save"),
)
REST = "rest of the loop"


class PartClock:
    """CPU seconds of this process (all threads) by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = [REST]
        self._since = time.process_time()

    def reset(self) -> None:
        self._turn()
        self.seconds.clear()

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def _turn(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


class Tool:
    """A profiler that starts once the first iterations are over."""

    def __init__(self, kind: str, rows: int) -> None:
        self._kind, self._rows = kind, rows
        self._functions = cProfile.Profile()
        self._operators: Any = None

    def start(self) -> None:
        if self._kind == "functions":
            self._functions.enable()
        elif self._kind == "operators":
            from torch.profiler import ProfilerActivity, profile

            self._operators = profile(activities=[ProfilerActivity.CPU])
            self._operators.__enter__()

    def text(self) -> str:
        """The costliest functions or operators by their own time."""
        if self._kind == "functions":
            self._functions.disable()
            out = io.StringIO()
            pstats.Stats(self._functions, stream=out).strip_dirs().sort_stats("tottime").print_stats(self._rows)
            return out.getvalue()
        if self._kind == "operators":
            self._operators.__exit__(None, None, None)
            averages = self._operators.key_averages()
            return str(averages.table(sort_by="self_cpu_time_total", row_limit=self._rows, max_name_column_width=48))
        return ""


def main() -> None:
    arguments = _arguments()
    set_quiet()
    clock, tool = PartClock(), Tool(arguments.tool, arguments.rows)
    with tempfile.TemporaryDirectory(prefix="slea-profile-") as folder:
        marks = _watched(clock, tool, skip=arguments.skip, report=arguments.skip + arguments.iterations)
        _train(arguments, Path(folder))
    (cpu, wall), (cpu_end, wall_end, seconds) = marks
    dialogues = arguments.iterations * arguments.episodes
    print(
        f"\n{arguments.recipe} {' '.join(arguments.overrides)}: {dialogues} dialogues after {arguments.skip} "
        f"iterations, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}; per 1,000 dialogues "
        f"{1000 * (cpu_end - cpu) / dialogues:.1f} CPU s, {1000 * (wall_end - wall) / dialogues:.1f} s on the clock\n"
    )
    print(_parts_table(seconds, dialogues))
    print(f"\n{marks.tool_text}" if marks.tool_text else "")


class Marks(list[tuple[Any, ...]]):
    """Clock readings at the start and the end of what is measured, and what the tool said."""

    tool_text = ""


def _watched(clock: PartClock, tool: Tool, *, skip: int, report: int) -> Marks:
    """Wrap all parts, and take readings when `skip` and `report` iterations are done."""
    for part, module, name in PARTS:
        _patch(module, name, lambda function, part=part: clock.wrap(part, function))
    marks, done = Marks(), 0

    def counted(record: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            nonlocal done
            result = record(*args)
            done += 1
            if done == skip:
                clock.reset()
                marks.append((time.process_time(), time.perf_counter()))
                tool.start()
            elif done == report:
                clock._turn()
                marks.append((time.process_time(), time.perf_counter(), dict(clock.seconds)))
                marks.tool_text = tool.text()
            return result

        return timed

    _patch("slea_llm.trainer", "Trainer._record", counted)
    return marks


def _patch(module: str, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner, _, attribute = name.rpartition(".")
    target: Any = import_module(module)
    for part in owner.split("."):
        target = getattr(target, part)
    setattr(target, attribute, wrapped(getattr(target, attribute)))


def _train(arguments: argparse.Namespace, folder: Path) -> None:
    from slea_llm.cli.session import quiet_third_parties
    from slea_llm.cli.train import TrainingRun, keep_freed_memory
    from slea_llm.config import load_recipe
    from slea_llm.distributed import make_accelerator

    keep_freed_memory()
    settings = [f"model.base={arguments.base}"] if arguments.base else []
    settings += ["generation={name: transformers}"]
    own = [f"run.output_dir={folder / 'run'}", "evaluation.tasks=0"]
    recipe = load_recipe(arguments.recipe, [*settings, *arguments.overrides, *own])
    arguments.episodes = recipe.rollout.episodes
    accelerator = make_accelerator(recipe.trainer, output_dir=folder / "run")
    with quiet_third_parties(folder / "third_parties.log"):
        TrainingRun(recipe, accelerator).run(resume=False, until=arguments.skip + arguments.iterations)


def _parts_table(seconds: dict[str, float], dialogues: int) -> str:
    total = sum(seconds.values())
    order = sorted(seconds, key=lambda part: -seconds[part])
    rows = [[part, f"{1000 * seconds[part] / dialogues:.2f}", f"{seconds[part] / total:.1%}"] for part in order]
    return table(
        ["part", "CPU s per 1,000 dialogues", "share"], [*rows, ["all", f"{1000 * total / dialogues:.1f}", ""]]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/order_taking_tiny.yaml", help="recipe file")
    parser.add_argument("--base", default="", help="folder of the warm start (default: the recipe's model.base)")
    parser.add_argument(
        "--skip", type=int, default=5, help="iterations before measuring begins, at least 1 (default 5)"
    )
    parser.add_argument("--iterations", type=int, default=10, help="measured iterations (default 10)")
    parser.add_argument("--tool", choices=("none", "functions", "operators"), default="none")
    parser.add_argument("--rows", type=int, default=40, help="rows of the tool's table (default 40)")
    parser.add_argument("overrides", nargs="*", default=(), metavar="key.sub=value", help="settings to change")
    arguments = parser.parse_args()
    if min(arguments.skip, arguments.iterations) < 1:
        parser.error("--skip and --iterations start at 1")
    return arguments


if __name__ == "__main__":
    main()
