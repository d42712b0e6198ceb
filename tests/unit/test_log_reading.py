"""Reading logs: form of a file, packing, damage, ids, and that every record is read or counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from slea_llm.errors import StorageError
from slea_llm.logs.reading import LogReader
from slea_llm.types import Trajectory


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
    write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    found = [[one.id for one in read(tmp_path / name)[0]] for name in ("a.jsonl", "b.json", "c.jsonl.gz")]
    assert found == [["e0", "e1", "e2"]] * 3


def test_what_cannot_be_read_is_counted_with_file_line_and_reason(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat(0), '{"id": ', chat(1), {"rows": 3}])
    found, reader = read(path)
    assert [one.id for one in found] == ["e0", "e1"]
    assert [(fault.line, fault.record) for fault in reader.faults] == [(2, 2), (4, 4)]
    assert str(reader.faults[0]).startswith(f"{path}, line 2: not JSON")
    assert (reader.records, reader.trajectories, reader.fault_count) == (4, 2, 2)
    with pytest.raises(StorageError, match="line 2"):
        read(path, strict=True)
