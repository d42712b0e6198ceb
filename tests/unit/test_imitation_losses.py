"""Imitation losses against hand-worked numbers; the choice of steps is in test_imitation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from slea_llm.errors import ConfigError
from slea_llm.losses.imitation import ImitationLoss
from slea_llm.losses.imitation_prototypes import PrototypeLoss
from slea_llm.tensors import Batch
from tests.unit.test_losses import batch_of, outputs_of, tensor


def imitated(weights: Sequence[Sequence[float]], **given: Any) -> Batch:
    return batch_of([[1.0] * len(row) for row in weights], imitation_weights=weights, **given)


def prototypes(shares: Sequence[float], lengths: Sequence[int], *, fade: float = 1.0) -> Batch:
    """One state with a row for each prototype, padded to the longest."""
    mask = [[1.0] * length + [0.0] * (max(lengths) - length) for length in lengths]
    batch = batch_of(
        mask, trajectory=[0] * len(lengths), prototypes=tensor(shares), imitation_weights=tensor(mask) * fade
    )
    return dataclasses.replace(batch, imitation_mask=tensor(mask).bool())


def spread(totals: Sequence[float], lengths: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of tokens that add up to these totals, rubbish where nothing is."""
    width = max(lengths)
    rows = [[total / n] * n + [7.0] * (width - n) for total, n in zip(totals, lengths, strict=True)]
    return tensor(rows)


def test_cross_entropy_of_an_expert_step() -> None:
    batch = imitated([[1.0, 1.0, 1.0]])
    term = ImitationLoss(ImitationLoss.Config())
    value = term(outputs_of(tensor([[-0.1, -0.5, -0.3]])), batch)
    assert float(value.total) == pytest.approx(0.9, abs=1e-6)
    assert float(value.total / term.denominator(batch)) == pytest.approx(0.3, abs=1e-6)
    assert float(value.metrics["nll"]) == pytest.approx(0.9, abs=1e-6)


