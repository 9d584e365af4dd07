"""Sampled graphs on a GPU: rows that came as a list by the Triton kernels of the edge room, rows of a mask in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.edges.lists import EdgeList
from subquad.kernels.graphs import reference


def attention(q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach) -> Tensor:
    about = (key_mask, seed, scale, dropout, ste, causal, reach)
    if devices.route("graphs", q.dtype, q.shape[3]).impl == "reference":
        return reference.attention(q, k, v, w, z, indptr, indices, mask, *about)
    parts = []
    if mask.numel():
        parts.append(reference.attention(q, k, v, w, z, *_nothing(indptr, indices), mask, *about))
    if indices.numel() or not parts:
        parts.append(list_attention(q, k, v, indptr, indices, key_mask, seed, scale, dropout))
    return sum(parts[1:], parts[0])


def attention_backward(
    grad, q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach, gated
) -> tuple[Tensor, ...]:
    tensors, random = (grad, q, k, v, w, z), (key_mask, seed, scale, dropout)
    if devices.route("graphs", q.dtype, q.shape[3]).impl == "reference":
        return reference.attention_backward(*tensors, indptr, indices, mask, *random, ste, causal, reach, gated)
    parts = []
    if mask.numel():
        lists = _nothing(indptr, indices)
        parts.append(reference.attention_backward(*tensors, *lists, mask, *random, ste, causal, reach, gated))
    if indices.numel() or not parts:
        parts.append(list_backward(*tensors, indptr, indices, *random, ste, reach, gated))
    return tuple(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True))


def _nothing(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(indptr), indices[:0]


def list_attention(q, k, v, indptr, indices, key_mask, seed, scale, dropout) -> Tensor:
    """Its edges lead to real keys only: the key mask is for the dropout."""
    from subquad.kernels.edges import gpu

    return gpu.attention(q, k, v, indptr, indices, 1, None, seed, scale, dropout, key_mask)


def list_backward(
    grad, q, k, v, w, z, indptr, indices, key_mask, seed, scale, dropout, ste, reach, gated
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz."""
    from subquad.kernels.edges import gpu

    if gated and ste == "difference":
        raise NotImplementedError(reference.NEEDS_MASK)
    edges = EdgeList(indptr.contiguous(), indices, k.shape[2])
    mode = gpu.MODES[ste] if gated else 0
    about = (None, key_mask, seed, scale, dropout, mode, reach)
    dq, dk, dv, by_key, credit = gpu.gradients(grad, q, k, v, edges, *about)
    if credit is None:
        return dq, dk, dv, w.new_zeros(w.shape), z.new_zeros(z.shape)
    dw = gpu.query_sums(credit, z, q.shape[1], edges)
    return dq, dk, dv, dw, gpu.key_sums(credit, w, k.shape[1], edges, by_key)
