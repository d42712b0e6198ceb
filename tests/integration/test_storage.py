"""Storage: whole files, checked logs, exact round trips, and what a kill, a full disk and bad bytes do."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from slea_llm.errors import StorageError
from slea_llm.records import decode_trajectory, encode_trajectory
from slea_llm.storage import (
    SCORED,
    TRAJECTORIES,
    ScoredLog,
    TrajectoryLog,
    atomic_write,
    log_kind,
    read_json_lines,
    read_scored,
    read_trajectories,
    safe_name,
    write_scored,
    write_trajectories,
)
from slea_llm.types import ScoredStep, ScoredTrajectory, TokenSpan, TokenTrace, Trajectory, Turn
from tests.strategies import scored_trajectories, trajectories

ANY_FILE = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(name: str = "t", text: str = "hello", **provenance: Any) -> Trajectory:
    return Trajectory(
        id=name,
        task={"dish": "ramen"},
        environment="order_taking",
        seed=1,
        policy_version=2,
        turns=(Turn(index=0, context=(), text=text, span=TokenSpan(0, 1, 2), reward=10.0),),
        traces=(TokenTrace(token_ids=(5, 6), sampled_mask=(False, True), logprobs=(0.0, -0.1)),),
        outcome=10.0,
        termination="success",
        provenance=provenance,
    )


@given(record=trajectories())
@ANY_FILE
def test_trajectories_are_read_back_equal(tmp_path: Path, record: Trajectory) -> None:
    path = tmp_path / "a.jsonl"
    assert write_trajectories(path, [record, record]) == 2
    assert list(read_trajectories(path)) == [record, record]


@given(record=scored_trajectories())
@ANY_FILE
def test_scored_trajectories_are_read_back_equal(tmp_path: Path, record: ScoredTrajectory) -> None:
    path = tmp_path / "a.jsonl"
    assert write_scored(path, [record]) == 1
    assert list(read_scored(path)) == [record]


def test_every_line_is_strict_json_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, [make(text="a\u2028b\nc\r\x85\x1e")])
    header, line = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    assert json.loads(header)["version"] == 1
    assert json.loads(line)["turns"][0]["text"] == "a\u2028b\nc\r\x85\x1e"


def test_a_log_grows_and_goes_on_where_it_make(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    with TrajectoryLog(path) as log:
        log.append(make("a"), make("b"))
    with TrajectoryLog(path) as log:
        assert log.cut_bytes == 0
        log.append(make("c"))
        log.append()
    assert [t.id for t in read_trajectories(path)] == ["a", "b", "c"]


def test_a_scored_log_holds_scored_trajectories(tmp_path: Path) -> None:
    scored = ScoredTrajectory(trajectory=make(), steps=(), scores=(), parser="tagged")
    with ScoredLog(tmp_path / "s.jsonl") as log:
        log.append(scored)
    assert list(read_scored(tmp_path / "s.jsonl")) == [scored]


def test_a_file_torn_at_any_byte_loses_only_its_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, [make("a"), make("b")])
    header, first, last = path.read_bytes().splitlines(keepends=True)
    for keep in (*range(1, len(last) - 2, 17), len(last) - 2):
        path.write_bytes(header + first + last[:keep])
        caplog.clear()
        assert [t.id for t in read_trajectories(path)] == ["a"]
        assert "line 3, torn by an interrupted write, is left out" in caplog.text
        with TrajectoryLog(path) as log:
            assert log.cut_bytes == keep
            log.append(make("c"))
        assert [t.id for t in read_trajectories(path)] == ["a", "c"]


def test_a_whole_line_without_its_line_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, [make("a")])
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    with TrajectoryLog(path) as log:
        assert log.cut_bytes == 0
        log.append(make("b"))
    assert [t.id for t in read_trajectories(path)] == ["a", "b"]


def test_a_torn_header_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"format":"slea.tra')
    with TrajectoryLog(path) as log:
        assert log.cut_bytes == 19
        log.append(make("a"))
    assert [t.id for t in read_trajectories(path)] == ["a"]


WRITER = """
import sys
from slea_llm.storage import TrajectoryLog
from slea_llm.types import Trajectory
log = TrajectoryLog(sys.argv[1])
number = 0
while True:
    log.append(Trajectory(id=str(number), task={}, environment="e", seed=0, policy_version=0, turns=(), traces=(),
                          outcome=None, termination="failure", provenance={"pad": "x" * 20000}))
    number += 1
    print(number, flush=True)
