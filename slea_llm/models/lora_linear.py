"""A LoRA linear layer as one autograd node: the adapter is added into the base layer's output, not beside it.

PEFT's own layer makes, for every linear layer of the model, three temporaries of the size of its output (the adapter's
output, that times the scale, the sum) and, on the way back, two more. They cost as much as the adapter's products.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


class _LoraLinear(torch.autograd.Function):
    """y = x W' + bias + s (x A') B'; W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.T
        y = rows @ weight.T if bias is None else torch.addmm(bias, rows, weight.T)
        y.addmm_(low, b.T, alpha=scale)
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scale = scale
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, low, weight, a, b = ctx.saved_tensors
        wants_x, _, _, wants_a, wants_b, _ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        grad_low = (grad @ b).mul_(ctx.scale)
        grad_x = (grad @ weight).addmm_(grad_low, a).view(ctx.shape) if wants_x else None
        grad_a = grad_low.T @ rows if wants_a else None
        grad_b = (grad.T @ low).mul_(ctx.scale) if wants_b else None
        return grad_x, None, None, grad_a, grad_b, None


class LoraLinear(PeftLinear):  # type: ignore[misc]
    """PEFT's layer, with the same parameters under the same names and the same results up to rounding.

    Whatever is not one plain adapter of the base's own type on a frozen dense layer goes PEFT's way: autocast, mixed
    types, merged or several adapters, dropout, variants such as DoRA, sharded tensors.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(..., out) of x (..., in)."""
        name = self._plain_adapter(x)
        if name is None or args or kwargs:
            output: torch.Tensor = super().forward(x, *args, **kwargs)
            return output
        base = self.base_layer
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        fused: torch.Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
            x, base.weight, base.bias, a, b, self.scaling[name]
        )
        return fused

    def _plain_adapter(self, x: torch.Tensor) -> str | None:
        active = self.active_adapters
        if len(active) != 1 or active[0] not in self.lora_A or self.disable_adapters or self.merged:
            return None
        name = str(active[0])
        weights = (self.base_layer.weight, self.lora_A[name].weight, self.lora_B[name].weight)
        plain = (
            name not in self.lora_variant
            and isinstance(self.lora_dropout[name], nn.Identity)
            and not self.base_layer.weight.requires_grad
            and all(weight.dtype == x.dtype and not isinstance(weight, DTensor) for weight in weights)
            and self.lora_B[name].bias is None
            and not torch.is_autocast_enabled(x.device.type)
        )
        return name if plain else None


def fuse(layers: Iterable[nn.Module]) -> None:
    """Turn PEFT's layers over dense base layers into `LoraLinear` in place; parameters and names stay. Others stay."""
    for layer in layers:
        if type(layer) is PeftLinear and type(layer.base_layer) is nn.Linear:
            layer.__class__ = LoraLinear
