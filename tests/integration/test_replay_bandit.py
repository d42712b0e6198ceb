"""A bandit whose best policy is known: replay with its weights gets there, replay without them gets elsewhere.

Three arms pay r; the objective is the expected pay plus tau times the entropy, and the best policy is softmax(r / tau)
(Ziebart 2010). All pulls were made by one earlier policy and are drawn by priority, so that two weights are needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from slea_llm.buffer import POWER, ReplayBuffer
from slea_llm.interfaces import LocalReducer
from slea_llm.losses.entropy import EntropyLoss
from slea_llm.losses.ppo import PpoLoss
from slea_llm.settings import ReplaySettings
from slea_llm.types import ScoredTrajectory
from tests.support.replay import credited, one
from tests.unit.test_losses import batch_of, outputs_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PAY = torch.tensor([1.0, 0.8, 0.0], dtype=torch.float64)
TAU = 0.5
BEST = (PAY / TAU).softmax(0)
BEHAVIOUR = torch.tensor([0.15, 0.7, 0.15], dtype=torch.float64)
PRIORITY = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
PULLS = 400


def pull(number: int, arm: int) -> ScoredTrajectory:
    """A dialogue of one token, the arm, with the log-probability that the earlier policy gave it."""
    made = one(f"{number}.{arm}")
    turn = made.trajectory.turns[0]
    assert turn.span is not None
    span = dataclasses.replace(turn.span, end=turn.span.start + 1)
    (trace,) = made.trajectory.traces
    size = turn.span.start + 1
    trace = dataclasses.replace(
        trace,
        token_ids=(*trace.token_ids[: size - 1], arm),
        sampled_mask=trace.sampled_mask[:size],
        logprobs=(*trace.logprobs[: size - 1], float(BEHAVIOUR[arm].log())),
    )
    trajectory = dataclasses.replace(made.trajectory, turns=(dataclasses.replace(turn, span=span),), traces=(trace,))
    return dataclasses.replace(made, trajectory=trajectory, steps=(), scores=())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayBuffer]:
    """Pulls in exactly the shares of the earlier policy, the poor arm with the highest priority."""
    settings = ReplaySettings(share=0.75, priority="error", capacity=10_000)
    buffer = ReplayBuffer(settings, tmp_path_factory.mktemp("bandit"), seed=0)
    counts = (BEHAVIOUR * PULLS).round().int().tolist()
    with closing(buffer):
        pulls = [pull(number, arm) for arm, count in enumerate(counts) for number in range(count)]
        buffer.add(pulls)
        buffer.weigh(
            [credited(each, error=float(PRIORITY[arm_of(each)]) - 0.01) for each in pulls], reducer=LocalReducer()
        )
        yield buffer


def arm_of(scored: ScoredTrajectory) -> int:
    return scored.trajectory.traces[0].token_ids[-1]


def learn(store: ReplayBuffer, *, weighed: bool, stored: bool) -> torch.Tensor:
    """The policy after training on draws alone. Without `weighed` priorities are not undone; without `stored` today's
    log-probabilities stand in for those of the policy that sampled."""
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    ppo, entropy = PpoLoss(PpoLoss.Config(importance_cap=50.0)), EntropyLoss(EntropyLoss.Config(weight=TAU))
    optimizer = torch.optim.SGD([logits], lr=0.6)
    average = torch.zeros(3, dtype=torch.float64)
    for iteration in range(120):
        drawn = store.draw(64, iteration=iteration, progress=1.0)
        names = [each.trajectory.id for each in drawn]
        arms = torch.tensor([arm_of(each) for each in drawn])
        weights = torch.tensor([store._weights[name] for name in names], dtype=torch.float64)
        if not weighed:  # how often each was drawn
            weights = weights * (PRIORITY[arms] / PRIORITY.min()) ** POWER
        policy = logits.log_softmax(0)
        today = policy.detach()
        behaviour = BEHAVIOUR.log()[arms] if stored else today[arms]
        values = (today.exp() * PAY).sum()  # advantages made anew with today's value
        batch = batch_of(
            [[1.0]] * len(arms),
            proximal_logprobs=today[arms].unsqueeze(1),
            behaviour_logprobs=behaviour.unsqueeze(1),
            advantages=(PAY[arms] - values).unsqueeze(1),
            weights=(weights / weights.mean()).unsqueeze(1),
        )
        outputs = outputs_of(policy[arms].unsqueeze(1))
        gain = ppo(outputs, batch).total / ppo.denominator(batch)
        # The entropy is that of the state, which is the same at every pull.
        spread = dataclasses.replace(outputs, entropy=-(policy.exp() * policy).sum().expand(len(arms), 1))
        loss = gain + entropy.weight * entropy(spread, batch).total / entropy.denominator(batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if iteration >= 60:
            average += logits.detach().softmax(0) / 60
    return average


def test_replay_with_both_weights_finds_the_best_policy_and_without_either_another_one(store: ReplayBuffer) -> None:
    both = float((learn(store, weighed=True, stored=True) - BEST).abs().sum())
    without_priorities = float((learn(store, weighed=False, stored=True) - BEST).abs().sum())
    without_behaviour = float((learn(store, weighed=True, stored=False) - BEST).abs().sum())
    assert both < 0.04
    assert min(without_priorities, without_behaviour) > 0.1, (without_priorities, without_behaviour)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.5])
def test_changing_the_stored_log_probabilities_changes_the_loss_as_the_formula_says(factor: float) -> None:
    """min(p_proximal / p_behaviour, C) is linear in 1 / p_behaviour up to the cap, in the loss and in its gradient."""
    proximal, advantages = np.array([0.5, 0.2, 0.8]), np.array([1.0, -2.0, 0.5])
    behaviour = np.array([0.4, 0.05, 0.9])
    cap = 2.0
    term = PpoLoss(PpoLoss.Config(importance_cap=cap))

    def loss(mu: np.ndarray) -> tuple[float, list[float]]:
        logprobs = torch.from_numpy(np.log(proximal))[None].requires_grad_()
        batch = batch_of(
            [[1.0] * 3],
            proximal_logprobs=torch.from_numpy(np.log(proximal))[None],
            behaviour_logprobs=torch.from_numpy(np.log(mu))[None],
            advantages=torch.from_numpy(advantages)[None],
        )
        value = term(outputs_of(logprobs), batch).total
        value.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        return float(value.detach()), logprobs.grad[0].tolist()

    for mu in (behaviour, behaviour * factor):
        weights = np.minimum(proximal / mu, cap)
        total, gradient = loss(mu)
        assert total == pytest.approx(-(weights * advantages).sum(), abs=1e-9)
        assert gradient == pytest.approx((-weights * advantages).tolist(), abs=1e-9)
    assert loss(proximal)[0] == pytest.approx(-advantages.sum(), abs=1e-12)  # its own policy: weights of exactly 1