"""


def test_kill_9_while_writing_loses_no_record_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 20:
            break
    writer.send_signal(signal.SIGKILL)
    acknowledged = 20 + len(writer.stdout.read().splitlines())
    writer.stdout.close()
    writer.wait()
    with TrajectoryLog(path):
        pass
    ids = [int(t.id) for t in read_trajectories(path)]
    assert ids == list(range(len(ids)))
    assert len(ids) >= acknowledged


def test_damage_within_a_file_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, [make("a", text="ramen"), make("b")])
    path.write_bytes(path.read_bytes().replace(b"hello", b"hullo").replace(b'"text":"ramen"', b'"text":"sushi"'))
    with pytest.raises(StorageError, match=r"a\.jsonl, line 2: the checksum is wrong"):
        list(read_trajectories(path))
    with pytest.raises(StorageError, match="line 2: the checksum is wrong"):
        TrajectoryLog(path)


def header(path: Path, **changes: Any) -> None:
    """Give a log another header, with a checksum that fits."""
    value = {"format": "slea.trajectories", "version": 1, **changes}
    body = json.dumps(value, separators=(",", ":")).encode()
    rest = path.read_bytes().split(b"\n", 1)[1]
    path.write_bytes(b'%s,"crc32":"%08x"}\n%s' % (body[:-1], zlib.crc32(body), rest))


def test_other_versions_and_kinds_are_refused_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, [make()])
    with pytest.raises(StorageError, match=r"is a slea\.trajectories log; a slea\.scored_trajectories log is needed"):
        list(read_scored(path))
    header(path, version=9)
    with pytest.raises(
        StorageError, match=r"has version 9 .* reads version 1: read it with the slea_llm that wrote it"
    ):
        list(read_trajectories(path))
    with pytest.raises(StorageError, match="has version 9"):
        TrajectoryLog(path)
    path.write_text('{"id": "e1"}\n')
    before = path.read_bytes()
    with pytest.raises(StorageError, match=r"does not begin with the header of a slea\.trajectories log"):
        list(read_trajectories(path))
    with pytest.raises(StorageError, match=r"does not begin with the header of a slea\.trajectories log"):
        TrajectoryLog(path)
    assert path.read_bytes() == before
    with pytest.raises(StorageError, match=r"nowhere\.jsonl could not be read: No such file"):
        list(read_trajectories(tmp_path / "nowhere.jsonl"))


def test_the_kind_of_a_log_is_told_by_its_header(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.jsonl", [])
    write_scored(tmp_path / "s.jsonl", [])
    assert log_kind(tmp_path / "t.jsonl") == TRAJECTORIES.name
    assert log_kind(tmp_path / "s.jsonl") == SCORED.name
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(StorageError, match="does not begin with the header of a slea log"):
        log_kind(tmp_path / "x.jsonl")


@pytest.mark.parametrize("change", [{"surprise": 1}, {"turns": None}, {"termination": "won"}, {"outcome": "10"}])
def test_a_record_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode_trajectory({**encode_trajectory(make()), **change})


def test_br_073_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id":"e1"}\r\n{"id":"e2"}\r\n')
    assert [line.value["id"] for line in read_json_lines(path)] == ["e1", "e2"]


def test_br_073_our_own_logs_survive_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, [make("e1"), make("e2")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert [t.id for t in read_trajectories(path)] == ["e1", "e2"]
    with TrajectoryLog(path) as log:
        log.append(make("e3"))
    assert [t.id for t in read_trajectories(path)] == ["e1", "e2", "e3"]


def test_br_075_nan_is_written_as_null_with_a_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, [make(reward=float("nan"), limit=float("inf"))])

    def strict(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    written = json.loads(path.read_bytes().splitlines()[1], parse_constant=strict)
    assert written["provenance"] == {"reward": None, "limit": None}
    assert written["flags"] == [
        "non-finite number nan at /provenance/reward",
        "non-finite number inf at /provenance/limit",
    ]
    (read,) = read_trajectories(path)
    assert read.provenance == {"reward": None, "limit": None}
    assert "non-finite number nan at /provenance/reward" in caplog.text


def test_br_075_nan_is_read_as_null_with_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id":"e1","reward":NaN}\n\n{"id":"e2","reward":0.5}\n')
    lines = list(read_json_lines(path))
    rewards = [line.value["reward"] for line in lines if line.value["reward"] is not None]
    assert sum(rewards) / len(rewards) == 0.5
    assert [line.flags for line in lines] == [("non-finite number NaN",), ()]
    assert [line.number for line in lines] == [1, 3]


def test_a_nan_where_a_number_must_stand_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    bad = ScoredStep(turn=0, step=0, evaluator="e", version="1", score=0.5, parts={"x": float("nan")})
    scored = ScoredTrajectory(trajectory=make(), steps=(), scores=(bad,), parser="tagged")
    path = tmp_path / "s.jsonl"
    with ScoredLog(path) as log:
        log.append(dataclasses.replace(scored, scores=()))
        before = path.read_bytes()
        with pytest.raises(StorageError, match=r"a record of slea\.scored_trajectories cannot be written"):
            log.append(dataclasses.replace(scored, scores=()), scored)
        assert path.read_bytes() == before
    with pytest.raises(StorageError, match="cannot be written"):
        write_trajectories(tmp_path / "b.jsonl", [make(when=object())])
    assert not (tmp_path / "b.jsonl").exists()


def test_br_077_a_line_of_12_million_characters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    size = 12_000_000
    path.write_bytes(b'{"t":"' + b"x" * size + b'"}\n')
    tracemalloc.start()
    (line,) = read_json_lines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(line.value["t"]) == size
    assert peak <= 6 * size
    path.unlink()
    write_trajectories(path, [make(text="x" * size)])
    tracemalloc.start()
    (record,) = read_trajectories(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(record.turns[0].text) == size
    assert peak <= 6 * size


def test_br_097_half_characters_are_replaced_and_flagged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('"\\ud83d\\ude80"\n"\\ud83d"\n')
    first, second = read_json_lines(path)
    assert (first.value, first.flags) == ("\U0001f680", ())
    assert second.value == "\ufffd"
    assert second.flags == ("lone surrogate at /",)
    write_trajectories(path, [make(text="a\ud83db", key="\ude80")])
    (read,) = read_trajectories(path)
    assert read.turns[0].text == "a\ufffdb"
    assert json.loads(path.read_bytes().splitlines()[1])["flags"][0] == "lone surrogate at /provenance/key"


def test_bytes_that_are_not_utf_8_are_flagged_and_broken_json_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"a\xffb"\n{"a": \n')
    lines = read_json_lines(path)
    assert next(lines).flags == ("not UTF-8 at byte 2",)
    with pytest.raises(StorageError, match=r"a\.jsonl, line 2: not JSON"):
        next(lines)


FULL_DISK = """
import resource, sys
from slea_llm.errors import StorageError
from slea_llm.storage import TrajectoryLog, atomic_write, read_trajectories, write_trajectories
from slea_llm.types import Trajectory

