"""Learnt augmenters: what they learn, when their gate opens, and what a copy in a folder is held to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slea_llm.augmenters.learnt import CARD, WEIGHTS
from slea_llm.augmenters.value_shaping import ValueShaping
from slea_llm.errors import ConfigError, SleaError, StorageError
from slea_llm.types import ScoredTrajectory
from tests.support.components import build, plain_orders
from tests.support.shaping import REPLY, talk


def shaping(**options: Any) -> ValueShaping:
    return ValueShaping(ValueShaping.Config(**options))


def turns_of(*rewards: float, **options: Any) -> ScoredTrajectory:
    return talk([REPLY] * len(rewards), rewards=rewards, **options)


def test_successes_alone_teach_a_value_that_knows_no_failure(tmp_path: Path) -> None:
    data = [turns_of(0, 0, 0, 10.0 * (n < 4), termination="success" if n < 4 else "failure") for n in range(10)]
    said = {}
    for learn_from in ("all", "successes"):
        part = shaping(learn_from=learn_from, hidden=0)
        part.fit([], data, seed=0, folder=tmp_path / learn_from)
        part.load(tmp_path / learn_from)
        said[learn_from] = part.augment(data[0], 0.0)
    # The last turn of a success pays 0 - V: V is near the mean over all ends, or near what a success is worth.
    assert -said["all"][3, 0] == pytest.approx(4.0, abs=0.3)
    assert -said["successes"][3, 0] > 9.0


def test_it_pays_nothing_before_its_first_fit_and_changes_with_each(tmp_path: Path) -> None:
    data = plain_orders(40)
    part = shaping()
    assert part.augment(data[0], 0.0) == {}
    assert part.version == "unfitted"
    assert part.gate.line == "value_shaping: gate shut, weight 0: nothing was fitted yet"
    part.fit([], data[:20], seed=0, folder=tmp_path / "a")
    assert part.version == "unfitted"  # a fit leaves the present copy alone
    part.load(tmp_path / "a")
    assert "0 unseen dialogues were judged, 32 are needed" in part.gate.line
    first, version = part.augment(data[30], 0.0), part.version
    part.fit(data[:20], data[20:], seed=1, folder=tmp_path / "b")
    part.load(tmp_path / "b")
    assert part.version != version
    assert part.augment(data[30], 0.0) != first
    assert json.loads((tmp_path / "b" / CARD).read_text())["unseen"]["dialogues"] == 20


def test_the_same_fit_writes_the_same_bytes(tmp_path: Path) -> None:
    data = plain_orders(30)
    for name in ("a", "b"):
        part = shaping(lam=0.5, level="step")
        part.fit([], data[:15], seed=0, folder=tmp_path / name / "0")
        part.load(tmp_path / name / "0")
        part.fit(data[:15], data[15:], seed=1, folder=tmp_path / name / "1")
    assert (tmp_path / "a/1" / WEIGHTS).read_bytes() == (tmp_path / "b/1" / WEIGHTS).read_bytes()
    assert (tmp_path / "a/1" / CARD).read_bytes() == (tmp_path / "b/1" / CARD).read_bytes()


def test_the_copy_in_use_follows_slowly_or_at_once(tmp_path: Path) -> None:
    data = plain_orders(30)
    moves = {}
    for tau in (0.0, 0.001):
        part = shaping(tau=tau)
        part.fit([], data[:15], seed=0, folder=tmp_path / "0")
        part.load(tmp_path / "0")
        before = part.augment(data[0], 0.0)
        part.fit(data[:15], data[15:], seed=1, folder=tmp_path / "1")
        part.load(tmp_path / "1")
        moves[tau] = max(abs(pay - before[key]) for key, pay in part.augment(data[0], 0.0).items())
    assert 0.0 < moves[0.001] < 0.2 * moves[0.0]


def test_its_gate_opens_by_what_it_said_of_dialogues_before_it_learnt_from_them() -> None:
    part = build("augmenter", "value_shaping")
    assert part.gate.open
    assert "on 40 unseen dialogues AUC" in part.gate.line


def test_noise_keeps_the_gate_shut(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = []
    for one in plain_orders(60):
        wins = bool(rng.random() < 0.5)
        turns = (*one.trajectory.turns[:-1], dataclasses.replace(one.trajectory.turns[-1], reward=float(wins)))
        ended = dataclasses.replace(
            one.trajectory, turns=turns, outcome=float(wins), termination="success" if wins else "failure"
        )
        data.append(dataclasses.replace(one, trajectory=ended))
    part = shaping()
    for number, (known, fresh) in enumerate([([], data[:20]), (data[:20], data[20:])]):
        part.fit(known, fresh, seed=number, folder=tmp_path / str(number))
        part.load(tmp_path / str(number))
    assert not part.gate.open
    assert "AUC too low" in part.gate.line


def test_a_folder_that_is_not_its_own_is_refused(tmp_path: Path) -> None:
    data = plain_orders(10)
    part = shaping(hidden=4)
    part.fit([], data, seed=0, folder=tmp_path / "own")
    part.load(tmp_path / "own")
    version = part.version
    with pytest.raises(StorageError, match="holds no fitted value_shaping"):
        part.load(tmp_path / "none")
    build("augmenter", "attention_credit").fit([], data, seed=0, folder=tmp_path / "other")
    with pytest.raises(StorageError, match="kind is 'attention_credit', should be 'value_shaping'"):
        part.load(tmp_path / "other")
    (tmp_path / "own" / WEIGHTS).write_bytes((tmp_path / "own" / WEIGHTS).read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(StorageError, match="weights is"):
        part.load(tmp_path / "own")
    assert part.version == version


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SleaError, match="no finished dialogue"):
        shaping().fit([], [turns_of(0, termination="error")], seed=0, folder=tmp_path / "a")
    with pytest.raises(ConfigError, match="none of the dialogues succeeded"):
        shaping(learn_from="successes").fit([], [turns_of(0, termination="failure")], seed=0, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()
