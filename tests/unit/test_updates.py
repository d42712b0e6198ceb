"""One update: denominators over micro-batches, clipping apart, early stop, refusal of what is not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slea_llm.batching import blank
from slea_llm.errors import TrainingError
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import TrainerSettings
from slea_llm.tensors import Batch, LossValue, ModelOutputs
from slea_llm.updates import Updater, deal


class Scale(nn.Module):
    """Log-probabilities w * advantages and values v * advantages: gradients can be told by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.v = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch: Batch) -> ModelOutputs:
        logprobs = self.w * batch.advantages
        return ModelOutputs(logprobs=logprobs, entropy=logprobs * 0, values=(self.v * batch.advantages).unsqueeze(-1))

    def policy_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("w", self.w)]

    def critic_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("v", self.v)]


class Mean:
    """The mean over policy tokens of the log-probability (or of the value)."""

    def __init__(self, name: str, *, values: bool = False, factor: float = 1.0) -> None:
        self.name, self.weight, self._values, self._factor = name, 1.0, values, factor

    def denominator(self, batch: Batch) -> torch.Tensor:
        return batch.policy_mask.sum()

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        what = outputs.values[..., 0] if self._values else outputs.logprobs
        return LossValue(total=self._factor * (what * batch.policy_mask).sum())


class Alone:
    """What an Updater asks of an accelerator, in one process."""

    device = torch.device("cpu")

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        optimizer.optimizer = optimizer
        return model, optimizer

    def no_sync(self, _model: Any) -> Any:
        return torch.enable_grad()

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def clip_grad_norm_(self, parameters: Sequence[nn.Parameter], limit: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit)


def batch(values: Sequence[float], *, trained: bool = True) -> Batch:
    empty = blank(streams=1, pad_id=0, dtype=torch.float64)
    row = torch.tensor([list(values)], dtype=torch.float64)
    mask = torch.full(row.shape, trained)
    return dataclasses.replace(empty, advantages=row, policy_mask=mask, proximal_logprobs=row.clone())


def updater(model: Scale, *, losses: Sequence[Any] | None = None, **changes: Any) -> Updater:
    chosen = TrainerSettings(
        **{"optimizer": "sgd", "learning_rate": 1.0, "critic_learning_rate": 1.0, "max_grad_norm": 0.0, **changes}
    )
    terms: Sequence[Any] = losses if losses is not None else [Mean("policy"), Mean("critic", values=True)]
    return Updater(
        model,  # type: ignore[arg-type]
        terms,
        settings=chosen,
        total_updates=10,
        accelerator=Alone(),
        reducer=LocalReducer(),
    )


def test_br_046_short_micro_batches_get_no_more_weight_than_their_tokens() -> None:
    model = Scale()
    report = updater(model).run([batch([1, 1, 1, 1]), batch([4])], train_policy=True)
    assert report.metrics["policy/loss"] == pytest.approx(1.6, abs=1e-12)
    assert model.w.item() == pytest.approx(1 - 1.6, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=1, max_size=4))
def test_accumulation_equals_the_big_batch(pieces: list[list[float]]) -> None:
    one, many = Scale(), Scale()
    updater(one).run([batch([value for piece in pieces for value in piece])], train_policy=True)
    updater(many).run([batch(piece) for piece in pieces], train_policy=True)
    assert one.w.item() == pytest.approx(many.w.item(), abs=1e-9)
    assert one.v.item() == pytest.approx(many.v.item(), abs=1e-9)


class Sum(Mean):
    """A plain sum as the loss, with a metric that is a mean over tokens all the same."""

    def denominator(self, batch: Batch) -> torch.Tensor:
        return torch.zeros_like(batch.policy_mask.sum())

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        value = super().__call__(outputs, batch)
        return LossValue(
            total=value.total, metrics={"mean": value.total.detach()}, metric_units=batch.policy_mask.sum()
        )


@pytest.mark.parametrize("pieces", [[[1.0, 1, 1, 1, 4]], [[1.0, 1, 1, 1], [4.0]]])
def test_a_loss_that_is_a_sum_is_not_divided_and_its_metrics_are(pieces: list[list[float]]) -> None:
    model = Scale()
    report = updater(model, losses=[Sum("policy"), Mean("critic", values=True)]).run(
        [batch(piece) for piece in pieces], train_policy=True
    )
    assert report.metrics["policy/loss"] == pytest.approx(8.0)
    assert report.metrics["policy/mean"] == pytest.approx(1.6)
    assert model.w.item() == pytest.approx(1 - 8.0)
    assert set(report.metrics) == {
        "policy/loss", "policy/mean", "critic/loss", "update/kl", "update/entropy",
        *(f"grad_norm/{n}" for n in ("policy", "critic")), *(f"learning_rate/{n}" for n in ("policy", "critic")),
    }  # fmt: skip


