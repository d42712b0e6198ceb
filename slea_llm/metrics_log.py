"""What an iteration says about itself: dialogues, updates, seconds by phase, as one JSON line."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slea_llm.errors import StorageError
from slea_llm.referee import PARTIES
from slea_llm.storage import cut_back

if TYPE_CHECKING:
    from slea_llm.interfaces import Reducer
    from slea_llm.questions import Usage
    from slea_llm.types import Trajectory
    from slea_llm.updates import UpdateReport


class MetricsLog:
    """Appends records to a JSON-lines file; its position goes into checkpoints, so that a resumed run has no twins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and flush it to the disk. Raises StorageError, naming path and cause."""
        line = json.dumps(record, allow_nan=False, sort_keys=True) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(line)
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            raise StorageError(f"could not write {self.path}: {error}") from error

    def rewind(self, position: int) -> None:
        """Cut the file back to a position taken earlier: what follows it belongs to updates that are made again.

        Raises StorageError when the file is shorter than that.
        """
        cut_back(self.path, position)


class PhaseClock:
    """Seconds by phase since the last `reset`, and the CPU seconds of this process since the last `cpu_seconds`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._cpu = time.process_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def reset(self) -> dict[str, float]:
        """Return the seconds by phase, rounded to milliseconds, and start again."""
        seconds = {name: round(value, 3) for name, value in self._seconds.items()}
        self._seconds = {}
        return seconds

    def cpu_seconds(self) -> float:
        """CPU seconds of all threads of this process since it was last asked, or since the clock was made."""
        before, self._cpu = self._cpu, time.process_time()
        return round(self._cpu - before, 3)


def peak_memory() -> dict[str, float]:
    """Most memory that this process has held so far, in GiB: `resident`, and `accelerator` (0 without one)."""
    # ru_maxrss is in KiB, on macOS in bytes.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    allocated = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"resident": round(resident, 3), "accelerator": round(allocated, 3)}


def episode_metrics(trajectories: Sequence[Trajectory], *, policy_version: int, reducer: Reducer) -> dict[str, float]:
    """Counts of an iteration's dialogues over all ranks, and means over those that neither failed nor are excluded.

    `episodes/stale` is the share sampled by an older policy than `policy_version`.
    """
    whole = [one for one in trajectories if not one.failed and not one.excluded]
    excluded_here = [one for one in trajectories if not one.failed and one.excluded]
    blamed_here = [sum(_blamed(one) == party for one in trajectories) for party in PARTIES]
    failed, excluded, played, empty, success, outcome, turns, tokens, truncated, stale = reducer.sum(
        [
            float(len(trajectories) - len(whole) - len(excluded_here)),
            float(len(excluded_here)),
            float(len(whole)),
            float(sum(one.sampled_tokens == 0 for one in whole)),
            float(sum(one.success for one in whole)),
            float(sum(one.outcome or 0.0 for one in whole)),
            float(sum(len(one.turns) for one in whole)),
            float(sum(one.sampled_tokens for one in whole)),
            float(sum(one.truncated for one in whole)),
            float(sum(one.policy_version != policy_version for one in whole)),
        ]
    )
    count = max(played, 1.0)
    blamed = reducer.sum([float(number) for number in blamed_here])
    return {
        "episodes/played": played,
        "episodes/failed": failed,
        "episodes/excluded": excluded,
        **{f"episodes/blamed/{party}": number for party, number in zip(PARTIES, blamed, strict=True)},
        "episodes/empty": empty,
        "episodes/success": success / count,
        "episodes/outcome": outcome / count,
        "episodes/turns": turns / count,
        "episodes/tokens": tokens / count,
        "episodes/truncated": truncated / count,
        "episodes/stale": stale / count,
    }


def _blamed(trajectory: Trajectory) -> Any:
    return (trajectory.provenance.get("blame") or {}).get("party")


def asking_metrics(spent: Mapping[str, Usage], *, reducer: Reducer) -> dict[str, float]:
    """What the chat models that parse or judge have cost in an iteration, summed over all ranks, by component."""
    metrics: dict[str, float] = {}
    for name in sorted(spent):
        own = {field.name: float(getattr(spent[name], field.name)) for field in fields(spent[name])}
        metrics |= {
            f"asking/{name}/{key}": total for key, total in zip(own, reducer.sum(list(own.values())), strict=True)
        }
    return metrics


def update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Means over the updates of an iteration; extremes by maximum."""
    means = {key: sum(one.metrics[key] for one in reports) / len(reports) for key in reports[0].metrics}
    peaks = {key: max(one.extremes[key] for one in reports) for key in reports[0].extremes}
    return {
        **means,
        **peaks,
        "update/kl_max": max(one.kl for one in reports),
        "update/count": float(len(reports)),
        "update/policy_count": float(sum(one.policy_stepped for one in reports)),
    }
