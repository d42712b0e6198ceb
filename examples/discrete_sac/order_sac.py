"""Discrete SAC of TorchRL, fed with the project's experience.

Two things are the example's own: how an experience becomes transitions, and what SAC says of a dialogue when it is
credited (its soft values). Losses, targets and the temperature are TorchRL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from order_acts import ACTS, SIZE, Floats, vector
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.objectives import DiscreteSACLoss, SoftUpdate, ValueEstimators

from slea_llm.crediting import OUTCOME
from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SacSettings:
    """The same for every arm."""

    hidden: int = 64
    learning_rate: float = 2e-3
    tau: float = 0.05
    """Rate at which the target networks follow."""
    alpha: float = 0.1
    """Temperature at the start."""
    entropy: float = 0.15
    """Target entropy, as a share of that of the uniform policy."""
    batch: int = 64


def states(trajectory: Trajectory) -> Floats:
    """(turns + 1, SIZE): the state before every reply, and after the last one."""
    before = [vector(turn.state_before) for turn in trajectory.turns]
    return np.stack([*before, vector(trajectory.turns[-1].state_after)])


def transitions(experiences: Sequence[AugmentedExperience]) -> TensorDict:
    """One row for every reply: state, act, reward, next state, end, and its weight.

    The reward is the sum of all parts that the recipe's streams paid for the reply, `outcome` what of it the
    environment paid. `priority_weight` is lambda times the importance weight of the buffer; TorchRL multiplies it into
    its losses.
    """
    rows: dict[str, list[np.ndarray]] = {
        name: [] for name in ("here", "there", "act", "reward", "outcome", "done", "terminated", "weight")
    }
    for one in experiences:
        trajectory = one.scored.trajectory
        count = len(trajectory.turns)
        parts = [(name, paid) for stream in one.rewards.values() for name, paid in stream.items()]
        seen, last = states(trajectory), np.arange(count) == count - 1
        rows["here"].append(seen[:-1])
        rows["there"].append(seen[1:])
        rows["act"].append(np.concatenate([trajectory.reply_ids(turn) for turn in trajectory.turns]))
        rows["reward"].append(sum((paid for _, paid in parts), np.zeros(count)))
        rows["outcome"].append(sum((paid for name, paid in parts if name == OUTCOME), np.zeros(count)))
        rows["done"].append(last)
        rows["terminated"].append(last & (not trajectory.truncated))
        rows["weight"].append(one.weights)
    found = {name: torch.from_numpy(np.concatenate(part)) for name, part in rows.items()}
    count = len(found["act"])
    return TensorDict(
        {
            "observation": found["here"],
            "action": found["act"].long(),
            "priority_weight": found["weight"].float(),
            "next": {
                "observation": found["there"],
                "reward": found["reward"].float().unsqueeze(-1),
                "outcome": found["outcome"].float().unsqueeze(-1),
                "done": found["done"].unsqueeze(-1),
                "terminated": found["terminated"].unsqueeze(-1),
            },
        },
        batch_size=[count],
    )


def network(hidden: int) -> nn.Sequential:
    """State -> one number an act."""
    return nn.Sequential(
        nn.Linear(SIZE, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, len(ACTS))
    )


class Sac:
    """Actor, two critics and their targets."""

    def __init__(self, settings: SacSettings, *, gamma: float, seed: int) -> None:
        """`gamma` must be the discount between turns of the stream that pays."""
        self._settings = settings
        self._noise = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._actor, critic = network(settings.hidden), network(settings.hidden)
            self.loss = DiscreteSACLoss(
                ProbabilisticTensorDictSequential(
                    TensorDictModule(self._actor, in_keys=["observation"], out_keys=["logits"]),
                    ProbabilisticTensorDictModule(
                        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical
                    ),
                ),
                TensorDictModule(critic, in_keys=["observation"], out_keys=["action_value"]),
                action_space="categorical",
                num_actions=len(ACTS),
                alpha_init=settings.alpha,
                target_entropy=settings.entropy * float(np.log(len(ACTS))),
                loss_function="l2",
                delay_qvalue=True,
            )
        self.loss.make_value_estimator(ValueEstimators.TD0, gamma=gamma)
        self._targets = SoftUpdate(self.loss, tau=settings.tau)
        self._optimizer = torch.optim.Adam(self.loss.parameters(), lr=settings.learning_rate)
        self.updates = 0

    @torch.no_grad()
    def draw(self, state: Floats) -> tuple[int, float]:
        """An act drawn from the policy, and its log-probability."""
        logprobs = self._logprobs(torch.from_numpy(state))
        act = int(torch.multinomial(logprobs.exp(), 1, generator=self._noise))
        return act, min(0.0, float(logprobs[act]))

    @torch.no_grad()
    def best(self, state: Floats) -> tuple[int, float]:
        """The likeliest act."""
        logprobs = self._logprobs(torch.from_numpy(state))
        act = int(logprobs.argmax())
        return act, min(0.0, float(logprobs[act]))

    @torch.no_grad()
    def stats(self, scored: ScoredTrajectory, *, streams: Sequence[str], version: int) -> TokenStats:
        """What SAC says today of a dialogue, for credit: log-probabilities of its acts, and V = E[Q - alpha log pi]."""
        trajectory = scored.trajectory
        seen = torch.from_numpy(states(trajectory))
        logprobs = self._logprobs(seen)
        acts = torch.tensor([trajectory.reply_ids(turn)[0] for turn in trajectory.turns])
        taken = logprobs[:-1].gather(1, acts.unsqueeze(1)).squeeze(1).double().numpy()
        value = (logprobs.exp() * (self.critics(seen).min(0)[0] - self.alpha * logprobs)).sum(-1).double().numpy()
        return TokenStats(
            proximal=taken,
            reference=taken,  # no stream of the recipes charges a distance to a reference
            values=dict.fromkeys(streams, value),
            policy_version=version,
            critic_version=version,
        )

    @torch.no_grad()
    def critics(self, states: torch.Tensor) -> torch.Tensor:
        """(2, n, acts): Q of both critics."""
        said = []
        for parameters in self.loss.qvalue_network_params.unbind(0):
            with parameters.to_module(self.loss.qvalue_network):
                asked = TensorDict({"observation": states}, batch_size=[len(states)])
                said.append(self.loss.qvalue_network(asked)["action_value"])
        return torch.stack(said)

    @property
    def alpha(self) -> float:
        return float(self.loss.log_alpha.exp())

    def learn(self, rows: TensorDict, *, updates: int) -> dict[str, float]:
        """So many updates on minibatches of these rows; the losses of the last one."""
        said: dict[str, float] = {}
        for _ in range(updates):
            size = min(self._settings.batch, len(rows))
            batch = rows[torch.randperm(len(rows), generator=self._noise)[:size]]
            losses = self.loss(batch)
            total = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
            self._optimizer.zero_grad()
            total.backward()
            self._optimizer.step()
            self._targets.step()
            self.updates += 1
            said = {name: float(losses[name].detach()) for name in ("loss_actor", "loss_qvalue", "alpha", "entropy")}
        return said

    def _logprobs(self, states: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self._actor(states), -1)
