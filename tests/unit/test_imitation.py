"""What is imitated: the best steps of successes by clusters of states, prototypes of a state, logged successes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.batching import collate
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.demonstrations import TOKENISED, Demonstrations, tokenise
from slea_llm.encoders import HashingEncoder
from slea_llm.errors import ConfigError, TemplateError
from slea_llm.imitation import (
    Imitation,
    awr_weights,
    divergence,
    faded,
    leader_clusters,
    sil_weights,
    smoothed,
)
from slea_llm.interfaces import LocalReducer
from slea_llm.losses.imitation import ImitationConfig
from slea_llm.losses.imitation_prototypes import PrototypeConfig
from slea_llm.settings import StreamSettings
from slea_llm.storage import write_scored, write_trajectories
from slea_llm.types import OVERRIDE, AugmentedExperience, Message, ScoredTrajectory, TokenSpan
from tests.support.experience import dialogue, on_ranks, stats_of

STREAMS = {"outcome": StreamSettings(sources=("outcome",)), "judge": StreamSettings(sources=("judge",), weight=0.5)}


def experience(
    name: str,
    scores: Sequence[float],
    *,
    advantages: Sequence[float] | None = None,
    states: Sequence[Mapping[str, Any]] | None = None,
    texts: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    shut: tuple[str, ...] = (),
    **options: Any,
) -> AugmentedExperience:
    """A dialogue of one reply of two tokens a turn, each with a score and an advantage."""
    one = dialogue(
        [[("reply", 2)] for _ in scores],
        scores={"judge": {(turn, 0): score for turn, score in enumerate(scores)}},
        name=name,
        **options,
    )
    turns = tuple(
        dataclasses.replace(turn, state_before=dict(states[turn.index]) if states else {"at": "the one state"})
        for turn in one.trajectory.turns
    )
    steps = tuple(
        dataclasses.replace(step, text=texts[step.turn] if texts else f"step {name} {step.turn}") for step in one.steps
    )
    trajectory = dataclasses.replace(one.trajectory, turns=turns, provenance=provenance or {})
    one = dataclasses.replace(one, trajectory=trajectory, steps=steps, shut=shut)
    n = one.trajectory.sampled_tokens
    numbers = np.repeat(np.asarray(advantages if advantages is not None else scores, np.float64), 2)
    return AugmentedExperience(
        scored=one,
        stats=stats_of(one, {name: [0.25] * n for name in STREAMS}),
        rewards={},
        advantages=numbers,
        returns={"outcome": numbers.copy(), "judge": np.zeros(n)},
        weights=np.ones(n),
        value_mask=np.ones(n, bool),
        policy_mask=np.ones(n, bool),
    )


def imitation(
    steps: ImitationConfig | None = None, prototypes: PrototypeConfig | None = None, **options: Any
) -> Imitation:
    return Imitation(steps, prototypes, encoders={"hashing": HashingEncoder()}, streams=STREAMS, **options)


def config(**options: Any) -> ImitationConfig:
    return ImitationConfig(**{"encoder": "hashing", "gain": "judge", "fade_until": 1.0, **options})


def mark(chooser: Imitation, pool: Sequence[AugmentedExperience], *, progress: float = 0.0) -> Any:
    return chooser.mark(pool, iteration=0, progress=progress, reducer=LocalReducer())


def chosen(marked: Sequence[AugmentedExperience]) -> set[tuple[str, int]]:
    """(dialogue, turn) of what is imitated."""
    return {
        (one.scored.trajectory.id, at // 2)
        for one in marked
        if one.imitation is not None
        for at in np.flatnonzero(~np.isnan(one.imitation)).tolist()
    }


def test_advantage_weighted_regression_weights() -> None:
    advantages = np.array([-1.0, 0.0, 0.5, 2.0, 5.0])
    expected = [0.36787944, 1.0, 1.64872127, 7.3890561, 20.0]
    assert awr_weights(advantages, beta=1.0, largest=20.0).tolist() == pytest.approx(expected, abs=1e-6)
    sharp = awr_weights(advantages, beta=0.05, largest=20.0).tolist()
    assert sharp == pytest.approx([0.0, 1.0, 20.0, 20.0, 20.0], abs=1e-6)
    assert math.isfinite(float(awr_weights(np.array([1e9]), beta=0.05, largest=20.0)[0]))


def test_self_imitation_weights() -> None:
    assert sil_weights(np.array([5.0, 2.0, 3.4]), np.array([3.0, 3.0, 3.0])).tolist() == pytest.approx([1.0, 0.0, 0.4])
    assert sil_weights(np.array([5.0]), np.array([3.0]), largest=9.0).tolist() == [2.0]


def test_smoothed_counts_and_their_divergence() -> None:
    shares = smoothed(np.array([6, 3, 1]))
    assert shares.tolist() == pytest.approx([0.53846154, 0.30769231, 0.15384615], abs=1e-6)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    assert divergence(p, q) == pytest.approx(0.02526715, abs=1e-6)
    middle = (p + q) / 2
    assert (divergence(p, middle) + divergence(q, middle)) / 2 == pytest.approx(0.0063672, abs=1e-6)  # Jensen-Shannon


def test_the_weight_falls_in_a_straight_line_to_zero() -> None:
    assert [faded(progress, 0.5) for progress in (0.0, 0.25, 0.5, 0.9)] == [1.0, 0.5, 0.0, 0.0]


def test_clusters_follow_their_first_member() -> None:
    east, north = np.array([1.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32)
    between = np.array([0.8, 0.6], np.float32)
    assert leader_clusters(np.stack([east, north, between, north, east]), 0.75).tolist() == [0, 1, 0, 1, 0]
    assert leader_clusters(np.stack([east, north, between]), 0.85).tolist() == [0, 1, 2]
    assert leader_clusters(np.zeros((0, 2), np.float32), 0.9).tolist() == []


def test_only_steps_with_a_gain_in_successes_that_nobody_changed_are_imitated() -> None:
    pool = [
        experience("good", [0.5, -0.5, 0.0]),
        experience("failed", [0.9], termination="failure"),
        experience("cut", [0.9], termination="max_turns"),
        experience("reviewed", [0.9], provenance={OVERRIDE: [{"reviewer": "r"}]}),
        experience("unproved", [0.9], shut=("judge",)),
    ]
    marked, metrics = mark(imitation(config(top=1.0)), pool)
    assert chosen(marked) == {("good", 0)}
    assert metrics["imitation/steps"] == metrics["imitation/candidates"] == metrics["imitation/ess"] == 1
    assert [one.scored for one in marked] == [one.scored for one in pool]
    assert all(one.imitation is None for one in marked[1:])


def test_the_best_share_of_every_cluster_of_states_is_taken() -> None:
    kitchen, street = {"asks": "which dish would you like to eat"}, {"zip": "9021 Elm Road house 7"}
    pool = [
        experience("a", [0.1, 0.9, 0.2], states=[kitchen, kitchen, street]),
        experience("b", [0.3, 0.3, 0.1], states=[kitchen, kitchen, street]),
    ]
    assert chosen(mark(imitation(config(top=0.2)), pool)[0]) == {("a", 1), ("a", 2)}
    assert chosen(mark(imitation(config(top=0.5)), pool)[0]) == {("a", 1), ("b", 0), ("a", 2)}
    assert len(chosen(mark(imitation(config(top=1.0)), pool)[0])) == 6


def test_gains_by_advantage_need_no_evaluator() -> None:
    pool = [experience("a", [-9.0, -9.0], advantages=[0.4, -0.1])]
    assert chosen(mark(imitation(config(gain="advantage", top=1.0)), pool)[0]) == {("a", 0)}
    blind = [dataclasses.replace(pool[0], policy_mask=np.zeros(4, bool))]
    assert chosen(mark(imitation(config(gain="advantage", top=1.0)), blind)[0]) == set()


def test_forms_and_schedule_set_the_weights() -> None:
    pool = [experience("a", [0.5], advantages=[0.7])]
    for form, expected in (
        ("cross_entropy", 1.0),
        ("awr", math.exp(0.7)),
        ("sil", 0.7 - 0.25 + 0.5 * (0.0 - 0.25)),  # over the streams, each with its weight
    ):
        marked, metrics = mark(imitation(config(form=form)), pool, progress=0.75)
        assert marked[0].imitation.tolist() == pytest.approx([expected / 4] * 2)
        assert metrics["imitation/fade"] == 0.25
    marked, metrics = mark(imitation(config(fade_until=0.5)), pool, progress=0.5)
    assert marked == pool
    assert metrics["imitation/fade"] == metrics["imitation/steps"] == 0


@pytest.mark.parametrize("inside", [[0.2] * 3, [5.0, -3.0, 0.9], [-4.0] * 3])
def test_self_imitation_reads_the_critic_where_it_is_trained(inside: list[float]) -> None:
    """Inside a turn that is one unit the critic is never taught, so that its word there is noise."""
    one = dialogue([[("reply", 4)]], name="w", rewards=[1.0])
    streams = {"outcome": StreamSettings(sources=("outcome",), whiten=False)}
    stats = stats_of(one, {"outcome": [0.2, *inside]})
    credit = NestedGae(NestedGae.Config(unit="turn", lam_critic=1.0, whiten_final=False), streams=streams)
    pool = Crediting(streams, [], credit).credit([one], [stats], progress=0.0, reducer=LocalReducer())
    assert pool[0].value_mask.tolist() == [True, False, False, False]
    form = config(form="sil", top=1.0, gain="advantage", fade_until=1.0)
    told = Imitation(form, None, encoders={"hashing": HashingEncoder()}, streams=streams)
    ((marked, *_), _) = mark(told, pool)
    assert marked.imitation.tolist() == pytest.approx([0.8] * 4)


@pytest.mark.parametrize("conditional", ["none", "q_head", "after_state"])
def test_prototypes_stand_beside_values_that_are_read_after_a_step(conditional: Any) -> None:
    streams = {"outcome": StreamSettings(sources=("outcome",))}
    dialogues = [
        dialogue([[("reply", 3)]], rewards=[2.0], name="w"),
        dialogue([[("reply", 2)]], rewards=[1.9], name="v"),
        dialogue([[("reply", 3)]], rewards=[-2.0], termination="failure", name="l"),
    ]
    credit = NestedGae(NestedGae.Config(unit="turn", conditional=conditional), streams=streams)
    stats = []
    for one, said in zip(dialogues, (1.0, 0.9, 0.1), strict=True):
        n = one.trajectory.sampled_tokens
        after = {head: [said if head.endswith("_q") else 0.5] * n for head in credit.heads}
        stats.append(stats_of(one, {head: [0.5] * n for head in credit.heads}, said_after=after))
    pool = Crediting(streams, [], credit).credit(dialogues, stats, progress=0.0, reducer=LocalReducer())
    bare = [dataclasses.replace(one, after_mask=None, value_mask=np.zeros_like(one.value_mask)) for one in pool[:1]]
    bare = [
        dataclasses.replace(one, returns=dict.fromkeys(credit.heads, np.zeros(3)), after_returns={}) for one in bare
    ]
    whole = collate(pool, streams=credit.heads, pad_id=0, dtype=torch.float64)
    mixed = collate([*pool, *bare], streams=credit.heads, pad_id=0, dtype=torch.float64)
    assert not mixed.value_mask[3].any()
    assert torch.equal(mixed.value_mask[:3], whole.value_mask)
    assert torch.equal(mixed.returns[:3], whole.returns)
    if conditional != "none":
        assert mixed.head_mask is not None
        assert whole.head_mask is not None
        assert torch.equal(mixed.head_mask[:3], whole.head_mask)
        assert not mixed.head_mask[3].any()


def test_the_effective_number_of_steps_is_logged() -> None:
    pool = [experience("a", [0.5] * 4, advantages=[0.0, 1.0, 2.0, 2.5])]
    _, metrics = mark(imitation(config(form="awr", top=1.0)), pool)
    weights = np.exp([0.0, 1.0, 2.0, 2.5])
    assert metrics["imitation/ess"] == pytest.approx(weights.sum() ** 2 / np.square(weights).sum())


def test_the_monitor_is_zero_when_the_policy_says_what_is_imitated_and_grows_with_what_it_says_else() -> None:
    alike = [experience("a", [0.5, 0.5], texts=["which dish please"] * 2)]
    _, metrics = mark(imitation(config(top=1.0)), alike)
    assert metrics["imitation/cluster_kl"] == 0
    other = experience("b", [-0.5] * 6, texts=["the weather is quite nice"] * 6, termination="failure")
    _, metrics = mark(imitation(config(top=1.0)), [*alike, other])
    said, imitated = smoothed(np.array([2, 6])), smoothed(np.array([2, 0]))
    assert metrics["imitation/cluster_kl"] == pytest.approx(divergence(said, imitated))
    old = dataclasses.replace(other.scored.trajectory, policy_version=-3)
    replayed = dataclasses.replace(other, scored=dataclasses.replace(other.scored, trajectory=old))
    _, metrics = mark(imitation(config(top=1.0)), [*alike, replayed])
    assert metrics["imitation/cluster_kl"] == 0  # what an earlier policy said is not today's


@settings(deadline=None, max_examples=15)
@given(
    gains=st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=3), min_size=1, max_size=5),
    top=st.floats(0.05, 1.0),
    form=st.sampled_from(["cross_entropy", "awr", "sil"]),
)
def test_marks_are_finite_never_negative_and_never_on_a_step_without_a_gain(
    gains: list[list[float]], top: float, form: Any
) -> None:
    pool = [experience(f"t{number}", row) for number, row in enumerate(gains)]
    marked, metrics = mark(imitation(config(form=form, top=top)), pool)
    allowed = {(f"t{number}", turn) for number, row in enumerate(gains) for turn, gain in enumerate(row) if gain > 0}
    assert chosen(marked) <= allowed
    assert bool(chosen(marked)) == bool(allowed)
    assert metrics["imitation/candidates"] == len(allowed)
    for one in marked:
        if one.imitation is not None:
            weights = one.imitation[~np.isnan(one.imitation)]
            assert np.isfinite(weights).all()
            assert (weights >= 0).all()


def test_ranks_agree_on_the_metrics_and_each_marks_its_own() -> None:
    pools = [[experience("a", [0.5, 0.7])], []]

    def rank(reducer: Any) -> Any:
        chooser = imitation(config(top=1.0), PrototypeConfig(encoder="hashing", gain="judge", fade_until=1.0))
        return chooser.mark(pools[reducer.rank], iteration=0, progress=0.0, reducer=reducer)

    (first, metrics), (second, same) = on_ranks(rank)
    assert metrics == same
    assert chosen(first[:1]) == {("a", 0), ("a", 1)}
    assert second == []


def two_ways() -> list[AugmentedExperience]:
    texts = ["which dish please", "the weather is quite nice"]
    return [experience("a", [0.8, 0.2], texts=texts), experience("b", [0.4, -1.0], texts=["which dish please", "zzz"])]


def test_prototypes_are_rows_behind_one_state_with_shares_by_their_gain() -> None:
    options = {"encoder": "hashing", "gain": "judge", "fade_until": 1.0, "temperature": 0.5, "smoothing": 0.1}
    pool = two_ways()
    marked, metrics = mark(imitation(None, PrototypeConfig(**options)), pool)  # type: ignore[arg-type]
    assert marked[:2] == pool
    (added,) = marked[2:]
    assert metrics == {"imitation_prototypes/states": 1, "imitation_prototypes/rows": 2}
    exact = np.exp(np.array([0.6, 0.2]) / 0.5)  # the mean gain of the two alike is 0.6
    assert added.prototypes.tolist() == pytest.approx((0.9 * exact / exact.sum() + 0.05).tolist())
    trajectory, source = added.scored.trajectory, pool[0].scored.trajectory
    first = source.turns[0].span
    assert first is not None
    for trace, ids in zip(trajectory.traces, (source.reply_ids(turn) for turn in source.turns), strict=True):
        assert trace.token_ids[: first.start] == source.traces[0].token_ids[: first.start]
        assert trace.token_ids[first.start :] == ids
    assert added.imitation.tolist() == [1.0] * 4
    assert not added.policy_mask.any()
    assert not added.value_mask.any()
    batch = collate(marked, streams=list(STREAMS), pad_id=0, dtype=torch.float64)
    assert batch.prototypes.tolist() == pytest.approx([0.0, 0.0, *added.prototypes.tolist()])
    assert batch.trajectory.tolist() == [0, 1, 2, 2]
    assert batch.imitation_mask.sum(dim=1).tolist() == [0, 0, 2, 2]
    assert batch.policy_mask.sum(dim=1).tolist() == [4, 4, 0, 0]


def test_one_way_of_saying_it_is_no_choice_among_prototypes() -> None:
    pool = [experience("a", [0.8, 0.2], texts=["which dish please"] * 2)]
    options = {"encoder": "hashing", "gain": "judge"}
    assert mark(imitation(None, PrototypeConfig(**options)), pool)[0] == pool  # type: ignore[arg-type]


class Words:
    """Every character is a token, behind a role token; -1 ends a reply."""

    def encode_rows(self, messages: Sequence[Message]) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
        ids: list[int] = []
        mask: list[bool] = []
        for message in messages:
            body = [ord(letter) for letter in message.content]
            said = message.role == "assistant"
            ids += [1, *body, *([2] if said else [])]
            mask += [False, *([said] * (len(body) + said))]
        return [(tuple(ids), tuple(mask))]

    def decode(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        letters = [chr(i) for i in ids if i != 2]
        return "".join(letters), tuple(range(len(ids)))


def logged(name: str, *, termination: Any = "success") -> ScoredTrajectory:
    """A dialogue of text: a thought and a reply of one turn, both scored."""
    one = dialogue(
        [[("thought", 2), ("reply", 3)]], scores={"judge": {(0, 0): 0.5, (0, 1): -0.5}}, name=name,
        termination=termination,
    )  # fmt: skip
    said = (Message(role="user", content="hi"),)
    turns = tuple(dataclasses.replace(turn, span=None, context=said) for turn in one.trajectory.turns)
    steps = tuple(
        dataclasses.replace(step, tokens=None, span=span) for step, span in zip(one.steps, spans(one), strict=True)
    )
    return dataclasses.replace(one, trajectory=dataclasses.replace(one.trajectory, turns=turns, traces=()), steps=steps)


def spans(one: ScoredTrajectory) -> list[Any]:
    return [step.span for step in one.steps]


def test_logged_text_is_tokenised_marked_and_tiled_by_its_steps() -> None:
    got = tokenise(logged("t"), Words())
    (trace,) = got.trajectory.traces
    assert TOKENISED in got.trajectory.provenance
    assert [step.tokens for step in got.steps] == [TokenSpan(0, 4, 6), TokenSpan(0, 6, 10)]
    assert sum(trace.sampled_mask) == 6  # five letters and the end of turn


def test_logged_text_may_be_imitated_and_never_stands_in_a_ratio(tmp_path: Path) -> None:
    write_scored(tmp_path / "log.jsonl", [logged("bad", termination="failure"), logged("one"), logged("two")])
    shown = Demonstrations(tmp_path / "log.jsonl", tmp_path / "own", Words(), evaluator="judge")
    assert len(shown) == 2
    chooser = imitation(config(top=1.0, demonstrations="log.jsonl"), demonstrations=shown)
    own = experience("own", [-0.5])
    marked, metrics = mark(chooser, [own])
    assert [one.scored.trajectory.id for one in marked] == ["own", "one", "two"]
    assert metrics["imitation/demonstrations"] == metrics["imitation/steps"] == 2
    batch = collate(marked, streams=list(STREAMS), pad_id=0, dtype=torch.float64)
    assert batch.policy_mask.sum(dim=1).tolist() == [2, 0, 0]
    assert batch.value_mask.sum(dim=1).tolist() == [2, 0, 0]
    assert batch.imitation_mask.sum(dim=1).tolist() == [0, 2, 2]
    smuggled = dataclasses.replace(marked[1], policy_mask=np.ones(6, bool))
    with pytest.raises(ValueError, match=r"tokenised from text.*never stand in a ratio"):
        collate([smuggled], streams=list(STREAMS), pad_id=0, dtype=torch.float64)


def test_every_rank_shows_other_demonstrations_and_the_same_ones_again(tmp_path: Path) -> None:
    write_scored(tmp_path / "log.jsonl", [logged(f"t{number}") for number in range(5)])
    parts = []
    for rank in range(2):
        shown = Demonstrations(
            tmp_path / "log.jsonl", tmp_path / str(rank), Words(), evaluator="judge", rank=rank, world_size=2
        )
        parts.append([shown[number].trajectory.id for number in range(len(shown))])
        options = config(demonstrations="log.jsonl", demonstrations_per_iteration=2)
        twice = [mark(imitation(options, demonstrations=shown, rank=rank), [])[0] for _ in range(2)]
        assert [one.scored.trajectory.id for one in twice[0]] == [one.scored.trajectory.id for one in twice[1]]
    assert parts == [["t0", "t2", "t4"], ["t1", "t3"]]


def test_logs_of_no_use_are_refused_with_the_mend(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "raw.jsonl", [logged("t").trajectory])
    with pytest.raises(ConfigError, match="run slea score on it"):
        Demonstrations(tmp_path / "raw.jsonl", tmp_path, Words(), evaluator="judge")
    write_scored(tmp_path / "log.jsonl", [logged("t", termination="failure")])
    with pytest.raises(ConfigError, match="holds no success"):
        Demonstrations(tmp_path / "log.jsonl", tmp_path, Words(), evaluator="judge")
    with pytest.raises(ConfigError, match=r"no scores of 'judgee', only of judge \(did you mean 'judge'\?\)"):
        Demonstrations(tmp_path / "log.jsonl", tmp_path, Words(), evaluator="judgee")


def test_text_that_does_not_come_back_from_its_tokens_is_counted_and_named(tmp_path: Path) -> None:
    class Lossy(Words):
        def decode(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
            text, starts = super().decode(ids)
            return text.upper(), starts

    with pytest.raises(TemplateError, match="trajectory t: the tokens of turn 0 read 'XXXXX', not 'xxxxx'"):
        tokenise(logged("t"), Lossy())
    write_scored(tmp_path / "log.jsonl", [logged("t")])
    shown = Demonstrations(tmp_path / "log.jsonl", tmp_path / "own", Lossy(), evaluator="judge")
    assert len(shown) == 0
    assert "trajectory t" in shown.skipped[0]
