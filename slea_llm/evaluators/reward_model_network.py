"""The reward model's network: a small Transformer over sentence vectors, causal over the steps of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slea_llm.evaluators.reward_model_features import EVIDENCE, Prefixes
from slea_llm.evaluators.reward_model_memory import MEMORY

NUMBERS = len(EVIDENCE) + len(MEMORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """`segments` sentence vectors of `dimension` numbers a position; `members`: networks whose logits are averaged."""

    dimension: int
    segments: int
    width: int = 64
    layers: int = 1
    heads: int = 4
    members: int = 3
    dropout: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """A padded batch: `vectors` (B, P, segments, dimension), `evidence` (B, P, E), `mask` (B, P) true where real.

    Padding is on the right, so that causal attention never sees it from a real position.
    """

    vectors: Tensor
    evidence: Tensor
    mask: Tensor


class Member(nn.Module):
    """Segments of a position attend to each other, then positions to those before them; two logits a position."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        pairs = shape.segments - 1
        self.segment = nn.Linear(shape.dimension, shape.width)
        # The step beside each of its surroundings, coordinate by coordinate: agreement that sums would hide.
        self.agreement = nn.Linear(shape.dimension, shape.width)
        self.evidence = nn.Linear(NUMBERS, shape.width)
        self.kind = nn.Parameter(0.02 * torch.randn(shape.segments + pairs + 1, shape.width))
        self.within = nn.TransformerEncoder(_layer(shape), 1, enable_nested_tensor=False)
        self.across = nn.TransformerEncoder(_layer(shape), shape.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(shape.width)
        self.heads = nn.Linear(shape.width, 2)
        self.direct = nn.Linear(shape.dimension + NUMBERS, 2)
        nn.init.zeros_(self.direct.weight)

    def forward(self, batch: Positions) -> Tensor:
        """Logits (B, P, 2); those of padding mean nothing."""
        # Only what attends over places is padded: four tenths of the places of a usual batch are padding.
        vectors, evidence = batch.vectors[batch.mask], batch.evidence[batch.mask]
        scale = float(vectors.shape[-1]) ** 0.5
        vectors = vectors * scale  # unit vectors to coordinates of size 1
        step, others = vectors[:, -1:], vectors[:, :-1]
        if vectors.shape[1] == 2:  # joint: what is judged stands first, the history after it
            step, others = vectors[:, :1], vectors[:, 1:]
        tokens = torch.cat(
            [self.segment(vectors), self.agreement(step * others), self.evidence(evidence).unsqueeze(1)], dim=1
        )
        pooled = _padded(self.within(tokens + self.kind).mean(dim=1), batch.mask)
        causal = nn.Transformer.generate_square_subsequent_mask(
            pooled.shape[1], device=pooled.device, dtype=pooled.dtype
        )
        seen = self.norm(self.across(pooled, mask=causal, is_causal=True))
        direct = self.direct(torch.cat([step.squeeze(1) / scale, evidence], dim=-1))
        logits: Tensor = self.heads(seen) + _padded(direct, batch.mask)
        return logits


def _padded(rows: Tensor, mask: Tensor) -> Tensor:
    """(N, D) of the real places to (B, P, D), zeros elsewhere."""
    return rows.new_zeros(*mask.shape, rows.shape[-1]).index_put((mask,), rows)


def _layer(shape: NetworkShape) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        shape.width,
        shape.heads,
        dim_feedforward=2 * shape.width,
        dropout=shape.dropout,
        batch_first=True,
        norm_first=True,
    )


class RewardNetwork(nn.Module):
    """Logits of the step label and of success, at every position.

    `forward` gives (B, P, 2): [..., 0] the label of the step that the position ends with, [..., 1] success of the
    dialogue given everything up to the position. Position 0, before the first step, has a success logit only.
    """

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.members = nn.ModuleList(Member(shape) for _ in range(shape.members))

    def forward(self, batch: Positions) -> Tensor:
        return self.each(batch).mean(dim=0)

    def member(self, index: int) -> Member:
        found = self.members[index]
        if not isinstance(found, Member):
            raise TypeError(f"member {index} is a {type(found).__name__}")
        return found

    def each(self, batch: Positions) -> Tensor:
        """(members, B, P, 2): the members before they are averaged; they are trained one by one."""
        return torch.stack([member(batch) for member in self.members])


def collate(rows: Sequence[Prefixes]) -> Positions:
    """Pad to the longest. Raises ValueError for no rows."""
    if not rows:
        raise ValueError("a batch of no trajectory has no shape")
    longest = max(1, *(len(row) for row in rows))
    vectors = torch.zeros(len(rows), longest, *rows[0].vectors.shape[1:])
    evidence = torch.zeros(len(rows), longest, rows[0].evidence.shape[-1])
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        vectors[index, : len(row)] = torch.from_numpy(row.vectors)
        evidence[index, : len(row)] = torch.from_numpy(row.evidence)
        mask[index, : len(row)] = True
    return Positions(vectors=vectors, evidence=evidence, mask=mask)
