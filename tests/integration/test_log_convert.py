"""Converting logs onto a disk that is full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.log_samples import openai_chat

pytestmark = pytest.mark.integration

FULL_DISK = """
import resource, sys
from slea_llm.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
sys.exit(main(["convert", sys.argv[1], "--to", sys.argv[2], "--output", sys.argv[3]]))
"""


@pytest.mark.parametrize("target", ["slea", "openai_chat", "hub_dataset"])
def test_br_099_a_full_disk_leaves_nothing_half_written_and_names_path_and_cause(target: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(openai_chat())}\n" * 50, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "in.jsonl"), target, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert f"{tmp_path}/out" in result.stderr
    assert "too large" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
