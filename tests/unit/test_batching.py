"""From numbers per sampled token to padded tensors: alignment, masks, padding; no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.batching import blank, collate, microbatches
from slea_llm.errors import ConfigError
from slea_llm.tensors import Batch
from slea_llm.types import (
    AugmentedExperience,
    ScoredTrajectory,
    TokenSpan,
    TokenStats,
    TokenTrace,
    Trajectory,
    Turn,
)

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids, and 1 where the policy sampled one."""


def experience(name: str, rows: Sequence[Row], *, first: float = 0.0, streams: int = 1) -> AugmentedExperience:
    """An experience whose k-th sampled token carries `first + k` in every column (negated where it must be)."""
    traces, turns = [], []
    for row, (ids, mask) in enumerate(rows):
        sampled = np.array(mask, dtype=bool)
        traces.append(
            TokenTrace(
                token_ids=tuple(ids),
                sampled_mask=tuple(sampled.tolist()),
                logprobs=tuple(np.where(sampled, -1.0 - np.arange(len(ids)), 0.0).tolist()),
            )
        )
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        turns += [TokenSpan(row, int(start), int(end)) for start, end in edges.reshape(-1, 2)]
    trajectory = Trajectory(
        id=name,
        task={},
        environment="test",
        seed=0,
        policy_version=0,
        turns=tuple(Turn(index=k, context=(), text="", span=span) for k, span in enumerate(turns)),
        traces=tuple(traces),
        outcome=0.0,
        termination="success",
    )
    n = trajectory.sampled_tokens
    numbers = first + np.arange(n, dtype=np.float64)
    names = [f"s{column}" for column in range(streams)]
    return AugmentedExperience(
        scored=ScoredTrajectory(trajectory=trajectory, steps=(), scores=(), parser="test"),
        stats=TokenStats(
            proximal=-numbers,
            reference=-2 * numbers,
            values={name: np.append(numbers + 10 * k, 99.0) for k, name in enumerate(names)},
            policy_version=0,
            critic_version=0,
        ),
        rewards={},
        advantages=numbers,
        returns={name: numbers - 10 * k for k, name in enumerate(names)},
        weights=np.ones(n),
        value_mask=np.ones(n, dtype=bool),
        policy_mask=np.ones(n, dtype=bool),
    )


def collated(*experiences: AugmentedExperience, streams: Sequence[str] = ("s0",), pad_id: int = 0) -> Batch:
    return collate(experiences, streams=streams, pad_id=pad_id, dtype=torch.float64)


def test_br_001_gradient_goes_to_sampled_tokens_and_nowhere_else() -> None:
    roles = ["user", "user", "assistant", "assistant", "user", "assistant", "assistant"]
    ids = [10, 11, 20, 21, 12, 22, 23]
    batch = collated(experience("a", [(ids, [int(role == "assistant") for role in roles])]))
    assert batch.policy_mask.int().tolist() == [[0, 0, 1, 1, 0, 1, 1]]
    assert batch.input_ids.tolist() == [ids]
    assert int(batch.policy_mask.sum()) == 4
    assert batch.trajectory_tokens.tolist() == [4.0]


def test_br_009_padding_with_the_end_token_hides_no_real_end() -> None:
    """eos = pad = 1; rows [2, 3, 1] and [2, 1] after a prompt of one token."""
    batch = collated(
        experience("a", [([5, 2, 3, 1], [0, 1, 1, 1])]), experience("b", [([5, 2, 1], [0, 1, 1])]), pad_id=1
    )
    labels = torch.where(batch.policy_mask, batch.input_ids, -100)[:, 1:]
    assert labels.tolist() == [[2, 3, 1], [2, 1, -100]]


def test_br_012_a_token_that_was_appended_is_not_trained() -> None:
    batch = collated(experience("a", [([9, 5, 6, 2], [0, 1, 1, 0])]))
    assert batch.input_ids[0, 1:].tolist() == [5, 6, 2]
    assert batch.policy_mask[0, 1:].int().tolist() == [1, 1, 0]


@pytest.mark.parametrize("longer", [0, 4])
def test_br_013_the_score_is_read_at_the_last_real_token(longer: int) -> None:
    """Row 7 | 5 6 with a score on its last token, whatever stands beside it in the batch."""
    other = experience("b", [([7] * (3 + longer), [0, *[1] * (2 + longer)])], first=50.0)
    batch = collated(experience("a", [([7, 5, 6], [0, 1, 1])], first=-0.5), other)
    last = int(batch.attention_mask[0].nonzero().max())
    assert int(batch.input_ids[0, last]) == 6
    assert float(batch.advantages[0, last]) == 0.5
    assert not bool(batch.advantages[0, last + 1 :].any())


def test_br_107_the_terminal_reward_stands_on_the_last_real_token() -> None:
    """Response 5 6 2 with padding to five: the number of its last token is at index 2, and none on padding."""
    one = experience("a", [([9, 5, 6, 2], [0, 1, 1, 1])])
    one.returns["s0"][:] = [0.0, 0.0, 1.0]
    batch = collated(one, experience("b", [([9, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1])]))
    assert batch.returns[0, 1:, 0].tolist() == [0, 0, 1, 0, 0]
    assert batch.input_ids[0, 1:].tolist() == [5, 6, 2, 0, 0]


