"""Loss terms against hand-worked numbers, known failures and invariances; no model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.errors import ConfigError
from slea_llm.losses.entropy import EntropyLoss
from slea_llm.losses.imitation import ImitationLoss
from slea_llm.losses.imitation_prototypes import PrototypeLoss
from slea_llm.losses.maths import k1, k2, k3, masked_sum, truncated_importance
from slea_llm.losses.ppo import PpoLoss
from slea_llm.losses.reference_kl import ReferenceKlLoss
from slea_llm.losses.value import ValueLoss
from slea_llm.tensors import Batch, LossValue, ModelOutputs

Rows = Sequence[Sequence[float]]
TERMS: tuple[Any, ...] = (
    PpoLoss(PpoLoss.Config()),
    PpoLoss(PpoLoss.Config(aggregation="seq-mean-token-mean")),
    PpoLoss(PpoLoss.Config(aggregation="seq-mean-token-sum")),
    PpoLoss(PpoLoss.Config(aggregation="seq-mean-token-sum-norm", norm_length=4)),
    ValueLoss(ValueLoss.Config(clip_range=0.2)),
    ReferenceKlLoss(ReferenceKlLoss.Config()),
    ReferenceKlLoss(ReferenceKlLoss.Config(estimator="k3")),
    EntropyLoss(EntropyLoss.Config()),
    ImitationLoss(ImitationLoss.Config()),
    ImitationLoss(ImitationLoss.Config(form="sil", value_weight=0.5)),
    PrototypeLoss(PrototypeLoss.Config()),
    PrototypeLoss(PrototypeLoss.Config(direction="reverse", length_power=0.5)),
)


def tensor(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def batch_of(mask: Rows, *, trajectory: Sequence[int] | None = None, **given: Any) -> Batch:
    """A batch whose loss masks are `mask`; everything not given is 0, weights are 1."""
    on = torch.tensor(mask).bool()
    zeros = torch.zeros(on.shape, dtype=torch.float64)
    owner = torch.tensor(list(trajectory) if trajectory is not None else list(range(len(mask))))
    counts = torch.zeros(int(owner.max()) + 1, dtype=torch.float64).index_add(0, owner, on.sum(1).double())
    values = {
        "behaviour_logprobs": zeros,
        "proximal_logprobs": zeros,
        "reference_logprobs": zeros,
        "advantages": zeros,
        "weights": torch.ones_like(zeros),
        "imitation_weights": zeros,
        "prototypes": zeros[:, 0],
        "returns": zeros.unsqueeze(-1),
        "old_values": zeros.unsqueeze(-1),
    } | {name: value if isinstance(value, torch.Tensor) else tensor(value) for name, value in given.items()}
    return Batch(
        input_ids=torch.zeros(on.shape, dtype=torch.int64),
        attention_mask=torch.ones_like(on),
        policy_mask=on,
        imitation_mask=on if "imitation_weights" in given else torch.zeros_like(on),
        value_mask=on,
        trajectory=owner,
        trajectory_tokens=counts[owner],
        **values,
    )


def outputs_of(logprobs: torch.Tensor, values: torch.Tensor | None = None) -> ModelOutputs:
    return ModelOutputs(
        logprobs=logprobs, entropy=-logprobs, values=logprobs.unsqueeze(-1) if values is None else values
    )


def ppo(ratios: Rows, advantages: Rows, *, config: Any, **given: Any) -> tuple[LossValue, torch.Tensor, torch.Tensor]:
    """The loss, its gradient by log-probability, and its denominator."""
    logprobs = tensor(ratios).log().requires_grad_()
    batch = batch_of([[1.0] * len(row) for row in ratios], advantages=advantages, **given)
    term = PpoLoss(config)
    value = term(outputs_of(logprobs), batch)
    value.total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return value, logprobs.grad, term.denominator(batch)


def each(ratios: Sequence[float], advantage: float, **options: Any) -> list[float]:
    """The clipped objective of each ratio on its own."""
    config = PpoLoss.Config(**{"clip_high": 0.2, "dual_clip": 0.0, "importance_cap": 0.0} | options)
    return [-float(ppo([[ratio]], [[advantage]], config=config)[0].total.detach()) for ratio in ratios]


RATIOS = (0.5, 0.9, 1.0, 1.15, 1.5)


@pytest.mark.parametrize(
    ("advantage", "expected"), [(2.0, [1.0, 1.8, 2.0, 2.3, 2.4]), (-2.0, [-1.6, -1.8, -2.0, -2.3, -3.0])]
)
def test_clipped_objective(advantage: float, expected: list[float]) -> None:
    assert each(RATIOS, advantage) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "still"), [(2.0, [False, False, False, False, True]), (-2.0, [True, False, False, False, False])]
)
def test_the_clip_takes_the_gradient_on_one_side_only(advantage: float, still: list[bool]) -> None:
    config = PpoLoss.Config(clip_high=0.2, dual_clip=0.0, importance_cap=0.0)
    value, gradient, _ = ppo([list(RATIOS)], [[advantage] * 5], config=config)
    assert (gradient[0] == 0).tolist() == still
    assert float(value.metrics["clip_frac"]) == sum(still)


def test_asymmetric_clip() -> None:
    assert each([1.15, 1.25, 1.3, 1.5], 2.0, clip_high=0.28) == pytest.approx([2.3, 2.5, 2.56, 2.56], abs=1e-6)


def test_dual_clip_bounds_what_one_bad_token_costs() -> None:
    assert each([2.0, 4.0], -1.0, dual_clip=3.0) == pytest.approx([-2.0, -3.0], abs=1e-6)
    assert each([4.0], -1.0) == pytest.approx([-4.0], abs=1e-6)


def test_truncated_importance_weights() -> None:
    proximal, behaviour = tensor([0.5, 0.2, 0.8]).log(), tensor([0.4, 0.05, 0.9]).log()
    assert truncated_importance(proximal, behaviour, 2.0).tolist() == pytest.approx([1.25, 2.0, 0.88888889], abs=1e-6)
    assert truncated_importance(proximal, behaviour, 0.0).tolist() == [1.0, 1.0, 1.0]
    weights = truncated_importance(proximal, behaviour, 2.0)
    assert float(weights.sum() ** 2 / weights.square().sum()) == pytest.approx(2.69658691, abs=1e-6)


def test_a_token_weighs_by_its_own_ratio_and_never_by_the_product_over_its_reply() -> None:
    """The product of a reply explodes with its length; the weight of a token does not know how long the reply is."""
    ratios = tensor([1.25, 4.0, 0.88888889])
    assert float(ratios.prod()) == pytest.approx(4.44444444, abs=1e-6)
    assert float(ratios.log().mean().exp()) == pytest.approx(1.64414138, abs=1e-6)
    turn = tensor([1.1, 1.1, 0.9, 1.2])
    assert float(turn.prod()) == pytest.approx(1.3068, abs=1e-6)
    assert float(turn.log().mean().exp()) == pytest.approx(1.06918358, abs=1e-6)
    for tokens, product in ((10, 2.59374246), (100, 13780.61233982)):
        long = tensor([1.1] * tokens)
        assert float(long.prod()) == pytest.approx(product, rel=1e-9)
        weights = truncated_importance(long.log(), torch.zeros_like(long), 2.0)
        assert weights.tolist() == pytest.approx([1.1] * tokens, abs=1e-12)
    assert truncated_importance(turn.log(), torch.zeros_like(turn), 2.0).tolist() == pytest.approx(turn.tolist())
    value, _, _ = ppo([turn.tolist()], [[1.0] * 4], config=PpoLoss.Config(clip_high=0.2))
    assert float(value.total.detach()) == pytest.approx(-4.3, abs=1e-6)  # the sum of the tokens' own ratios


def test_decoupled_loss_weights_by_the_sampler_and_clips_by_the_proximal_policy() -> None:
    config = PpoLoss.Config(clip_high=0.2, importance_cap=2.0)
    value, _, _ = ppo([[1.3]], [[1.5]], config=config, behaviour_logprobs=[[-math.log(4.0)]])
    assert float(value.total.detach()) == pytest.approx(-3.6, abs=1e-6)
    assert each([5.2], 1.5) == pytest.approx([1.8], abs=1e-6)  # the coupled ratio, for comparison


def test_br_105_replayed_tokens_are_clipped_against_the_policy_that_sampled_them() -> None:
    """Coupled: the stored log-probability is the proximal one. Decoupled: what is left is in the weight, never lost."""
    coupled = batch_of([[1.0]], proximal_logprobs=[[-1.0]], behaviour_logprobs=[[-1.0]], advantages=[[1.0]])
    term = PpoLoss(PpoLoss.Config(clip_high=0.2))
    value = term(outputs_of(tensor([[-0.5]])), coupled)
    assert float(value.metrics["ratio"]) == pytest.approx(1.648721, abs=1e-6)
    assert -float(value.total) == pytest.approx(1.2, abs=1e-6)
    today = dataclasses.replace(coupled, proximal_logprobs=tensor([[-0.5]]))
    value = term(outputs_of(tensor([[-0.5]])), today)
    assert float(value.metrics["ratio"]) == 1.0
    assert float(value.metrics["importance"]) == pytest.approx(1.648721, abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 1.66666667),
        ("seq-mean-token-mean", 1.5),
        ("seq-mean-token-sum", 5.0),
        ("seq-mean-token-sum-norm", 2.5),
    ],
)
@pytest.mark.parametrize("rows_of_one_dialogue", [False, True])
def test_aggregation(aggregation: Any, expected: float, rows_of_one_dialogue: bool) -> None:
    """Rows [1, 1, -, -] and [2, 2, 2, 2]; a dialogue spread over two rows counts as one."""
    mask, advantages, owner = [[1.0, 1, 0, 0], [1.0, 1, 1, 1]], [[-1.0, -1, 9, 9], [-2.0] * 4], [0, 1]
    if rows_of_one_dialogue:
        mask, owner = [mask[0], [1.0, 1, 0, 0], [0.0, 0, 1, 1]], [0, 1, 1]
        advantages = [advantages[0], [-2.0, -2, 9, 9], [9.0, 9, -2, -2]]
    term = PpoLoss(PpoLoss.Config(aggregation=aggregation, norm_length=4))
    batch = batch_of(mask, trajectory=owner, advantages=advantages)
    value = term(outputs_of(torch.zeros(len(mask), 4, dtype=torch.float64)), batch)
    assert float(value.total) / (float(term.denominator(batch)) or 1.0) == pytest.approx(expected, abs=1e-6)
    assert value.metric_units is not None
    assert float(value.metrics["ratio"] / value.metric_units) == pytest.approx(1.0)


def test_weights_multiply_the_policy_loss() -> None:
    config = PpoLoss.Config()
    value, _, _ = ppo([[1.0, 1.0]], [[1.0, 1.0]], config=config, weights=[[0.5, 2.0]])
    assert float(value.total.detach()) == pytest.approx(-2.5)


@pytest.mark.parametrize(
    ("old", "new", "returned", "expected"),
    [(0.5, 0.9, 1.0, 0.045), (0.5, 0.6, 1.0, 0.08), (0.5, 0.9, 0.4, 0.125), (0.5, 0.1, 1.0, 0.405)],
)
def test_value_clip(old: float, new: float, returned: float, expected: float) -> None:
    batch = batch_of([[1.0]], old_values=[[[old]]], returns=[[[returned]]])
    outputs = outputs_of(tensor([[0.0]]), values=tensor([[[new]]]))
    value = ValueLoss(ValueLoss.Config(clip_range=0.2))(outputs, batch)
    assert float(value.total) == pytest.approx(expected, abs=1e-6)
    unclipped = ValueLoss(ValueLoss.Config())(outputs, batch)
    assert float(unclipped.total) == pytest.approx(0.5 * (new - returned) ** 2, abs=1e-6)


def test_value_loss_adds_streams_and_counts_tokens_once() -> None:
    batch = batch_of([[1.0, 0.0]], returns=tensor([[[1.0, -2.0], [9.0, 9.0]]]), old_values=torch.zeros(1, 2, 2))
    term = ValueLoss(ValueLoss.Config())
    value = term(outputs_of(tensor([[0.0, 0.0]]), values=torch.zeros(1, 2, 2, dtype=torch.float64)), batch)
    assert float(value.total) == pytest.approx(2.5)
    assert int(term.denominator(batch)) == 1


def test_kl_estimators() -> None:
    logp, ref = tensor([-0.5, -1.2, -0.7]), tensor([-0.7, -1.0, -0.7])
    assert k1(logp - ref).tolist() == pytest.approx([0.2, -0.2, 0.0], abs=1e-6)
    assert k2(logp - ref).tolist() == pytest.approx([0.02, 0.02, 0.0], abs=1e-6)
    assert k3(logp - ref).tolist() == pytest.approx([0.01873075, 0.02140276, 0.0], abs=1e-6)
    assert [float(k(logp - ref).mean()) for k in (k1, k2, k3)] == pytest.approx([0.0, 0.01333333, 0.01337784], abs=1e-6)


def test_kl_estimators_of_a_whole_distribution() -> None:
    p, q = tensor([0.5, 0.3, 0.2]), tensor([0.4, 0.4, 0.2])
    log_ratio = p.log() - q.log()
    assert k1(log_ratio).tolist() == pytest.approx([0.22314355, -0.28768207, 0.0], abs=1e-6)
    assert k2(log_ratio).tolist() == pytest.approx([0.02489652, 0.04138049, 0.0], abs=1e-6)
    assert k3(log_ratio).tolist() == pytest.approx([0.02314355, 0.04565126, 0.0], abs=1e-6)
    means = [float((p * k(log_ratio)).sum()) for k in (k1, k2, k3)]
    assert means == pytest.approx([0.02526715, 0.02486241, 0.02526715], abs=1e-6)


def test_br_025_kl_estimators_have_the_right_sign() -> None:
    log_ratio = tensor([-1.0, -2.0]) - tensor([-1.5, -1.8])
    assert k1(log_ratio).tolist() == pytest.approx([0.5, -0.2], abs=1e-6)
    assert k2(log_ratio).tolist() == pytest.approx([0.125, 0.02], abs=1e-6)
    assert k3(log_ratio).tolist() == pytest.approx([0.106531, 0.021403], abs=1e-6)
    assert [float(k(torch.zeros(1))) for k in (k1, k2, k3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k2", [-0.11868591, -0.17456627, 0.29325217]), ("k3", [-0.06174957, -0.19484075, 0.25659032])],
)
def test_expected_gradient_of_the_kl_loss(estimator: str, expected: list[float]) -> None:
    """k2: that of KL(policy || reference). k3: that of KL(reference || policy)."""
    theta = tensor([0.2, -0.3, 0.5]).requires_grad_()
    reference = tensor([0.4, 0.4, 0.2]).log()
    term = ReferenceKlLoss(ReferenceKlLoss.Config(estimator=estimator))
    total = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        logprob = theta.log_softmax(0)[token]
        batch = batch_of([[1.0]], reference_logprobs=reference[token].view(1, 1))
        total = total + logprob.detach().exp() * term(outputs_of(logprob.view(1, 1)), batch).total
    (gradient,) = torch.autograd.grad(total, theta)
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6)


def test_k1_is_refused_as_a_loss_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="expected gradient is 0"):
        ReferenceKlLoss(ReferenceKlLoss.Config(estimator="k1"))
    with pytest.raises(ConfigError, match="not one of k2, k3"):
        ReferenceKlLoss(ReferenceKlLoss.Config(estimator="k4"))


def test_br_046_short_micro_batches_get_no_extra_weight() -> None:
    term = ValueLoss(ValueLoss.Config())
    pieces = [batch_of([[1.0] * 4]), batch_of([[1.0]])]
    values = [tensor([[[math.sqrt(2)]] * 4]).view(1, 4, 1), tensor([[[math.sqrt(8)]]])]  # losses 1, 1, 1, 1 and 4
    totals = [
        float(term(outputs_of(value[..., 0], values=value), piece).total)
        for piece, value in zip(pieces, values, strict=True)
    ]
    count = sum(int(term.denominator(piece)) for piece in pieces)
    assert sum(totals) / count == pytest.approx(1.6, abs=1e-6)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: type(term).__name__)
def test_br_021_no_trained_token_gives_zero_not_nan(term: Any) -> None:
    batch = batch_of([[0.0, 0.0]], advantages=[[0.3, 0.4]])
    logprobs = tensor([[-0.3, -0.4]]).requires_grad_()
    value = term(outputs_of(logprobs), batch)
    value.total.backward()
    assert float(value.total.detach()) == 0.0
    assert int(term.denominator(batch)) == 0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0]]
    assert all(float(metric) == 0.0 for metric in value.metrics.values())


@pytest.mark.parametrize("term", TERMS, ids=lambda term: type(term).__name__)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e300])
def test_what_stands_outside_the_mask_changes_nothing(term: Any, rubbish: float) -> None:
    odd = [[0.1, rubbish]]
    batch = batch_of(
        [[1.0, 0.0]],
        advantages=odd, weights=odd, proximal_logprobs=odd, behaviour_logprobs=odd, reference_logprobs=odd,
        returns=[[[0.1], [rubbish]]], old_values=[[[0.1], [rubbish]]],
    )  # fmt: skip
    logprobs = tensor([[0.3, rubbish]]).requires_grad_()
    value = term(outputs_of(logprobs), batch)
    value.total.backward()
    assert math.isfinite(float(value.total.detach()))
    assert logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad[0, 0]))
    assert float(logprobs.grad[0, 1]) == 0.0
    assert all(math.isfinite(float(one)) for one in (*value.metrics.values(), *value.extremes.values()))


@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_extreme_ratios_overflow_nowhere(log_ratio: float, advantage: float, dual_clip: float) -> None:
    logprobs = torch.tensor([[log_ratio]], requires_grad=True)
    batch = batch_of([[1.0]], advantages=[[advantage]], behaviour_logprobs=[[-log_ratio]])
    batch = dataclasses.replace(batch, **{
        name: getattr(batch, name).float()
        for name in ("advantages", "behaviour_logprobs", "proximal_logprobs", "reference_logprobs", "weights")
    })  # fmt: skip
    value = PpoLoss(PpoLoss.Config(dual_clip=dual_clip))(outputs_of(logprobs), batch)
    kl = ReferenceKlLoss(ReferenceKlLoss.Config(estimator="k3"))(outputs_of(logprobs), batch)
    (value.total + kl.total).backward()  # type: ignore[no-untyped-call]
    assert bool(torch.isfinite(value.total + kl.total))
    assert logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad).all())
    assert all(bool(torch.isfinite(one)) for one in (*value.metrics.values(), *kl.metrics.values()))


@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": 0.0},
        {"clip_low": 1.0},
        {"clip_high": 0.0},
        {"dual_clip": 1.0},
        {"importance_cap": 0.5},
        {"norm_length": 0},
        {"aggregation": "token_mean"},
    ],
)
def test_ppo_settings_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PpoLoss(PpoLoss.Config(**options))


def test_a_negative_value_clip_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip_range"):
        ValueLoss(ValueLoss.Config(clip_range=-0.1))


@pytest.mark.parametrize("term", TERMS, ids=lambda term: type(term).__name__)
def test_every_metric_is_documented(term: Any) -> None:
    batch = batch_of([[1.0]])
    value = term(outputs_of(tensor([[-1.0]])), batch)
    assert set(value.metrics) <= set(term.metrics)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_that_does_not_say_so_never_reads_the_reference(term: Any) -> None:
    batch = batch_of([[0, 1, 1]], reference_logprobs=[[math.nan] * 3], advantages=[[0.0, 1.0, -1.0]])
    outputs = outputs_of(tensor([[0.0, -0.5, -0.7]]))
    assert math.isnan(float(term(outputs, batch).total)) == term.reads_reference


def test_masked_sum_of_an_empty_mask_is_zero() -> None:
    assert float(masked_sum(tensor([[math.nan]]), torch.tensor([[False]]))) == 0.0


@st.composite
def random_batches(draw: st.DrawFn) -> tuple[Batch, torch.Tensor]:
    """A batch of some trajectories of one or two rows, right-padded, with log-probabilities of today's policy."""
    rows_of = draw(st.lists(st.integers(1, 2), min_size=2, max_size=5))
    owner = [number for number, rows in enumerate(rows_of) for _ in range(rows)]
    width = draw(st.integers(2, 6))
    lengths = torch.tensor([draw(st.integers(1, width)) for _ in owner])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    real = torch.arange(width) < lengths.unsqueeze(1)
    mask = real & (torch.rand(real.shape, generator=generator) < 0.7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    size = (len(owner), width)
    compared = torch.tensor(owner) % 3 == 2  # every third trajectory holds prototypes of a state, a row each
    batch = batch_of(
        mask.double().tolist(),
        trajectory=owner,
        behaviour_logprobs=random(*size), proximal_logprobs=random(*size), reference_logprobs=random(*size),
        advantages=random(*size), weights=random(*size).abs(), returns=random(*size, 2), old_values=random(*size, 2),
        imitation_weights=random(*size).abs(), prototypes=torch.where(compared, random(len(owner)).abs() + 0.1, 0.0),
        head_mask=random(*size, 2) > -1.0,
    )  # fmt: skip
    return batch, random(*size)


def taken(batch: Batch, rows: torch.Tensor) -> Batch:
    return Batch(**{field.name: getattr(batch, field.name)[rows] for field in dataclasses.fields(batch)})


def padded(batch: Batch, more: int) -> Batch:
    """The same batch with `more` columns of padding that hold rubbish."""

    def pad(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 1:
            return value
        shape = (value.shape[0], more, *value.shape[2:])
        rubbish = torch.zeros(shape, dtype=torch.bool) if value.dtype == torch.bool else torch.full(shape, 77)
        return torch.cat([value, rubbish.to(value.dtype)], dim=1)

    return Batch(**{field.name: pad(getattr(batch, field.name)) for field in dataclasses.fields(batch)})


def mean_and_gradient(term: Any, pieces: Sequence[tuple[Batch, torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
    """Sum of totals over the sum of denominators, as a trainer does it, and its gradient piece by piece."""
    leaves = [logprobs.clone().requires_grad_() for _, logprobs in pieces]
    count = sum(float(term.denominator(batch)) for batch, _ in pieces) or 1.0
    streams = [leaf.unsqueeze(-1) * torch.tensor([1.0, 2.0]) for leaf in leaves]
    total = torch.stack([
        term(outputs_of(leaf, values=stream), batch).total
        for (batch, _), leaf, stream in zip(pieces, leaves, streams, strict=True)
    ]).sum() / count  # fmt: skip
    return float(total.detach()), list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("term", TERMS, ids=lambda term: type(term).__name__)
@settings(deadline=None, max_examples=15)
@given(drawn=random_batches(), more=st.integers(1, 4), size=st.integers(1, 3), seed=st.integers(0, 99))
def test_padding_split_and_order_change_no_loss_and_no_gradient(
    term: Any, drawn: tuple[Batch, torch.Tensor], more: int, size: int, seed: int
) -> None:
    batch, logprobs = drawn
    whole, gradient = mean_and_gradient(term, [(batch, logprobs)])

    wide = torch.cat([logprobs, torch.full((len(batch), more), 5.0, dtype=torch.float64)], dim=1)
    with_padding, padded_gradient = mean_and_gradient(term, [(padded(batch, more), wide)])
    assert with_padding == pytest.approx(whole, abs=1e-6)
    assert torch.allclose(padded_gradient[0][:, : logprobs.shape[1]], gradient[0], atol=1e-6)

    shuffle = torch.Generator().manual_seed(seed)
    names = torch.unique(batch.trajectory)
    names = names[torch.randperm(len(names), generator=shuffle)]
    groups = [
        torch.isin(batch.trajectory, names[start : start + size]).nonzero().squeeze(1)
        for start in range(0, len(names), size)
    ]
    split, pieces = mean_and_gradient(term, [(taken(batch, rows), logprobs[rows]) for rows in groups])
    assert split == pytest.approx(whole, abs=1e-6)
    for rows, piece in zip(groups, pieces, strict=True):
        assert torch.allclose(piece, gradient[0][rows], atol=1e-6)
