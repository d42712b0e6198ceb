"""Several processes as one: the accelerator of a run, sums across ranks, and who plays which dialogues."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from slea_llm.errors import ConfigError, MissingDependencyError, StartupCheckError

if TYPE_CHECKING:
    from slea_llm.settings import TrainerSettings


class AcceleratorReducer:
    """Sums and maxima across ranks, in float64, the same on every rank to the bit.

    The values of all ranks are gathered and added in rank order, so no rank can disagree about a denominator or about
    an early stop. NaN on one rank is NaN on all: everybody sees a bad value, and nobody waits for a rank that left.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def world_size(self) -> int:
        return int(self._accelerator.num_processes)

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._gather(values).sum(dim=0).tolist() if values else []

    def max(self, values: Sequence[float]) -> list[float]:
        return self._gather(values).amax(dim=0).tolist() if values else []

    def _gather(self, values: Sequence[float]) -> torch.Tensor:
        """Shape (ranks, len(values))."""
        own = torch.tensor([list(values)], dtype=torch.float64, device=self._accelerator.device)
        gathered: torch.Tensor = self._accelerator.gather(own)
        return gathered.cpu()


def make_accelerator(
    settings: TrainerSettings, *, output_dir: Path | None = None, expected_processes: int | None = None
) -> Accelerator:
    """The accelerator of this process, its world size already checked.

    `expected_processes` is what a recipe or launch config asks for; None: what the environment says. Raises
    StartupCheckError when fewer processes run than were asked for, and MissingDependencyError for a tracker that is not
    installed, which accelerate would leave out without a word.
    """
    available = sorted(str(name) for name in get_available_trackers())
    for name in settings.trackers:
        if name not in available:
            raise MissingDependencyError(
                f"tracker {name!r} is unknown or not installed; installed: {', '.join(available) or 'none'}; "
                f"try: pip install {name}"
            )
    accelerator = Accelerator(
        # Without a GPU, and not told to use the CPU, accelerate ignores the ranks of a launcher: each runs alone.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=settings.precision,
        log_with=list(settings.trackers) or None,
        project_dir=None if output_dir is None else str(output_dir),
    )
    assert_world_size(int(accelerator.num_processes), expected=expected_processes, environment=os.environ)
    return accelerator


def assert_world_size(running: int, *, expected: int | None, environment: Mapping[str, str]) -> None:
    """Raise StartupCheckError when the launcher was asked for other than the `running` number of processes.

    `accelerate launch --cpu --num_processes 2` and configs with `distributed_type: MULTI_CPU` start one process without
    a word. They leave a trace: the address of a rendezvous is set, and the size of the world is not.
    """
    mend = (
        "start it with `accelerate launch --multi_gpu --num_processes N` (it works on CPUs too) or with "
        "`torchrun --nproc_per_node N`; `--cpu` and `distributed_type: MULTI_CPU` start a single process"
    )
    if expected is not None and running != expected:
        raise StartupCheckError(f"{running} process(es) run where {expected} were asked for; {mend}")
    declared = environment.get("WORLD_SIZE")
    if declared is not None and int(declared) != running:
        raise StartupCheckError(f"the launcher started {declared} processes, but each of them runs alone; {mend}")
    launched = "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment
    if declared is None and launched and running == 1:
        raise StartupCheckError(f"the launcher was asked for more than one process and started only this one; {mend}")


def shard(groups: int, *, rank: int, world_size: int) -> range:
    """The consecutive groups that a rank plays; sizes differ by one at most, and a group is never split.

    Consecutive, so that the trajectories of all ranks, one rank after the other, are in the order of one process.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in 0 to {world_size - 1}")
    size, longer = divmod(groups, world_size)
    start = rank * size + min(rank, longer)
    return range(start, start + size + (rank < longer))
