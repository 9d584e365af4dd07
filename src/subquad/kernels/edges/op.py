"""Entrances, schemas, derivatives and costs of the operators over edge lists; see the package for the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.edges import cpu, cuda, reference
from subquad.kernels.edges.lists import Buckets, EdgeList
from subquad.kernels.operators import derive

scores_op = torch.library.custom_op("subquad::edge_scores", mutates_args=())(reference.scores)
sums_op = torch.library.custom_op("subquad::edge_sum", mutates_args=())(reference.sums)
attention_op = torch.library.custom_op("subquad::edge_attention", mutates_args=())(reference.attention)
attention_backward_op = torch.library.custom_op("subquad::edge_attention_backward", mutates_args=())(
    reference.attention_backward
)
scores_op.register_kernel("cpu")(cpu.scores)
sums_op.register_kernel("cpu")(cpu.sums)
attention_op.register_kernel("cpu")(cpu.attention)
attention_backward_op.register_kernel("cpu")(cpu.attention_backward)
sums_op.register_kernel("cuda")(cuda.sums)
attention_op.register_kernel("cuda")(cuda.attention)
attention_backward_op.register_kernel("cuda")(cuda.attention_backward)


# ---- entrances ----


def edge_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: EdgeList,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Softmax attention over the edges: q (B, H, n, d), k (B, H/g, m, d), v (B, H/g, m, d') → (B, H, n, d').

    g query heads in a row share a key head. `key_mask` bool (B, m), True = a real key; what stands at other keys does
    not matter. Dropout follows `seed`, int64 (). Half precision is computed in float32. There is no second derivative.
    """
    _check(edges, q=q, k=k, v=v)
    seed = _check_random(edges, q, key_mask, dropout, seed)
    k, v = _without_padding(key_mask, k, v)
    return attention_op(q, k, v, edges.indptr, edges.indices, edges.share, key_mask, seed, scale, dropout)


def edge_mapped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: EdgeList,
    probability_map: Callable[[Tensor, Tensor], Tensor],
    *,
    scale: float,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    buckets: Buckets | None = None,
) -> Tensor:
    """`edge_attention` with another probability map: scores, map, sum. See `edge_map` for the map and `buckets`."""
    _check(edges, q=q, k=k, v=v)
    seed = _check_random(edges, q, key_mask, dropout, seed)
    k, v = _without_padding(key_mask, k, v)
    heads = q.shape[1]
    allowed = reference.real_edges(edges, key_mask, heads)  # (B·H // g, E)
    scores = edge_scores(q, k, edges, scale=scale)
    weights = edge_map(scores, edges, probability_map, heads, allowed=allowed, buckets=buckets)
    if dropout:
        weights = weights * reference.edge_dropout(edges, seed, dropout, key_mask, q.shape[:2], weights.dtype)
    return edge_sum(weights, v, edges, heads)


def edge_scores(q: Tensor, k: Tensor, edges: EdgeList, *, scale: float) -> Tensor:
    """scale · q_i·k_j: (B, H, n, d), (B, H/g, m, d) → (B·H // graphs, E). Differentiable at any order."""
    _check(edges, q=q, k=k)
    work = torch.promote_types(q.dtype, torch.float32)
    return scores_op(q.to(work), k.to(work), edges.indptr, edges.indices, edges.share, scale).to(q.dtype)


def edge_sum(weights: Tensor, v: Tensor, edges: EdgeList, num_heads: int) -> Tensor:
    """Σ_e weights_e · v_j: (B·H // graphs, E), (B, H/g, m, d) → (B, H, n, d). Differentiable at any order."""
    if v.ndim == 4 and (num_heads < 1 or num_heads % v.shape[1]):
        raise ValueError(f"num_heads must be a multiple of the heads of v, {v.shape[1]}, got {num_heads}")
    _check(edges, num_heads, v=v)
    _check_per_edge(edges, v.shape[0], num_heads, "weights", weights)
    work, lists = torch.promote_types(v.dtype, torch.float32), (edges.indptr, edges.indices, edges.share)
    return sums_op(weights.to(work), v.to(work), *lists, num_heads, edges.num_keys, False).to(v.dtype)


