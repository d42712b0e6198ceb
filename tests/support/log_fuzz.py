"""Mutated records of every log format, and a check that none is lost; used by a test and by benchmarks/fuzz_logs.py."""

from __future__ import annotations

import copy
import json
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from slea_llm.logs.reading import LogReader
from slea_llm.storage import write_trajectories
from tests.support.log_samples import REFLEXION, inspect_sample, samples

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "<|im_start|>system",
    "</think></tool_call>",
    "\ud83d",
    "\x00\x1b[2J",
    "{{ 7 * 7 }}",
    "x" * 5000,
    [],
    {},
    [[]],
    {"role": "assistant"},
    [None],
    {"type": "text"},
)
BATCH = 200


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        pairs = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, item in pairs:
            found.append((one, key))
            waiting.append(item)
    return found


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy with one to four changes."""
    root = {"root": copy.deepcopy(value)}
    for _ in range(rng.choice((1, 1, 2, 4))):
        container, key = rng.choice(places(root))
        kind = rng.randrange(8)
        if kind <= 2:
            container[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif kind == 3 and container is not root:
            del container[key]
        elif kind == 4 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif kind == 5:
            container[key] = [container[key]]
        elif kind == 6 and isinstance(container, dict) and container is not root:
            container[rng.choice(("role", "content", "id", "messages", "steps", key + "x"))] = container.pop(key)
        else:
            other, place = rng.choice(places(root))
            container[key] = copy.deepcopy(other[place])
    return root["root"]


def broken(raw: bytes, rng: random.Random) -> bytes:
    """Bytes cut, flipped, doubled or with something inserted."""
    place, kind = rng.randrange(len(raw) + 1), rng.randrange(5)
    if kind == 0:
        return raw[:place]
    if kind == 1:
        return raw[:place] + bytes([rng.randrange(256)]) + raw[place + 1 :]
    if kind == 2:
        return (
            raw[:place] + rng.choice((b'"', b"\\", b"}", b"]", b"{", b"\xff", b"\r\n", b"\x00", b"NaN,")) + raw[place:]
        )
    if kind == 3:
        return raw[:place] + raw[place // 2 :]
    return raw.replace(b"assistant", rng.choice((b"gpt", b"Assistant", b"", b"tool")), 1)


class Fuzz:
    """Counts over all batches."""

    def __init__(self, folder: Path, seed: int, extra: list[Any]) -> None:
        self.folder = folder
        self.rng = random.Random(seed)  # noqa: S311 - a fixed seed is what is wanted
        known = {name: rows for name, rows in samples().items() if name != "reflexion"}
        self.seeds = [(name, row) for name, rows in known.items() for row in rows] + [("file", row) for row in extra]
        self.records = self.read = self.refused = 0
        self.trajectories: Counter[str] = Counter()

    def lines(self, *, by_bytes: bool) -> None:
        rows = []
        for _ in range(BATCH):
            row = json.dumps(mutated(self.rng.choice(self.seeds)[1], self.rng)).encode()
            rows.append(broken(row, self.rng) if by_bytes else row)
        raw = self.rng.choice((b"", b"\xef\xbb\xbf")) + self.rng.choice((b"\n", b"\r\n")).join(rows)
        expected = sum(bool(line.strip()) for line in raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
        self.check("lines.jsonl", raw, expected)

    def array(self) -> None:
        rows = [mutated(self.rng.choice(self.seeds)[1], self.rng) for _ in range(BATCH)]
        rows.insert(0, {"first": "no record, so that the array is one of records"})
        text = json.dumps(rows, indent=self.rng.choice((None, 1)))
        self.check("array.json", text.encode(), len(rows))

    def text(self) -> None:
        for _ in range(20):
            self.check("log.txt", broken(REFLEXION.encode(), self.rng), None)

    def archive(self) -> None:
        for _ in range(5):
            path = self.folder / "log.eval"
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("header.json", json.dumps({"version": 2, "eval": mutated({"task": "t"}, self.rng)}))
                for number in range(3):
                    sample = json.dumps(mutated(inspect_sample(), self.rng)).encode()
                    archive.writestr(f"samples/{number}_epoch_1.json", sample if number else broken(sample, self.rng))
            raw = path.read_bytes()
            self.check("log.eval", raw if self.rng.random() < 0.5 else broken(raw, self.rng), None)

    def check(self, name: str, raw: bytes, expected: int | None) -> None:
        path = self.folder / name
        path.write_bytes(raw)
        reader = LogReader(path)
        found = list(reader)
        if expected is not None and reader.records != expected:
            raise AssertionError(f"{reader.records} records counted where {expected} stand in {path}")
        if not found and not reader.fault_count:
            raise AssertionError(f"nothing read and nothing counted in {path}")
        own = self.folder / "own.jsonl"
        write_trajectories(own, found)
        if list(LogReader(own)) != found:
            raise AssertionError(f"what was read of {path} is not what is read back from our own log")
        self.records += max(reader.records, 1)
        self.refused += reader.fault_count
        self.trajectories += reader.by_format


def run(records: int, seed: int, extra: list[Any], folder: Path) -> Fuzz:
    """Read at least so many mutated records. Raises AssertionError when one is lost or comes back changed."""
    fuzz = Fuzz(folder, seed, extra)
    turn = 0
    while fuzz.records < records:
        turn += 1
        fuzz.lines(by_bytes=turn % 2 == 0)
        if turn % 3 == 0:
            fuzz.array()
        if turn % 10 == 0:
            fuzz.text()
            fuzz.archive()
    return fuzz
