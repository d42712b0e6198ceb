"""Log-probability and entropy of chosen tokens from hidden states, a tile of logits at a time, none of them kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE = 2**27
"""Logits (positions times vocabulary) in memory at a time: 0.5 GiB in float32, enough rows to keep a GPU busy."""
LOGITS_AT_ONCE_ON_CPU = 2**23
"""32 MiB in float32. glibc gives larger blocks back at once, so that each would cost its page faults again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """How hidden states become logits, and under which autocast; the backward pass runs outside of it."""

    project: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    temperature: float
    dtype: torch.dtype
    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype

    def tiles(self, first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        limit = LOGITS_AT_ONCE_ON_CPU if self.device_type == "cpu" else LOGITS_AT_ONCE
        rows = max(1, limit // self.vocabulary)
        return zip(torch.split(first, rows), torch.split(second, rows), strict=True)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device_type, dtype=self.autocast_dtype, enabled=self.autocast):
            logits = self.project(states).to(self.dtype)
        return logits if self.temperature == 1.0 else logits / self.temperature


class _TokenLogprobs(torch.autograd.Function):
    """d log p(y) / dz = onehot(y) - p;  dH / dz = -p (log p + H), each pulled back through the head to the state.

    The first is pulled back in the forward pass, while the logits are there, and only scaled in the backward pass; the
    second, which few losses read, makes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trained = ctx.needs_input_grad[0]
        logprobs, entropies, pulled = [], [], []
        for states, wanted in head.tiles(hidden, targets):
            with torch.set_grad_enabled(trained):
                states = states.detach().requires_grad_(trained)
                graph = head.logits(states)
            logits, at = graph.detach(), wanted.unsqueeze(-1)
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            logprobs.append((logits.gather(-1, at) - normaliser).squeeze(-1))
            p = (logits - normaliser).exp_()
            entropies.append(normaliser.squeeze(-1) - torch.linalg.vecdot(p, logits))
            if trained:
                gradient = p.neg_().scatter_add_(-1, at, torch.ones_like(at, dtype=p.dtype))
                pulled.append(torch.autograd.grad(graph, states, gradient)[0])
        if trained:
            ctx.head = head
            ctx.save_for_backward(hidden, torch.cat(pulled))
            ctx.set_materialize_grads(False)
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        grad_logprobs, grad_entropy = grads
        hidden, pulled = ctx.saved_tensors
        total = None if grad_logprobs is None else (pulled * grad_logprobs.unsqueeze(-1)).to(hidden.dtype)
        if grad_entropy is not None:
            of_entropy = _entropy_gradient(ctx.head, hidden, grad_entropy)
            total = of_entropy if total is None else total + of_entropy
        return total, None, None


def _entropy_gradient(head: _Head, hidden: torch.Tensor, grad_entropy: torch.Tensor) -> torch.Tensor:
    parts = []
    for states, grad in head.tiles(hidden, grad_entropy.unsqueeze(-1)):
        with torch.enable_grad():
            states = states.detach().requires_grad_()
            graph = head.logits(states)
        log_p = graph.detach().log_softmax(dim=-1)
        p = log_p.exp()
        entropy = -torch.linalg.vecdot(p, log_p).unsqueeze(-1)
        parts.append(torch.autograd.grad(graph, states, p.mul_(log_p.add_(entropy)).mul_(-grad))[0])
    return torch.cat(parts)


def logprobs_and_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`log p(target)` and the entropy in nats, each (N,), from logits (N, V) and targets (N,)."""
    return project_logprobs(
        logits, targets, head=nn.Identity(), vocabulary=logits.shape[-1], temperature=1.0, dtype=logits.dtype
    )


def project_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies at `temperature` in `dtype`, each (N,), of hidden states (N, H).

    `head` maps hidden states to logits (N, `vocabulary`); its own parameters get no gradient. Memory beside the result
    is that of a tile of logits, however many positions there are.
    """
    device = hidden.device.type
    described = _Head(
        project=head,
        vocabulary=vocabulary,
        temperature=temperature,
        dtype=dtype,
        device_type=device,
        autocast=torch.is_autocast_enabled(device),
        autocast_dtype=torch.get_autocast_dtype(device),
    )
    logprobs, entropy = _TokenLogprobs.apply(hidden, targets, described)  # type: ignore[no-untyped-call]
    return logprobs, entropy
