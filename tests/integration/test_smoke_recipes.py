"""Every recipe of recipes/smoke/ trains to its end, all in this process, on one tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slea_llm.assets import find, names
from slea_llm.cli import main
from slea_llm.config import load_recipe
from slea_llm.planning import check
from tests.support import loop
from tests.support.training import fresh_accelerator

pytestmark = pytest.mark.integration

SMOKE = [name for name in names("recipes") if name.startswith("smoke/")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `slea warm-start` makes of these recipes, without the warm start."""
    return loop.write_base(tmp_path_factory.mktemp("base"))


def test_there_are_some() -> None:
    assert len(SMOKE) > 20


@pytest.mark.parametrize("name", SMOKE)
def test_a_smoke_recipe_trains(name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = find("recipes", name), tmp_path / "run"
    recipe = load_recipe(path)
    check(recipe)
    assert recipe.run.output_dir.endswith(Path(name).stem)
    fresh_accelerator()
    assert main(["train", str(path), f"model.base={base}", f"run.output_dir={output}"]) == 0
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, recipe.trainer.iterations + 1))
    for line in lines:
        assert all(math.isfinite(value) for value in line["metrics"].values())
        assert line["metrics"]["update/policy_count"] == line["metrics"]["update/count"] > 0
    assert load_recipe(output / "recipe.yaml").credit == recipe.credit
    if name == "smoke/atomic_actions.yaml":
        assert "every reply is one step" in capsys.readouterr().out
