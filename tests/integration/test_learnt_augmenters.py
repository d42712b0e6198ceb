"""Learnt augmenters: what they learn, when their gate opens, and what a copy in a folder is held to."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slea_llm.assets import find
from slea_llm.augmenters.attention_credit import AttentionCredit
from slea_llm.augmenters.learnt import CARD, WEIGHTS
from slea_llm.augmenters.value_shaping import ValueShaping
from slea_llm.cli import main
from slea_llm.errors import CheckpointError, ConfigError, SleaError, StorageError
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.refitting import Refitting
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredStep, ScoredTrajectory
from tests.support import loop
from tests.support.components import build, fitted_augmenter, plain_orders
from tests.support.dialogue_mdp import FactsEnvironment, FactsUser, value
from tests.support.shaping import REPLY, talk
from tests.support.training import fresh_accelerator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums of several threads come in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_value_shaping_learns_what_a_process_is_worth(tmp_path: Path) -> None:
    """On a dialogue process whose values are known exactly, V before a turn is near them, at either lambda."""
    data = facts_dialogues(480)
    truth = [exact_values(one) for one in data[400:]]
    for lam in (1.0, 0.5):
        part = shaping(gamma=1.0, lam=lam, window=400)
        for number in range(0, 400, 40):
            part.fit(data[:number], data[number : number + 40], seed=number, folder=tmp_path / f"{lam}-{number}")
            part.load(tmp_path / f"{lam}-{number}")
        unseen = json.loads((tmp_path / f"{lam}-360" / CARD).read_text())["unseen"]
        assert unseen["explained"] > max(0.0, unseen["explained_by_place"])
        # Undiscounted, what the turns up to one pay adds up to V there less V at the start.
        found, known = [], []
        for one, values in zip(data[400:], truth, strict=True):
            paid = list(part.augment(one, 0.0).values())[:-1]
            found += list(np.cumsum(paid))
            known += [value - values[0] for value in values[1:]]
        assert np.corrcoef(found, known)[0, 1] > 0.9
        assert float(np.mean(np.abs(np.array(found) - np.array(known)))) < 0.15


def facts_dialogues(count: int) -> list[ScoredTrajectory]:
    environment, user = FactsEnvironment(), FactsUser()
    scorer = Scorer(TaggedParser(TaggedParser.Config()), [])
    found = []
    for seed in range(count):
        task = environment.task(seed)
        found.append(scorer.score(play(environment, user, environment.expert(task), task, seed=seed, max_turns=12)))
    return found


def exact_values(one: ScoredTrajectory) -> list[float]:
    """P(success) before every turn."""
    return [value(turn.index, len(turn.state_before["known"])) for turn in one.trajectory.turns]


def probed(data: list[ScoredTrajectory], *, sign: float) -> list[ScoredTrajectory]:
    """The dialogues with counterfactual scores whose size agrees with a reader's attention (`sign` 1) or opposes it."""
    reader = AttentionCredit(AttentionCredit.Config(read="attention"))
    reader.load(fitted_augmenter("attention_credit"))
    found = []
    for one in data:
        scores = [
            ScoredStep(turn=turn, step=step, evaluator="counterfactual", version="1", score=-(4 + sign * weight))
            for (turn, step), weight in reader.weights(one, 0.0).items()
        ]
        found.append(dataclasses.replace(one, scores=tuple(scores), evaluator_versions={"counterfactual": "1"}))
    return found


@pytest.mark.parametrize(("sign", "trusted"), [(1.0, True), (-1.0, False)])
def test_attention_is_used_where_counterfactuals_agree_with_it_and_replaced_where_not(
    tmp_path: Path, sign: float, trusted: bool
) -> None:
    data = probed(plain_orders(60)[20:], sign=sign)
    first, part = (AttentionCredit(AttentionCredit.Config()) for _ in range(2))
    first.load(fitted_augmenter("attention_credit"))
    assert first.agreement is None  # nothing was probed yet
    assert not first.trusts_attention
    first.fit([], data, seed=3, folder=tmp_path / "probed")
    part.load(tmp_path / "probed")
    assert part.agreement is not None
    assert np.sign(part.agreement) == sign
    assert part.trusts_attention is trusted
    forced = {read: AttentionCredit(AttentionCredit.Config(read=read)) for read in ("attention", "leave_one_out")}
    for one in forced.values():
        one.load(tmp_path / "probed")
    same = forced["attention" if trusted else "leave_one_out"]
    assert part.shares(data[0]) == same.shares(data[0])
    assert forced["attention"].shares(data[0]) != forced["leave_one_out"].shares(data[0])
    assert sum(part.shares(data[0]).values()) == pytest.approx(1.0)
    assert json.loads((tmp_path / "probed" / CARD).read_text())["agreement"] == pytest.approx(part.agreement, abs=1e-6)


