"""Where a sampling engine runs: its environment, its process, its scratch folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from slea_llm.errors import ConfigError

# Set only where the user did not: no usage statistics, no log lines below errors, no binding of threads to cores
# (which starves every other process on a shared machine).
QUIET_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
)
LAUNCHER_VARIABLES: tuple[str, ...] = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def set_defaults() -> None:
    """Set the engine's environment variables that the user has not set."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def is_isolated(choice: str) -> bool:
    """Whether the engine gets a process of its own; in this one it would join (and at its end destroy) the ranks'
    process group. Raises ConfigError for `never` on several ranks.
    """
    import torch.distributed

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    grouped = ranks > 1 or (torch.distributed.is_available() and torch.distributed.is_initialized())
    if choice == "never" and grouped:
        raise ConfigError("generation.isolate=never does not go with a process group; use auto or always")
    return choice == "always" or (choice == "auto" and grouped)


@contextmanager
def engine_environment(*, isolated: bool) -> Iterator[None]:
    """Environment while the engine starts: where its core runs, and nothing of the launcher in a process of its own."""
    changes: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if isolated else "0"}
    if isolated:
        changes |= dict.fromkeys(LAUNCHER_VARIABLES)
        changes |= dict.fromkeys(name for name in os.environ if name.startswith("TORCHELASTIC_"))
        device = os.environ.get("LOCAL_RANK")
        if device is not None:
            visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
            changes["CUDA_VISIBLE_DEVICES"] = visible[int(device)] if int(device) < len(visible) else device
    saved = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(saved)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def scratch_folder() -> Path:
    """A private folder for weights on their way to the engine, in memory where the system offers it."""
    memory = Path("/dev/shm")  # noqa: S108  tmpfs of every Linux; mkdtemp makes a private folder in it
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="slea-engine-", dir=parent))
