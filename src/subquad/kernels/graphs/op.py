"""Entrance, schemas, derivatives and costs of attention over sampled graphs; see the package for the formulas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.graphs import cpu, cuda, reference
from subquad.kernels.operators import no_second_derivative
from subquad.kernels.sampler import Sample

attention_op = torch.library.custom_op("subquad::graph_attention", mutates_args=())(reference.attention)
backward_op = torch.library.custom_op("subquad::graph_attention_backward", mutates_args=())(
    reference.attention_backward
)
attention_op.register_kernel("cpu")(cpu.attention)
backward_op.register_kernel("cpu")(cpu.attention_backward)
attention_op.register_kernel("cuda")(cuda.attention)
backward_op.register_kernel("cuda")(cuda.attention_backward)


def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    z: Tensor,
    graphs: Sample,
    *,
    scale: float,
    ste: str = "pre",
    causal: bool = False,
    reach: int = -1,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """q (B, H, n, d), k, v (B, H, m, d), w (B, H, n, c), z (B, H, m, c) → (B, H, n, d).

    `graphs` were drawn for the same key mask. ste=difference needs all their rows in the mask: a list does not hold
    pairs without an edge. Dropout follows the seed. First derivatives only. Half precision is computed in float32.
    """
    if ste not in reference.MODES:
        raise ValueError(f"ste must be one of {', '.join(reference.MODES)}, not {ste!r}")
    if dropout and seed is None:
        raise TypeError("seed must be an int64 tensor where dropout > 0, not None")
    if ste == "difference" and key_mask is not None:
        z = z * key_mask[:, None, :, None]  # no credit for padding, which cannot be drawn
    drawn = (graphs.indptr, graphs.indices, graphs.mask, key_mask, seed if dropout else None)
    return attention_op(q, k, v, w, z, *drawn, scale, dropout, ste, causal, reach)


@attention_op.register_fake
def _(q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach):
    return q.new_empty(*q.shape[:3], v.shape[3])


@backward_op.register_fake
def _(grad, q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach, gated):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, w, z))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:10])
    ctx.settings = inputs[10:]


def _backward(ctx, grad):
    gated = any(ctx.needs_input_grad[3:5])
    grads = backward_op(grad, *ctx.saved_tensors, *ctx.settings, gated)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, *[None] * 10


attention_op.register_autograd(_backward, setup_context=_save)
backward_op.register_autograd(no_second_derivative("graph_attention"))


def _pairs(q: Tensor, k: Tensor, indices: Tensor, mask: Tensor) -> int:
    """Pairs that are multiplied: the edges of a list, all of them under a mask."""
    return indices.numel() + (q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] if mask.numel() else 0)


@register_flop_formula(torch.ops.subquad.graph_attention, get_raw=True)
def _flops(q, k, v, w, z, indptr, indices, mask, *args, out_val=None, **kwargs) -> int:
    return 4 * q.shape[3] * _pairs(q, k, indices, mask)


@register_flop_formula(torch.ops.subquad.graph_attention_backward, get_raw=True)
def _backward_flops(grad, q, k, v, w, z, indptr, indices, mask, *args, out_val=None, **kwargs) -> int:
    return (10 * q.shape[3] + 4 * w.shape[3]) * _pairs(q, k, indices, mask)
