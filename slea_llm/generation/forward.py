"""One pass of a model over new tokens of rows whose earlier keys and values are kept: by its modules, or by blocks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from slea_llm.models.llama_blocks import Block, Shape, blocks_of, mixed, normed, projected, rotations, small_shape

MOST_COPIED = 2**24
"""Weights below the output layer up to which they are copied into blocks (64 MiB in float32). In larger models the
products with them are the time, and modules do as well."""


class Forward(Protocol):
    """`ids` and `positions` (b, q) of the rows that `cache` points at, `seen` (b, q, width) what each may attend to."""

    def states(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, cache: Any) -> None:
        """Compute keys and values only."""
        ...

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, cache: Any) -> torch.Tensor:
        """The same, and logits (b, V) after the last token of each row."""
        ...

    def refresh(self) -> None:
        """Take note that the model's weights have changed."""
        ...


def forward_of(model: Any, *, max_context: int) -> Forward:
    """The faster way that computes what the model's modules do."""
    head = sum(parameter.numel() for parameter in model.get_output_embeddings().parameters())
    layers = sum(parameter.numel() for parameter in model.parameters()) - head
    small = model.device.type == "cpu" and layers <= MOST_COPIED
    shape = small_shape(model, _weight) if small else None
    return ByModules(model) if shape is None else ByBlocks(model, shape, max_context)


class ByModules:
    """The model as transformers runs it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def states(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, cache: Any) -> None:
        self._model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=seen[:, None], past_key_values=cache, use_cache=True
        )

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=ids, position_ids=positions, attention_mask=seen[:, None], past_key_values=cache, use_cache=True
        ).logits[:, -1]
        return logits

    def refresh(self) -> None:
        pass


class ByBlocks:
    """A small Llama: a token a row takes some fifty small operations, a third of what its modules take."""

    def __init__(self, model: Any, shape: Shape, max_context: int) -> None:
        self._decoder, self._head, self._shape = model.get_decoder(), model.get_output_embeddings(), shape
        self._blocks: list[Block] = []
        every = torch.arange(max_context, device=model.device)
        self._turns = torch.cat(rotations(self._decoder, every, max_context), dim=-1)
        self.refresh()

    def refresh(self) -> None:
        with torch.no_grad():
            self._blocks = blocks_of(self._decoder, _weight)

    def states(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, cache: Any) -> None:
        self._run(ids, positions, seen, cache)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, cache: Any) -> torch.Tensor:
        last = self._run(ids, positions, seen, cache).view(*ids.shape, -1)[:, -1]
        logits: torch.Tensor = self._head(normed(last, self._decoder.norm.weight, self._shape.eps)[0])
        return logits

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, cache: Any) -> torch.Tensor:
        """States (b * q, H) before the last norm."""
        rows, queries = ids.shape
        # Right-padding of a prefill may lie beyond the context; what it computes is overwritten before it is seen.
        cos, sin = self._turns[positions.flatten().clamp(max=len(self._turns) - 1)].chunk(2, dim=-1)
        states: torch.Tensor = self._decoder.embed_tokens(ids.flatten())
        bias = None if queries > 1 else torch.where(seen, 0.0, -torch.inf).to(states.dtype)[:, None]
        for block, layer in zip(self._blocks, cache.layers, strict=True):
            qkv = projected(states, block, cos, sin, self._shape).view(rows, queries, -1)
            query, key, value = (heads.transpose(1, 2) for heads in self._shape.split(qkv))
            keys, values = layer.update(key, value)
            attended = (
                self._one(query, keys, values, bias) if bias is not None else self._many(query, keys, values, seen)
            )
            states = mixed(states, attended.reshape(rows * queries, -1), block, self._shape.eps)
        return states

    def _one(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Attention of one query a row: what PyTorch's kernel does for many costs it more than these products."""
        rows, key_heads = keys.shape[:2]
        grouped = query.reshape(rows, key_heads, -1, self._shape.size) * self._shape.scaling
        return (grouped @ keys.transpose(2, 3)).add_(bias).softmax(dim=-1) @ values

    def _many(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        grouped = self._shape.heads != self._shape.key_heads
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=seen[:, None], scale=self._shape.scaling, enable_gqa=grouped
        ).transpose(1, 2)


def _weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight
    return weight
