"""Attention over a CSR edge list: time and memory linear in the number of edges.

    s_e = score_gate_e · scale · q_i·k_j            for every edge e = (i, j)
    p_e = exp(s_e) / Σ_{e' of row i} exp(s_e')      a row without edges has output 0 and gradient 0
    out_i = Σ_{e of row i} weight_gate_e · p_e · v_j

The gradient of `score_gate`, dL/ds_e · scale · q_i·k_j, is at gate 1 the straight-through estimator of the
SBM-Transformer (Cho et al. 2022, eq. 9). That of `weight_gate`, p_e · dL/dout_i·v_j, is the variant with the
mask after the softmax; dropout is a weight gate too.

CPU: the operators of `edge_ops`. Other devices: `segment_*`, plain torch. The device alone decides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from subquad.kernels import edge_ops

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
    return edge_ops.attention(*heads, edges.indptr, edges.indices, *gates, scale).to(q.dtype)


def edge_scores(q: Tensor, k: Tensor, edges: EdgeList, *, scale: float) -> Tensor:
    """scale · q_i·k_j: (B, H, n, d), (B, H, m, d) -> (B·H // g, E). Differentiable at any order."""
    _check(edges, {}, q=q, k=k)
    work = torch.promote_types(q.dtype, torch.float32)
    if q.device.type != "cpu":
        return segment_scores(q.to(work), k.to(work), edges, scale=scale).to(q.dtype)
    return edge_ops.scores(q.to(work), k.to(work), edges.indptr, edges.indices, scale).to(q.dtype)


def edge_sum(weights: Tensor, v: Tensor, edges: EdgeList, num_heads: int) -> Tensor:
    """Σ_e weights_e · v_j: (B·H // g, E), (B, H, m, d) -> (B, H, n, d). Differentiable at any order."""
    _check(edges, {"weights": weights}, v=v)
    if num_heads != v.shape[1]:
        raise ValueError(f"num_heads must be the number of heads of v, {v.shape[1]}, got {num_heads}")
    work = torch.promote_types(v.dtype, torch.float32)
    if v.device.type != "cpu":
        return segment_sum(weights.to(work), v.to(work), edges).to(v.dtype)
    lists = edges.indptr, edges.indices, edges.num_keys
    return edge_ops.sums(weights.to(work), v.to(work), *lists, False).to(v.dtype)


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
