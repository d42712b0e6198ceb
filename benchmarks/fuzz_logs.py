"""Read mutated records of every log format: nothing may crash, and every record must be read or counted.

    python benchmarks/fuzz_logs.py [--records 100000] [--seed 0] [FILE ...]

The seeds are the small records of tests/support/log_samples.py, and the records of the files given. A mutation changes
the JSON (values, keys, order, depth) or the bytes (cut, flipped, inserted). Mutated records are read from JSON lines,
an array, a text or an archive; how many records a file holds is counted apart from the reader. What was read is written
as our own log and read back: it must be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slea_llm.logs.formats import LogRecord
from slea_llm.logs.reading import LogReader
from slea_llm.logs.sources import form_of
from tests.support.log_fuzz import run

LARGEST_SEED = 200_000
"""Characters of a record above which it is no seed: mutating it would take most of the time."""


def seeds_of(files: list[Path]) -> list[Any]:
    """The first three records of each file."""
    found: list[Any] = []
    for file in files:
        items = list(LogReader().raw_records(file, form_of(file)[0]))
        values = [item.value for item in items if isinstance(item, LogRecord)]
        found += [value for value in values[:3] if len(json.dumps(value)) < LARGEST_SEED]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="JSON or JSON lines whose records are seeds too")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = run(arguments.records, arguments.seed, seeds_of(arguments.files), Path(folder))
    seconds = time.perf_counter() - start
    print(f"{fuzz.records} mutated records in {seconds:.0f} s, seed {arguments.seed}: no crash, none lost")
    print(f"{fuzz.refused} counted as not read, {sum(fuzz.trajectories.values())} trajectories")
    print(", ".join(f"{name} {count}" for name, count in sorted(fuzz.trajectories.items())))


if __name__ == "__main__":
    main()