def edge_map(
    scores: Tensor,
    edges: EdgeList,
    probability_map: Callable[[Tensor, Tensor], Tensor],
    num_heads: int,
    *,
    allowed: Tensor | None = None,
    buckets: Buckets | None = None,
) -> Tensor:
    """A map of each row's scores to weights: (B·H // graphs, E) → (B·H // graphs, E).

    `probability_map(scores, mask)` gets (B, H, rows, width), mask True = an edge, and maps the last dimension.
    It is called once per bucket (see `EdgeList.buckets`): if the heads share a graph, padding at most doubles
    the work. If they do not, a bucket has as many rows as the head with most of them.
    `allowed` bool (B·H // graphs, E) takes edges out, those to padded keys say. `buckets`: those of the list, where a
    compiled graph has them as constants.
    """
    instances = scores.shape[0] * edges.num_graphs
    if instances % num_heads:
        raise ValueError(f"num_heads must divide the {instances} instances of scores, got {num_heads}")
    _check_per_edge(edges, instances // num_heads, num_heads, "scores", scores)
    copies = scores.shape[0]
    pairs, place = edges.buckets if buckets is None else buckets
    weights = [scores.new_empty(copies, 0)]
    for slots, mask in pairs:  # (g, rows, width)
        at = slots.flatten().expand(copies, -1)  # (copies, g·rows·width)

        def heads(x: Tensor, shape: tuple[int, ...] = slots.shape) -> Tensor:
            """(copies, g·rows·width) → (B, H, rows, width)."""
            return edges.by_instance(x.reshape(copies, *shape)).unflatten(0, (-1, num_heads))

        real = heads(mask.expand(copies, *mask.shape))
        if allowed is not None:
            real = real & heads(allowed.gather(1, at))
        found = probability_map(heads(scores.gather(1, at)).masked_fill(~real, 0), real)
        weights.append(edges.by_graph(found.flatten(0, 1)).reshape(copies, -1))
    return torch.cat(weights, 1).gather(1, place.expand(copies, -1))


# ---- checks ----


def _check(edges: EdgeList, num_heads: int | None = None, **tensors: Tensor) -> None:
    """Name the argument that does not fit. q has a row per row of the list, k and v have one per key."""
    like, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        length = edges.num_queries if name == "q" else edges.num_keys
        if x.ndim != 4 or x.shape[0] != first.shape[0] or x.shape[2] != length:
            raise ValueError(f"{name} must be (B, H, {length}, d), B as in {like}, got {tuple(x.shape)}")
        if first.shape[1] % max(1, x.shape[1]) or (
            name == "v" and "k" in tensors and x.shape[1] != tensors["k"].shape[1]
        ):
            raise ValueError(
                f"{name} must be (B, H/g, {length}, d) with a divisor of the {first.shape[1]} heads of {like}, as many "
                f"in k as in v, got {tuple(x.shape)}"
            )
        if not x.is_floating_point() or x.dtype != first.dtype:
            raise TypeError(f"{name} must be floating and of the dtype of {like}, {first.dtype}, got {x.dtype}")
        if x.device != edges.indices.device:
            raise ValueError(f"{name} must be on the device of edges, {edges.indices.device}, got {x.device}")
    if "q" in tensors and tensors["k"].shape[3] != first.shape[3]:
        raise ValueError(f"k must have the head dimension of q, {first.shape[3]}, got {tensors['k'].shape[3]}")
    edges.num_copies(first.shape[0], first.shape[1] if num_heads is None else num_heads)


def _check_random(
    edges: EdgeList, q: Tensor, key_mask: Tensor | None, dropout: float, seed: Tensor | None
) -> Tensor | None:
    """The seed, None where nothing is dropped."""
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (q.shape[0], edges.num_keys)):
        got = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise ValueError(f"key_mask must be bool (B, m) = ({q.shape[0]}, {edges.num_keys}), got {got}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability ≥ 0 and < 1, got {dropout!r}")
    if dropout and (not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.ndim):
        raise TypeError(f"seed must be an int64 tensor of no dimension where dropout > 0, got {seed!r}")
    return seed if dropout else None


