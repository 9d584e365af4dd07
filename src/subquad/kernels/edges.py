"""Attention over a CSR edge list: time and memory linear in the number of edges.

    s_e = score_gate_e · scale · q_i·k_j            for every edge e = (i, j)
    p_e = exp(s_e) / Σ_{e' of row i} exp(s_e')      a row without edges has output 0 and gradient 0
    out_i = Σ_{e of row i} weight_gate_e · p_e · v_j

The gradient of `score_gate`, dL/ds_e · scale · q_i·k_j, is at gate 1 the straight-through estimator of the
SBM-Transformer (Cho et al. 2022, eq. 9). That of `weight_gate`, p_e · dL/dout_i·v_j, is the variant with the
mask after the softmax; dropout is a weight gate too.

CPU: Numba kernels, seen by torch as operators. A task is a block of rows of one instance: all its scores, the
softmax of each row, all its sums. The rows of a block walk through their ascending keys side by side, so that
a key fetched for one row is still in the cache for the next. dk and dv are sums over the transposed list (a
counting sort), so that every row is written by one task: no atomics, no private copies. The backward pass
recomputes p from the row maximum. A stored logsumexp would be cheaper by little and, at logits of 1e4 in
float32, wrong in the third digit of p.
Other devices: `segment_*`, plain torch. The device alone decides.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numba
import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

Buckets: TypeAlias = tuple[list[tuple[Tensor, Tensor]], Tensor]  # see `EdgeList.buckets`


@dataclass(frozen=True, eq=False)
class EdgeList:
    """Who attends to whom: g graphs of n query rows each, as CSR.

    g is 1, H or B·H: instance (b, h), of flat index t = b·H + h, uses graph t % g. A tensor with a number per
    edge and instance is (B·H // g, E): instance t reads row t // g.
    """

    indptr: Tensor  # (g, n + 1) int64: row i of graph r owns indices[indptr[r, i] : indptr[r, i + 1]]
    indices: Tensor  # (E,) int32: key positions, ascending within a row
    num_keys: int

    def __post_init__(self) -> None:
        for name, dtype, dims in (("indptr", torch.int64, 2), ("indices", torch.int32, 1)):
            x = getattr(self, name)
            if x.dtype != dtype or x.ndim != dims:
                raise TypeError(f"{name} must be {dims}-D {dtype}, got {x.ndim}-D {x.dtype}")
        if 0 in self.indptr.shape:
            raise ValueError(f"indptr must be (graphs, rows + 1), got {tuple(self.indptr.shape)}")
        if self.indptr.device != self.indices.device:
            raise ValueError(
                f"indptr must be on the device of indices, {self.indices.device}, got {self.indptr.device}"
            )

    @classmethod
    def from_mask(cls, mask: Tensor) -> "EdgeList":
        """The edges of a bool mask (n, m) or (g, n, m), True = attends."""
        if mask.dtype != torch.bool or mask.ndim not in (2, 3):
            raise TypeError(f"mask must be 2-D or 3-D bool, got {mask.ndim}-D {mask.dtype}")
        mask = mask[None] if mask.ndim == 2 else mask  # (g, n, m)
        graphs, n, m = mask.shape
        ends = mask.sum(-1).flatten().cumsum(0)  # (g·n,)
        offsets = torch.cat((ends.new_zeros(1), ends))  # (g·n + 1,)
        graph = torch.arange(graphs, device=mask.device)[:, None]  # (g, 1)
        return cls(offsets[graph * n + torch.arange(n + 1, device=mask.device)], mask.nonzero()[:, 2].int(), m)

    def to_mask(self) -> Tensor:
        """(g, n, m) bool, the inverse of `from_mask`."""
        mask = self.indices.new_zeros(self.num_graphs * self.num_queries, self.num_keys, dtype=torch.bool)
        mask[self.rows, self.indices.long()] = True
        return mask.unflatten(0, (self.num_graphs, self.num_queries))

    def to(self, device: torch.device | str) -> "EdgeList":
        return EdgeList(self.indptr.to(device), self.indices.to(device), self.num_keys)

    def masked(self, key_mask: Tensor, num_heads: int) -> "EdgeList":
        """The B·H graphs that remain without the edges to padded keys. key_mask: (B, m) bool, True = real."""
        if key_mask.dtype != torch.bool or key_mask.ndim != 2 or key_mask.shape[1] != self.num_keys:
            got = f"{key_mask.dtype} {tuple(key_mask.shape)}"
            raise ValueError(f"key_mask must be bool (B, {self.num_keys}), got {got}")
        copies = self.num_copies(key_mask.shape[0] * num_heads, num_heads)
        copy = torch.arange(copies, device=self.indices.device)[:, None]  # (copies, 1)
        instance = copy * self.num_graphs + self.rows // self.num_queries  # (copies, E)
        keep = key_mask[instance // num_heads, self.indices.long()]  # (copies, E)
        ends = keep.flatten().cumsum(0)
        kept_before = torch.cat((ends.new_zeros(1), ends))  # (copies·E + 1,)
        indptr = kept_before[copy[..., None] * self.num_edges + self.indptr]  # (copies, g, n + 1)
        return EdgeList(indptr.flatten(0, 1), self.indices.expand(copies, -1)[keep], self.num_keys)

    def num_copies(self, instances: int, num_heads: int) -> int:
        """B·H // g: how many instances share a graph."""
        if self.num_graphs not in (1, num_heads, instances):
            raise ValueError(f"edges must have 1, H = {num_heads} or B·H = {instances} graphs, got {self.num_graphs}")
        return instances // self.num_graphs

    @property
    def num_edges(self) -> int:
        return self.indices.shape[0]

    @property
    def num_graphs(self) -> int:
        return self.indptr.shape[0]

    @property
    def num_queries(self) -> int:
        return self.indptr.shape[1] - 1

    @property
    def degrees(self) -> Tensor:
        """(g, n): keys per row."""
        return self.indptr.diff(dim=1)

    @property
    def rows(self) -> Tensor:
        """(E,): the row r·n + i of each edge."""
        rows = torch.arange(self.num_graphs * self.num_queries, device=self.indptr.device)
        return rows.repeat_interleave(self.degrees.flatten(), output_size=self.num_edges)

    @cached_property
    def buckets(self) -> Buckets:
        """The edges as padded rows, for `edge_map`: one bucket per power of two that rounds up a degree.

        Pairs (slots, mask), both (g, rows, width), and the place (E,) of every edge in all slots in sequence.
        Kept, because fixed patterns use it at every step.
        """
        degrees, starts = self.degrees, self.indptr[:, :-1]  # (g, n)
        place = self.indptr.new_empty(self.num_edges)
        pairs, before, width = [], 0, 1
        while width < 2 * degrees.max():
            inside = (width // 2 < degrees) & (degrees <= width)  # (g, n)
            longest = int(inside.sum(1).max())
            rows = inside.byte().argsort(dim=1, descending=True, stable=True)[:, :longest]  # (g, rows)
            degree = (degrees * inside).gather(1, rows)[..., None]  # (g, rows, 1), 0 where a graph has fewer
            offset = torch.arange(width, device=degrees.device)
            mask = offset < degree  # (g, rows, width)
            slots = (starts.gather(1, rows)[..., None] + offset).masked_fill(~mask, 0)
            place[slots[mask]] = before + mask.flatten().nonzero()[:, 0]
            if longest:  # rows that only fill up a graph get one entry: no map need accept an empty set
                pairs.append((slots, mask | ((degree == 0) & (offset == 0))))
            before, width = before + mask.numel(), 2 * width
        return pairs, place


def edge_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: EdgeList,
    *,
    scale: float,
    score_gate: Tensor | None = None,
    weight_gate: Tensor | None = None,
) -> Tensor:
    """Softmax attention over the edges: q (B, H, n, d), k (B, H, m, d), v (B, H, m, d') -> (B, H, n, d').

    Gates: (B·H // g, E), 1 when absent. Half precision is computed in float32. There is no second derivative.
    """
    _check(edges, {"score_gate": score_gate, "weight_gate": weight_gate}, q=q, k=k, v=v)
    work = torch.promote_types(q.dtype, torch.float32)
    heads = [x.to(work) for x in (q, k, v)]
    if q.device.type != "cpu":
        gates = {"score_gate": score_gate, "weight_gate": weight_gate}
        return segment_attention(*heads, edges, scale=scale, **gates).to(q.dtype)
    gates = [q.new_empty(0, 0, dtype=work) if x is None else x.to(work) for x in (score_gate, weight_gate)]
    return _attention(*heads, edges.indptr, edges.indices, *gates, scale).to(q.dtype)


def edge_scores(q: Tensor, k: Tensor, edges: EdgeList, *, scale: float) -> Tensor:
    """scale · q_i·k_j: (B, H, n, d), (B, H, m, d) -> (B·H // g, E). Differentiable at any order."""
    _check(edges, {}, q=q, k=k)
    work = torch.promote_types(q.dtype, torch.float32)
    if q.device.type != "cpu":
        return segment_scores(q.to(work), k.to(work), edges, scale=scale).to(q.dtype)
    return _scores(q.to(work), k.to(work), edges.indptr, edges.indices, scale).to(q.dtype)


def edge_sum(weights: Tensor, v: Tensor, edges: EdgeList, num_heads: int) -> Tensor:
    """Σ_e weights_e · v_j: (B·H // g, E), (B, H, m, d) -> (B, H, n, d). Differentiable at any order."""
    _check(edges, {"weights": weights}, v=v)
    if num_heads != v.shape[1]:
        raise ValueError(f"num_heads must be the number of heads of v, {v.shape[1]}, got {num_heads}")
    work = torch.promote_types(v.dtype, torch.float32)
    if v.device.type != "cpu":
        return segment_sum(weights.to(work), v.to(work), edges).to(v.dtype)
    lists = edges.indptr, edges.indices, edges.num_keys
    return _sum(weights.to(work), v.to(work), *lists, False).to(v.dtype)


def edge_map(
    scores: Tensor,
    edges: EdgeList,
    probability: Callable[[Tensor, Tensor], Tensor],
    num_heads: int,
    *,
    allowed: Tensor | None = None,
    buckets: Buckets | None = None,
) -> Tensor:
    """A map of each row's scores to weights: (B·H // g, E) -> (B·H // g, E).

    `probability(scores, mask)` gets (B, H, rows, width), mask True = an edge, and maps the last dimension.
    It is called once per bucket (see `EdgeList.buckets`): if the heads share a graph, padding at most doubles
    the work. If they do not, a bucket has as many rows as the head with most of them.
    `allowed` bool (B·H // g, E) takes edges out, those to padded keys say. `buckets`: those of the list, where a
    compiled graph has them as constants.
    """
    instances = scores.shape[0] * edges.num_graphs
    if instances % num_heads:
        raise ValueError(f"num_heads must divide the {instances} instances of scores, got {num_heads}")
    copies = edges.num_copies(instances, num_heads)
    _check_per_edge(edges, copies, "scores", scores)
    pairs, place = edges.buckets if buckets is None else buckets
    weights = [scores.new_empty(copies, 0)]
    for slots, mask in pairs:  # (g, rows, width)
        shape = (-1, num_heads, *slots.shape[1:])  # (B, H, rows, width)
        at = slots.flatten().expand(copies, -1)  # (copies, g·rows·width)
        padded, real = scores.gather(1, at).view(shape), mask.expand(copies, *mask.shape).reshape(shape)
        if allowed is not None:
            real = real & allowed.gather(1, at).view(shape)
        weights.append(probability(padded.masked_fill(~real, 0), real).reshape(copies, -1))
    return torch.cat(weights, 1).gather(1, place.expand(copies, -1))


def _check(edges: EdgeList, per_edge: dict[str, Tensor | None], **tensors: Tensor) -> None:
    """Name the argument that does not fit. q has a row per row of the list, k and v have one per key."""
    like, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        length = edges.num_queries if name == "q" else edges.num_keys
        if x.ndim != 4 or x.shape[:2] != first.shape[:2] or x.shape[2] != length:
            raise ValueError(f"{name} must be (B, H, {length}, d), B and H as in {like}, got {tuple(x.shape)}")
        if not x.is_floating_point() or x.dtype != first.dtype:
            raise TypeError(f"{name} must be floating and of the dtype of {like}, {first.dtype}, got {x.dtype}")
        if x.device != edges.indices.device:
            raise ValueError(f"{name} must be on the device of edges, {edges.indices.device}, got {x.device}")
    if "q" in tensors and tensors["k"].shape[3] != first.shape[3]:
        raise ValueError(f"k must have the head dimension of q, {first.shape[3]}, got {tensors['k'].shape[3]}")
    copies = edges.num_copies(first.shape[0] * first.shape[1], first.shape[1])
    for name, x in per_edge.items():
        if x is not None:
            _check_per_edge(edges, copies, name, x)


def _check_per_edge(edges: EdgeList, copies: int, name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating, got {x.dtype}")
    if x.shape != (copies, edges.num_edges) or x.device != edges.indices.device:
        wanted = f"({copies}, {edges.num_edges}) on {edges.indices.device}"
        raise ValueError(f"{name} must be (B·H // g, E) = {wanted}, got {tuple(x.shape)} on {x.device}")


# ---- Other devices: plain torch, memory E·d instead of E ----


def segment_scores(q: Tensor, k: Tensor, edges: EdgeList, *, scale: float) -> Tensor:
    x = _per_edge(q, edges, edges.rows)  # (B·H // g, E, d)
    return (x * _per_edge(k, edges, _keys(edges))).sum(-1) * scale


def segment_sum(weights: Tensor, v: Tensor, edges: EdgeList) -> Tensor:
    terms = weights[..., None] * _per_edge(v, edges, _keys(edges))  # (B·H // g, E, d)
    total = terms.new_zeros(terms.shape[0], edges.num_graphs * edges.num_queries, terms.shape[2])
    return total.index_add(1, edges.rows, terms).view(*v.shape[:2], edges.num_queries, v.shape[3])


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: EdgeList,
    *,
    scale: float,
    score_gate: Tensor | None = None,
    weight_gate: Tensor | None = None,
) -> Tensor:
    s = segment_scores(q, k, edges, scale=scale)  # (B·H // g, E)
    s = s if score_gate is None else s * score_gate
    rows = edges.rows.expand_as(s)
    limits = torch.finfo(s.dtype)  # a row with nothing above -inf gets top > -inf and total > 0, hence p = 0
    top = s.new_full((s.shape[0], edges.num_graphs * edges.num_queries), -math.inf)  # (B·H // g, g·n)
    top = top.scatter_reduce(1, rows, s.detach(), "amax").clamp_min(limits.min)
    p = (s - top.gather(1, rows)).exp()  # (B·H // g, E)
    total = torch.zeros_like(top).scatter_add(1, rows, p).clamp_min(limits.tiny)
    p = p / total.gather(1, rows)
    return segment_sum(p if weight_gate is None else p * weight_gate, v, edges)


def _per_edge(x: Tensor, edges: EdgeList, rows: Tensor) -> Tensor:
    """(B, H, n, d) -> (B·H // g, E, d): instance t = u·g + r stands in copy u, from row r·n on."""
    return x.reshape(-1, edges.num_graphs * x.shape[2], x.shape[3]).index_select(1, rows)


def _keys(edges: EdgeList) -> Tensor:
    """(E,): the key r·m + j of each edge."""
    return edges.rows // edges.num_queries * edges.num_keys + edges.indices


# ---- The operators on CPU. Scores, sums and transposed sums are each other's derivatives ----


@torch.library.custom_op("subquad::edge_scores", mutates_args=(), device_types="cpu")
def _scores(q: Tensor, k: Tensor, indptr: Tensor, indices: Tensor, scale: float) -> Tensor:
    _check_list(indptr, indices, k.shape[2])
    x, y, ptr, keys = map(_array, (q, k, indptr, indices))
    out = np.empty((len(x) // len(ptr), len(keys)), x.dtype)  # (B·H // g, E)
    _launch(_scores_kernel, x.shape, x, y, ptr, keys, x.dtype.type(scale), out)
    return torch.from_numpy(out)


@torch.library.custom_op("subquad::edge_sum", mutates_args=(), device_types="cpu")
def _sum(w: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, num_keys: int, transposed: bool) -> Tensor:
    """Σ_e w_e x_j for each row i; transposed: Σ_e w_e x_i for each key j."""
    _check_list(indptr, indices, num_keys)
    edges = _array(indptr), _array(indices), _IN_PLACE
    edges = _transpose(*edges[:2], num_keys) if transposed else edges
    out = x.new_empty(*x.shape[:2], edges[0].shape[1] - 1, x.shape[3])
    y = _array(out)
    _launch(_sum_kernel, y.shape, _array(w), _array(x), *edges, y)
    return out


@torch.library.custom_op("subquad::edge_attention", mutates_args=(), device_types="cpu")
def _attention(
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
    _launch(_attention_kernel, x.shape, x, *arrays, x.dtype.type(scale), _array(out))
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
    grads = _like(q, k, v, gate, weight)
    dq, dk, dv, dgate, dweight = map(_array, grads)
    do, x, y, z, ptr, keys, gate_, weight_ = map(_array, (dout, q, k, v, indptr, indices, gate, weight))
    by_key = _transpose(ptr, keys, k.shape[2])
    factor, one = x.dtype.type(scale), x.dtype.type(1)
    s, dp = (np.empty((len(x) // len(ptr), len(keys)), x.dtype) for _ in range(2))  # (B·H // g, E)
    _launch(_scores_kernel, x.shape, x, y, ptr, keys, factor, s)
    _launch(_scores_kernel, x.shape, do, z, ptr, keys, one, dp)
    _launch(_softmax_backward_kernel, x.shape, s, dp, ptr, gate_, weight_, factor, dgate, dweight)
    _launch(_sum_kernel, x.shape, s, y, ptr, keys, _IN_PLACE, dq)
    _launch(_sum_kernel, y.shape, s, x, *by_key, dk)
    _launch(_sum_kernel, y.shape, dp, do, *by_key, dv)
    return grads


@_scores.register_fake
def _(q, k, indptr, indices, scale):
    return q.new_empty(q.shape[0] * q.shape[1] // indptr.shape[0], indices.shape[0])


@_sum.register_fake
def _(w, x, indptr, indices, num_keys, transposed):
    return x.new_empty(*x.shape[:2], num_keys if transposed else indptr.shape[1] - 1, x.shape[3])


@_attention.register_fake
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
    dq = _sum(w, k, indptr, indices, k.shape[2], False) if ctx.needs_input_grad[0] else None
    dk = _sum(w, q, indptr, indices, k.shape[2], True) if ctx.needs_input_grad[1] else None
    return dq, dk, None, None, None


def _sum_grad(ctx, grad):
    (w, x, indptr, indices), (num_keys, transposed) = ctx.saved_tensors, ctx.numbers
    pair = (x, grad) if transposed else (grad, x)
    dw = _scores(*pair, indptr, indices, 1.0) if ctx.needs_input_grad[0] else None
    dx = _sum(w, grad, indptr, indices, num_keys, not transposed) if ctx.needs_input_grad[1] else None
    return dw, dx, None, None, None, None


def _attention_grad(ctx, grad):
    dq, dk, dv, dgate, dweight = _attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return dq, dk, dv, None, None, dgate, dweight, None


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError(
        "edge_attention has no second derivative; edge_scores, edge_map and edge_sum together have"
    )


_scores.register_autograd(_scores_grad, setup_context=_save)
_sum.register_autograd(_sum_grad, setup_context=_save)
_attention.register_autograd(_attention_grad, setup_context=_save)
_attention_backward.register_autograd(_no_second_derivative)

_IN_PLACE = np.empty(0, np.int32)  # an `order` for lists that are not transposed


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


@contextmanager
def _threads() -> Iterator[int]:
    """As many Numba threads as torch uses."""
    before = numba.get_num_threads()
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    try:
        yield threads
    finally:
        numba.set_num_threads(before)


def _launch(kernel: Callable, shape: tuple[int, int, int], *arguments: object) -> None:
    """Run a kernel on (instances, n, ·) rows, in tasks of up to 64 rows of one instance."""
    instances, n, _ = shape
    with _threads() as workers:
        rows = max(1, min(64, instances * n // (4 * workers)))
        kernel(instances * -(-n // rows), rows, workers, *arguments)


def _transpose(indptr: np.ndarray, indices: np.ndarray, num_keys: int) -> tuple[np.ndarray, ...]:
    """The list by key: offsets (g, m + 1), queries (E,), and where each of these edges stands (E,)."""
    offsets = np.zeros((len(indptr), num_keys + 1), np.int64)
    queries = np.empty_like(indices)
    order = np.empty(indices.shape, np.int32 if len(indices) < 2**31 else np.int64)
    with _threads():
        _transpose_kernel(indptr, indices, offsets, queries, order)
    return offsets, queries, order


# ---- Numba: one row, one block of rows, then the kernels ----

_FAST = {"reassoc", "contract", "arcp", "nsz"}  # without nnan and ninf: -inf and NaN keep their meaning
_inline = numba.njit(fastmath=_FAST, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_kernel = numba.njit(fastmath=_FAST, error_model="numpy", parallel=True, cache=True)
_SPAN = 64  # edges of a row before the next row's turn: 64 keys of 64 floats are 16 kB, half of a usual L1


@_inline
def _dots(x, y, keys, scale, out):
    """out[e] = scale · x·y[keys[e]]. Four edges at a time: x is loaded once, four sums are independent."""
    whole = keys.size // 4 * 4
    for e in range(0, whole, 4):
        y0, y1, y2, y3 = y[keys[e]], y[keys[e + 1]], y[keys[e + 2]], y[keys[e + 3]]
        s0 = s1 = s2 = s3 = x.dtype.type(0)
        for c in range(x.size):
            s0 += x[c] * y0[c]
            s1 += x[c] * y1[c]
            s2 += x[c] * y2[c]
            s3 += x[c] * y3[c]
        out[e], out[e + 1], out[e + 2], out[e + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
    for e in range(whole, keys.size):
        y0, s0 = y[keys[e]], x.dtype.type(0)
        for c in range(x.size):
            s0 += x[c] * y0[c]
        out[e] = s0 * scale


@_inline
def _sums(weights, y, keys, out):
    """out += Σ_e weights[e] · y[keys[e]]. Eight edges at a time: out is loaded and stored once."""
    whole = keys.size // 8 * 8
    for e in range(0, whole, 8):
        y0, y1, y2, y3 = y[keys[e]], y[keys[e + 1]], y[keys[e + 2]], y[keys[e + 3]]
        y4, y5, y6, y7 = y[keys[e + 4]], y[keys[e + 5]], y[keys[e + 6]], y[keys[e + 7]]
        w0, w1, w2, w3 = weights[e], weights[e + 1], weights[e + 2], weights[e + 3]
        w4, w5, w6, w7 = weights[e + 4], weights[e + 5], weights[e + 6], weights[e + 7]
        for c in range(out.size):
            left = w0 * y0[c] + w1 * y1[c] + w2 * y2[c] + w3 * y3[c]
            out[c] += left + (w4 * y4[c] + w5 * y5[c] + w6 * y6[c] + w7 * y7[c])
    for e in range(whole, keys.size):
        y0, w0 = y[keys[e]], weights[e]
        for c in range(out.size):
            out[c] += w0 * y0[c]


def _exp(x):
    """e^x for x <= 0; in float32 in a form that LLVM vectorises, which a call of the C library is not."""


@overload(_exp, jit_options={"fastmath": _FAST})
def _(x):
    def polynomial(x):  # e^x = 2^m · e^r, r = x - m·ln 2 in [-ln 2 / 2, ln 2 / 2], with ln 2 as two floats
        y = np.float32(-87) if x < np.float32(-87) else x  # written so that NaN stays NaN
        m = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
        r = (y - m * np.float32(0.693359375)) + m * np.float32(2.12194440e-4)
        z = np.float32(1 / 5040) * r + np.float32(1 / 720)
        z = ((z * r + np.float32(1 / 120)) * r + np.float32(1 / 24)) * r + np.float32(1 / 6)
        z = ((z * r + np.float32(0.5)) * r + np.float32(1)) * r + np.float32(1)
        z *= np.int32((np.int32(m) + np.int32(127)) << np.int32(23)).view(np.float32)
        return np.float32(0) if x < np.float32(-87) else z

    return polynomial if x == numba.float32 else lambda x: math.exp(x)


@_inline
def _softmax(row):
    """In place. A row with nothing above -inf becomes 0."""
    top = row.dtype.type(-np.inf)
    for e in range(row.size):
        top = top if row[e] <= top else row[e]  # written so that a row of NaN does not look empty
    if top == -np.inf:
        row[:] = 0
        return
    for e in range(row.size):
        row[e] = _exp(row[e] - top)
    total = row.dtype.type(0)
    for e in range(row.size):
        total += row[e]
    for e in range(row.size):
        row[e] /= total


@_inline
def _softmax_backward(s, dp, gate, weight, scale, dgate, dweight):
    """s = scale · q·k becomes dL/d(q·k), to sum dq and dk; dp = dout·v becomes p · weight, to sum dv."""
    p = s.copy()
    if gate.size:
        _multiply(p, gate)
    _softmax(p)
    for e in range(dweight.size):
        dweight[e] = p[e] * dp[e]
    if weight.size:
        _multiply(dp, weight)
    mean = s.dtype.type(0)
    for e in range(s.size):
        mean += p[e] * dp[e]
    for e in range(s.size):
        dp[e] = p[e] * (dp[e] - mean)  # dL/ds_e
    for e in range(dgate.size):
        dgate[e] = dp[e] * s[e]
    for e in range(s.size):
        s[e] = dp[e] * scale
        dp[e] = p[e]
    if gate.size:
        _multiply(s, gate)
    if weight.size:
        _multiply(dp, weight)


@_inline
def _multiply(x, y):
    for e in range(x.size):
        x[e] *= y[e]


@_inline
def _block(task, indptr, rows):
    """Number of a task -> its instance, its copy of the graphs, its rows, their offsets."""
    graphs, n = indptr.shape[0], indptr.shape[1] - 1
    blocks = (n + rows - 1) // rows
    t, first = task // blocks, task % blocks * rows
    last = min(n, first + rows)
    return t, t // graphs, first, last, indptr[t % graphs, first : last + 1]


@_inline
def _part(ptr, i, part, parts):
    degree = ptr[i + 1] - ptr[i]
    return ptr[i] + degree * part // parts, ptr[i] + degree * (part + 1) // parts


@_inline
def _block_dots(x, y, ptr, indices, scale, out):
    rows, start = x.shape[0], ptr[0]
    parts = max(1, (ptr[rows] - start) // (rows * _SPAN))
    for part in range(parts):
        for i in range(rows):
            a, b = _part(ptr, i, part, parts)
            _dots(x[i], y, indices[a:b], scale, out[a - start : b - start])


@_inline
def _block_sums(weights, y, ptr, indices, out):
    rows, start = out.shape[0], ptr[0]
    parts = max(1, (ptr[rows] - start) // (rows * _SPAN))
    out[:] = 0
    for part in range(parts):
        for i in range(rows):
            a, b = _part(ptr, i, part, parts)
            _sums(weights[a - start : b - start], y, indices[a:b], out[i])


@_kernel
def _scores_kernel(tasks, rows, workers, q, k, indptr, indices, scale, out):
    for worker in numba.prange(workers):  # tasks are dealt in turn, so that heads of unequal density balance
        for task in range(worker, tasks, workers):
            t, u, first, last, ptr = _block(task, indptr, rows)
            _block_dots(q[t, first:last], k[t], ptr, indices, scale, out[u, ptr[0] : ptr[-1]])


@_kernel
def _sum_kernel(tasks, rows, workers, weights, y, indptr, indices, order, out):
    """`order` says where the weight of each edge stands; empty: in its place."""
    for worker in numba.prange(workers):
        for task in range(worker, tasks, workers):
            t, u, first, last, ptr = _block(task, indptr, rows)
            w = weights[u, ptr[0] : ptr[-1]]
            if order.size:
                w = np.empty(ptr[-1] - ptr[0], weights.dtype)
                for e in range(w.size):
                    w[e] = weights[u, order[ptr[0] + e]]
            _block_sums(w, y[t], ptr, indices, out[t, first:last])


@_kernel
def _attention_kernel(tasks, rows, workers, q, k, v, indptr, indices, gate, weight, scale, out):
    for worker in numba.prange(workers):
        for task in range(worker, tasks, workers):
            t, u, first, last, ptr = _block(task, indptr, rows)
            start, stop = ptr[0], ptr[-1]
            p = np.empty(stop - start, q.dtype)
            _block_dots(q[t, first:last], k[t], ptr, indices, scale, p)
            if gate.size:
                _multiply(p, gate[u, start:stop])
            for i in range(last - first):
                _softmax(p[ptr[i] - start : ptr[i + 1] - start])
            if weight.size:
                _multiply(p, weight[u, start:stop])
            _block_sums(p, v[t], ptr, indices, out[t, first:last])


@_kernel
def _softmax_backward_kernel(tasks, rows, workers, s, dp, indptr, gate, weight, scale, dgate, dweight):
    for worker in numba.prange(workers):
        for task in range(worker, tasks, workers):
            _, u, first, last, ptr = _block(task, indptr, rows)
            for i in range(last - first):
                a, b = ptr[i], ptr[i + 1]
                g, w, dg, dw = gate[u, a:b], weight[u, a:b], dgate[u, a:b], dweight[u, a:b]
                _softmax_backward(s[u, a:b], dp[u, a:b], g, w, scale, dg, dw)


@_kernel
def _transpose_kernel(indptr, indices, offsets, queries, order):
    """Counting sort of every graph by key; offsets start as zeros."""
    for r in numba.prange(indptr.shape[0]):
        for e in range(indptr[r, 0], indptr[r, -1]):
            offsets[r, indices[e] + 1] += 1
        offsets[r, 0] = indptr[r, 0]
        for j in range(offsets.shape[1] - 1):
            offsets[r, j + 1] += offsets[r, j]
        free = offsets[r].copy()
        for i in range(indptr.shape[1] - 1):
            for e in range(indptr[r, i], indptr[r, i + 1]):
                slot = free[indices[e]]
                queries[slot], order[slot] = i, e
                free[indices[e]] += 1
