"""The reward model: what its scores add up to, what it may see, when its gate opens, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slea_llm.encoders import HashingEncoder
from slea_llm.errors import ConfigError, EvaluatorError, StorageError
from slea_llm.evaluators.gate import MAX_ECE, MIN_AUC
from slea_llm.evaluators.reward_model import RewardModel
from slea_llm.evaluators.reward_model_card import CARD, WEIGHTS, Card, Reliability, judge
from slea_llm.evaluators.reward_model_features import EVIDENCE, SEGMENTS, prefixes
from slea_llm.evaluators.reward_model_memory import MEMORY, Memory, attached_apart
from slea_llm.evaluators.reward_model_network import NetworkShape, RewardNetwork, collate
from slea_llm.fitting.evaluator import fit_evaluator
from slea_llm.fitting.training import Example, multitask_loss
from slea_llm.scoring import Scorer
from slea_llm.types import Trajectory
from tests.strategies import trajectories
from tests.support.judged import BAD, GOOD, PARSER, TINY, cut, dialogue, drawn, fitted, labelled, of_replies

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fitted") / "model"
    fitted().save(target)
    return target


@pytest.fixture(scope="module")
def model(folder: Path) -> RewardModel:
    return RewardModel(RewardModel.Config(model=str(folder)))


def totals(model: RewardModel, trajectory: Trajectory) -> list[float]:
    return [word.score for word in model.score(trajectory, cut(trajectory)) if word.score is not None]


def test_the_gate_opens_for_what_beats_the_rules(model: RewardModel) -> None:
    card = Card.read(Path(model.config.model) / CARD)
    found = card.reliability["success"]
    assert found.auc is not None
    assert found.auc >= MIN_AUC
    assert found.auc > max(value for value in found.baselines.values() if value is not None)
    assert model.gate.open is (found.ece <= MAX_ECE)
    assert set(found.baselines) == {"position", "length", "type", "popularity", "popularity_with_overlap"}
    assert card.labels == {"outcome": 80 * 6}


def test_asking_scores_above_small_talk(model: RewardModel) -> None:
    good = sum(totals(model, of_replies("g", GOOD)))
    bad = sum(totals(model, of_replies("b", BAD)))
    assert good > 0.1 > -0.1 > bad


def test_one_vector_for_state_message_and_step_is_fitted_and_read_back_too(tmp_path: Path) -> None:
    fitted(encoding="joint").save(tmp_path / "joint")
    joint = RewardModel(RewardModel.Config(model=str(tmp_path / "joint")))
    assert Card.read(tmp_path / "joint" / CARD).encoding == "joint"
    assert sum(totals(joint, of_replies("g", GOOD))) > 0.1 > sum(totals(joint, of_replies("b", BAD)))


def test_scores_are_differences_of_success_and_add_up(model: RewardModel) -> None:
    words = model.score(one := dialogue(1, drawn(5), turns=4), cut(one))
    for left, right in itertools.pairwise(words):
        assert left.parts["success_after"] == right.parts["success_before"]
    total = sum(word.score or 0.0 for word in words)
    assert total == pytest.approx(words[-1].parts["success_after"] - words[0].parts["success_before"])
    assert {(word.evaluator, word.version) for word in words} == {("reward_model", model.version)}


def test_cutting_a_thought_into_more_steps_earns_nothing(model: RewardModel) -> None:
    one = of_replies("t", GOOD[:1])
    turn = dataclasses.replace(one.turns[0], text="<think>First this. Then that. And more.</think>What dish?")
    one = dataclasses.replace(one, turns=(turn,))
    fine = type(PARSER)(type(PARSER).Config(split_thoughts=True)).parse(turn, one.id, None)
    words = model.score(one, fine)
    assert len(words) == 4
    assert sum(word.score or 0.0 for word in words) == pytest.approx(
        words[-1].parts["success_after"] - words[0].parts["success_before"]
    )


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(0, 10_000))
def test_what_comes_later_changes_no_earlier_score(turns: int, seed: int) -> None:
    """The network is causal and the features look back only: random weights must keep it too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RewardNetwork(NetworkShape(dimension=512, segments=len(SEGMENTS["apart"]), width=8, members=1)).eval()
    rng, memory = drawn(seed), Memory.of([])
    whole = dialogue(0, rng, turns=turns + 2)
    other = dataclasses.replace(whole, turns=(*whole.turns[:turns], *dialogue(0, rng, turns=turns + 2).turns[turns:]))
    cutoff = dataclasses.replace(whole, turns=whole.turns[:turns])
    with torch.no_grad():
        first, second, third = (
            network(collate([memory.attached(row) for row in prefixes([(one, cut(one))], HashingEncoder(), "apart")]))[
                0
            ]
            for one in (whole, other, cutoff)
        )
    kept = len(third)
    torch.testing.assert_close(first[:kept], third)
    torch.testing.assert_close(second[:kept], third)


