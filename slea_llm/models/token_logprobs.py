"""Log-probability and entropy of chosen tokens from logits, with one saved tensor instead of a softmax's several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**27
"""Logits (positions times vocabulary) held at once; above it they are made again in the backward pass (0.5 GiB)."""


class _TokenLogprobs(torch.autograd.Function):
    """d log p(y) / dz = onehot(y) - p;  dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normaliser = logits.logsumexp(dim=-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
        probabilities = (logits - normaliser.unsqueeze(-1)).exp_()
        entropy = normaliser - (probabilities * logits).sum(dim=-1)
        ctx.save_for_backward(logits, targets, normaliser, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        grad_logprobs, grad_entropy = grads
        logits, targets, normaliser, entropy = ctx.saved_tensors
        log_p = logits - normaliser.unsqueeze(-1)
        p = log_p.exp()
        scale = torch.zeros_like(normaliser).unsqueeze(-1)
        if grad_logprobs is not None:
            scale = scale - grad_logprobs.unsqueeze(-1)
        if grad_entropy is not None:
            scale = scale - grad_entropy.unsqueeze(-1) * (log_p + entropy.unsqueeze(-1))
        gradient = p.mul_(scale)
        if grad_logprobs is not None:
            gradient.scatter_add_(-1, targets.unsqueeze(-1), grad_logprobs.unsqueeze(-1))
        return gradient, None


def logprobs_and_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`log p(target)` and the entropy in nats, each (N,), from logits (N, V) and targets (N,)."""
    logprobs, entropy = _TokenLogprobs.apply(logits, targets)  # type: ignore[no-untyped-call]
    return logprobs, entropy


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

    `head` maps hidden states to logits (N, `vocabulary`). When all logits together are many they are made piece by
    piece and, for the backward pass, made again, so that the peak does not grow with the batch.
    """

    def piece(states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(states).to(dtype)
        return logprobs_and_entropy(logits if temperature == 1.0 else logits / temperature, wanted)

    if hidden.shape[0] * vocabulary <= LOGITS_AT_ONCE:
        return piece(hidden, targets)
    size = max(1, LOGITS_AT_ONCE // vocabulary)
    pieces = [
        checkpoint(piece, states, wanted, use_reentrant=False)
        for states, wanted in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
    ]
    logprobs, entropy = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)
