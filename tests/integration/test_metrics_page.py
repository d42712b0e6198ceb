"""docs/metrics.md lists exactly the names that a run emits."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from slea_llm import registry
from slea_llm.encoders import HashingEncoder
from slea_llm.evaluation import EvaluationReport
from slea_llm.health import RULES
from slea_llm.imitation import Imitation
from slea_llm.interfaces import LossTerm
from slea_llm.losses.imitation import ImitationConfig
from slea_llm.losses.imitation_prototypes import PrototypeConfig
from slea_llm.settings import TrainerSettings
from tests.support import replay, training

pytestmark = pytest.mark.integration

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
PLACEHOLDERS = {
    r"asking/[\w/]+/(\w+)": r"asking/<component>/\1",
    r"credit/paid/\w+": "credit/paid/<part>",
    r"credit/unscored/\w+": "credit/unscored/<evaluator>",
    r"credit/share/\w+": "credit/share/<part>",
    r"credit/\w+/(advantage_\w+|reward_max|explained_variance)": r"credit/<stream>/\1",
}


WITH_WEIGHTS = {"credit/weights/max", "credit/weights/effective_share"}
"""Told only where weights enter the loss, as tests/unit/test_weighting.py has them."""


@pytest.fixture
def emitted(tmp_path: Path) -> set[str]:
    """Every name in the metrics of two iterations with all loss terms, as the page writes it."""
    model = training.policy(training.write_base(tmp_path / "base"))
    rng = np.random.default_rng(0)
    recorded = [
        [training.sampled_by(model, [training.random_dialogue(rng, f"{n}.{k}") for k in range(4)])] for n in "ab"
    ]
    settings = TrainerSettings(iterations=2, epochs=1, minibatch=4, microbatch=2, save_every=1)
    components = [registry.load("loss", name) for name in sorted(registry.ROWS["loss"].keys() - {"ppo", "value"})]
    losses: list[LossTerm] = [component(component.Config()) for component in components]
    options = {"encoder": "hashing", "fade_until": 1.0}
    chooser = Imitation(
        ImitationConfig(**options),  # type: ignore[arg-type]
        PrototypeConfig(**options),  # type: ignore[arg-type]
        encoders={"hashing": HashingEncoder()},
        streams=training.STREAMS,
    )
    with closing(replay.buffer(tmp_path / "replay")) as buffer:
        training.trainer(
            model, settings, recorded, tmp_path / "run", more_losses=losses, replay=buffer, imitation=chooser
        ).run()
    names: set[str] = set()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for own in ("seconds", "peak_gib"):
            names |= {f"{own}/{name}" for name in record.pop(own)}
        names |= record.pop("metrics").keys() | record.keys()
    for pattern, placeholder in PLACEHOLDERS.items():
        names = {re.sub(rf"^{pattern}$", placeholder, name) for name in names}
    return names


def documented() -> list[str]:
    """The names in the first column of every table."""
    cells = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_metric_is_described_and_every_description_is_of_a_metric(emitted: set[str]) -> None:
    assert sorted(documented()) == sorted(emitted | WITH_WEIGHTS)


def test_the_page_tells_every_alarm_with_its_threshold() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Alarms")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| **")]
    assert [cells[0].strip(" *") for cells in rows] == [rule.name for rule in RULES]
    for (_, when, meaning, mend), rule in zip(rows, RULES, strict=True):
        assert f" {rule.threshold:g}" in when
        assert (meaning.strip(), mend.strip()) == (rule.meaning, rule.mend)


def test_the_page_names_every_field_of_an_evaluation() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Evaluations")[2]
    missing = {field.name for field in dataclasses.fields(EvaluationReport)} - set(re.findall(r"`(\w+)`", section))
    assert not missing
