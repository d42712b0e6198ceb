"""The fused LoRA layer against PEFT's own, in value and gradient, and when it steps aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn

from slea_llm.models.lora_linear import LoraLinear, fuse


def layer(*, bias: bool = False, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Any:
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(5, 7, bias=bias, dtype=dtype)
    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=dropout)
    made = PeftLinear(base, "policy", config, r=3, lora_alpha=6, lora_dropout=dropout)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made.to(dtype).requires_grad_(False)


def trained(made: Any) -> list[torch.Tensor]:
    return [made.lora_A["policy"].weight.requires_grad_(), made.lora_B["policy"].weight.requires_grad_()]


@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_are_those_of_peft(bias: bool) -> None:
    made = layer(bias=bias)
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = [x, *trained(made)]
    results = []
    for _ in range(2):
        y = made(x)
        results.append([y, *torch.autograd.grad((weights * y).sum(), inputs)])
        fuse([made])
    assert type(made) is LoraLinear
    for own, theirs in zip(results[1], results[0], strict=True):
        assert torch.allclose(own, theirs, atol=1e-12)


def test_gradcheck() -> None:
    made = layer()
    fuse([made])
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda one, *_: made(one), (x, *trained(made)))


def test_only_wanted_gradients_are_made() -> None:
    made = layer()
    fuse([made])
    trained(made)
    made(torch.randn(3, 5, dtype=torch.float64)).sum().backward()
    assert made.lora_A["policy"].weight.grad is not None
    assert made.base_layer.weight.grad is None


def test_an_adapter_without_effect_leaves_the_base_to_the_bit() -> None:
    made = layer(dtype=torch.float32)
    nn.init.zeros_(made.lora_B["policy"].weight)
    fuse([made])
    x = torch.randn(4, 5)
    assert torch.equal(made(x), made.base_layer(x))


def calls_own_way(made: Any, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether PEFT's forward was left out."""
    calls: list[int] = []
    forward = PeftLinear.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        result: torch.Tensor = forward(self, *args, **kwargs)
        return result

    monkeypatch.setattr(PeftLinear, "forward", counted)
    made(x)
    return not calls


def test_it_goes_its_own_way_for_one_plain_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer()
    fuse([made])
    assert calls_own_way(made, torch.randn(2, 5, dtype=torch.float64), monkeypatch)


@pytest.mark.parametrize("odd", ["types", "dropout", "none", "trained base", "autocast"])
def test_it_steps_aside_for_anything_else(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(dtype=torch.float32, dropout=0.5 if odd == "dropout" else 0.0)
    fuse([made])
    if odd == "types":
        made.base_layer.to(torch.bfloat16)
    if odd == "none":
        made._active_adapter = []
    if odd == "trained base":
        made.base_layer.weight.requires_grad_()
    x = torch.randn(2, 5, dtype=torch.bfloat16 if odd == "types" else torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd == "autocast"):
        assert not calls_own_way(made, x, monkeypatch)


def test_other_layers_stay_as_they_are() -> None:
    other = nn.Linear(2, 2)
    fuse([other])
    assert type(other) is nn.Linear
