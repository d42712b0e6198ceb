"""The decoder of a small Llama in a few autograd nodes a layer, for CPUs; the same function as transformers' modules.

With two layers of width 128, passes over memory (norms, rotation, SwiGLU, residuals) and LoRA's narrow products cost as
much as the products with the weights. Here an adapter is added into the weights once a pass, W + s B A, q, k and v are
one product, gate and up another, and of the last layer only those tokens are computed whose states are read.

Backward of y = x r n with r = (mean x^2 + eps)^(-1/2): dx = r (g - x r mean(g x r)) where g = n dy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from slea_llm.models.packing import Layout, attends_to_all, equal, probe_rows

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
Weight = Callable[[Any], torch.Tensor]
"""Linear module -> its weight (out, in) with whatever adapter is in use added to it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer, each (out, in): q, k and v under one another, gate and up likewise."""

    first_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    second_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that all layers share."""

    heads: int
    key_heads: int
    size: int
    scaling: float
    eps: float

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values (..., heads, size) of (..., width)."""
        heads = qkv.view(*qkv.shape[:-1], -1, self.size)
        return torch.split(heads, [self.heads, self.key_heads, self.key_heads], dim=-2)


def blocks_of(decoder: Any, weight: Weight) -> list[Block]:
    """The layers' weights; those that an adapter changes are made here, the others are views or copies."""
    found = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [getattr(attention, name) for name in PROJECTIONS[:3]]
        biases = [bias for bias in map(_bias, qkv) if bias is not None]  # all of them or none
        found.append(
            Block(
                first_norm=layer.input_layernorm.weight,
                qkv=torch.cat([weight(one) for one in qkv]),
                qkv_bias=torch.cat(biases) if biases else None,
                out=weight(attention.o_proj),
                second_norm=layer.post_attention_layernorm.weight,
                gate_up=torch.cat([weight(mlp.gate_proj), weight(mlp.up_proj)]),
                down=weight(mlp.down_proj),
            )
        )
    return found


def small_shape(base: PreTrainedModel, weight: Weight) -> Shape | None:
    """Sizes of a decoder for which `decode` gives the states of its own modules; None where it does not."""
    shape = _shape(base)
    if shape is None:
        return None
    decoder, (ids, mask) = base.get_decoder(), probe_rows(base)
    with torch.no_grad():
        ours = decode(decoder, shape, blocks_of(decoder, weight), ids, Layout.of(mask), None)
        theirs = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[mask]
    return shape if equal(ours, theirs) else None


