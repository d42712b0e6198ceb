"""Three whole iterations on two ranks, each with its own sampler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launching import launch
from tests.support import loop

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.engine)])
def test_two_ranks_with_a_sampler_each_stay_one_policy(tmp_path: Path, engine: str) -> None:
    loop.write_base(tmp_path / "base")
    launch(tmp_path, [f"rollouts:{engine}"], processes=2)
    ranks = [json.loads((tmp_path / f"{engine}-rank{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
        assert (found["update"], found["served"]) == (6, 3)
        assert [version for _, version in found["dialogues"]] == [0, 0, 1, 1, 2, 2]
    names = [name for found in ranks for name, _ in found["dialogues"]]
    assert len(set(names)) == 12
    first, second = (load_file(tmp_path / f"{engine}-rank{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(bool(first[name].any()) for name in first if "lora_B" in name)


def test_two_ranks_replay_their_own_dialogues_and_resume_to_the_bit(tmp_path: Path) -> None:
    loop.write_base(tmp_path / "base")
    launch(tmp_path, ["replay"], processes=2)
    ranks = [json.loads((tmp_path / f"replay-rank{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
        assert found["cut"] == found["whole"]
        assert found["whole"]["update"] == 6
        assert len(found["whole"]["stored"]) == 4
    assert not set(ranks[0]["whole"]["stored"]) & set(ranks[1]["whole"]["stored"])
    weights = [
        load_file(tmp_path / f"replay-{name}-rank{rank}.safetensors") for name in ("cut", "whole") for rank in (0, 1)
    ]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in other)
    lines = (tmp_path / "replay-whole" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    assert [one["replay/drawn"] > 0 for one in metrics] == [False, True, True]
    assert all(one["replay/share"] <= 0.5 for one in metrics)
