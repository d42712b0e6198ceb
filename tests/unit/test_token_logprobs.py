"""Log-probability and entropy of chosen tokens against log-softmax, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slea_llm.models import token_logprobs
from slea_llm.models.token_logprobs import logprobs_and_entropy, project_logprobs


def slow(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = logits.log_softmax(-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)])
def test_values_and_gradients_are_those_of_log_softmax(parts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(logprobs_and_entropy(logits, targets), slow(logits, targets), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)
    gradients = [
        torch.autograd.grad(sum(((weights[part] * pair[part]).sum() for part in parts), torch.zeros(())), logits)[0]
        for pair in (logprobs_and_entropy(logits, targets), slow(logits, targets))
    ]
    assert torch.allclose(gradients[0], gradients[1], atol=1e-12)


def test_gradcheck() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, torch.tensor([0, 4, 2])), (logits,))


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprob, entropy = logprobs_and_entropy(logits, torch.tensor([1]))
    (logprob + entropy).sum().backward()  # type: ignore[no-untyped-call]
    assert float(logprob.detach()) == -2e4
    assert float(entropy.detach()) == 0.0
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_no_chosen_token_keeps_the_graph_connected() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    head = nn.Linear(4, 9)
    pair = project_logprobs(
        hidden, torch.zeros(0, dtype=torch.int64), head=head, vocabulary=9, temperature=0.5, dtype=torch.float32
    )
    (pair[0].sum() + pair[1].sum()).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_piecewise_logits_equal_all_at_once(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(10, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 9, (10,), generator=generator)
    head = nn.Linear(4, 9, bias=False, dtype=torch.float64)

    def run() -> list[torch.Tensor]:
        logprobs, entropy = project_logprobs(
            hidden, targets, head=head, vocabulary=9, temperature=temperature, dtype=torch.float64
        )
        return [logprobs, entropy, *torch.autograd.grad((logprobs * entropy).sum(), hidden)]

    at_once = run()
    monkeypatch.setattr(token_logprobs, "LOGITS_AT_ONCE_ON_CPU", 27)  # three positions at a time
    for one, other in zip(at_once, run(), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_no_logits_are_kept_for_the_backward_pass() -> None:
    hidden = torch.randn(60, 4, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        project_logprobs(
            hidden,
            torch.arange(60) % 50,
            head=nn.Linear(4, 50),
            vocabulary=50,
            temperature=1.0,
            dtype=torch.float32,
        )
    assert saved
    assert max(saved) == hidden.numel()


def test_logits_made_again_in_the_backward_pass_are_under_the_autocast_of_the_forward_pass() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 4, generator=generator, requires_grad=True)
    head = nn.Linear(4, 9, bias=False).requires_grad_(False)
    types: list[torch.dtype] = []
    head.register_forward_hook(lambda *call: types.append(call[-1].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, entropy = project_logprobs(
            hidden, torch.arange(5), head=head, vocabulary=9, temperature=1.0, dtype=torch.float32
        )
    entropy.sum().backward()  # type: ignore[no-untyped-call]
    assert types == [torch.bfloat16, torch.bfloat16]


def test_br_044_log_probability_is_that_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    logprob, _ = project_logprobs(
        logits, torch.tensor([0]), head=nn.Identity(), vocabulary=3, temperature=0.5, dtype=torch.float32
    )
    assert float(logprob) == pytest.approx(-0.142932, abs=1e-6)
