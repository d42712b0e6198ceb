"""Starting the worker under `accelerate launch`, or alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(folder: Path, cases: list[str], *, processes: int) -> None:
    """Run `tests.distributed.worker` on these cases in so many processes; fails with what it said when it fails."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        options = f"--multi_gpu --num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
        launcher += ["accelerate.commands.launch", *options.split(), "--main_process_port", str(free_port()), "-m"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [*launcher, "tests.distributed.worker", str(folder), *cases],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