def test_a_reader_attends_to_the_step_that_decides(tmp_path: Path) -> None:
    """One of four steps decides the end; what is read of it, left out, moves the prediction most."""
    rng = np.random.default_rng(0)
    data = []
    for number in range(160):
        wins, at = bool(rng.random() < 0.5), int(rng.integers(4))
        texts = ["fine", "maybe", "let us see", "hm"]
        texts[at] = "the right key" if wins else "the wrong door"
        rewards = [0.0] * 3 + [1.0 if wins else 0.0]
        ending: Any = "success" if wins else "failure"
        turns: Any = [[("reply", text)] for text in texts]
        data.append((at, talk(turns, rewards=rewards, termination=ending, name=f"t{number}")))
    part = AttentionCredit(AttentionCredit.Config(window=160))
    dialogues = [one for _, one in data]
    for number in range(0, 120, 20):
        part.fit(dialogues[:number], dialogues[number : number + 20], seed=number, folder=tmp_path / str(number))
        part.load(tmp_path / str(number))
    assert part.gate.open, part.gate.line
    hits = [max(shares := part.shares(one), key=shares.__getitem__)[0] == at for at, one in data[120:]]
    assert np.mean(hits) > 0.8
    weights = part.weights(data[0][1], 0.0)
    assert sum(weights.values()) == pytest.approx(4.0)


class Observed:
    """A part that is fitted on observed dialogues in a folder, and what was said."""

    def __init__(self, folder: Path, part: Any, *, main: bool = True, gather: Any = list) -> None:
        self.part, self.folder, self.said = part, folder, list[str]()
        self.refitting = Refitting(part, folder=folder, main=main, gather=gather, seed=7, report=self.said.append)

    def observe(self, first: int, last: int, data: list[ScoredTrajectory]) -> list[str]:
        """The versions in use after each of these iterations, eight dialogues in each."""
        versions = []
        for iteration in range(first, last):
            self.refitting.observe(iteration, data[8 * iteration : 8 * iteration + 8])
            versions.append(self.part.version)
        return versions


PARTS: dict[str, Callable[[], Any]] = {
    "value_shaping": lambda: ValueShaping(ValueShaping.Config(refresh_every=16, window=40)),
    "attention_credit": lambda: AttentionCredit(AttentionCredit.Config(refresh_every=16, window=40)),
}


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    """Fits come after two iterations of eight; a run that is cut after the third goes on as the whole one did."""
    data = plain_orders(60)
    whole = Observed(tmp_path / "whole", PARTS[name]())
    versions = whole.observe(0, 7, data)
    assert len(set(versions)) == 4  # unfitted, and three copies
    assert versions[1] == "unfitted"  # what is credited now was never learnt from before
    assert versions[2] == versions[3]  # a frozen copy in between
    cut = Observed(tmp_path / "cut", PARTS[name]())
    cut.observe(0, 3, data)
    state = json.loads(json.dumps(cut.refitting.state()))
    cut.observe(3, 7, data)  # goes on beyond the checkpoint, and is lost
    late = Observed(tmp_path / "cut", PARTS[name]())
    late.refitting.restore(state)
    assert late.observe(3, 7, data) == versions[3:]
    assert late.part.augment(data[50], 0.0) == whole.part.augment(data[50], 0.0)


def test_only_the_copies_that_checkpoints_name_are_kept(tmp_path: Path) -> None:
    data = plain_orders(60)
    run = Observed(tmp_path, PARTS["value_shaping"]())
    run.observe(0, 3, data)
    run.refitting.state()
    run.observe(3, 7, data)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["iteration-2", "iteration-6"]


def test_ranks_load_what_the_first_one_wrote(tmp_path: Path) -> None:
    data = plain_orders(48)
    parts = [PARTS["value_shaping"]() for _ in range(2)]
    mailbox: list[list[ScoredTrajectory]] = [[], []]
    barrier = threading.Barrier(2, timeout=30)

    def rank(index: int) -> list[str]:
        def gather(own: list[ScoredTrajectory]) -> list[ScoredTrajectory]:
            mailbox[index] = own
            barrier.wait()
            everyone = [one for piece in mailbox for one in piece]
            barrier.wait()
            return everyone

        run = Observed(tmp_path, parts[index], main=index == 0, gather=gather)
        return run.observe(0, 3, data[24 * index : 24 * index + 24])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second
    assert first[-1] != "unfitted"
    assert parts[0].augment(data[0], 0.0) == parts[1].augment(data[0], 0.0)


def test_a_fit_that_fails_leaves_the_copy_of_before(tmp_path: Path) -> None:
    part = ValueShaping(ValueShaping.Config(refresh_every=8, learn_from="successes"))
    failures = [turns_of(0, -1, termination="failure", name=f"t{n}") for n in range(32)]
    run = Observed(tmp_path, part)
    assert run.observe(0, 3, failures) == ["unfitted"] * 3
    assert "not fitted, the copy of before goes on: value_shaping: none of the dialogues succeeded" in run.said[0]
    assert not list(tmp_path.iterdir())


