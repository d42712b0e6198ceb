"""Train the reward model's network on labelled prefixes, and predict what was held out."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from slea_llm.errors import ConfigError
from slea_llm.evaluators.reward_model_memory import Judged, Memory, attached_apart
from slea_llm.evaluators.reward_model_network import NetworkShape, RewardNetwork, collate
from slea_llm.fitting.regression import logistic_regression

Floats = NDArray[np.float64]
HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Judged):
    """The labelled positions of one trajectory.

    `targets` and `weights` have shape (P, 2), like the logits of `RewardNetwork`; a weight of 0 says that there is no
    label. Targets are probabilities in [0, 1]. Examples of one `group` (a conversation, a task) are never on both sides
    of a split. The last steps of examples of one `context` are alternatives to each other.
    """

    trajectory: str = ""

    @property
    def context(self) -> str:
        """What stands before the last step."""
        return self.prefixes.contexts[-1]


AnyExample = TypeVar("AnyExample", bound=Example)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    epochs: int = 10
    """Passes at most."""
    batch: int = 32
    """Trajectories of one update."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    ranking_coef: float = 0.5
    """Weight of the pairwise loss between alternatives of one context (Bradley and Terry 1952). 0: none."""
    patience: int = 3
    """Passes without a better loss on the inner held-out groups after which a member stops."""
    inner_share: float = 0.15
    """Share of the groups held out for that."""


def folds(groups: Sequence[str], count: int, *, seed: int) -> NDArray[np.int64]:
    """(n,) the fold of every example; examples of one group share theirs. Raises ConfigError for fewer groups."""
    names = sorted(set(groups))
    if len(names) < count:
        raise ConfigError(
            f"{len(names)} groups (tasks, or dialogues) with labelled steps cannot be split into {count} folds; give "
            "logs of more"
        )
    order = np.random.default_rng(seed).permutation(len(names))
    place = {names[index]: rank % count for rank, index in enumerate(order)}
    return np.array([place[group] for group in groups], np.int64)


def set_aside(groups: Sequence[str], share: float, *, seed: int) -> NDArray[np.bool_]:
    """(n,) whether an example is of the groups held out: about that share of them, one at least.

    Raises ConfigError for a single group.
    """
    count = max(2, min(round(1.0 / share), len(set(groups))))
    held: NDArray[np.bool_] = folds(groups, count, seed=seed) == 0
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedNetwork:
    """A network and the memory that it reads beside the evidence."""

    network: RewardNetwork
    memory: Memory


def fit(examples: Sequence[Example], shape: NetworkShape, settings: TrainingSettings, *, seed: int) -> FittedNetwork:
    """A network fitted to the examples; every member has its own start, its own order and its own inner split."""
    memory, rows = attached_apart(examples)
    remembered = [dataclasses.replace(one, prefixes=row) for one, row in zip(examples, rows, strict=True)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RewardNetwork(shape)
        for index in range(shape.members):
            _start_from_evidence(network, index, remembered)
            _fit_member(network, index, remembered, settings, seed=seed * 1000 + index)
    return FittedNetwork(network=network.eval(), memory=memory)


def predict(fitted: FittedNetwork, examples: Sequence[Example], *, batch: int = 64) -> list[Floats]:
    """Logits (P, 2) of every example, in order."""
    network = fitted.network.eval()
    rows = [fitted.memory.attached(one.prefixes) for one in examples]
    found: list[Floats] = [np.zeros((0, HEADS))] * len(examples)
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].prefixes))
    with torch.no_grad():
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            logits = network(collate([rows[place] for place in places])).double().numpy()
            for place, row in zip(places, logits, strict=True):
                found[place] = row[: len(rows[place])]
    return found


def _start_from_evidence(network: RewardNetwork, index: int, examples: Sequence[Example]) -> None:
    """Let the direct path begin at the logistic regression on evidence and memory; the rest learns what it misses."""
    direct = network.member(index).direct
    width = examples[0].prefixes.evidence.shape[1]
    for head in range(HEADS):
        kept = [one.weights[:, head] > 0 for one in examples]
        features = np.concatenate([one.prefixes.evidence[keep] for one, keep in zip(examples, kept, strict=True)])
        targets = np.concatenate([one.targets[keep, head] for one, keep in zip(examples, kept, strict=True)])
        if len(targets):
            solved = logistic_regression(features.astype(np.float64), targets, ridge=10.0)
            with torch.no_grad():
                direct.weight[head, -width:] = torch.from_numpy(solved[1:])
                direct.bias[head] = float(solved[0])


