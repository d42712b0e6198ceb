"""Reading logs: the form of a file, packing, damage, ids, and that every record is read or counted."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from slea_llm.errors import ConfigError, StorageError
from slea_llm.logs import json_stream
from slea_llm.logs.json_stream import Decoded, JsonStream, NotJsonError
from slea_llm.logs.reading import LogReader, is_log
from slea_llm.storage import write_trajectories
from slea_llm.types import Trajectory
from tests.strategies import json_values
from tests.support.log_samples import inspect_log, inspect_sample, openhands, samples, tau2_bench, tau_bench


def chat(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"e{number}",
        "messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}],
        **more,
    }


def read(path: Path, **options: Any) -> tuple[list[Trajectory], LogReader]:
    reader = LogReader(path, **options)
    return list(reader), reader


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_lines_arrays_and_packed_files_hold_the_same_trajectories(tmp_path: Path) -> None:
    rows = [chat(number) for number in range(3)]
    lines = write_lines(tmp_path / "a.jsonl", rows).read_bytes()
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.compress(lines[:40]) + zstandard.compress(lines[40:]))
    (tmp_path / "e.json").write_text("\n\n".join(json.dumps(row, indent=1) for row in rows), encoding="utf-8")
    found = [[one.id for one in read(path)[0]] for path in sorted(tmp_path.iterdir())]
    assert found == [["e0", "e1", "e2"]] * 5


def test_br_073_a_log_with_byte_order_mark_and_crlf_is_read(tmp_path: Path) -> None:
    text = "\r\n".join(json.dumps(chat(number)) for number in (1, 2)) + "\r\n"
    for name, raw in {"a.jsonl": text.encode(), "b.json": json.dumps([chat(1), chat(2)]).encode()}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + raw)
        assert [one.id for one in read(tmp_path / name)[0]] == ["e1", "e2"]


def test_br_075_a_reward_that_is_nan_is_no_reward_and_is_flagged(tmp_path: Path) -> None:
    rows = [json.dumps(chat(1))[:-1] + ', "reward": NaN}', chat(2, reward=0.5), chat(3, reward="high")]
    found, reader = read(write_lines(tmp_path / "a.jsonl", rows))
    assert [one.outcome for one in found] == [None, 0.5, None]
    assert [one.termination for one in found] == ["unknown", "failure", "unknown"]
    assert reader.flags == {"non-finite number NaN": 1, "reward 'high' is no finite number": 1}
    array = tmp_path / "b.json"
    array.write_text(
        f"[{', '.join(row if isinstance(row, str) else json.dumps(row) for row in rows)}]", encoding="utf-8"
    )
    assert [one.outcome for one in read(array)[0]] == [None, 0.5, None]


def test_a_success_is_also_told_by_0_and_1_and_flagged_when_it_is_neither(tmp_path: Path) -> None:
    rows = [chat(1, success=1), chat(2, success=0), chat(3, success="yes"), chat(4, success=None)]
    found, reader = read(write_lines(tmp_path / "a.jsonl", rows))
    assert [one.termination for one in found] == ["success", "failure", "unknown", "unknown"]
    assert reader.flags == {"success 'yes' is neither true nor false": 1}


def test_br_077_a_message_of_12_million_characters_is_read(tmp_path: Path) -> None:
    row = {"messages": [{"role": "assistant", "content": "x" * 12_000_000}]}
    for name, text in {"a.jsonl": json.dumps(row), "b.json": json.dumps([row])}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (one,), reader = read(tmp_path / name)
        assert len(one.turns[0].text) == 12_000_000
        assert reader.records == 1


def test_br_097_half_characters_are_replaced_and_flagged_and_whole_ones_kept(tmp_path: Path) -> None:
    raw = '{"messages": [{"role": "user", "content": "\\ud83d\\ude80"}, {"role": "assistant", "content": "\\ud83d"}]}'
    for name, text in {"a.jsonl": raw, "b.json": f"[{raw}]"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (one,), reader = read(tmp_path / name)
        assert (one.turns[0].context[0].content, one.turns[0].text) == ("\U0001f680", "\ufffd")
        assert [flag for flag in reader.flags if flag.startswith("lone surrogate")]
        write_trajectories(tmp_path / "own.jsonl", [one])
        assert read(tmp_path / "own.jsonl")[0] == [one]


def test_br_093_an_id_that_leaves_its_folder_or_holds_a_command_is_only_a_text(tmp_path: Path) -> None:
    names = ["../out", "a; touch MARK", "x/../../y", "n" * 300, "\x1b[2J"]
    folder = tmp_path / "in"
    folder.mkdir()
    found, _ = read(write_lines(folder / "a.jsonl", [{**chat(0), "id": name} for name in names]))
    assert [one.id for one in found] == names
    write_trajectories(folder / "own.jsonl", found)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.jsonl", "in", "own.jsonl"]


def test_what_cannot_be_read_is_counted_with_file_line_and_reason(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat(0), '{"id": ', chat(1), {"rows": 3}, "[1, 2]", '"text"'])
    found, reader = read(path)
    assert [one.id for one in found] == ["e0", "e1"]
    assert [(fault.line, fault.record) for fault in reader.faults] == [(2, 2), (4, 4), (5, 5), (6, 6)]
    assert str(reader.faults[0]).startswith(f"{path}, line 2: not JSON")
    assert "no known format: an object with 'rows'" in str(reader.faults[1])
    assert (reader.records, reader.trajectories, reader.fault_count) == (6, 2, 4)
    lines = list(reader.lines())
    assert lines[0] == "1 files, 6 records, 2 trajectories (openai_chat 2), 4 not read"
    with pytest.raises(StorageError, match="line 2"):
        read(path, strict=True)


def test_an_unknown_role_names_the_nearest_and_shows_no_control_character(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": role, "content": "x"}]} for role in ("asistant", "\x1b[31m")]
    _, reader = read(write_lines(tmp_path / "a.jsonl", rows))
    assert "did you mean 'assistant'?" in reader.faults[0].reason
    assert "\x1b" not in reader.faults[1].reason


def test_a_broken_item_of_an_array_costs_that_item_alone(tmp_path: Path) -> None:
    items = [json.dumps(chat(number)) for number in range(4)]
    items[1] = '{"id": "e1", "messages": [{"role": nonsense, "content": "a, ] }"}]}'
    path = tmp_path / "a.json"
    path.write_text("[" + ",\n".join(items) + "]", encoding="utf-8")
    found, reader = read(path)
    assert [one.id for one in found] == ["e0", "e2", "e3"]
    assert [(fault.record, fault.line) for fault in reader.faults] == [(2, 2)]


def test_an_array_that_was_cut_gives_what_is_whole_and_says_so(tmp_path: Path) -> None:
    text = json.dumps([chat(number) for number in range(3)])
    path = tmp_path / "a.json"
    path.write_text(text[:-20], encoding="utf-8")
    found, reader = read(path)
    assert [one.id for one in found] == ["e0", "e1"]
    assert reader.fault_count == 1
    assert reader.records == 3


@pytest.mark.parametrize(("whole", "rows"), [(tau2_bench(), 1), (inspect_log(), 2)])
def test_rows_of_a_document_are_read_one_by_one_with_its_header(whole: Any, rows: int, tmp_path: Path) -> None:
    (tmp_path / "one_line.json").write_text(json.dumps(whole), encoding="utf-8")
    (tmp_path / "indented.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
    (first, _), (second, reader) = (read(tmp_path / name) for name in ("one_line.json", "indented.json"))
    assert [one.id for one in first] == [one.id for one in second]
    assert [one.task for one in first] == [one.task for one in second]
    assert reader.records == rows


def test_an_archive_is_read_without_writing_anything_and_a_bad_member_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "in" / "log.eval"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"task": "popularity", "model": "m"}}))
        for number in (10, 2, 1):
            archive.writestr(f"samples/{number}_epoch_1.json", json.dumps({**inspect_sample(), "id": number}))
        archive.writestr("samples/../../../out.json", "{broken")
    found, reader = read(path)
    assert [one.id for one in found] == ["popularity/1/1", "popularity/2/1", "popularity/10/1"]
    assert reader.fault_count == 1
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_files_that_are_no_logs_are_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "x")
    for name, raw in {
        "empty.jsonl": b"",
        "blank.json": b" \n ",
        "picture.json": b"\x89PNG\x00\x00",
        "other.eval": buffer.getvalue(),
        "cut.jsonl.gz": gzip.compress(b'{"a": 1}' * 100)[:20],
        "flipped.jsonl.gz": gzip.compress(json.dumps(chat(1)).encode())[:-20] + b"x" * 20,
        "flipped.jsonl.zst": zstandard.compress(json.dumps(chat(1)).encode())[:-20] + b"x" * 20,
        "none.json": b"[]",
        "prose.txt": b"Once upon a time.",
        "utf16.json": "[{}]".encode("utf-16"),
    }.items():
        (tmp_path / name).write_bytes(raw)
        found, reader = read(tmp_path / name)
        assert (found, reader.fault_count) == ([], 1), name
        assert name in str(reader.faults[0])
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / ".hidden.jsonl").write_text("{}")
    _, reader = read(tmp_path)
    assert reader.fault_count == 10
    assert reader.passed_over == [str(tmp_path / "LICENSE")]
    with pytest.raises(StorageError, match="does not exist"):
        read(tmp_path / "nothing")


def test_repeated_ids_are_told_apart_and_counted(tmp_path: Path) -> None:
    found, reader = read(write_lines(tmp_path / "a.jsonl", [chat(1), chat(1), chat(2)]))
    assert [one.id for one in found] == ["e1", "e1#2", "e2"]
    assert found[1].provenance["id_written"] == "e1"
    assert reader.repeated_ids == 1


def test_one_file_may_mix_formats(tmp_path: Path) -> None:
    rows = [rows[0] for name, rows in samples().items() if name != "reflexion"]
    _, reader = read(write_lines(tmp_path / "a.jsonl", rows))
    assert reader.fault_count == 0
    assert set(reader.by_format) == samples().keys() - {"reflexion"}


def test_an_array_of_events_is_one_trajectory_and_an_array_of_records_is_many(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(openhands()), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps([tau_bench(), tau_bench(trial=3)]), encoding="utf-8")
    assert [len(read(tmp_path / name)[0]) for name in ("a.json", "b.json")] == [1, 2]
    assert is_log(tmp_path / "a.json")
    assert not is_log(tmp_path / "a.json", besides=("openhands",))


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tau_bench'"):
        LogReader(format="taubench")


def test_our_own_logs_are_checked_and_damage_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    found, _ = read(write_lines(tmp_path / "a.jsonl", [chat(1), chat(2), chat(3)]))
    write_trajectories(path, found)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"q2"', b'"Q2"'))
    again, reader = read(path)
    assert [one.id for one in again] == ["e1", "e3"]
    assert "checksum is wrong" in reader.faults[0].reason
    assert (reader.records, reader.faults[0].line) == (3, 3)


def collected(raw: bytes) -> list[Any]:
    return [item.value for item in JsonStream(io.BytesIO(raw)).items() if isinstance(item, Decoded)]


@given(values=st.lists(json_values(), max_size=5), indent=st.none() | st.integers(0, 2), size=st.integers(1, 9))
def test_items_are_those_of_the_whole_array_whatever_is_read_at_a_time(values: Any, indent: Any, size: int) -> None:
    raw = json.dumps(values, indent=indent, ensure_ascii=len(values) % 2 == 0).encode()
    whole = json_stream.CHUNK
    try:
        json_stream.CHUNK = size
        assert collected(raw) == values
    finally:
        json_stream.CHUNK = whole


@given(st.binary(max_size=60))
def test_any_bytes_end_and_nothing_but_json_errors_comes(raw: bytes) -> None:
    items = list(JsonStream(io.BytesIO(b"[" + raw)).items())
    assert all(isinstance(item, Decoded | NotJsonError) for item in items)