def _shape(base: PreTrainedModel) -> Shape | None:
    """Sizes of a decoder whose modules are those of a Llama, as Qwen2's and Mistral's are; None of any other."""
    decoder, config = base.get_decoder(), base.config.get_text_config()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    # In half precision a trial on a few tokens could not tell a Llama from its like.
    if base.dtype != torch.float32 or not attends_to_all(config) or rope not in ("default", "linear", "llama3"):
        return None
    if {name for name, _ in decoder.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    if not all(_is_llama(layer) for layer in decoder.layers):
        return None
    attention = decoder.layers[0].self_attn
    eps = {layer.input_layernorm.variance_epsilon for layer in decoder.layers} | {decoder.norm.variance_epsilon}
    heads, keys = (_out_features(one) // attention.head_dim for one in (attention.q_proj, attention.k_proj))
    return Shape(heads, keys, attention.head_dim, attention.scaling, eps.pop()) if len(eps) == 1 else None


def _is_llama(layer: Any) -> bool:
    parts = {name: {child for child, _ in module.named_children()} for name, module in layer.named_children()}
    if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    if parts["self_attn"] != set(PROJECTIONS) or parts["mlp"] != {*MLP, "act_fn"}:
        return False
    modules = [getattr(layer.self_attn, name) for name in PROJECTIONS] + [getattr(layer.mlp, name) for name in MLP]
    plain = all(type(getattr(module, "base_layer", module)) is nn.Linear for module in modules)
    biased = [_bias(module) is not None for module in modules] if plain else []
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        plain
        and not any(biased[3:])
        and len(set(biased[:3])) == 1
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
    )


def _bias(module: Any) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(module, "base_layer", module).bias
    return bias


def _out_features(module: Any) -> int:
    return int(getattr(module, "base_layer", module).out_features)


def rotations(decoder: Any, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (..., 1, size / 2) of the places of tokens in their rows, all below `longest`."""
    every = torch.arange(longest, device=positions.device)[None]
    cos, sin = decoder.rotary_emb(decoder.embed_tokens.weight, position_ids=every)
    half = cos.shape[-1] // 2  # the second half repeats the first
    return cos[0, :, None, :half][positions], sin[0, :, None, :half][positions]


def decode(
    decoder: Any, shape: Shape, blocks: Sequence[Block], ids: torch.Tensor, layout: Layout, wanted: torch.Tensor | None
) -> torch.Tensor:
    """Last states (n, H) of the tokens of right-padded rows `ids` (B, T), or of the wanted ones of them (m, H)."""
    cos, sin = rotations(decoder, layout.positions, max(layout.lengths))
    states = decoder.embed_tokens(ids.flatten()[layout.places])
    for number, block in enumerate(blocks):
        attended = _attend(projected(states, block, cos, sin, shape), layout.lengths, shape)
        if wanted is not None and number == len(blocks) - 1:
            states, attended = states.index_select(0, wanted), attended.index_select(0, wanted)
        states = mixed(states, attended, block, shape.eps)
    normed: torch.Tensor = decoder.norm(states)
    return normed


def projected(states: torch.Tensor, block: Block, cos: torch.Tensor, sin: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Queries, keys and values (n, width) of states (n, H): the first two rotated, one after another in a row."""
    made: torch.Tensor = _Projected.apply(  # type: ignore[no-untyped-call]
        states, block.first_norm, block.qkv, block.qkv_bias, cos, sin, shape
    )
    return made


def mixed(states: torch.Tensor, attended: torch.Tensor, block: Block, eps: float) -> torch.Tensor:
    """States (n, H) after the layer, of those before it and of what attention gave (n, heads * size)."""
    made: torch.Tensor = _Mixed.apply(  # type: ignore[no-untyped-call]
        states, attended, block.out, block.second_norm, block.gate_up, block.down, eps
    )
    return made


def _attend(qkv: torch.Tensor, lengths: Sequence[int], shape: Shape) -> torch.Tensor:
    """Causal attention within every row: (n, heads * size) of queries, keys and values (n, width)."""
    grouped = shape.heads != shape.key_heads
    rows = []
    for row in torch.split(qkv, list(lengths)):
        query, key, value = (states.transpose(0, 1)[None] for states in shape.split(row))
        found = scaled_dot_product_attention(query, key, value, is_causal=True, scale=shape.scaling, enable_gqa=grouped)
        rows.append(found[0].transpose(0, 1).flatten(1))
    return torch.cat(rows)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm: its result, x over its root mean square, and one over that."""
    inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    scaled = x * inverse
    return scaled * weight, scaled, inverse


def _normed_gradient(
    grad: torch.Tensor, weight: torch.Tensor, scaled: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """dx of the RMS norm; `grad` is overwritten."""
    grad.mul_(weight)
    along = torch.linalg.vecdot(grad, scaled).unsqueeze(-1).div_(grad.shape[-1])
    return grad.addcmul_(scaled, along, value=-1).mul_(inverse)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False) -> None:
    """Turn (..., heads, size) by the angles of their places, in place."""
    first, second = heads.chunk(2, dim=-1)
    sign = -1.0 if back else 1.0
    turned = first * cos
    turned.addcmul_(second, sin, value=-sign)
    second.mul_(cos).addcmul_(first, sin, value=sign)
    first.copy_(turned)


class _Projected(torch.autograd.Function):
    """Norm, then queries, keys and values in one product, the first two rotated; norm and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: Shape,
    ) -> torch.Tensor:
        h, scaled, inverse = normed(x, norm, shape.eps)
        y = h @ weight.T if bias is None else torch.addmm(bias, h, weight.T)
        turning = shape.heads + shape.key_heads
        rotate(y.view(len(y), -1, shape.size)[:, :turning], cos, sin)
        ctx.save_for_backward(h, scaled, inverse, norm, weight, cos, sin)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, scaled, inverse, norm, weight, cos, sin = ctx.saved_tensors
        shape: Shape = ctx.shape
        grad = grad.clone(memory_format=torch.contiguous_format)
        turning = shape.heads + shape.key_heads
        rotate(grad.view(len(grad), -1, shape.size)[:, :turning], cos, sin, back=True)
        of_weight = grad.T @ h if ctx.needs_input_grad[2] else None
        of_x = _normed_gradient(grad @ weight, norm, scaled, inverse) if ctx.needs_input_grad[0] else None
        return of_x, None, of_weight, None, None, None, None


class _Mixed(torch.autograd.Function):
    """Output projection and residual, norm, SwiGLU and residual; the norm is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mixed: torch.Tensor,
        out: torch.Tensor,
        norm: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        middle = torch.addmm(x, mixed, out.T)
        h, scaled, inverse = normed(middle, norm, eps)
        gate, up = (h @ gate_up.T).chunk(2, dim=1)
        opened = silu(gate)
        product = opened * up
        ctx.save_for_backward(mixed, out, norm, gate_up, down, h, scaled, inverse, gate, up, opened, product)
        return torch.addmm(middle, product, down.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixed, out, norm, gate_up, down, h, scaled, inverse, gate, up, opened, product = ctx.saved_tensors
        _, _, out_trained, _, gate_up_trained, down_trained, _ = ctx.needs_input_grad
        of_down = grad.T @ product if down_trained else None
        of_product = grad @ down
        both = torch.empty(len(grad), 2 * gate.shape[1], dtype=grad.dtype)
        of_gate, of_up = both.chunk(2, dim=1)
        torch.mul(of_product, opened, out=of_up)
        of_gate.copy_(torch.ops.aten.silu_backward(of_product.mul_(up), gate))
        of_gate_up = both.T @ h if gate_up_trained else None
        of_middle = _normed_gradient(both @ gate_up, norm, scaled, inverse).add_(grad)
        of_out = of_middle.T @ mixed if out_trained else None
        return of_middle, of_middle @ out, of_out, None, of_gate_up, of_down, None
