"""Replay with every registered credit method and augmenter: credit is made anew, the sampler's word is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slea_llm import registry
from slea_llm.batching import collate
from slea_llm.buffer import ReplayBuffer
from slea_llm.crediting import Crediting
from slea_llm.interfaces import Augmenter, LocalReducer
from slea_llm.losses.ppo import PpoLoss
from slea_llm.settings import StreamSettings
from slea_llm.tensors import ModelOutputs
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats
from tests.support import replay
from tests.support.components import build
from tests.support.experience import dialogue, stats_of

METHODS = sorted(registry.names("credit"))
PAYING = [name for name in sorted(registry.names("augmenter")) if hasattr(registry.load("augmenter", name), "augment")]


def state(filled: int) -> dict[str, Any]:
    """The public state of an order with so many slots filled."""
    slots = ["dish", "quantity"]
    return {
        "required": slots,
        "filled": dict.fromkeys(slots[:filled], "x"),
        "confirmed": [],
        "missing": slots[filled:],
        "unconfirmed": slots[:filled],
    }


def dialogues() -> list[ScoredTrajectory]:
    """Two dialogues of one task, played by policy version 3, with the log-probabilities of that policy."""
    found = []
    for number, paid in enumerate((1.0, -1.0)):
        shape: Any = [[("thought", 2), ("reply", 3)], [("reply", 2)]]
        scores = {"judge": {(0, 0): 0.5 * paid, (0, 1): 0.25, (1, 0): -0.5}}
        one = dialogue(shape, rewards=[0.0, paid], scores=scores, name=f"t{number}")
        (trace,) = one.trajectory.traces
        logprobs = tuple(-0.125 * (at + 1) if mine else 0.0 for at, mine in enumerate(trace.sampled_mask))
        traces = (dataclasses.replace(trace, logprobs=logprobs),)
        turns = [
            dataclasses.replace(turn, state_before=state(turn.index), state_after=state(turn.index + 1))
            for turn in one.trajectory.turns
        ]
        trajectory = dataclasses.replace(
            one.trajectory, traces=traces, turns=tuple(turns), policy_version=3, task={"id": "one"}
        )
        found.append(dataclasses.replace(one, trajectory=trajectory))
    return found


def stats(scored: Sequence[ScoredTrajectory], crediting: Crediting, *, today: float) -> list[TokenStats]:
    """What today's models say: every token at log-probability `today`, every value `today` too."""
    heads = getattr(crediting, "heads", tuple(crediting.streams))
    found = []
    for one in scored:
        n = one.trajectory.sampled_tokens
        made = stats_of(one, {head: [today] * n for head in heads}, after=today)
        changes: dict[str, Any] = {"proximal": np.full(n, today), "policy_version": 4}
        if hasattr(made, "after"):
            changes["after"] = {head: np.full(n, today) for head in heads}
        found.append(dataclasses.replace(made, **changes))
    return found


def crediting(method: str, augmenter: str | None = None) -> Crediting:
    """The method over the outcome and the scores, and over what the augmenter pays if one is named."""
    streams = {
        "outcome": StreamSettings(sources=("outcome",)),
        "scores": StreamSettings(sources=("judge",), gamma_step=0.0, gamma_turn=0.0, weight=0.5),
    }
    augmenters: list[Augmenter] = []
    if augmenter:
        streams["extra"] = StreamSettings(sources=(augmenter,))
        augmenters = [build("augmenter", augmenter)]
    cls = registry.load("credit", method)
    return Crediting(streams, augmenters, cls(cls.Config(), streams=streams))


def credit(how: Crediting, scored: Sequence[ScoredTrajectory], *, today: float) -> Sequence[AugmentedExperience]:
    return how.credit(scored, stats(scored, how, today=today), progress=0.5, reducer=LocalReducer())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with closing(replay.buffer(tmp_path)) as buffer:
        buffer.add(dialogues())
        yield buffer


def numbers(experiences: Sequence[AugmentedExperience]) -> list[Any]:
    return [
        (one.advantages.tolist(), {name: part.tolist() for name, part in one.returns.items()}, one.weights.tolist())
        for one in experiences
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("augmenter", [None, *PAYING])
def test_br_055_a_resumed_buffer_gives_the_same_credit(
    tmp_path: Path, store: ReplayBuffer, method: str, augmenter: str | None
) -> None:
    """What went over the disk and through a checkpoint is credited as what was just played."""
    state = json.loads(json.dumps(store.state()))
    with closing(replay.buffer(tmp_path)) as again:
        again.restore(state)
        back = [again.read(name) for name in again.ids]
    how = crediting(method, augmenter)
    assert back == dialogues()
    assert numbers(credit(how, back, today=-0.5)) == numbers(credit(how, dialogues(), today=-0.5))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("augmenter", [None, *PAYING])
def test_br_105_the_stored_log_probabilities_reach_the_loss_with_every_credit_method(
    store: ReplayBuffer, method: str, augmenter: str | None
) -> None:
    """Proximal is today's policy, behaviour the one that sampled; what lies between them weighs the token, cut at C."""
    drawn = store.draw(2, iteration=1, progress=0.0)
    assert {one.trajectory.policy_version for one in drawn} == {3}
    how = crediting(method, augmenter)
    experiences = credit(how, drawn, today=-0.5)
    heads = tuple(getattr(how, "heads", tuple(how.streams)))
    batch = collate(experiences, streams=heads, pad_id=0, dtype=torch.float64)
    mask = batch.policy_mask
    assert bool(mask.any())
    assert bool((batch.proximal_logprobs[mask] == -0.5).all())
    places = mask.nonzero()[:, 1]
    assert batch.behaviour_logprobs[mask].tolist() == (-0.125 * (places + 1)).tolist()
    outputs = ModelOutputs(
        logprobs=batch.proximal_logprobs,
        entropy=torch.zeros_like(batch.weights),
        values=torch.zeros_like(batch.returns),
    )
    expected = (
        (-0.5 - batch.behaviour_logprobs[mask]).exp().clamp(max=2.0) * batch.advantages[mask] * batch.weights[mask]
    )
    loss = PpoLoss(PpoLoss.Config(importance_cap=2.0))(outputs, batch)
    assert float(loss.total) == pytest.approx(-float(expected.sum()), abs=1e-9)
    assert float(loss.metrics["ratio"]) == pytest.approx(int(mask.sum()))