def test_cross_entropy_is_the_forward_kl_to_what_the_experts_did_and_a_constant() -> None:
    """A state where experts chose 0, 1, 2 with shares .6, .3, .1: gradients of the loss and of KL(ref || pi) agree."""
    chosen = [0] * 6 + [1] * 3 + [2]
    reference = tensor([0.6, 0.3, 0.1])
    logits = tensor([0.2, -0.3, 0.5]).requires_grad_()
    term, batch = ImitationLoss(ImitationLoss.Config()), imitated([[1.0]] * 10)
    policy = logits.log_softmax(0)
    loss = term(outputs_of(policy[chosen].unsqueeze(-1)), batch).total / term.denominator(batch)
    kl = (reference * (reference.log() - policy)).sum()
    assert float((loss - kl).detach()) == pytest.approx(float(-(reference * reference.log()).sum()), abs=1e-9)
    (of_loss,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (of_kl,) = torch.autograd.grad(kl, logits)
    assert torch.allclose(of_loss, of_kl, atol=1e-12)


def test_weights_scale_the_loss_and_not_its_denominator() -> None:
    batch = imitated([[0.5, 0.0, 2.0]])
    term = ImitationLoss(ImitationLoss.Config())
    value = term(outputs_of(tensor([[-1.0, -8.0, -3.0]])), batch)
    assert float(value.total) == pytest.approx(6.5)
    assert int(term.denominator(batch)) == 3
    assert float(value.metrics["weight"]) == pytest.approx(2.5)


def test_self_imitation_moves_the_critic_only_where_the_return_is_above_it() -> None:
    """R = 5, V = 3: 0.5 (R - V)^2 = 2; R = 2, V = 3: nothing."""
    for returned, expected in ((5.0, 2.0), (2.0, 0.0)):
        batch = imitated([[0.0]], returns=[[[returned]]])
        values = tensor([[[3.0]]]).requires_grad_()
        term = ImitationLoss(ImitationLoss.Config(form="sil", value_weight=1.0))
        value = term(outputs_of(tensor([[-1.0]]), values=values), batch)
        assert float(value.total.detach()) == pytest.approx(expected, abs=1e-6)
        (gradient,) = torch.autograd.grad(value.total, values)
        assert float(gradient) == pytest.approx(-2.0 if expected else 0.0)
    masked = dataclasses.replace(
        imitated([[0.0]], returns=[[[5.0, 5.0]]]), head_mask=torch.tensor([[[True, False]]])
    )  # the second head is not taught at this place
    values = tensor([[[3.0, 3.0]]]).requires_grad_()
    (gradient,) = torch.autograd.grad(term(outputs_of(tensor([[-1.0]]), values=values), masked).total, values)
    assert gradient.tolist() == [[[-2.0, 0.0]]]
    plain = ImitationLoss(ImitationLoss.Config())(outputs_of(tensor([[-1.0]]), values=tensor([[[3.0]]])), batch)
    assert float(plain.total) == 0.0


@pytest.mark.parametrize(
    ("power", "expected"), [(0.0, [0.11849965, 0.8756006, 0.00589975]), (1.0, [0.27406862, 0.27406862, 0.45186276])]
)
def test_the_softmax_over_prototypes_depends_on_their_lengths(power: float, expected: list[float]) -> None:
    totals, lengths = [-12.0, -10.0, -15.0], [6, 5, 10]
    term = PrototypeLoss(PrototypeLoss.Config(length_power=power))
    found = []
    for row in range(3):
        shares = [1e-300, 1e-300, 1e-300]
        shares[row] = 1.0
        value = term(outputs_of(spread(totals, lengths)), prototypes(shares, lengths))
        found.append(math.exp(-float(value.total)))  # KL(one-hot || policy) = -log policy
    assert found == pytest.approx(expected, abs=1e-6)


def test_both_directions_of_the_kl_and_the_order_of_torchs_arguments() -> None:
    reference, policy = [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]
    batch, outputs = prototypes(reference, [1, 1, 1]), outputs_of(tensor(policy).log().unsqueeze(-1))
    forward = PrototypeLoss(PrototypeLoss.Config(direction="forward"))(outputs, batch)
    reverse = PrototypeLoss(PrototypeLoss.Config(direction="reverse"))(outputs, batch)
    assert float(forward.total) == pytest.approx(0.27725887, abs=1e-6)
    assert float(reverse.total) == pytest.approx(0.34657359, abs=1e-6)
    for value in (forward, reverse):
        assert float(value.metrics["forward"]) == pytest.approx(0.27725887, abs=1e-6)
        assert float(value.metrics["reverse"]) == pytest.approx(0.34657359, abs=1e-6)
    # F.kl_div(log q, p) is KL(p || q): the policy stands first, and it is the forward direction.
    theirs = functional.kl_div(tensor(policy).log(), tensor(reference), reduction="sum")
    assert float(forward.total) == pytest.approx(float(theirs), abs=1e-9)
    cross_entropy = -(tensor(reference) * tensor(policy).log()).sum()
    entropy = -(tensor(reference) * tensor(reference).log()).sum()
    assert float(cross_entropy) == pytest.approx(1.1752046, abs=1e-6)
    assert float(entropy) == pytest.approx(0.89794572, abs=1e-6)
    assert float(forward.total) == pytest.approx(float(cross_entropy - entropy), abs=1e-9)


@pytest.mark.parametrize(("p", "q", "forward", "reverse"), [([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], 0.02526715, 0.02581541)])
def test_kl_of_two_near_distributions(p: list[float], q: list[float], forward: float, reverse: float) -> None:
    value = PrototypeLoss(PrototypeLoss.Config())(outputs_of(tensor(q).log().unsqueeze(-1)), prototypes(p, [1, 1, 1]))
    assert float(value.metrics["forward"]) == pytest.approx(forward, abs=1e-6)
    assert float(value.metrics["reverse"]) == pytest.approx(reverse, abs=1e-6)


def test_fading_scales_the_prototype_loss_and_states_are_counted_once() -> None:
    lengths = [2, 3]
    outputs = outputs_of(spread([-1.0, -6.0], lengths))
    whole, half = (
        PrototypeLoss(PrototypeLoss.Config())(outputs, prototypes([0.9, 0.1], lengths, fade=fade)).total
        for fade in (1.0, 0.5)
    )
    assert float(half) == pytest.approx(float(whole) / 2)
    term = PrototypeLoss(PrototypeLoss.Config())
    assert int(term.denominator(prototypes([0.9, 0.1], lengths))) == 1
    assert int(term.denominator(imitated([[1.0]]))) == 0


def test_prototypes_and_steps_do_not_mix() -> None:
    """A row of one kind adds nothing to the loss of the other."""
    batch, outputs = prototypes([0.9, 0.1], [2, 3]), outputs_of(spread([-1.0, -6.0], [2, 3]))
    term = ImitationLoss(ImitationLoss.Config())
    assert float(term(outputs, batch).total) == float(term.denominator(batch)) == 0
    steps = imitated([[1.0, 1.0]])
    assert float(PrototypeLoss(PrototypeLoss.Config())(outputs_of(tensor([[-1.0, -2.0]])), steps).total) == 0


@pytest.mark.parametrize("term", [ImitationLoss, PrototypeLoss])
def test_a_batch_with_nothing_to_imitate_is_zero_with_a_gradient_of_zero(term: Any) -> None:
    loss, batch = term(term.Config()), batch_of([[1.0, 1.0]])
    logprobs = tensor([[-1.0, -2.0]]).requires_grad_()
    value = loss(outputs_of(logprobs, values=logprobs.unsqueeze(-1)), batch)
    (gradient,) = torch.autograd.grad(value.total, logprobs)
    assert float(value.total.detach()) == float(loss.denominator(batch)) == float(gradient.abs().sum()) == 0


@pytest.mark.parametrize(
    ("component", "options", "message"),
    [
        (ImitationLoss, {"form": "silly"}, r"form 'silly' is not one of.*did you mean 'sil'"),
        (ImitationLoss, {"top": 0.0}, r"imitation.top 0.0 is not in \(0, 1\]"),
        (ImitationLoss, {"beta": 0.0}, "beta 0.0 must be above 0"),
        (ImitationLoss, {"demonstrations": "log.jsonl"}, "they have no advantage and no value"),
        (ImitationLoss, {"demonstrations": "log.jsonl", "gain": "judge", "form": "awr"}, "form 'awr'"),
        (PrototypeLoss, {"direction": "both"}, "is not one of forward, reverse"),
        (PrototypeLoss, {"smoothing": 0.0}, "a reverse KL could be infinite"),
        (PrototypeLoss, {"length_power": 2.0}, r"length_power 2.0 is not in \[0, 1\]"),
        (PrototypeLoss, {"prototypes": 1}, "prototypes 1 2 or more"),
        (PrototypeLoss, {"fade_until": 0.0}, "fade_until 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(component: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        component(component.Config(**options))