def test_a_dummy_micro_batch_changes_nothing() -> None:
    plain, padded = Scale(), Scale()
    updater(plain).run([batch([1, 2])], train_policy=True)
    updater(padded).run([batch([1, 2]), blank(streams=1, pad_id=0, dtype=torch.float64)], train_policy=True)
    assert plain.w.item() == padded.w.item()


def test_policy_and_critic_are_clipped_apart() -> None:
    model = Scale()
    losses = [Mean("policy"), Mean("critic", values=True, factor=100.0)]
    report = updater(model, losses=losses, max_grad_norm=1.0).run([batch([0.5])], train_policy=True)
    assert report.metrics["grad_norm/policy"] == pytest.approx(0.5)
    assert report.metrics["grad_norm/critic"] == pytest.approx(50.0)
    assert model.w.item() == pytest.approx(1 - 0.5)
    assert model.v.item() == pytest.approx(1 - 1.0, abs=1e-6)


def test_two_learning_rates_and_one_schedule() -> None:
    model = Scale()
    made = updater(model, learning_rate=0.1, critic_learning_rate=0.4, schedule="linear", warmup_updates=2)
    rates = []
    for _ in range(3):
        report = made.run([batch([1.0])], train_policy=True)
        rates.append((report.metrics["learning_rate/policy"], report.metrics["learning_rate/critic"]))
    assert rates == [(0.0, 0.0), (pytest.approx(0.05), pytest.approx(0.2)), (pytest.approx(0.1), pytest.approx(0.4))]


def test_without_the_policy_only_the_critic_moves() -> None:
    model = Scale()
    report = updater(model, optimizer="adamw").run([batch([1.0])], train_policy=False)
    assert not report.policy_stepped
    assert model.w.item() == 1.0
    assert model.v.item() != 1.0


def test_momentum_does_not_move_a_policy_that_is_left_out() -> None:
    model = Scale()
    made = updater(model, optimizer="adamw", learning_rate=0.01, target_kl=0.0)
    made.run([batch([1.0])], train_policy=True)
    before = model.w.item()
    made.run([batch([1.0])], train_policy=False)
    assert model.w.item() == before


def test_a_kl_above_the_target_leaves_the_policy_out() -> None:
    model = Scale()
    made = updater(model, target_kl=0.01)
    near = dataclasses.replace(batch([1.0]), proximal_logprobs=torch.tensor([[1.0 - 0.05]], dtype=torch.float64))
    far = dataclasses.replace(batch([1.0]), proximal_logprobs=torch.tensor([[1.0 - 0.5]], dtype=torch.float64))
    assert made.run([near], train_policy=True).policy_stepped
    model.w.data.fill_(1.0)
    report = made.run([far], train_policy=True)
    assert not report.policy_stepped
    assert report.kl == pytest.approx(0.14872127070012815)  # e^0.5 - 1 - 0.5
    assert model.w.item() == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_named_and_never_stepped(value: float) -> None:
    model = Scale()
    losses = [Mean("policy"), Mean("critic", values=True, factor=value)]
    with pytest.raises(TrainingError, match=r"'critic' is (nan|inf)"):
        updater(model, losses=losses).run([batch([1.0])], train_policy=True)
    assert (model.w.item(), model.v.item()) == (1.0, 1.0)


class InfiniteGradient(Mean):
    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue:
        zero = (outputs.logprobs - outputs.logprobs.detach()) * batch.policy_mask
        return LossValue(total=zero.abs().pow(0.5).sum())


def test_a_gradient_that_is_not_finite_is_named_and_never_stepped() -> None:
    model = Scale()
    losses = [InfiniteGradient("odd"), Mean("critic", values=True)]
    with pytest.raises(TrainingError, match=r"gradient norm of the policy .*odd, critic"):
        updater(model, losses=losses).run([batch([1.0])], train_policy=True)
    assert (model.w.item(), model.v.item()) == (1.0, 1.0)


def test_br_003_no_step_with_zero_trainable_tokens() -> None:
    model = Scale()
    with pytest.raises(TrainingError, match="no token of this update is trained"):
        updater(model).run([batch([1.0], trained=False)], train_policy=True)
    assert model.w.item() == 1.0


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 8), st.integers(0, 3))
def test_minibatches_take_an_equal_share_of_every_run_of_neighbours(count: int, parts: int, seed: int) -> None:
    dealt = deal(count, parts, seed=(seed, 0, 0))
    assert len(dealt) == count
    for start in range(0, count - parts + 1, parts):
        assert sorted(dealt[start : start + parts]) == list(range(parts))
    assert dealt == deal(count, parts, seed=(seed, 0, 0))


def test_minibatches_differ_between_epochs() -> None:
    assert deal(40, 4, seed=(0, 0, 0)) != deal(40, 4, seed=(0, 0, 1))
