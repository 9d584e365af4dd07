"""The operators of the graph room on a CPU: each row by the route it came for."""

from __future__ import annotations

from torch import Tensor

from subquad.kernels.graphs import list_route, mask_route, tile_route
from subquad.kernels.precision import in_float32


@in_float32
def attention(q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach) -> Tensor:
    random = (key_mask, seed, scale, dropout)
    parts = [tile_route.forward(q, k, v, mask, *random)] if mask.numel() else []
    if indices.numel() or not parts:
        parts.append(list_route.forward(q, k, v, indptr, indices, *random))
    return sum(parts[1:], parts[0])


@in_float32
def attention_backward(
    grad, q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach, gated
) -> tuple[Tensor, ...]:
    tensors, random, parts = (grad, q, k, v, w, z), (key_mask, seed, scale, dropout), []
    if mask.numel() and gated and ste == "difference":  # a gradient for every pair
        parts.append(mask_route.backward(*tensors, mask, *random, causal, reach))
    elif mask.numel():
        parts.append(tile_route.backward(*tensors, mask, *random, ste, reach, gated))
    if indices.numel() or not parts:
        parts.append(list_route.backward(*tensors, indptr, indices, *random, ste, reach, gated))
    return tuple(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True))
