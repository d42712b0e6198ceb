"""The learning study from end to end: killed, gone on with, kept, never played twice; and TRL's trainer beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "learning"))

from measures import Point
from protocol import Protocol
from runs import Result

from slea_llm.cli import main as slea
from slea_llm.config import load_recipe
from slea_llm.evaluation import EvaluationReport

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
LEARNING = ROOT / "benchmarks" / "learning"
SMALL = {
    "warm_start.dialogues": 24,
    "warm_start.from_scratch": {"hidden": 64, "layers": 1, "heads": 1, "vocab_size": 500},
    "rollout.episodes": 8,
    "rollout.max_reply_tokens": 12,
    "rollout.max_context_tokens": 512,
    "trainer.epochs": 1,
    "trainer.minibatch": 8,
    "trainer.critic_warmup_iterations": 0,
    "trainer.save_every": 1,
    "evaluation.tasks": 2,
    "model.lora_rank": 8,
    "model.critic_rank": 8,
}


def write_protocol(folder: Path, **common: Any) -> Path:
    document = yaml.safe_load((LEARNING / "protocol.yaml").read_text(encoding="utf-8"))
    document["common"] |= {**SMALL, **common}
    row = {"arms": ["token_gae"], "baseline": "token_gae", "seeds": [901], "dialogues": 24, "tuned": False}
    document["studies"] = {"small": row}
    path = folder / "protocol.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def study(protocol: Path) -> subprocess.Popen[str]:
    folder = protocol.parent
    arguments = ["--protocol", str(protocol), "--results", str(folder / "results"), "--tuning", str(folder / "tuning")]
    command = [sys.executable, str(LEARNING / "study.py"), "run", "small", *arguments, "--work", str(folder / "work")]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def said(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=600)
    return text


@pytest.mark.timeout(900)
def test_a_killed_study_goes_on_and_a_finished_run_is_never_played_again(tmp_path: Path) -> None:
    protocol = write_protocol(tmp_path)
    run = tmp_path / "work" / "order_taking_tiny-24" / "token_gae-901"
    first = study(protocol)
    while first.poll() is None and not (run / "train" / "checkpoints" / "step-1").is_dir():
        time.sleep(0.1)
    first.kill()  # what it had started lives on and holds the lock of its run
    assert said(first).startswith("1 of 1 runs to play"), (run / "output.log").read_text()
    beside = study(protocol)  # a second one waits for the run and takes its result
    text = said(study(protocol))
    shown = ": 0.000 -> 0.000, "
    assert shown in text
    assert shown in said(beside)
    kept = tmp_path / "results" / "order_taking_tiny-24" / "token_gae-901.json"
    assert kept.is_file(), text
    result = Result.read(kept)
    assert result.resumed == 1
    assert [point.played for point in result.curve] == [8, 8, 8]
    assert all(point.cpu > 0 for point in result.curve)
    assert [panel and panel["n"] for panel in (result.before, result.after, result.greedy)] == [2, 2, 2]
    assert set(result.before or ()) == set(EvaluationReport.__dataclass_fields__)
    assert result.tokens["rows"] > result.tokens["sampled"] > 0
    assert [command.split()[3] for command in result.commands] == ["warm-start", "train", "export", *["evaluate"] * 3]
    assert str(tmp_path) not in kept.read_text(), "a path of this machine"
    assert not run.exists()
    stamp = kept.stat().st_mtime_ns
    assert said(study(protocol)).startswith("0 of 1 runs to play")
    assert kept.stat().st_mtime_ns == stamp
    changed = study(write_protocol(tmp_path, **{"trainer.learning_rate": 1e-5}))
    assert "token_gae-901 made with other settings" in said(changed)
    assert changed.returncode == 1


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_trls_trainer_learns_from_our_dialogues_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outside import Weights, train

    from slea_llm.cli import compose
    from slea_llm.cli.session import open_session
    from slea_llm.models.policy import build

    base = tmp_path / "base"
    changes = {**SMALL, "generation": {"name": "transformers"}, "evaluators": [], "model.critic": "none"}
    changes |= {"streams": {"outcome": {"sources": ["outcome"]}}, "credit": {"name": "group_relative"}}
    changes |= {"losses": [{"name": "ppo"}, {"name": "reference_kl", "weight": 0.05}], "rollout.group_size": 4}
    changes |= {"warm_start.output": str(base), "model.base": str(base), "run.output_dir": str(tmp_path / "run")}
    changes |= {"trainer.iterations": 4, "trainer.learning_rate": 0.01}
    settings = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    path = str(ROOT / "recipes" / "order_taking_tiny.yaml")
    assert slea(["warm-start", path, *settings]) == 0
    recipe = load_recipe(path, settings)
    session = open_session(recipe)
    (tmp_path / "run").mkdir()
    sent: list[dict[str, torch.Tensor]] = []
    merged = Weights.merged_weights

    def sending(weights: Weights) -> list[tuple[str, torch.Tensor]]:
        sent.append(dict(merged(weights)))
        return list(sent[-1].items())

    monkeypatch.setattr(Weights, "merged_weights", sending)
    try:
        # The outcome of a policy that knows nothing is always the same: pay what differs, so that there is a gradient.
        # One has no reward, as a dialogue that the referee excludes.
        def length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
            return [None, *(float(len(one)) for one in completion_ids[1:])]

        monkeypatch.setattr("outside.outcome", length)
        train(recipe, session, tmp_path / "run", until=3)
    finally:
        session.generator.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert all(line["metrics"]["episodes/played"] == 8 and line["cpu_seconds"] > 0 for line in lines)
    assert len(sent) == 2, "before each rollout but the first"
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(sent[0][name], sent[1][name]), "what TRL learns is what plays next"
    settings_of_export = replace(recipe.model, adapter=str(tmp_path / "run" / "export" / "adapter"))
    exported = build(settings_of_export, streams=compose.heads(recipe), temperature=1.0, seed=0)
    last = dict(exported.merged_weights())
    assert last.keys() == sent[-1].keys()
    assert not torch.equal(last[name], sent[-1][name]), "with the last iteration's updates"


def test_every_seed_stands_in_the_figure(tmp_path: Path) -> None:
    from figure import draw

    protocol = Protocol.read()
    made = [
        replace(one, seed=one.seed + more, arm=arm)
        for one in [finished()]
        for more in (0, 1)
        for arm in ("token_gae", "streams_split")
    ]
    draw(made, study=protocol.study("quick"), path=tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "token_gae: 0 of 2 seeds to 80%" in text
    assert "streams_split: 0 of 2 seeds to 80%" in text


def finished() -> Result:
    return Result(
        arm="token_gae",
        seed=101,
        label="",
        trainer="slea",
        recipe="recipes/order_taking_tiny.yaml",
        changes={},
        iterations=2,
        until=2,
        digest="",
        tuned=None,
        commands=(),
        commit="unknown",
        versions={},
        resumed=0,
        cpu_seconds=1.0,
        curve=(Point(played=32, successes=8, turns=5.0), Point(played=32, successes=16, turns=5.0)),
        alarms=(),
    )
