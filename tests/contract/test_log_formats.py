"""What every registered log format must keep. A new row needs a sample in tests/support/log_samples.py."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slea_llm import registry
from slea_llm.logs.anthropic import AnthropicMessages
from slea_llm.logs.atif import Atif
from slea_llm.logs.formats import JsonFormat, TextFormat
from slea_llm.logs.inspect_ai import InspectLog
from slea_llm.logs.nemo_gym import NemoGym
from slea_llm.logs.openai_chat import OpenAIChat
from slea_llm.logs.openhands import OpenHands
from slea_llm.logs.otel_genai import OtelGenAi
from slea_llm.logs.own import OwnLog
from slea_llm.logs.react import ReactLog
from slea_llm.logs.reading import LogReader
from slea_llm.logs.reflexion import ReflexionLog
from slea_llm.logs.sharegpt import ShareGpt
from slea_llm.logs.swe_agent import SweAgent
from slea_llm.logs.tau2_bench import Tau2Bench
from slea_llm.logs.tau_bench import TauBench
from slea_llm.logs.toolbench import ToolBench
from slea_llm.scoring import Scorer
from slea_llm.storage import write_trajectories
from slea_llm.types import Trajectory
from tests.support.components import build
from tests.support.log_samples import samples

FORMATS = sorted(registry.names("log_format"))
OURS: Mapping[str, type] = {
    "slea": OwnLog,
    "tau_bench": TauBench,
    "tau2_bench": Tau2Bench,
    "nemo_gym": NemoGym,
    "swe_agent": SweAgent,
    "openhands": OpenHands,
    "inspect": InspectLog,
    "atif": Atif,
    "toolbench": ToolBench,
    "otel_genai": OtelGenAi,
    "sharegpt": ShareGpt,
    "anthropic": AnthropicMessages,
    "reflexion": ReflexionLog,
    "react": ReactLog,
    "openai_chat": OpenAIChat,
}


def written(folder: Path, row: Any) -> Path:
    path = folder / ("log.txt" if isinstance(row, str) else "log.jsonl")
    path.write_text(row if isinstance(row, str) else json.dumps(row) + "\n", encoding="utf-8")
    return path


def read(path: Path, **options: Any) -> tuple[list[Trajectory], LogReader]:
    reader = LogReader(path, **options)
    return list(reader), reader


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_name_of_its_row_a_frozen_config_and_a_sample(name: str) -> None:
    found = registry.load("log_format", name)
    assert OURS[name] == found
    assert found.name == name
    assert found.__doc__
    assert dataclasses.is_dataclass(found.Config)
    assert vars(found.Config)["__dataclass_params__"].frozen
    assert issubclass(found, JsonFormat | TextFormat)
    assert samples()[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_is_found_by_its_content_and_comes_back_from_our_own_log_as_it_was(name: str, tmp_path: Path) -> None:
    for row in samples()[name]:
        path = written(tmp_path, row)
        found, reader = read(path)
        assert (set(reader.by_format), reader.fault_count) == ({name}, 0)
        assert all(one.provenance["source"]["format"] == name for one in found if name != "slea")
        assert found == read(path, format=name, strict=True)[0]
        write_trajectories(tmp_path / "own.jsonl", found)
        assert read(tmp_path / "own.jsonl")[0] == found


@pytest.mark.parametrize("name", FORMATS)
def test_every_reply_can_be_parsed_and_scored(name: str, tmp_path: Path) -> None:
    scorer = Scorer(build("parser", "auto"), [])
    for row in samples()[name]:
        for one in read(written(tmp_path, row))[0]:
            steps = scorer.score(one).steps
            assert {step.turn for step in steps} == {turn.index for turn in one.turns}
            assert [turn.index for turn in one.turns] == list(range(len(one.turns)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_of_another_form_is_counted_when_a_format_is_forced(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"nothing": 1}\n{"messages": 3}\n', encoding="utf-8")
    found, reader = read(path, format=name)
    assert found == []
    assert reader.fault_count >= 1


def test_formats_are_loaded_without_torch_or_numpy() -> None:
    code = (
        "import sys\nfrom slea_llm.logs.reading import LogReader\nLogReader()\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
