"""Fit the causal form of the reward model: LoRA on a frozen base and two heads, multi-task at every step's end."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_safetensors
from torch.nn import functional as F

from slea_llm import folders
from slea_llm.checks import check_least
from slea_llm.errors import ConfigError, SleaError
from slea_llm.evaluators.reward_model_card import CARD, CAUSAL, WEIGHTS, Card, judge
from slea_llm.fitting.evaluator import HEAD_PLACE, measured, predict_apart
from slea_llm.fitting.labels import StepLabel, examples
from slea_llm.fitting.training import HEADS, Example, Floats, contexts_together, multitask_loss, set_aside
from slea_llm.models.step_reader import Opened, Row, StepReader, batches, probe, row_of
from slea_llm.settings import ModelSettings
from slea_llm.types import Step, Trajectory, Verdict, leaf_steps

NAME = "causal_reward_model"


class NoVectors:
    """The baselines read words and counts, no sentence vectors."""

    name = "none"
    dimension = 1

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.zeros((len(texts), 1), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExample(Example):
    """An example with its tokens; weights are 0 at places that lie beyond the row."""

    row: Row

    @property
    def context(self) -> str:
        """As for every example; one whose last step was not read is an alternative to nothing."""
        return f"{self.trajectory} is cut" if self.row.beyond else self.prefixes.contexts[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalSettings:
    folds: int = 5
    """Groups are split into so many folds; each is predicted by a model that was fitted on the others. 2 or more."""
    epochs: int = 3
    """Passes at most. 0: the heads alone, on the states of the bare base."""
    batch: int = 8
    """Dialogues of one update, alternatives of one context together."""
    learning_rate: float = 2e-4
    """Of the adapter; the heads learn five times as fast."""
    ridge: float = 100.0
    """Penalty of the squared weights in the regression that the heads start from."""
    ranking_coef: float = 0.5
    """Weight of the pairwise loss between alternatives of one context (Bradley and Terry 1952). 0: none."""
    patience: int = 1
    """Passes without a better loss on the inner held-out groups after which the fit stops."""
    inner_share: float = 0.15
    """Share of the groups held out for that."""
    batch_tokens: int = 16_384
    """Padded tokens of one forward pass where nothing is learnt."""

    def __post_init__(self) -> None:
        check_least(self, folds=2, why="one part is held out")
        check_least(self, epochs=0, why="0 fits the heads alone")
        for name in ("batch", "learning_rate", "ridge", "batch_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} {getattr(self, name)} must be above 0")


def token_examples(
    parsed: Sequence[tuple[Trajectory, Sequence[Step]]],
    labels: Iterable[StepLabel],
    opened: Opened,
    *,
    report: Callable[[str], None] = lambda _line: None,
) -> tuple[list[TokenExample], dict[str, int]]:
    """The labelled dialogues as tokens, and what could not be read of them, counted and said.

    Raises ConfigError as `labels.examples` does, and when no labelled step is left.
    """
    by_id = {trajectory.id: (trajectory, leaf_steps(steps)) for trajectory, steps in parsed}
    found: list[TokenExample] = []
    left_out: Counter[str] = Counter()
    for one in examples(parsed, labels, NoVectors(), "apart"):
        trajectory, leaves = by_id[one.trajectory]
        try:
            row = row_of(opened.chat, trajectory, leaves, longest=opened.longest)
        except SleaError as error:
            left_out["dialogues that the template refuses"] += 1
            report(f"left out: {error}")
            continue
        weights = one.weights.copy()
        weights[len(row.places) :] = 0.0
        left_out["labelled steps beyond the tokens that are read"] += int(
            (one.weights[len(row.places) :] > 0).any(1).sum()
        )
        if (weights[1:] > 0).any():
            fields = {entry.name: getattr(one, entry.name) for entry in dataclasses.fields(one)}
            found.append(TokenExample(**{**fields, "weights": weights}, row=row))
    counted = {name: count for name, count in left_out.items() if count}
    for name, count in counted.items():
        report(f"left out: {count} {name}")
    if not found:
        raise ConfigError(
            f"no labelled step lies within {opened.longest} tokens of its dialogue's beginning; read more tokens, or "
            "give outcomes, a labels file or a heuristic"
        )
    return found, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedReader:
    """What was fitted: write it with `save`."""

    tensors: dict[str, torch.Tensor]
    card: Card
    verdict: Verdict

    def save(self, folder: Path, *, overwrite: bool = False) -> None:
        """Adapter, heads and card, whole or not at all. Raises StorageError when the folder holds something already."""
        with folders.whole_folder(folder, overwrite=overwrite) as partial:
            (partial / WEIGHTS).write_bytes(to_safetensors(self.tensors))
            (partial / CARD).write_text(self.card.to_json() + "\n", encoding="utf-8")


def fit_causal(
    rows: Sequence[TokenExample],
    labels: Iterable[StepLabel],
    opened: Opened,
    *,
    base: ModelSettings,
    settings: CausalSettings,
    seed: int,
    left_out: dict[str, int] | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> FittedReader:
    """Measure on held-out groups, then fit on everything; the gate judges the measures.

    `base` names what `opened` was loaded from. The same rows and seed give the same weights on the same machine.
    """
    reader = opened.reader
    reader.reset()
    states = _states(reader, [one.row for one in rows], settings.batch_tokens)

    def refit(train: Sequence[int], held: Sequence[int], number: int) -> list[Floats]:
        _fit(reader, [rows[place] for place in train], [states[place] for place in train], settings, seed=seed + number)
        report(f"fold {number + 1} of {settings.folds} fitted")
        if not settings.epochs:  # the base was left as it is, and what the heads see of it is known
            return [_from_states(reader, rows[place], states[place]) for place in held]
        return predict(reader, [rows[place] for place in held], settings.batch_tokens)

    held_out = predict_apart(rows, refit, settings.folds, seed=seed)
    _fit(reader, rows, states, settings, seed=seed + settings.folds)
    facts = measured(rows, held_out)
    facts["data"] |= {"left_out": left_out or {}}
    card = Card(
        encoder=base.declared_base or base.base,
        encoding=CAUSAL,
        network={
            "rank": base.lora_rank,
            "alpha": base.lora_alpha,
            "dtype": base.dtype,
            "revision": base.revision,
            "longest": opened.longest,
            "probe": probe(opened),
        },
        seed=seed,
        labels=dict(Counter(label.source for label in labels)),
        settings=dataclasses.asdict(settings),
        **facts,
    )
    head = card.head()
    return FittedReader(tensors=reader.tensors(), card=card, verdict=judge(NAME, head, card.reliability.get(head)))


@torch.no_grad()
def predict(reader: StepReader, rows: Sequence[TokenExample], batch_tokens: int) -> list[Floats]:
    """Logits (P, 2) of every example, in order; 0 at places beyond its row, which carry no weight."""
    found = [np.zeros((len(one.targets), HEADS)) for one in rows]
    for batch in batches([one.row for one in rows], batch_tokens):
        logits = reader([rows[index].row for index in batch]).double().cpu().numpy()
        for index, values in zip(batch, logits, strict=True):
            count = len(rows[index].row.places)
            found[index][:count] = values[:count]
    return found


@torch.no_grad()
def _from_states(reader: StepReader, row: TokenExample, states: torch.Tensor) -> Floats:
    found = np.zeros((len(row.targets), HEADS))
    found[: len(states)] = reader.heads(states.to(reader.device)).double().cpu().numpy()
    return found


@torch.no_grad()
def _states(reader: StepReader, rows: Sequence[Row], batch_tokens: int) -> list[torch.Tensor]:
    """(P, width) of every row, on the CPU: what the heads see of the base that they are set on."""
    found = [torch.zeros(0, reader.width)] * len(rows)
    for batch in batches(rows, batch_tokens):
        states = reader.states([rows[index] for index in batch]).cpu()
        for index, values in zip(batch, states, strict=True):
            found[index] = values[: len(rows[index].places)].clone()
    return found


def _fit(
    reader: StepReader,
    rows: Sequence[TokenExample],
    states: Sequence[torch.Tensor],
    settings: CausalSettings,
    *,
    seed: int,
) -> None:
    """From the untrained reader: heads by regression on the bare base's states, then adapter and heads together."""
    reader.reset()
    _start_heads(reader, rows, states, settings.ridge)
    if not settings.epochs:
        return
    inner = set_aside([one.group for one in rows], settings.inner_share, seed=seed)
    train = [one for one, held in zip(rows, inner, strict=True) if not held]
    held_out = [one for one, held in zip(rows, inner, strict=True) if held]
    rate = settings.learning_rate
    optimizer = torch.optim.AdamW(
        [
            {"params": reader.adapter_parameters(), "lr": rate},
            {"params": list(reader.heads.parameters()), "lr": 5.0 * rate},
        ],
        weight_decay=0.0,
    )
    updates = settings.epochs * math.ceil(len(train) / settings.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: _warm_then_falling(update, updates))
    rng = np.random.default_rng(seed)
    best, kept, waited = _loss(reader, held_out, settings), copy.deepcopy(reader.tensors()), 0
    for _ in range(settings.epochs):
        for part in contexts_together(train, settings.batch, rng):
            loss = multitask_loss(reader([one.row for one in part]), part, settings.ranking_coef)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
            optimizer.step()
            schedule.step()
        loss_now = _loss(reader, held_out, settings)
        waited += 1
        if loss_now < best:
            best, kept, waited = loss_now, reader.tensors(), 0
        if waited > settings.patience:
            break
    reader.load(kept, source="the best pass")