def _fit_member(
    network: RewardNetwork, index: int, examples: Sequence[Example], settings: TrainingSettings, *, seed: int
) -> None:
    member = network.member(index)
    inner = set_aside([one.group for one in examples], settings.inner_share, seed=seed)
    train = [one for one, held in zip(examples, inner, strict=True) if not held]
    held_out = [one for one, held in zip(examples, inner, strict=True) if held]
    direct = {id(parameter) for parameter in member.direct.parameters()}
    groups = [
        {
            "params": [one for one in member.parameters() if id(one) not in direct],
            "weight_decay": settings.weight_decay,
        },
        {"params": list(member.direct.parameters()), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    rng = np.random.default_rng(seed)
    updates = settings.epochs * math.ceil(len(train) / settings.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=updates + 1, pct_start=0.1
    )
    best, best_state, waited = math.inf, copy.deepcopy(member.state_dict()), 0
    for _ in range(settings.epochs):
        member.train()
        for rows in contexts_together(train, settings.batch, rng):
            loss = multitask_loss(member(collate([one.prefixes for one in rows])), rows, settings.ranking_coef)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(member.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        member.eval()
        with torch.no_grad():
            # The ranking is left out: what is held out must be calibrated, and holds few alternatives.
            total = sum(
                float(multitask_loss(member(collate([one.prefixes for one in rows])), rows, 0.0)) * len(rows)
                for rows in contexts_together(held_out, settings.batch, None)
            )
        waited += 1
        if total < best:
            best, best_state, waited = total, copy.deepcopy(member.state_dict()), 0
        if waited >= settings.patience:
            break
    member.load_state_dict(best_state)


def contexts_together(
    examples: Sequence[AnyExample], size: int, rng: np.random.Generator | None
) -> Iterator[list[AnyExample]]:
    """Batches in which alternatives of one context stand together."""
    by_context: dict[str, list[AnyExample]] = {}
    for one in examples:
        by_context.setdefault(one.context, []).append(one)
    contexts = list(by_context.values())
    order = range(len(contexts)) if rng is None else rng.permutation(len(contexts))
    flat = [one for place in order for one in contexts[place]]
    for start in range(0, len(flat), size):
        yield flat[start : start + size]


def multitask_loss(logits: torch.Tensor, rows: Sequence[Example], ranking_coef: float) -> torch.Tensor:
    """Logits (B, P, 2): BCE of the step labels + 0.5 BCE of success at every prefix + the ranking of alternatives."""
    targets, weights = torch.zeros_like(logits), torch.zeros_like(logits)
    for index, one in enumerate(rows):
        count = min(len(one.targets), logits.shape[1])  # places that were not read carry no weight
        targets[index, :count] = torch.from_numpy(one.targets[:count])
        weights[index, :count] = torch.from_numpy(one.weights[:count])
    each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * weights
    totals = weights.sum(dim=(0, 1)).clamp(min=1e-6)
    label, success = each.sum(dim=(0, 1)) / totals
    loss: torch.Tensor = label + 0.5 * success
    if ranking_coef:
        loss = loss + ranking_coef * _ranking(logits, targets, weights, rows)
    return loss


def _ranking(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, rows: Sequence[Example]
) -> torch.Tensor:
    """-log sigmoid of the difference of the label logits over pairs of one context whose labels differ."""
    last = torch.tensor([min(len(one.targets), logits.shape[1]) - 1 for one in rows], device=logits.device)
    at = torch.arange(len(rows), device=logits.device)
    score, target, weight = (table[at, last, 0] for table in (logits, targets, weights))
    names = {name: number for number, name in enumerate(dict.fromkeys(one.context for one in rows))}
    context = torch.tensor([names[one.context] for one in rows], device=logits.device)
    better = (target[:, None] > target[None, :]) & (context[:, None] == context[None, :])
    pairs = better & (weight[:, None] > 0) & (weight[None, :] > 0)
    if not bool(pairs.any()):
        return logits.sum() * 0.0
    return -F.logsigmoid((score[:, None] - score[None, :])[pairs]).mean()
