"""Score large logs with rules: peak memory against that of a small log, and records a second over a bare parse.

    python benchmarks/logs.py [--folder DIR] [--sizes 10 100 1000] [--record 14] [--forms lines array]

For each size (MB, of 10^6 bytes) a JSON lines file and one JSON array of tool-calling dialogues are made, and each is
scored in a process of its own by the command `slea score` with its rules, as a user would: read, cut, scored, written
and read back for the summary, without advantages (which it leaves out of large logs). `read` is `LogReader` alone. A
bare parse is `json.loads` of each line; for the array, which the standard library can only load whole, it is the same
records as lines. Peak memory is the largest resident size of that process, the interpreter and all imports included.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slea_llm import score_runs
from slea_llm.cli import main as slea
from slea_llm.logs.reading import LogReader

WORDS = (
    "the",
    "order",
    "is",
    "on",
    "its",
    "way",
    "to",
    "you",
    "and",
    "we",
    "can",
    "change",
    "it",
    "until",
    "it",
    "leaves",
)


def dialogue(number: int, kilobytes: int, rng: random.Random) -> dict[str, Any]:
    """A dialogue of 2 to 6 exchanges with thoughts, calls and results, of about this size, most of it results."""
    exchanges = rng.randint(2, 6)
    words = kilobytes * 220 // exchanges
    messages: list[dict[str, Any]] = [{"role": "system", "content": " ".join(rng.choices(WORDS, k=300))}]
    for turn in range(exchanges):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=15))})
        arguments = json.dumps({"order": f"W{rng.randrange(10**6)}", "reason": " ".join(rng.choices(WORDS, k=6))})
        calls = [{"id": f"c{turn}", "type": "function", "function": {"name": "find_order", "arguments": arguments}}]
        thought = f"First I look it up. Then I answer. {' '.join(rng.choices(WORDS, k=12))}."
        messages.append({"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": " ".join(rng.choices(WORDS, k=words))})
        messages.append({"role": "assistant", "content": f"{' '.join(rng.choices(WORDS, k=20))}. Anything else?"})
    return {"id": f"d{number}", "messages": messages, "reward": float(rng.random() < 0.5)}


def make(folder: Path, megabytes: int, kilobytes: int) -> tuple[Path, Path]:
    """A lines file and an array of the same records, of about this size each: 64 dialogues under ever new ids."""
    lines, array = folder / f"lines-{megabytes}.jsonl", folder / f"array-{megabytes}.json"
    rng = random.Random(kilobytes)  # noqa: S311 - a fixed seed is what is wanted
    pool = [json.dumps(dialogue(number, kilobytes, rng)).partition(",")[2] for number in range(64)]
    size = number = 0
    with lines.open("w", encoding="utf-8") as one, array.open("w", encoding="utf-8") as other:
        while size < megabytes * 1_000_000:
            text = f'{{"id": "d{number}",{pool[number % len(pool)]}'
            one.write(f"{text}\n")
            other.write(f"{',' if number else '['}\n{text}")
            size += len(text) + 1
            number += 1
        other.write("\n]\n")
    return lines, array


def bare(path: Path) -> None:
    """Parse every line and keep nothing."""
    start = time.perf_counter()
    count = sum(1 for _ in _values(path))
    report(count, time.perf_counter() - start)


def _values(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for raw in file:
            yield json.loads(raw)


def read_only(path: Path) -> None:
    """Read every trajectory and keep nothing."""
    start = time.perf_counter()
    reader = LogReader(path)
    count = sum(1 for _ in reader)
    report(count, time.perf_counter() - start)


def score(path: Path, parser: str) -> None:
    """What `slea score` does, and what its card counts."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        results = Path(folder) / "results"
        if code := slea(["score", str(path), "--no-credit", "--strict", "--parser", parser, "--output", str(results)]):
            raise SystemExit(code)
        seconds = time.perf_counter() - start
        report(score_runs.latest(results).card.counts["dialogues"], seconds)


def report(records: int, seconds: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"records": records, "seconds": seconds, "peak": peak}))


def apart(*arguments: str) -> dict[str, Any]:
    """What this script says when it is run in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def table(folder: Path, arguments: argparse.Namespace) -> None:
    peaks: dict[str, float] = {}
    print(
        f"{'file':<15} {'records':>8} {'parse/s':>8} {'read/s':>8} {'score/s':>8} {'of parse':>8} {'peak MB':>8} ratio"
    )
    for megabytes in arguments.sizes:
        files = make(folder, megabytes, arguments.record)
        made = dict(zip(("lines", "array"), files, strict=True))
        parsed = apart("--do", "bare", "--file", str(made["lines"]))
        for form in arguments.forms:
            read = apart("--do", "read", "--file", str(made[form]))
            scored = apart("--do", "score", "--file", str(made[form]), "--parser", arguments.parser)
            peak = max(read["peak"], scored["peak"])
            base = peaks.setdefault(form, peak)
            parse, reading, scoring = (one["records"] / one["seconds"] for one in (parsed, read, scored))
            print(
                f"{form:<6} {megabytes:>5} MB {scored['records']:>8} {parse:>8.0f} {reading:>8.0f} {scoring:>8.0f} "
                f"{scoring / parse:>8.4f} {peak / 1e6:>8.1f} {peak / base:>6.3f}",
                flush=True,
            )
        for path in made.values():
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the files are made; without it a temporary folder")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000], help="MB; the first is the base")
    parser.add_argument("--forms", nargs="+", choices=("lines", "array"), default=["lines", "array"])
    parser.add_argument("--record", type=int, default=14, help="kB of a dialogue (default 14, as in tau-bench)")
    parser.add_argument("--parser", default="auto", help="parser that cuts the replies (default: auto)")
    parser.add_argument("--do", choices=("bare", "read", "score"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.do == "bare":
        bare(arguments.file)
    elif arguments.do == "read":
        read_only(arguments.file)
    elif arguments.do == "score":
        score(arguments.file, arguments.parser)
    else:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            table(Path(folder), arguments)


if __name__ == "__main__":
    main()
