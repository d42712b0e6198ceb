"""What the benchmarks share: sides in processes of their own, their memory, paired ratios, and a table to print."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

GIB = 2**30
QUIET: Mapping[str, str] = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
START_SECONDS = 300
ROUND_SECONDS = 600


def model_folder(name: str) -> str:
    """The folder of a model that `slea fetch-model` knows (built on first use), or `name` itself: a folder or hub name.

    Raises SleaError when it has to be built and cannot be.
    """
    from slea_llm import fetch_model

    return str(fetch_model.fetch(name)) if name in fetch_model.KNOWN else name


class MemoryProbe:
    """Resident memory of this process (Linux, main memory only), and its peak since a moment of choice, in GiB."""

    def __init__(self) -> None:
        self._before = 0.0

    def mark(self) -> float:
        """Begin a new peak; returns what is resident now, without what was freed and kept for later."""
        self._before = self.whole_peak()
        release_freed()
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")

    def peak(self) -> float:
        """The most that was resident since the last `mark`."""
        return _status("VmHWM")

    def whole_peak(self) -> float:
        """The most that was ever resident."""
        return max(self._before, _status("VmHWM"))


def release_freed() -> None:
    """Give memory that was freed back to the system: an idle side must not starve the other (glibc)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024 / GIB
    raise KeyError(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round of one side: seconds by name, tokens that it trained or made, GiB by name.

    `cpu` are CPU seconds of all threads of the process: where other programs share the cores, seconds on the clock say
    little and these still compare, best with one thread.
    """

    seconds: Mapping[str, float]
    tokens: int
    memory: Mapping[str, float]
    cpu: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a side sends in place of a sample when it raised."""

    trace: str


class Side:
    """One contender in a process of its own: idle until asked for a round, so that two never run at once.

    `main(gate, *arguments)` is a module-level function. It calls `gate.wait()` before every round and `gate.send(...)`
    after it, and returns when `wait` gives False.
    """

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(main, Gate(theirs), arguments), daemon=False)
        self._process.start()
        theirs.close()

    def start(self) -> None:
        """Wait until it is ready for its first round."""
        self._receive(START_SECONDS)

    def round(self) -> Sample:
        """Let it run one round and wait for the result."""
        self._connection.send(True)
        sample = self._receive(ROUND_SECONDS)
        if not isinstance(sample, Sample):
            raise TypeError(f"a side sent {sample!r} in place of a sample")
        return sample

    def close(self) -> None:
        """End it; harmless when it has ended already."""
        if self._process.is_alive():
            self._connection.send(False)
            self._process.join(timeout=60)
        if self._process.is_alive():
            self._process.terminate()

    def _receive(self, seconds: int) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"a side gave no answer in {seconds} s")
        message = self._connection.recv()
        if isinstance(message, Failure):
            raise RuntimeError(f"a side failed:\n{message.trace}")  # noqa: TRY004  no wrong type: its own failure
        return message


class Gate:
    """A side's end of the line."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ready = False

    def wait(self) -> bool:
        """Until the next round is asked for; False when there will be none."""
        if not self._ready:
            self._connection.send(None)
            self._ready = True
        return bool(self._connection.recv())

    def send(self, message: object) -> None:
        release_freed()
        self._connection.send(message)


def _serve(main: Callable[..., None], gate: Gate, arguments: Sequence[Any]) -> None:
    try:
        main(gate, *arguments)
    except Exception:  # handed to the process that waits, which raises
        gate.send(Failure(trace=traceback.format_exc()))
        raise


def race(sides: Mapping[str, Side], *, rounds: int, warm_up: int = 1) -> dict[str, list[Sample]]:
    """Rounds of all sides, one after the other in turn, so that what slows the machine for a while slows all.

    The order is turned round every time. The first `warm_up` rounds are left out.
    """
    with ExitStack() as stack:
        for side in sides.values():
            stack.callback(side.close)
        for side in sides.values():
            side.start()
        samples: dict[str, list[Sample]] = {name: [] for name in sides}
        with tqdm(total=(warm_up + rounds) * len(sides), unit="round", leave=False) as bar:
            for number in range(warm_up + rounds):
                order = list(sides) if number % 2 == 0 else list(sides)[::-1]
                for name in order:
                    bar.set_description(name)
                    sample = sides[name].round()
                    bar.update()
                    if number >= warm_up:
                        samples[name].append(sample)
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of paired measurements and their smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def seconds_per_token(samples: Sequence[Sample], key: str, *, cpu: bool = False) -> list[float]:
    """One number a round, on the clock or in CPU seconds."""
    return [(sample.cpu if cpu else sample.seconds)[key] / sample.tokens for sample in samples]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, round by round: below 1 is less time."""
    return Spread.of([own / other for own, other in zip(ours, theirs, strict=True)])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def set_quiet() -> None:
    """Two threads unless the environment says otherwise, no network, no chatter; before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