def test_a_part_starts_from_the_copy_that_an_earlier_run_fitted() -> None:
    data = plain_orders(60)
    classes: tuple[Any, ...] = (ValueShaping, AttentionCredit)
    for cls in classes:
        folder = fitted_augmenter(cls.name)
        loaded, started = cls(cls.Config()), cls(cls.Config(model=str(folder)))
        loaded.load(folder)
        assert started.version == loaded.version != "unfitted"
        assert started.gate == loaded.gate == cls.preflight(started.config)
        assert started.gate.open
        assert started.augment(data[0], 0.0) == loaded.augment(data[0], 0.0) != {}
        assert cls.preflight(cls.Config()) is None


def test_later_fits_go_on_from_that_copy_and_its_gate(tmp_path: Path) -> None:
    folder, data = fitted_augmenter("value_shaping"), plain_orders(60)
    started, fresh = (ValueShaping(ValueShaping.Config(model=model)) for model in (str(folder), ""))
    for name, part in (("started", started), ("fresh", fresh)):
        part.fit([], data[:16], seed=5, folder=tmp_path / name)
        part.load(tmp_path / name)
    assert json.loads((tmp_path / "started" / CARD).read_text())["unseen"]["dialogues"] == 40 + 16
    assert json.loads((tmp_path / "fresh" / CARD).read_text())["unseen"]["dialogues"] == 0
    assert started.gate.open
    assert not fresh.gate.open


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": "step"}, "level is 'turn', should be 'step'"),
        ({"gamma": 0.9}, "gamma is 0.99, should be 0.9"),
        ({"hidden": 0}, "hidden is 64, should be 0"),
        ({"learn_from": "successes"}, "learn_from is 'all', should be 'successes'"),
        ({"encoder": "use-multilingual"}, "encoder is 'hashing', should be 'use-multilingual'"),
    ],
)
def test_a_copy_of_other_settings_is_no_start(options: dict[str, Any], text: str) -> None:
    config = ValueShaping.Config(model=str(fitted_augmenter("value_shaping")), **options)
    for begin in (ValueShaping, ValueShaping.preflight):
        with pytest.raises(StorageError, match=text):
            begin(config)


def test_a_folder_without_weights_or_judgement_is_no_start(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fitted_augmenter("value_shaping"), tmp_path / "copy"))
    config = ValueShaping.Config(model=str(folder))
    with pytest.raises(StorageError, match="kind is 'value_shaping', should be 'attention_credit'"):
        AttentionCredit.preflight(AttentionCredit.Config(model=str(folder)))
    card = json.loads((folder / CARD).read_text())
    whole = card["unseen"]
    odd: list[Any] = [{"dialogues": 40}, {**whole, "dialogues": "forty"}, {**whole, "auc": "high"}, None, []]
    for unseen in odd:
        (folder / CARD).write_text(json.dumps({**card, "unseen": unseen}))
        with pytest.raises(StorageError, match="does not say how its copy was judged"):
            ValueShaping.preflight(config)
    (folder / CARD).write_text(json.dumps({**card, "unseen": {**whole, "auc": None}}))
    verdict = ValueShaping.preflight(config)
    assert verdict is not None
    assert not verdict.open
    (folder / WEIGHTS).unlink()
    for begin in (ValueShaping, ValueShaping.preflight):
        with pytest.raises(StorageError, match=r"holds (no fitted value_shaping|a card and no weights)"):
            begin(config)


def test_a_resumed_run_wants_the_copy_that_it_started_from(tmp_path: Path) -> None:
    folder = fitted_augmenter("value_shaping")
    started = ValueShaping(ValueShaping.Config(model=str(folder)))
    state = json.loads(json.dumps(Observed(tmp_path, started).refitting.state()))
    again = ValueShaping(ValueShaping.Config(model=str(folder)))
    Observed(tmp_path, again).refitting.restore(state)
    assert again.version == started.version
    with pytest.raises(CheckpointError, match=f"copy {started.version}, here is unfitted"):
        Observed(tmp_path, ValueShaping(ValueShaping.Config())).refitting.restore(state)


def test_a_training_run_is_shaped_from_its_first_update_by_a_copy_in_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fitted_augmenter("value_shaping", (("level", "step"), ("lam", 0.9)))
    base = loop.write_base(tmp_path / "base")
    recipe = find("recipes", "smoke/augment_value_shaping.yaml")
    paid = {}
    for name, start in (("fresh", ""), ("started", str(folder))):
        fresh_accelerator()
        options = [f"augmenters.value_shaping.model='{start}'", "augmenters.value_shaping.refresh_every=1000"]
        output = tmp_path / name
        assert main(["train", str(recipe), f"model.base={base}", f"run.output_dir={output}", *options]) == 0
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        paid[name] = [line["metrics"]["credit/paid/value_shaping"] for line in lines]
        said = capsys.readouterr().out
        assert ("value_shaping: gate open" if start else "value_shaping: gate shut") in said
    assert paid["fresh"] == [0.0, 0.0]
    assert all(paid["started"])
