"""Rows without their padding: the tokens of all rows one after another, each attending within its own row.

Everything but attention works on tokens alone, so padding is only lost time; with dialogues of unequal length it is a
third of an update. Attention runs row by row, which on a CPU costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "slea_rows"
"""Name of the attention function in transformers' table."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of right-padded rows (B, T) are once the padding is left out."""

    lengths: tuple[int, ...]
    places: torch.Tensor  # (n,) of each token in the flattened rows
    positions: torch.Tensor  # (n,) of each token in its row
    index: torch.Tensor  # (B * T,) of each attended place among the tokens; meaningless on padding

    @classmethod
    def of(cls, attention_mask: torch.Tensor) -> Layout:
        flat = attention_mask.flatten()
        lengths = tuple(int(length) for length in attention_mask.sum(dim=1))
        places = flat.nonzero().squeeze(1)
        return cls(lengths, places, places % attention_mask.shape[1], flat.cumsum(0) - 1)

    def arguments(self, ids: torch.Tensor) -> dict[str, Any]:
        """What the decoder is called with, its tokens as one row."""
        # A mask of four dimensions is handed through by transformers as it is; `attend` does not look at it.
        unread = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=ids.device)
        return {
            "input_ids": ids.flatten()[self.places][None],
            "position_ids": self.positions[None],
            "attention_mask": unread,
            "row_lengths": self.lengths,
        }


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    row_lengths: Sequence[int] | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within every row of (1, heads, n, size), as (1, n, heads, size); PyTorch's own without rows."""
    if row_lengths is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return output
    grouped = query.shape[1] != key.shape[1]
    queries, keys, values = (torch.split(states, list(row_lengths), dim=2) for states in (query, key, value))
    rows = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped).transpose(1, 2)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(rows, dim=1), None


def attends_to_all(config: Any) -> bool:
    """Whether every layer attends to the whole row: no window, no recurrent layers."""
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return not (kinds - {"full_attention"} or windowed)


@torch.no_grad()
def attend_by_rows(base: PreTrainedModel) -> bool:
    """Let `base` take rows without padding if it computes the same of them; what it computes of padded rows stays.

    It does not where layers look at a window, have an attention of their own, or take positions from elsewhere.
    """
    config = base.config.get_text_config()
    if config._attn_implementation != "sdpa" or not attends_to_all(config):
        return False
    ids, mask = probe_rows(base)
    decoder = base.get_decoder()
    padded = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[mask]
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
    base.set_attn_implementation(ATTENTION)
    packed = decoder(**Layout.of(mask).arguments(ids), use_cache=False).last_hidden_state[0]
    if equal(packed, padded):
        return True
    base.set_attn_implementation("sdpa")
    return False


def probe_rows(base: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of ids, one of them padded on the right, and their mask, to try two ways of computing on."""
    length, padding = 12, 5
    ids = torch.arange(2 * length, device=base.device).view(2, length) % base.get_input_embeddings().num_embeddings
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, -padding:] = False
    return ids, mask


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    tolerance = min(256 * torch.finfo(theirs.dtype).eps, 0.05)
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())
