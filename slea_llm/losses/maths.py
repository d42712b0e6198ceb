"""What the loss terms share: masked sums, safe exponentials and the three estimators of a KL divergence."""

from __future__ import annotations

import torch

MAX_LOG = 20.0
"""Log-ratios are cut here before they are exponentiated: e^20 is 4.9e8, far outside every clip range."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Zero outside the mask, whatever stands there (NaN and inf too), in the gradient as well."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum inside the mask; 0 for an empty mask."""
    return masked(values, mask).sum()


def safe_exp(log_values: torch.Tensor) -> torch.Tensor:
    """exp, with its argument cut to [-20, 20]; the gradient outside is 0."""
    return log_values.clamp(-MAX_LOG, MAX_LOG).exp()


def k1(log_ratio: torch.Tensor) -> torch.Tensor:
    """log p - log q under samples of p: unbiased for KL(p||q). As a loss its expected gradient is 0."""
    return log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: slightly biased as a value; as a loss its gradient is that of KL(p||q)."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """q/p - 1 - log(q/p), never negative: unbiased for KL(p||q). As a loss its gradient is that of KL(q||p)."""
    return safe_exp(-log_ratio) - 1.0 + log_ratio


def truncated_importance(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """min(p_proximal / p_behaviour, cap) per token, detached; ones when `cap` is 0."""
    if cap == 0:
        return torch.ones_like(proximal)
    return safe_exp(proximal - behaviour).clamp(max=cap).detach()
