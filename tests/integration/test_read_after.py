"""Values after a step, on a real model: read where the step ends, from nothing that comes later, and trained there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slea_llm.batching import collate
from slea_llm.interfaces import LocalReducer
from slea_llm.models.policy import PolicyCritic
from slea_llm.models.stats import token_stats
from slea_llm.settings import StreamSettings, TrainerSettings
from slea_llm.types import ScoredTrajectory, TokenStats
from tests.support import training
from tests.support.experience import spaced

pytestmark = pytest.mark.integration

STREAMS = {"outcome": StreamSettings(sources=("outcome",))}
HEADS = ("outcome", "outcome_q")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_base(tmp_path_factory.mktemp("base"))


def with_heads(base: Path, heads: tuple[str, ...]) -> PolicyCritic:
    """A critic whose values differ from token to token."""
    model = training.policy(base, heads=heads)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.critic_parameters():
            if "value_head" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def played(row_a_turn: bool) -> list[ScoredTrajectory]:
    rng = np.random.default_rng(5)
    dialogues = [training.random_dialogue(rng, str(number)) for number in range(4)]
    out = []
    for one in dialogues:
        moved = spaced(one, 3, row_a_turn=row_a_turn)
        traces = tuple(
            dataclasses.replace(trace, token_ids=tuple(int(token) for token in rng.integers(0, 260, len(trace))))
            for trace in moved.trajectory.traces
        )
        out.append(dataclasses.replace(moved, trajectory=dataclasses.replace(moved.trajectory, traces=traces)))
    return out


def said_of(model: PolicyCritic, scored: list[ScoredTrajectory]) -> list[TokenStats]:
    return token_stats(
        model,
        [one.trajectory for one in scored],
        microbatch=3,
        policy_version=0,
        critic_version=0,
        pad_id=training.PAD,
    )


@pytest.mark.parametrize("row_a_turn", [False, True])
@pytest.mark.parametrize(
    ("options", "heads"),
    [({"unit": "step", "conditional": "q_head"}, HEADS), ({"conditional": "after_state"}, HEADS[:1])],
)
def test_the_update_reads_each_head_where_credit_read_it(
    base: Path, row_a_turn: bool, options: dict[str, Any], heads: tuple[str, ...]
) -> None:
    model = with_heads(base, heads)
    scored = played(row_a_turn)
    stats = said_of(model, scored)
    credit = training.crediting(STREAMS, **options)
    assert credit.heads == heads
    experiences = credit.credit(scored, stats, progress=0.0, reducer=LocalReducer())
    batch = collate(experiences, streams=heads, pad_id=training.PAD, dtype=torch.float64)
    assert batch.head_mask is not None
    with torch.no_grad():
        values = model(batch).values
    torch.testing.assert_close(values[batch.head_mask], batch.old_values[batch.head_mask], rtol=0, atol=1e-9)
    counts = batch.head_mask.sum((0, 1)).tolist()
    read = sum(int(one.value_mask.sum()) for one in experiences)
    after = sum(int(one.after_mask.sum()) for one in experiences if one.after_mask is not None)
    assert counts == ([read, after] if "outcome_q" in heads else [read + after])
    assert after > 0


def test_what_comes_after_the_step_is_not_in_its_value(base: Path) -> None:
    """Cut off behind a reply, the dialogue gives the same value there."""
    model = with_heads(base, HEADS)
    one = max(played(False), key=lambda dialogue: len(dialogue.trajectory.turns))
    (whole,) = said_of(model, [one])
    first = one.trajectory.turns[0]
    assert first.span is not None
    (trace,) = one.trajectory.traces
    end = first.span.end
    cut = dataclasses.replace(
        trace, token_ids=trace.token_ids[:end], sampled_mask=trace.sampled_mask[:end], logprobs=trace.logprobs[:end]
    )
    shorter = dataclasses.replace(one.trajectory, turns=(first,), traces=(cut,), outcome=first.reward)
    (short,) = said_of(model, [dataclasses.replace(one, trajectory=shorter)])
    place = len(first.span) - 1
    for head in HEADS:
        assert short.values[head][-1] == pytest.approx(short.after[head][-1])
        assert whole.after[head][place] == pytest.approx(short.after[head][-1])
        assert whole.values[head][place + 1] != pytest.approx(whole.after[head][place])  # the user's words are in it


def test_a_q_head_learns_the_returns_of_steps(base: Path, tmp_path: Path) -> None:
    credit = training.crediting(STREAMS, unit="step", conditional="q_head", lam_critic=1.0)
    model = training.policy(base, heads=credit.heads)
    rng = np.random.default_rng(0)
    scored = training.sampled_by(model, [training.random_dialogue(rng, str(number)) for number in range(8)])
    settings = TrainerSettings(
        iterations=12, epochs=4, minibatch=8, microbatch=8, learning_rate=0.0, critic_learning_rate=2e-2
    )

    def error() -> float:
        experiences = credit.credit(scored, said_of(model, scored), progress=0.0, reducer=LocalReducer())
        gaps = [(one.after_returns["outcome_q"] - one.stats.after["outcome_q"])[one.after_mask] for one in experiences]
        return float(np.square(np.concatenate(gaps)).mean())

    before = error()
    training.trainer(model, settings, [[scored]] * 12, tmp_path, credit=credit).run()
    assert error() < 0.3 * before