@settings(deadline=None, max_examples=20)
@given(trajectories())
def test_any_trajectory_gives_one_finite_position_a_step(trajectory: Trajectory) -> None:
    leaves = [step for step in cut(trajectory) if step.parent is None]
    (found,) = prefixes([(trajectory, leaves)], HashingEncoder(), "joint")
    assert len(found) == (len(leaves) + 1 if trajectory.turns else 0)
    assert found.evidence.shape[1:] == (len(EVIDENCE),)
    assert np.isfinite(found.evidence).all()
    assert np.isfinite(found.vectors).all()


def test_batches_give_what_one_by_one_gives(model: RewardModel) -> None:
    rng = drawn(3)
    many = [dialogue(number, rng, turns=1 + number % 5) for number in range(70)]
    together = list(Scorer(PARSER, [model]).score_many(many))
    for one, scored in zip(many, together, strict=True):
        alone = model.score(one, cut(one))
        assert [word.turn for word in alone] == [word.turn for word in scored.scores]
        np.testing.assert_allclose([w.score for w in alone], [w.score for w in scored.scores], atol=1e-6)  # type: ignore[arg-type]


def test_the_version_is_that_of_weights_and_card(folder: Path, model: RewardModel, tmp_path: Path) -> None:
    assert RewardModel(model.config).version == model.version
    fitted(40, seed=1).save(tmp_path / "other")
    other = RewardModel(RewardModel.Config(model=str(tmp_path / "other")))
    assert other.version != model.version
    before = other.version
    other.load(folder)
    assert other.version == model.version != before


def test_equal_seeds_fit_equal_models(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fitted(30, seed=2).save(tmp_path / name)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    assert (tmp_path / "a" / CARD).read_bytes() == (tmp_path / "b" / CARD).read_bytes()


def test_shuffled_labels_are_refused_by_the_gate() -> None:
    rows, labels = labelled(80)
    rng = np.random.default_rng(0)
    outcomes = rng.permutation([one.targets[0, 1] for one in rows])
    mixed = [
        dataclasses.replace(one, targets=np.where(one.weights > 0, outcome, 0.0))
        for one, outcome in zip(rows, outcomes, strict=True)
    ]
    found = fit_evaluator(mixed, labels, encoder="hashing", encoding="apart", settings=TINY, seed=0)
    auc = found.card.reliability["success"].auc
    assert auc is not None
    assert auc < 0.65
    assert not found.verdict.open
    assert "gate shut, weight 0: AUC too low" in found.verdict.line


def reliable(**changes: float | dict[str, float | None] | None) -> Reliability:
    measures = {"positive_share": 0.5, "auc": 0.7, "ece": 0.1, "brier": 0.2, "baselines": {"type": 0.6}}
    values = {"steps": 100, "dialogues": 20, "positive_dialogues": 10, **measures}
    return Reliability(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head", "changes", "reason"),
    [
        ("success", {}, None),
        ("success", {"auc": 0.699}, "AUC too low"),
        ("success", {"ece": 0.101}, "badly calibrated"),
        ("success", {"baselines": {"type": 0.6, "position": 0.7}}, "no better than position"),
        ("success", {"positive_dialogues": 9}, "9 dialogues of one outcome, 10 are needed"),
        ("success", {"positive_dialogues": 11}, "9 dialogues of one outcome, 10 are needed"),
        ("success", {"auc": None}, "only one kind of label"),
        ("success", {"baselines": {"type": None}}, None),
        ("label", {}, "no differences of success"),
    ],
)
def test_the_gate_and_its_line(head: str, changes: dict[str, float], reason: str | None) -> None:
    verdict = judge("reward_model", head, reliable(**changes))
    assert verdict.open is (reason is None)
    assert (reason or "gate open") in verdict.line
    assert "weight 0" in verdict.line or verdict.open


def test_without_a_fitted_model_every_step_has_the_reason() -> None:
    model = RewardModel(RewardModel.Config())
    one = of_replies("n", GOOD)
    words = model.score(one, cut(one))
    assert {word.score for word in words} == {None}
    assert all("slea fit-evaluator" in (word.reason or "") for word in words)
    assert not model.gate.open
    assert model.version == "unfitted"


def test_read_says_which_head(folder: Path) -> None:
    with pytest.raises(ConfigError, match="was fitted on success only"):
        RewardModel(RewardModel.Config(model=str(folder), read="label"))
    with pytest.raises(ConfigError, match="did you mean 'progress'"):
        RewardModel.Config(read="progres")  # type: ignore[arg-type]
    assert RewardModel(RewardModel.Config(model=str(folder), read="progress", cache=0)).gate.open in (True, False)


def copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for name in (CARD, WEIGHTS):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def test_what_is_no_whole_model_is_refused(folder: Path, tmp_path: Path) -> None:
    def load(target: Path) -> RewardModel:
        return RewardModel(RewardModel.Config(model=str(target)))

    with pytest.raises(EvaluatorError, match="no card of a fitted reward model"):
        load(tmp_path)
    target = copy(folder, tmp_path / "weights")
    (target / WEIGHTS).write_bytes(b"not safetensors")
    with pytest.raises(EvaluatorError, match="does not hold the weights"):
        load(target)
    target = copy(folder, tmp_path / "nan")
    tensors = load_file(target / WEIGHTS)
    name = sorted(tensors)[0]
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, target / WEIGHTS)
    with pytest.raises(EvaluatorError, match="is not finite"):
        load(target)
    target = copy(folder, tmp_path / "card")
    card = json.loads((target / CARD).read_text(encoding="utf-8"))
    for change, words in (({"format": 9}, "has format 9"), ({"encodr": "x"}, "did you mean 'encoder'")):
        (target / CARD).write_text(json.dumps({**card, **change}), encoding="utf-8")
        with pytest.raises(EvaluatorError, match=words):
            load(target)
    (target / CARD).write_text("{", encoding="utf-8")
    with pytest.raises(EvaluatorError, match="is not JSON"):
        load(target)