def make(number):
    return Trajectory(id=str(number), task={}, environment="e", seed=0, policy_version=0, turns=(), traces=(),
                      outcome=None, termination="failure", provenance={"pad": "x" * 30000})

folder = sys.argv[1]
write_trajectories(f"{folder}/step-10.jsonl", [make(10)])
log = TrajectoryLog(f"{folder}/log.jsonl")
log.append(make(0))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
errors = []
for write in (
    lambda: write_trajectories(f"{folder}/step-20.jsonl", [make(n) for n in range(20)]),
    lambda: log.append(make(1), make(2)),
):
    try:
        write()
    except StorageError as error:
        errors.append(str(error))
log.append(Trajectory(id="small", task={}, environment="e", seed=0, policy_version=0, turns=(), traces=(), outcome=None,
                      termination="failure"))
print(errors[0])
raise SystemExit(errors[1])
"""


def test_br_099_a_full_disk_leaves_what_was_there_and_nothing_half_written(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode != 0
    assert (
        result.stdout.strip() == f"{tmp_path}/step-20.jsonl could not be written: File too large; what it held is kept"
    )
    assert result.stderr.strip() == f"{tmp_path}/log.jsonl could not be written: File too large; what it held is kept"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.jsonl", "step-10.jsonl"]
    assert [t.id for t in read_trajectories(tmp_path / "step-10.jsonl")] == ["10"]
    assert [t.id for t in read_trajectories(tmp_path / "log.jsonl")] == ["0", "small"]


def test_a_log_goes_back_to_an_earlier_position_and_on_from_there(tmp_path: Path) -> None:
    path, names = tmp_path / "log.jsonl", ("a", "b", "c", "d")
    with TrajectoryLog(path) as log:
        log.append(make("a"), make("b"))
        position = log.position
        log.append(make("torn away"), make("too"))
    with TrajectoryLog(path) as log:
        log.rewind(position)
        log.append(*map(make, names[2:]))
        assert log.position == path.stat().st_size
        with pytest.raises(StorageError, match=rf"log\.jsonl holds {log.position} bytes"):
            log.rewind(log.position + 1)
    assert tuple(one.id for one in read_trajectories(path)) == names


def interrupted_write(path: Path) -> None:
    with atomic_write(path) as file:
        file.write("new")
        raise KeyboardInterrupt


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        interrupted_write(path)
    assert path.read_text() == "old"
    with atomic_write(path) as file:
        file.write("ä\n")
        assert path.read_text() == "old"
    assert path.read_bytes() == "ä\n".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    with pytest.raises(ValueError, match="mode 'r'"), atomic_write(path, "r"):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/a\.jsonl could not be written"):
        write_trajectories(tmp_path / "file" / "a.jsonl", [])
    with pytest.raises(StorageError, match=r"file/a\.jsonl could not be written"):
        TrajectoryLog(tmp_path / "file" / "a.jsonl")


@pytest.mark.parametrize(
    "name", ["../out", "a; touch MARK", "x/../../y", "n" * 300, "", ".", "..", ".hidden", "-rf", "a\n", "a b", "ä"]
)
def test_br_093_unsafe_names_are_refused(name: str) -> None:
    with pytest.raises(StorageError, match="is not a safe name"):
        safe_name(name)


@pytest.mark.parametrize("name", ["run-1", "a", "v0.1_final", "n" * 128])
def test_safe_names_are_kept(name: str) -> None:
    assert safe_name(name) == name
