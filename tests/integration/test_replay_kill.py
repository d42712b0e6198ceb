"""A kill -9 while the buffer is written loses no dialogue that was reported as stored."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from slea_llm.errors import StorageError
from slea_llm.segments import REPLAY, Segments, Stored
from tests.support import replay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

STORE_FOR_EVER = """
import itertools, sys
from pathlib import Path
from tests.support import replay
store = replay.buffer(Path(sys.argv[1]), capacity=int(sys.argv[2]))
for number in itertools.count():
    names = [f"{number}.{part}" for part in range(1 + number % 5)]
    store.add(replay.several(*names, version=number))
    print(*names, flush=True)
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", range(6))
def test_kill_9_loses_nothing_that_was_reported_as_stored(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    capacity = chance.choice([40, 100_000])  # with 40 a segment has 5 dialogues: the kill may fall on a new file
    command = [sys.executable, "-c", STORE_FOR_EVER, str(tmp_path), str(capacity)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reported: list[str] = []
    for _ in range(chance.randint(2, 60)):
        reported += process.stdout.readline().split()
    time.sleep(chance.uniform(0.0, 0.02))
    process.kill()
    reported += process.communicate()[0].split()
    assert process.returncode == -9
    with closing(replay.buffer(tmp_path, capacity=100_000)) as store:
        store.recover()
        found = list(store.ids)
        assert found[: len(reported)] == reported  # what follows was on the disk and not yet reported
        assert len(found) - len(reported) <= 5
        for name in reported:
            assert store.read(name).trajectory.policy_version == int(name.partition(".")[0])
        store.add(replay.several("after"))
    with closing(replay.buffer(tmp_path, capacity=100_000)) as store:
        store.recover()
        assert list(store.ids) == [*found, "after"]
        store.recover()
        assert list(store.ids) == [*found, "after"]


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_end_or_header_takes_nothing_with_it(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    stored = [Stored(scored=each, group=n, entered=0) for n, each in enumerate(replay.several("a", "b"))]
    with closing(Segments(tmp_path, size=9)) as segments:
        segments.append(stored)
    whole = segments.path(1).read_bytes()
    segments.path(1).write_bytes(whole[:-cut])
    segments.path(2).write_bytes(REPLAY.header()[:-7])
    segments.path(3).write_bytes(b"")
    again = Segments(tmp_path, size=9)
    with caplog.at_level(logging.WARNING):
        assert [record for _, record in again.recover()] == stored[: 2 if cut == 1 else 1]
    assert bool(caplog.records) == (cut > 1)
    with closing(again):
        (location,) = again.append(stored[1:])
        assert location.segment == 4
        assert again.read(location) == stored[1]


def test_a_line_that_was_changed_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with closing(replay.buffer(tmp_path)) as store:
        store.add(replay.several("a", "b"))
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"c"'))
    with pytest.raises(StorageError, match="line 2: the checksum is wrong"), closing(replay.buffer(tmp_path)) as store:
        store.recover()


def test_a_buffer_never_writes_over_what_is_there(tmp_path: Path) -> None:
    with closing(replay.buffer(tmp_path)) as store:
        store.add(replay.several("a"))
    with pytest.raises(StorageError, match="is there already"), closing(replay.buffer(tmp_path)) as store:
        store.add(replay.several("b"))
    with pytest.raises(ValueError, match="holds nothing"):
        Segments(tmp_path, size=0)