def test_a_fitted_model_never_overwrites(folder: Path) -> None:
    with pytest.raises(StorageError, match="exists already"):
        fitted(30).save(folder)


def test_memory_gives_smoothed_rates_and_none_of_the_own_group() -> None:
    rows, _ = labelled(6)
    memory, apart = attached_apart(rows)
    place = MEMORY.index("success_count_text") - len(MEMORY)
    for one, row in zip(rows, apart, strict=True):
        for position in range(1, len(row)):
            text = one.prefixes.texts[position]
            others = sum(other.prefixes.texts.count(text) for other in rows if other.group != one.group)
            assert float(row.evidence[position, place]) == pytest.approx(np.log1p(others), abs=1e-5)
    seen = memory.attached(rows[0].prefixes).evidence[1, place]
    assert float(seen) == pytest.approx(np.log1p(sum(one.prefixes.texts.count("go on.") for one in rows)), abs=1e-5)
    back = Memory.from_arrays(**memory.arrays())
    np.testing.assert_array_equal(back.attached(rows[1].prefixes).evidence, memory.attached(rows[1].prefixes).evidence)
    with pytest.raises(ValueError, match="is none"):
        Memory.from_arrays(np.zeros(3, np.int64), np.zeros((2, 4)))


def test_a_step_never_judged_has_even_odds_without_any_memory() -> None:
    rows, _ = labelled(1)
    assert not Memory.of([]).attached(rows[0].prefixes).evidence[:, -len(MEMORY) :].any()


def test_br_059_a_score_is_read_at_the_positions_that_are_real_whatever_looks_like_padding() -> None:
    """One position in the middle is all zeros, as padding is; the row is padded too, and every score stays its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = RewardNetwork(NetworkShape(dimension=512, segments=len(SEGMENTS["apart"]), width=8, members=1)).eval()
    rng, memory = drawn(1), Memory.of([])
    short, long = (
        memory.attached(row)
        for row in prefixes(
            [(one, cut(one)) for one in (dialogue(0, rng), dialogue(1, rng, turns=6))], HashingEncoder(), "apart"
        )
    )
    vectors, evidence = short.vectors.copy(), short.evidence.copy()
    vectors[3], evidence[3] = 0.0, 0.0
    blank = dataclasses.replace(short, vectors=vectors, evidence=evidence)
    batch = collate([blank, long])
    assert batch.mask.sum(dim=1).tolist() == [7, 13]
    with torch.no_grad():
        alone, together = network(collate([blank]))[0], network(batch)[0, : len(blank)]
    torch.testing.assert_close(together, alone)
    assert torch.isfinite(together).all()
    assert not torch.equal(together[-1], together[3])


def test_loss_of_the_oracle() -> None:
    """Chances .9 .8 .3 .6 .1 against 1 1 0 0 0 cost 0.34136605 nats, half of that as chances of success."""
    chances, wanted = np.array([0.9, 0.8, 0.3, 0.6, 0.1]), np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    trajectory = of_replies("d", GOOD)
    (where,) = prefixes([(trajectory, cut(trajectory))], HashingEncoder(), "apart")
    logits = torch.from_numpy(np.log(chances / (1 - chances)))[None, :, None].repeat(1, 1, 2)
    targets = np.stack([wanted, wanted], axis=1)
    for head, share in ((0, 1.0), (1, 0.5)):
        weights = np.zeros((5, 2))
        weights[:, head] = 1.0
        rows = [Example(group="a", prefixes=where, targets=targets, weights=weights)]
        assert float(multitask_loss(logits, rows, 0.0)) == pytest.approx(share * 0.34136605, abs=1e-6)
