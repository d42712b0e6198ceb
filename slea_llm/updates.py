"""One optimizer update over the micro-batches of all ranks. It knows loss terms and parameter groups, no algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import get_scheduler

from slea_llm.errors import CheckpointError, TrainingError
from slea_llm.interfaces import Adapting
from slea_llm.tensors import Batch, ModelOutputs

if TYPE_CHECKING:
    from accelerate import Accelerator

    from slea_llm.interfaces import LossTerm, Reducer
    from slea_llm.models.policy import PolicyCritic
    from slea_llm.settings import TrainerSettings

_UNITS = ""  # the key, after the term's name, of what its metrics are divided by


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one update did, the same on every rank. `kl` is the mean k3 to the proximal policy before the update."""

    metrics: Mapping[str, float]
    extremes: Mapping[str, float]
    kl: float
    max_log_ratio: float
    policy_stepped: bool


class Updater:
    """Forward, backward, clip and step, with denominators that span micro-batches and ranks.

    Each rank must bring the same number of micro-batches (dummies where it has fewer): each runs one forward and one
    backward, and gradients meet in the last. The gradient is that of `sum over terms of weight * total / denominator`
    over all ranks together.
    """

    def __init__(
        self,
        model: PolicyCritic,
        losses: Sequence[LossTerm],
        *,
        settings: TrainerSettings,
        total_updates: int,
        accelerator: Accelerator,
        reducer: Reducer,
    ) -> None:
        self._losses = tuple(losses)
        self._adapting = {term.name: term for term in self._losses if isinstance(term, Adapting)}
        self._settings = settings
        self._accelerator = accelerator
        self._reducer = reducer
        self.groups: dict[str, list[nn.Parameter]] = {
            "policy": [parameter for _, parameter in model.policy_parameters()],
            "critic": [parameter for _, parameter in model.critic_parameters()],
        }
        self._model, self.optimizer = accelerator.prepare(model, make_optimizer(self.groups, settings))
        # Not prepared: accelerate would step a prepared schedule once for every process.
        self.scheduler = make_schedule(self.optimizer.optimizer, settings, total_updates)

    def run(self, batches: Sequence[Batch], *, train_policy: bool) -> UpdateReport:
        """Make one update from this rank's micro-batches.

        The policy's gradient is left out of the step when `train_policy` is false or the KL to the proximal policy has
        passed `target_kl`; the critic is updated all the same, and the schedule moves on. Leaving the gradient out, not
        multiplying it by 0, keeps Adam's momentum from moving the policy.

        Raises TrainingError, on every rank and before anything is stepped, when a loss or a gradient norm is not finite
        (naming the term or group) and when no token of the update is trained.
        """
        sums = self._accumulate(batches)
        kl = sums.metrics["update/kl"]
        policy_stepped = train_policy and not 0 < self._settings.target_kl < kl
        norms = {f"grad_norm/{name}": self._clip(name) for name in self.groups}
        if not policy_stepped:
            for parameter in self.groups["policy"]:
                parameter.grad = None
        rates = {f"learning_rate/{group['name']}": float(group["lr"]) for group in self.optimizer.param_groups}
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if policy_stepped:  # else nothing answered to the terms, and they would push harder and harder
            for term in self._adapting.values():
                term.adapt(sums.metrics)
        return UpdateReport(
            metrics={**sums.metrics, **norms, **rates},
            extremes=sums.extremes,
            kl=kl,
            max_log_ratio=sums.extremes["update/max_log_ratio"],
            policy_stepped=policy_stepped,
        )

    def state(self) -> dict[str, Any]:
        """What loss terms that adapt have come to, by name, as JSON values."""
        return {name: dict(term.state()) for name, term in self._adapting.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave. Raises CheckpointError when a term that adapts is missing from it."""
        for name, term in self._adapting.items():
            if name not in state:
                raise CheckpointError(f"the checkpoint holds nothing of loss term {name!r}, which adapts; start afresh")
            term.restore(state[name])

    def _accumulate(self, batches: Sequence[Batch]) -> _Totals:
        """Gradients of all micro-batches, and what the terms say, reduced over ranks."""
        placed = [to_device(batch, self._accelerator.device) for batch in batches]
        denominators = self._denominators(placed)
        sums: dict[str, torch.Tensor] = {}
        extremes: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(placed):
            last = index == len(placed) - 1
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                outputs = self._model(batch)
                loss = self._loss(outputs, batch, denominators, sums, extremes)
                self._accelerator.backward(loss)
        return self._reduce(sums, extremes, denominators)

    def _denominators(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Units of each term, and tokens under `update`, over all micro-batches and ranks; a term without units: 1."""
        own = [sum(float(term.denominator(batch)) for batch in batches) for term in self._losses]
        tokens = sum(float(batch.policy_mask.sum()) for batch in batches)
        *units, tokens = self._reducer.sum([*own, tokens])
        if tokens == 0:
            raise TrainingError("no token of this update is trained; look at the masks and at the failed dialogues")
        named = {term.name: count or 1.0 for term, count in zip(self._losses, units, strict=True)}
        return {**named, "update": tokens}

    def _loss(
        self,
        outputs: ModelOutputs,
        batch: Batch,
        denominators: Mapping[str, float],
        sums: dict[str, torch.Tensor],
        extremes: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """The scaled loss of one micro-batch; adds its sums and maxima to the accumulators."""
        # DDP averages the gradients of the ranks: times the world size it is their sum.
        scale = self._reducer.world_size
        loss = torch.zeros((), dtype=outputs.logprobs.dtype, device=outputs.logprobs.device)
        for term in self._losses:
            value = term(outputs, batch)
            loss = loss + value.total * (term.weight * scale / denominators[term.name])
            _add(sums, f"{term.name}/loss", value.total)
            if value.metric_units is not None:
                _add(sums, f"{term.name}/{_UNITS}", value.metric_units)
            for key, total in value.metrics.items():
                _add(sums, f"{term.name}/{key}", total)
            for key, extreme in value.extremes.items():
                name, peak = f"{term.name}/{key}", extreme.detach().double()
                extremes[name] = torch.maximum(extremes[name], peak) if name in extremes else peak
        k3, log_ratio = drift(outputs, batch)
        _add(sums, "update/kl", k3.sum())
        _add(sums, "update/entropy", outputs.entropy[batch.policy_mask].sum())
        peak = log_ratio.abs().max().double()
        extremes["update/max_log_ratio"] = torch.maximum(extremes.get("update/max_log_ratio", peak), peak)
        return loss

    def _reduce(
        self, sums: Mapping[str, torch.Tensor], extremes: Mapping[str, torch.Tensor], denominators: Mapping[str, float]
    ) -> _Totals:
        totals = dict(zip(sums, self._reducer.sum([float(value) for value in sums.values()]), strict=True))
        peaks = dict(zip(extremes, self._reducer.max([float(value) for value in extremes.values()]), strict=True))
        units = {name: totals.pop(f"{name}/{_UNITS}", count) or 1.0 for name, count in denominators.items()}
        metrics = {name: total / units[name.partition("/")[0]] for name, total in totals.items()}
        for term in self._losses:
            loss = metrics[f"{term.name}/loss"] = totals[f"{term.name}/loss"] / denominators[term.name]
            if not np.isfinite(loss):
                self.optimizer.zero_grad()
                raise TrainingError(f"loss term {term.name!r} is {loss}; nothing was stepped")
        return _Totals(metrics=metrics, extremes=peaks)

    def _clip(self, group: str) -> float:
        """Clip one group's gradient to its own norm and return the norm before."""
        limit = self._settings.max_grad_norm or float("inf")
        norm = float(self._accelerator.clip_grad_norm_(self.groups[group], limit))
        if not np.isfinite(norm):
            self.optimizer.zero_grad()
            terms = ", ".join(term.name for term in self._losses)
            raise TrainingError(
                f"the gradient norm of the {group} is {norm} although each loss term ({terms}) is finite; "
                "nothing was stepped"
            )
        return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    metrics: dict[str, float]
    extremes: dict[str, float]


def _add(sums: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    amount = value.detach().double()
    sums[name] = sums[name] + amount if name in sums else amount


def drift(outputs: ModelOutputs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token (B, T): k3 = r - 1 - log r and log r, with r = new / proximal probability; 0 outside the policy mask.

    k3 is the third estimator of Schulman's "Approximating KL divergence" (2020), here of KL(proximal || new).
    """
    log_ratio = (outputs.logprobs.detach() - batch.proximal_logprobs) * batch.policy_mask
    return torch.expm1(log_ratio) - log_ratio, log_ratio


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: one.to(device) for name, one in tensors.items() if one is not None})


def make_optimizer(groups: Mapping[str, list[nn.Parameter]], settings: TrainerSettings) -> torch.optim.Optimizer:
    """AdamW or SGD with one parameter group for the policy and one for the critic, each with its learning rate."""
    rates = {"policy": settings.learning_rate, "critic": settings.critic_learning_rate}
    rows = [{"params": parameters, "lr": rates[name], "name": name} for name, parameters in groups.items()]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(rows, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(rows, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def make_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainerSettings, total_updates: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning-rate schedule of transformers, counted in optimizer updates of the whole run."""
    name = settings.schedule
    if name == "constant" and settings.warmup_updates:
        name = "constant_with_warmup"  # type: ignore[assignment]
    schedule: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        name, optimizer, num_warmup_steps=settings.warmup_updates, num_training_steps=total_updates
    )
    return schedule


def deal(count: int, parts: int, *, seed: Sequence[int]) -> list[int]:
    """For each of `count` consecutive trajectories of all ranks, the minibatch (0 to parts - 1) that it belongs to.

    Each run of `parts` neighbours is dealt out in random order, one to every minibatch. So minibatches are equal in
    size (to one), do not depend on how many ranks there are, and take an equal share from a rank that holds a
    consecutive piece, which keeps ranks equally busy.
    """
    generator = np.random.default_rng(list(seed))
    dealt: list[int] = []
    while len(dealt) < count:
        dealt += generator.permutation(parts).tolist()
    return dealt[:count]