def _warm_then_falling(update: int, updates: int) -> float:
    """Factor of the learning rate: up over the first tenth, then down to 0 in a straight line."""
    return min(1.0, (update + 1) / (0.1 * updates + 1)) * (1.0 - update / (updates + 1))


@torch.no_grad()
def _loss(reader: StepReader, rows: Sequence[TokenExample], settings: CausalSettings) -> float:
    """Without the ranking: what is held out must be calibrated, and holds few alternatives."""
    return sum(
        float(multitask_loss(reader([one.row for one in part]), part, 0.0)) * len(part)
        for part in contexts_together(rows, settings.batch, None)
    )


def _start_heads(
    reader: StepReader, rows: Sequence[TokenExample], states: Sequence[torch.Tensor], ridge: float
) -> None:
    """Each head at the logistic regression on the bare base's states: where labels are few, this is the model."""
    features = torch.cat(list(states)).double()
    for head in HEAD_PLACE.values():
        targets, weights = (
            torch.from_numpy(
                np.concatenate([table[: len(seen), head] for table, seen in zip(tables, states, strict=True)])
            )
            for tables in ([one.targets for one in rows], [one.weights for one in rows])
        )
        keep = weights > 0
        if bool(keep.any()):
            solved = _regression(features[keep], targets[keep], weights[keep], ridge)
            with torch.no_grad():
                reader.heads.weight[head] = solved[1:]
                reader.heads.bias[head] = solved[0]


@torch.enable_grad()
def _regression(features: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, ridge: float) -> torch.Tensor:
    """(1 + d,) intercept and weights of a ridge logistic regression; the ridge spares the intercept.

    By L-BFGS rather than Newton's method: states have hundreds to thousands of coordinates.
    """
    solved = torch.zeros(features.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([solved], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logits = features @ solved[1:] + solved[0]
        each = F.binary_cross_entropy_with_logits(logits, targets, weight=weights, reduction="sum")
        loss = (each + 0.5 * ridge * solved[1:].square().sum()) / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return solved.detach()