def test_br_103_sorting_by_length_takes_every_number_along() -> None:
    rewards = {"a": (5, 1.0), "b": (1, 2.0), "c": (3, 3.0)}
    made = [experience(name, [([9, *[1] * n], [0, *[1] * n])], first=first) for name, (n, first) in rewards.items()]
    (group,) = microbatches(made, trajectories=3)
    assert [one.scored.trajectory.id for one in group] == ["b", "c", "a"]
    assert collated(*group).advantages[:, 1].tolist() == [2.0, 3.0, 1.0]


def test_rows_of_one_trajectory_share_its_number_and_its_count() -> None:
    two_rows = experience("a", [([9, 1, 2], [0, 1, 1]), ([9, 8, 3], [0, 0, 1])])
    batch = collated(two_rows, experience("b", [([9, 4], [0, 1])], first=7.0))
    assert batch.trajectory.tolist() == [0, 0, 1]
    assert batch.trajectory_tokens.tolist() == [3.0, 3.0, 1.0]
    assert batch.advantages.tolist() == [[0, 0, 1], [0, 0, 2], [0, 7, 0]]
    assert batch.behaviour_logprobs.tolist() == [[0, -2, -3], [0, 0, -3], [0, -2, 0]]


def test_streams_keep_their_columns() -> None:
    batch = collated(experience("a", [([9, 1, 2], [0, 1, 1])], streams=2), streams=("s1", "s0"))
    assert batch.returns[0, 1:].tolist() == [[-10.0, 0.0], [-9.0, 1.0]]
    assert batch.old_values[0, 1:].tolist() == [[10.0, 0.0], [11.0, 1.0]]  # the value after the end is left out


def test_masks_of_the_experience_are_kept() -> None:
    one = experience("a", [([9, 1, 2, 3], [0, 1, 1, 1])])
    one.value_mask[:] = [True, False, False]
    one.policy_mask[:] = [False, True, True]
    batch = collated(one)
    assert batch.value_mask.int().tolist() == [[0, 1, 0, 0]]
    assert batch.policy_mask.int().tolist() == [[0, 0, 1, 1]]
    assert batch.trajectory_tokens.tolist() == [2.0]


def test_what_does_not_fit_is_refused_by_name() -> None:
    one = experience("t7", [([9, 1, 2], [0, 1, 1])])
    with pytest.raises(ConfigError, match="t7 has no returns of 'outcom'"):
        collated(one, streams=("outcom",))
    with pytest.raises(ValueError, match="empty"):
        collated()
    with pytest.raises(ValueError, match="t8: the first token of a row is sampled"):
        collated(experience("t8", [([1, 2], [1, 1])]))
    with pytest.raises(ValueError, match="t9 has no sampled token"):
        collated(experience("t9", [([1, 2], [0, 0])]))
    short = dataclasses.replace(one, advantages=one.advantages[:1])
    with pytest.raises(ValueError, match="t7 has 2 sampled tokens, but counts of advantages 1"):
        collated(short)


def test_a_blank_batch_has_no_unit_of_any_loss() -> None:
    batch = blank(streams=2, pad_id=3, dtype=torch.float64)
    assert batch.returns.shape == (1, 2, 2)
    assert not bool((batch.policy_mask | batch.value_mask | batch.imitation_mask).any())
    assert batch.trajectory_tokens.tolist() == [0.0]


rows = st.integers(1, 6).flatmap(
    lambda length: st.lists(st.integers(0, 1), min_size=length, max_size=length).map(lambda mask: [0, *mask[:-1], 1])
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(rows, min_size=1, max_size=3), min_size=1, max_size=5), st.integers(1, 3))
def test_every_number_lands_on_its_token(shapes: list[list[list[int]]], size: int) -> None:
    """Against a slow loop over rows and positions; masks lie inside attention; groups cover all, each once."""
    made = [
        experience(str(k), [(range(100 * k, 100 * k + len(mask)), mask) for mask in masks], first=1000.0 * k)
        for k, masks in enumerate(shapes)
    ]
    groups = microbatches(made, trajectories=size)
    assert sorted(one.scored.trajectory.id for group in groups for one in group) == sorted(map(str, range(len(made))))
    assert all(len(group) <= size for group in groups)
    for group in groups:
        batch = collated(*group, pad_id=7)
        row = 0
        for owner, one in enumerate(group):
            k, seen = int(one.scored.trajectory.id), 0
            for mask in shapes[k]:
                for position in range(batch.input_ids.shape[1]):
                    real = position < len(mask)
                    assert bool(batch.attention_mask[row, position]) == real
                    assert int(batch.input_ids[row, position]) == (100 * k + position if real else 7)
                    sampled = real and bool(mask[position])
                    assert bool(batch.policy_mask[row, position]) == sampled
                    assert float(batch.advantages[row, position]) == (1000.0 * k + seen if sampled else 0.0)
                    seen += sampled
                assert int(batch.trajectory[row]) == owner
                row += 1
        assert len(batch) == row