def _check_per_edge(edges: EdgeList, batch: int, num_heads: int, name: str, x: Tensor) -> None:
    copies = edges.num_copies(batch, num_heads)
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating, got {x.dtype}")
    fits = x.dim() == 2 and x.shape[0] == copies and x.device == edges.indices.device
    counted = isinstance(edges.num_edges, int)  # a traced graph does not know the number
    if not fits or (counted and x.shape[1] != edges.num_edges):
        wanted = f"({copies}, {edges.num_edges}) on {edges.indices.device}"
        raise ValueError(f"{name} must be (B·H // graphs, E) = {wanted}, got {tuple(x.shape)} on {x.device}")


def _without_padding(key_mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """0 at padded keys: a NaN there times a weight of 0 would be NaN."""
    if key_mask is None:
        return tensors
    return tuple(x.masked_fill(~key_mask[:, None, :, None], 0) for x in tensors)


# ---- shapes, derivatives ----


@scores_op.register_fake
def _(q, k, indptr, indices, share, scale):
    return q.new_empty(q.shape[0] * q.shape[1] // indptr.shape[0], indices.shape[0])


@sums_op.register_fake
def _(w, x, indptr, indices, share, heads, num_keys, transposed):
    return x.new_empty(x.shape[0], heads, num_keys if transposed else indptr.shape[1] - 1, x.shape[3])


@attention_op.register_fake
def _(q, k, v, indptr, indices, share, key_mask, seed, scale, dropout):
    return q.new_empty(*q.shape[:3], v.shape[3])


def _save_scores(ctx, inputs, output):
    *tensors, ctx.share, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _scores_grad(ctx, grad):
    q, k, indptr, indices = ctx.saved_tensors
    w, lists = grad * ctx.scale, (indptr, indices, ctx.share)
    dq = sums_op(w, k, *lists, q.shape[1], k.shape[2], False) if ctx.needs_input_grad[0] else None
    dk = sums_op(w, q, *lists, k.shape[1], k.shape[2], True) if ctx.needs_input_grad[1] else None
    return dq, dk, None, None, None, None


def _save_sums(ctx, inputs, output):
    *tensors, ctx.share, ctx.heads, ctx.num_keys, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _sums_grad(ctx, grad):
    w, x, indptr, indices = ctx.saved_tensors
    lists = (indptr, indices, ctx.share)
    pair = (x, grad) if ctx.transposed else (grad, x)
    dw = scores_op(*pair, *lists, 1.0) if ctx.needs_input_grad[0] else None
    wanted = ctx.needs_input_grad[1]
    dx = sums_op(w, grad, *lists, x.shape[1], ctx.num_keys, not ctx.transposed) if wanted else None
    return dw, dx, None, None, None, None, None, None


scores_op.register_autograd(_scores_grad, setup_context=_save_scores)
sums_op.register_autograd(_sums_grad, setup_context=_save_sums)


# ---- floating-point operations: an edge is a pair that is multiplied ----


def _edges(instances: int, indptr, indices) -> int:
    return instances // indptr[0] * indices[0]


@register_flop_formula(torch.ops.subquad.edge_scores)
def _scores_flops(q_shape, k_shape, indptr, indices, *args, out_shape=None, **kwargs) -> int:
    return 2 * q_shape[3] * _edges(math.prod(q_shape[:2]), indptr, indices)


@register_flop_formula(torch.ops.subquad.edge_sum)
def _sums_flops(w_shape, x_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * x_shape[3] * math.prod(w_shape)


def _attention_flops(q, k, v, indptr, indices, *args, **kwargs) -> int:
    return 4 * q.shape[3] * _edges(q.shape[0] * q.shape[1], indptr.shape, indices.shape)


_name = "edge_attention, unlike edge_scores, edge_map and edge_sum together,"
derive(attention_op, attention_backward_op, _name, of=(0, 1, 2), behind=3, kept=slice(0), flops=_attention_flops)
