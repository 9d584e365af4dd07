"""Attention over a CSR edge list as operators of torch, on CPU; `edges` has their formulas and checks their arguments.

Lists are indptr (g, n + 1) and indices (E,), see `EdgeList`. Scores, sums and transposed sums are each other's
derivatives. dk and dv are sums over the transposed list, so that every row is written by one task: no atomics, no
private copies. The backward pass recomputes p from the row maximum. A stored logsumexp would be cheaper by little and,
at logits of 1e4 in float32, wrong in the third digit of p.
"""

import numpy as np
import torch
from torch import Tensor

from subquad.kernels import edge_loops as loops
from subquad.kernels.edge_loops import launch, moved, transpose


@torch.library.custom_op("subquad::edge_scores", mutates_args=(), device_types="cpu")
def scores(q: Tensor, k: Tensor, indptr: Tensor, indices: Tensor, scale: float) -> Tensor:
    _check_list(indptr, indices, k.shape[2])
    x, y, ptr, keys = map(_array, (q, k, indptr, indices))
    out = np.empty((len(x) // len(ptr), len(keys)), x.dtype)  # (B·H // g, E)
    launch(loops.scores_kernel, x.shape, x, y, ptr, keys, x.dtype.type(scale), out)
    return torch.from_numpy(out)


@torch.library.custom_op("subquad::edge_sum", mutates_args=(), device_types="cpu")
def sums(w: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, num_keys: int, transposed: bool) -> Tensor:
    """Σ_e w_e x_j for each row i; transposed: Σ_e w_e x_i for each key j."""
    _check_list(indptr, indices, num_keys)
    weights, ptr, ends = map(_array, (w, indptr, indices))
    if transposed:
        ptr, ends, slots = transpose(ptr, ends, num_keys)
        weights = moved(weights, slots)
    out = x.new_empty(*x.shape[:2], ptr.shape[1] - 1, x.shape[3])
    y = _array(out)
    launch(loops.sum_kernel, y.shape, weights, _array(x), ptr, ends, y)
    return out


@torch.library.custom_op("subquad::edge_attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    gate: Tensor,
    weight: Tensor,
    scale: float,
) -> Tensor:
    """A gate of shape (0, 0) is absent."""
    _check_list(indptr, indices, k.shape[2])
    out = q.new_empty(*q.shape[:3], v.shape[3])
    x, *arrays = map(_array, (q, k, v, indptr, indices, gate, weight))
    launch(loops.attention_kernel, x.shape, x, *arrays, x.dtype.type(scale), _array(out))
    return out


@torch.library.custom_op("subquad::edge_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    gate: Tensor,
    weight: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_list(indptr, indices, k.shape[2])
    grads = _like(q, k, v, gate, weight)
    arrays = map(_array, (dout, q, k, v, indptr, indices, gate, weight))
    by_key = transpose(_array(indptr), _array(indices), k.shape[2])
    backward(*arrays, by_key, scale, tuple(map(_array, grads)))
    return grads


def backward(do, q, k, v, ptr, keys, gate, weight, by_key, scale: float, grads: tuple[np.ndarray, ...]) -> None:
    """Fills dq, dk, dv, dgate and dweight. Arrays as in `edge_loops`; `by_key` is the transposed list."""
    dq, dk, dv, dgate, dweight = grads
    factor, one = q.dtype.type(scale), q.dtype.type(1)
    s, dp = (np.empty((len(q) // len(ptr), len(keys)), q.dtype) for _ in range(2))  # (B·H // g, E)
    launch(loops.scores_kernel, q.shape, q, k, ptr, keys, factor, s)
    launch(loops.scores_kernel, q.shape, do, v, ptr, keys, one, dp)
    launch(loops.softmax_backward_kernel, q.shape, s, dp, ptr, gate, weight, factor, dgate, dweight)
    launch(loops.sum_kernel, q.shape, s, k, ptr, keys, dq)
    *by_key, slots = by_key
    launch(loops.sum_kernel, k.shape, moved(s, slots), q, *by_key, dk)
    launch(loops.sum_kernel, k.shape, moved(dp, slots), do, *by_key, dv)


@scores.register_fake
def _(q, k, indptr, indices, scale):
    return q.new_empty(q.shape[0] * q.shape[1] // indptr.shape[0], indices.shape[0])


@sums.register_fake
def _(w, x, indptr, indices, num_keys, transposed):
    return x.new_empty(*x.shape[:2], num_keys if transposed else indptr.shape[1] - 1, x.shape[3])


@attention.register_fake
def _(q, k, v, indptr, indices, gate, weight, scale):
    return q.new_empty(*q.shape[:3], v.shape[3])


@_attention_backward.register_fake
def _(dout, q, k, v, indptr, indices, gate, weight, scale):
    return _like(q, k, v, gate, weight)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.numbers = [x for x in inputs if not isinstance(x, Tensor)]


def _scores_grad(ctx, grad):
    q, k, indptr, indices = ctx.saved_tensors
    w = grad * ctx.numbers[0]
    dq = sums(w, k, indptr, indices, k.shape[2], False) if ctx.needs_input_grad[0] else None
    dk = sums(w, q, indptr, indices, k.shape[2], True) if ctx.needs_input_grad[1] else None
    return dq, dk, None, None, None


def _sum_grad(ctx, grad):
    (w, x, indptr, indices), (num_keys, transposed) = ctx.saved_tensors, ctx.numbers
    pair = (x, grad) if transposed else (grad, x)
    dw = scores(*pair, indptr, indices, 1.0) if ctx.needs_input_grad[0] else None
    dx = sums(w, grad, indptr, indices, num_keys, not transposed) if ctx.needs_input_grad[1] else None
    return dw, dx, None, None, None, None


def _attention_grad(ctx, grad):
    dq, dk, dv, dgate, dweight = _attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return dq, dk, dv, None, None, dgate, dweight, None


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "edge_attention has no second derivative; edge_scores, edge_map and edge_sum together have"
    )


scores.register_autograd(_scores_grad, setup_context=_save)
sums.register_autograd(_sum_grad, setup_context=_save)
attention.register_autograd(_attention_grad, setup_context=_save)
_attention_backward.register_autograd(_no_second_derivative)


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


def _array(x: Tensor) -> np.ndarray:
    """Contiguous; (B, H, n, d) becomes (B·H, n, d)."""
    return (x.flatten(0, 1) if x.ndim == 4 else x).detach().contiguous().numpy()


def _check_list(indptr: Tensor, indices: Tensor, num_keys: int) -> None:
    """The kernels trust the list with their memory. To ask costs a hundredth of what they do."""
    rising = bool((indptr[1:, 0] == indptr[:-1, -1]).all()) and bool((indptr.diff(dim=1) >= 0).all())
    if not rising or indptr[0, 0] != 0 or indptr[-1, -1] != indices.shape[0]:
        raise ValueError(f"edges.indptr must rise from 0 to the number of edges, {indices.shape[0]}")
    if indices.numel():
        low, high = indices.aminmax()
        if low < 0 or high >= num_keys:
            raise ValueError(f"edges.indices must be in 0 … {num_keys - 1}, got {low} … {high}")
