"""One sampling step against its distribution, grouping of prefills, and what is kept of dialogues."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.generation.decoding import GROUP_FACTOR, GROUP_SLACK, DialogueStates, length_groups, sample


def draw(
    logits: list[float], noise: list[float], temperature: float, *, greedy: bool = False
) -> tuple[list[int], list[float]]:
    rows = len(noise)
    tokens, logprobs = sample(
        torch.tensor([logits]).expand(rows, -1),
        torch.tensor(noise, dtype=torch.float64)[:, None],
        torch.full((rows,), greedy),
        temperature,
    )
    return tokens.tolist(), logprobs.tolist()


def test_br_044_the_logprob_is_that_of_the_tempered_distribution() -> None:
    tokens, logprobs = draw([2.0, 1.0, 0.0], [0.0], 0.5)
    assert tokens == [0]
    assert logprobs == pytest.approx([-0.142932], abs=1e-6)
    assert draw([2.0, 1.0, 0.0], [0.0], 1.0)[1] == pytest.approx([-0.407606], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_an_even_grid_of_noise_gives_each_token_its_share(temperature: float) -> None:
    logits, count = [2.0, -1.0, 0.5, 0.0], 4000
    tokens, logprobs = draw(logits, [(i + 0.5) / count for i in range(count)], temperature)
    total = sum(math.exp(value / temperature) for value in logits)
    for token, value in enumerate(logits):
        share = math.exp(value / temperature) / total
        assert abs(tokens.count(token) - share * count) <= 1.0
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(logits[token] / temperature - math.log(total), abs=1e-5)


@pytest.mark.parametrize("noise", [0.0, 1e-300, 0.5, 1.0 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(noise: float) -> None:
    never = -math.inf
    tokens, logprobs = draw([never, 0.0, never, 1.0, never], [noise], 1.0)
    assert tokens[0] in {1, 3}
    assert math.isfinite(logprobs[0])


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    noise=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.05, 5),
)
@settings(deadline=None, max_examples=40)
def test_a_row_does_not_depend_on_its_neighbours(logits: list[float], noise: float, temperature: float) -> None:
    alone = draw(logits, [noise], temperature)
    among = draw(logits, [0.3, noise, 0.9], temperature)
    assert (alone[0][0], alone[1][0]) == (among[0][1], among[1][1])
    assert alone[1][0] <= 0.0


def test_greedy_is_the_argmax_with_its_logprob_at_temperature_one() -> None:
    tokens, logprobs = draw([2.0, 1.0, 0.0], [0.99999], 0.5, greedy=True)
    assert tokens == [0]
    assert logprobs == pytest.approx([-0.407606], abs=1e-6)


def test_half_precision_logits_are_widened() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    _, logprobs = sample(logits, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([False]), 0.5)
    assert logprobs.tolist() == pytest.approx([-0.142932], abs=1e-6)


@given(lengths=st.lists(st.integers(0, 500), max_size=40))
@settings(deadline=None, max_examples=40)
def test_prefill_groups_hold_every_row_with_work_once_and_pad_little(lengths: list[int]) -> None:
    groups = length_groups(lengths)
    assert sorted(index for group in groups for index in group) == [i for i, n in enumerate(lengths) if n > 0]
    for group in groups:
        assert group == sorted(group)
        shortest, longest = min(lengths[i] for i in group), max(lengths[i] for i in group)
        assert longest <= GROUP_FACTOR * shortest + GROUP_SLACK


def states_of(length: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    return ((torch.zeros(length, 1, 2), torch.zeros(length, 1, 2)),)  # 16 bytes a token


def test_states_match_the_longest_common_beginning_and_leave_one_token_to_compute() -> None:
    kept = DialogueStates(10_000)
    kept.keep((1, 2), (5, 6, 7, 8), states_of(4))
    assert kept.match((1, 2), (5, 6, 7, 8, 9))[0] == 4
    assert kept.match((1, 2), (5, 6, 7, 8))[0] == 3
    assert kept.match((1, 2), (5, 6, 0, 8, 9))[0] == 2  # an earlier thought was taken out
    assert kept.match((1, 2), (0, 6))[0] == 0
    assert kept.match((1, 3), (5, 6, 7, 8, 9)) == (0, ())
    kept.clear()
    assert kept.match((1, 2), (5, 6, 7, 8, 9)) == (0, ())


def test_the_least_recently_used_dialogue_goes_first_and_the_limit_holds() -> None:
    kept = DialogueStates(64)  # 4 tokens
    kept.keep((1,), (5, 6), states_of(2))
    kept.keep((2,), (5, 6), states_of(2))
    kept.match((1,), (5, 6, 7))
    kept.keep((3,), (5, 6), states_of(2))
    assert [kept.match((key,), (5, 6, 7))[0] for key in (1, 2, 3)] == [2, 0, 2]
    kept.keep((1,), (5, 6, 7), states_of(3))  # replaces its own entry
    assert [kept.match((key,), (5, 6, 7, 8))[0] for key in (1, 2, 3)] == [3, 0, 0]
    kept.keep((4,), (5,) * 9, states_of(9))  # larger than everything together
    assert kept.match((4,), (5,) * 10)[0] == 0
    assert kept.match((1,), (5, 6, 7, 8))[0] == 3
