"""Attention over sampled graphs M, with a straight-through gradient for the probabilities p_ij = w_i·z_j of the edges.

    s_ij = scale · q_i·k_j,   A_i = softmax of s_i over {j : M_ij = 1},   out_i = Σ_j A_ij v_j

    pre    dL/dp_ij = dL/ds_ij · s_ij   where M_ij = 1, else 0   (SBM-Transformer eq. 9: M multiplies the scores)
    post   dL/dp_ij = dL/dA_ij · A_ij   where M_ij = 1, else 0   (M multiplies the weights)
    difference   dL/dp_ij = g_i·(out_i with the edge - out_i without it), g = dL/dout, for every pair, drawn or not:
                 to first order what the edge is worth. With r_ij = e^s_ij / Σ over edges of e^s:
                 M_ij = 1: r / (1 - r) · g_i·(v_j - out_i);   M_ij = 0: r / (1 + r) · g_i·(v_j - out_i)

Edges |i - j| ≤ reach are pinned: they are there whatever p is, so dL/dp_ij = 0 (reach = -1: none is).
p itself is never needed: the forward pass uses M alone. Rows that come as a list run through the edge kernel, linear
in the edges; rows that come as a mask run dense, a block of rows at a time: a matrix product, one fused kernel
over the block while it is in the cache, a matrix product. No n × m matrix is kept but the mask, one bit per pair.
A row without edges gives 0, so the two routes are added where there are both. The choice is made inside one operator:
a compiled graph holds both routes. On either the result of a row depends on nothing but the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.edge_loops import exp, launch, moved, sum_kernel, transpose
from subquad.kernels.edge_ops import backward as edge_backward
from subquad.kernels.edges import EdgeList, edge_attention, edge_scores

BLOCK = 2**20  # pairs of a block: three float32 buffers of 4 MB
MODES = ("pre", "post", "difference")
POST, DIFFERENCE = 1, 2  # places in MODES: what the loops are told
REST = 1e-3  # `difference` takes 1 - A_ij no smaller: v_j - out has lost its digits by then
GROUP = 2**21  # edges of the graphs that are differentiated together: buffers of 8 MB
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_inline = numba.njit(fastmath=_FAST, error_model="numpy")
_kernel = numba.njit(fastmath=_FAST, error_model="numpy", parallel=True, cache=True)


def graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    z: Tensor,
    graphs: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    ste: str = "pre",
    causal: bool = False,
    reach: int = -1,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """q (B, H, n, d), k, v (B, H, m, d), w (B, H, n, c), z (B, H, m, c) → (B, H, n, d).

    `graphs`: indptr (B·H, n + 1), indices (E,) and mask (B·H·n·⌈m/8⌉,) uint8 or empty; a row has edges in one of them.
    ste=difference needs all rows in the mask (a list does not hold pairs without an edge), and z = 0 at padded keys.
    Dropout follows the seed. First derivatives only. Half precision is computed in float32.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    seed = torch.zeros((), dtype=torch.int64) if seed is None else seed
    tensors = [x.to(work) for x in (q, k, v, w, z)]
    run = _attention_op if q.device.type == "cpu" else _plain
    return run(*tensors, *graphs, seed, scale, dropout, ste, causal, reach).to(q.dtype)


def _plain(q, k, v, w, z, indptr, indices, mask, seed, scale, dropout, ste, causal, reach) -> Tensor:
    """Other devices: plain autograd. 1 + (p - p.detach()) is 1 and has the gradient of p."""
    if not mask.numel():
        return _plain_list(q, k, v, w, z, indptr, indices, seed, scale, dropout, ste, reach)
    p = settled_to_zero(w @ z.mT, causal, reach)  # (B, H, n, m)
    gate = 1 + (p - p.detach())
    s = q @ k.mT * scale * (gate if ste == "pre" else 1)
    seen = unpack_mask(mask, s.shape)
    weights = torch.softmax(s.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0)
    weights = weights * gate if ste == "post" else weights
    weights = credited(weights, s, seen, p) if ste == "difference" else weights
    if dropout:
        weights = weights * _dropped(weights, dropout, torch.Generator(q.device).manual_seed(int(seed)))
    out = weights @ v
    rest = (q, k, v, w, z, indptr, indices, seed, scale, dropout, ste, reach)
    return out + _plain_list(*rest) if indices.numel() else out


def _plain_list(q, k, v, w, z, indptr, indices, seed, scale, dropout, ste, reach) -> Tensor:
    draw, edges = torch.Generator(q.device).manual_seed(int(seed)), EdgeList(indptr, indices, k.shape[2])
    gate = edge_scores(w, z, edges, scale=1.0) * _free(indptr, indices, reach)  # (1, E)
    gate = 1 + (gate - gate.detach())
    keep = _dropped(gate, dropout, draw) if dropout else None
    if ste == "difference" and gate.requires_grad:
        raise NotImplementedError(_NEEDS_MASK)
    if ste == "post":
        return edge_attention(q, k, v, edges, scale=scale, weight_gate=gate if keep is None else gate * keep)
    return edge_attention(q, k, v, edges, scale=scale, score_gate=gate, weight_gate=keep)


def _dropped(like: Tensor, dropout: float, draw: torch.Generator) -> Tensor:
    """Factors 0 or 1 / (1 - dropout)."""
    return torch.empty_like(like).bernoulli_(1 - dropout, generator=draw).div_(1 - dropout)


_NEEDS_MASK = "ste=difference looks at every pair: its rows must come as a mask"


def credited(weights: Tensor, s: Tensor, seen: Tensor, p: Tensor) -> Tensor:
    """`difference` in plain autograd: the weights by value, and a gradient for p on every pair."""
    with torch.no_grad():
        edge = s.masked_fill(~seen, -torch.inf)
        top = edge.amax(-1, keepdim=True)  # -inf: the row has no edge, and any would be all it has
        alone = seen & (seen.sum(-1, keepdim=True) == 1)  # without it nothing is left: out = 0
        r = torch.where(top == -torch.inf, torch.inf, (s - edge.logsumexp(-1, keepdim=True)).exp())
        c = torch.where(seen, r / (1 - r).clamp_min(REST), torch.where(r.isinf(), 1, r / (1 + r)))
        c = torch.where(alone, 1, c)
    x = c * (p - p.detach())
    return weights + x - weights.detach() * x.masked_fill(alone, 0).sum(-1, keepdim=True)


def settled_to_zero(x: Tensor, causal: bool, reach: int, first: int = 0) -> Tensor:
    """x (…, rows, keys) with 0 where p has no say: pinned edges, and in causal later keys. `first` is the first row."""
    if reach < 0 and not causal:
        return x
    i, j = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    distance = j - (i[:, None] + first)  # (rows, keys)
    settled = distance.abs() <= reach
    return x.masked_fill(settled | (distance > 0) if causal else settled, 0)


def _free(indptr: Tensor, indices: Tensor, reach: int) -> Tensor:
    """(E,) bool: edges that are not pinned."""
    rows = torch.arange(indptr.shape[1] - 1, device=indptr.device).repeat(len(indptr))
    return (rows.repeat_interleave(indptr.diff(dim=1).flatten()) - indices).abs() > reach


# ---- blocks of a mask -----------------------------------------------------------------------------------------------


@_inline
def pack(marks, bits):
    """0 and 1 in bytes, a multiple of eight of them → bits, the first in the lowest place."""
    words = marks.view(np.uint64)
    for c in range(bits.size):
        bits[c] = (words[c] * np.uint64(0x0102040810204080)) >> np.uint64(56)


@_inline
def _unpacked(bits):
    """The inverse of `pack`: as many bytes, 0 or 1, as there are bits."""
    marks = np.empty(8 * bits.size, np.uint8)
    words = marks.view(np.uint64)
    for c in range(bits.size):
        spread = np.uint64(bits[c]) * np.uint64(0x0101010101010101) & np.uint64(0x8040201008040201)
        words[c] = (spread + np.uint64(0x7F7F7F7F7F7F7F7F)) >> np.uint64(7) & np.uint64(0x0101010101010101)
    return marks


@_inline
def _softmax_row(row, edge, scale):
    nothing = row.dtype.type(-np.inf)
    top, total = nothing, row.dtype.type(0)
    for j in range(row.size):
        row[j] = row[j] * scale if edge[j] else nothing
    for j in range(row.size):
        top = max(top, row[j])
    if top == nothing:
        row[:] = 0
        return
    for j in range(row.size):
        row[j] = exp(row[j] - top)
    for j in range(row.size):
        total += row[j]
    for j in range(row.size):
        row[j] /= total


@_inline
def _backward_row(row, grad, edge, drop, scale, ste, gate):
    nothing = row.dtype.type(-np.inf)
    top, total, delta = nothing, row.dtype.type(0), row.dtype.type(0)
    for j in range(row.size):
        row[j] *= scale
        gate[j] = row[j] if edge[j] else nothing
    for j in range(row.size):
        top = max(top, gate[j])
    if top == nothing:
        for j in range(row.size):  # any edge would be all that the row has
            gate[j] = grad[j] if ste == DIFFERENCE else row.dtype.type(0)
        if ste == DIFFERENCE:
            for j in range(drop.size):
                gate[j] *= drop[j]
        row[:], grad[:] = 0, 0
        return
    for j in range(row.size):
        gate[j] = exp(gate[j] - top)
    for j in range(row.size):
        total += gate[j]
    for j in range(drop.size):
        grad[j] *= drop[j]
    for j in range(row.size):
        delta += gate[j] * grad[j]
    delta /= total
    edges, one, rest = edge.sum(), row.dtype.type(1), row.dtype.type(REST)
    for j in range(row.size):
        a = gate[j] / total
        ds = a * (grad[j] - delta)
        if ste == DIFFERENCE:
            alone = edge[j] and edges == 1  # without it nothing is left: out = 0
            gate[j] = grad[j] if alone else _worth(a, edge[j], row[j], top, total, one, rest) * (grad[j] - delta)
        else:
            gate[j] = a * grad[j] if ste == POST else ds * row[j]
        row[j] = ds * scale
        grad[j] = a
    for j in range(drop.size):
        grad[j] *= drop[j]


@_inline
def _worth(a, edge, s, top, total, one, rest):
    """How far an edge moves the output along v_j - out: r / (1 - r) where it is there, r / (1 + r) where it is not."""
    if edge:
        return a / max(one - a, rest)
    if s > top:
        return one / (one + total * exp(top - s))
    r = exp(s - top) / total
    return r / (one + r)


@_kernel
def _softmax(s, bits, scale):
    """In place, over the last dimension of s (g, rows, m), where bits (g, rows, ⌈m / 8⌉) has an edge."""
    for task in numba.prange(s.shape[0] * s.shape[1]):
        t, i = task // s.shape[1], task % s.shape[1]
        _softmax_row(s[t, i], _unpacked(bits[t, i]), scale)


@_kernel
def _softmax_backward(s, dp, bits, drop, scale, ste, g):
    """q·k and dout·v become the weights of dq, dk (ds · scale) and of dv (A); g becomes the gradient of p."""
    for task in numba.prange(s.shape[0] * s.shape[1]):
        t, i = task // s.shape[1], task % s.shape[1]
        dropped = drop[t, i] if drop.size else s[t, i, :0]
        _backward_row(s[t, i], dp[t, i], _unpacked(bits[t, i]), dropped, scale, ste, g[t, i])


def unpack_mask(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Packed masks (…·⌈m / 8⌉,) uint8 as bool of the given shape (…, m)."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(*shape[:-1], -1, 1) >> places & 1).bool().flatten(-2)[..., : shape[-1]]


def pack_mask(mask: Tensor) -> Tensor:
    """The inverse of `unpack_mask`."""
    bytes_ = torch.nn.functional.pad(mask.byte(), (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bytes_ << places).sum(-1, dtype=torch.uint8).flatten()


def blocks(graphs: int, n: int, m: int, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Some graphs, some rows, and the keys that these rows may see: about BLOCK pairs at a time."""
    rows = max(1, min(n, BLOCK // m))
    step = max(1, BLOCK // (rows * m))
    for first in range(0, n, rows):
        last = min(n, first + rows)
        for t in range(0, graphs, step):
            yield slice(t, min(graphs, t + step)), slice(first, last), slice(0, min(m, last) if causal else m)


def scratch(like: Tensor, graphs: int, n: int, m: int) -> Tensor:
    """Room for the largest of the blocks: fresh pages for each would cost as much as a product."""
    rows = max(1, min(n, BLOCK // m))
    return like.new_empty(min(graphs, max(1, BLOCK // (rows * m))) * rows * m)


def product(x: Tensor, y: Tensor, buffer: Tensor) -> Tensor:
    """x @ y, batched, into the buffer."""
    shape = (*x.shape[:2], y.shape[2])
    return torch.bmm(x, y, out=buffer[: math.prod(shape)].view(shape))


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [x.flatten(0, 1) for x in tensors]  # (B, H, n, d) → (B·H, n, d)


def _dense_forward(q, k, v, mask, seed, scale, dropout, causal) -> Tensor:
    out = torch.zeros(q.shape[:3] + v.shape[3:], dtype=q.dtype)
    x, y, u, o = _flat(q, k, v, out)
    bits = mask.numpy().reshape(len(x), x.shape[1], -1)  # (B·H, n, ⌈m / 8⌉)
    draw, buffer = torch.Generator().manual_seed(int(seed)), scratch(q, len(x), x.shape[1], y.shape[1])
    for t, rows, keys in blocks(len(x), x.shape[1], y.shape[1], causal):
        if not bits[t, rows].any():
            continue
        a = product(x[t, rows], y[t, keys].mT, buffer)  # (g, rows, keys)
        _softmax(a.numpy(), bits[t, rows], a.numpy().dtype.type(scale))
        if dropout:
            a *= _dropped(a, dropout, draw)
        o[t, rows] = torch.matmul(a, u[t, keys])
    return out


def _dense_backward(grad, q, k, v, w, z, mask, seed, scale, dropout, ste, causal, reach, gated) -> tuple[Tensor, ...]:
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, w, z)]
    do, x, y, u, a, b = _flat(grad, q, k, v, w, z)
    dx, dy, du, da, db = _flat(*grads)
    bits = mask.numpy().reshape(len(x), x.shape[1], -1)  # (B·H, n, ⌈m / 8⌉)
    draw = torch.Generator().manual_seed(int(seed))
    buffers = [scratch(q, len(x), x.shape[1], y.shape[1]) for _ in range(3)]
    number = np.dtype(str(q.dtype).removeprefix("torch.")).type
    for t, rows, keys in blocks(len(x), x.shape[1], y.shape[1], causal):
        if not bits[t, rows].any():
            continue
        s = product(x[t, rows], y[t, keys].mT, buffers[0])  # (g, rows, keys)
        dp = product(do[t, rows], u[t, keys].mT, buffers[1])
        drop = _dropped(s, dropout, draw) if dropout else s.new_empty(0, 0, 0)
        g = buffers[2][: s.numel()].view_as(s)
        arrays = (s.numpy(), dp.numpy(), bits[t, rows], drop.numpy())
        _softmax_backward(*arrays, number(scale), MODES.index(ste), g.numpy())
        dx[t, rows] = torch.matmul(s, y[t, keys])
        dy[t, keys].baddbmm_(s.mT, x[t, rows])
        du[t, keys].baddbmm_(dp.mT, do[t, rows])
        if gated:
            g = settled_to_zero(g, causal and ste == "difference", reach, rows.start)
            da[t, rows] = torch.matmul(g, b[t, keys])
            db[t, keys].baddbmm_(g.mT, a[t, rows])
    return tuple(grads)


# ---- a list of edges ------------------------------------------------------------------------------------------------


def _edge_keep(like: Tensor, indices: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """(1, E) dropout factors, (0, 0) if there is no dropout."""
    if not dropout:
        return like.new_empty(0, 0)
    return _dropped(like.new_empty(1, len(indices)), dropout, torch.Generator().manual_seed(int(seed)))


def _edge_backward(grad, q, k, v, w, z, indptr, indices, seed, scale, dropout, ste, reach, gated) -> tuple[Tensor, ...]:
    """Some graphs at a time: numbers per edge stay small, and their pages are used again."""
    if gated and ste == "difference":
        raise NotImplementedError(_NEEDS_MASK)
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, w, z)]
    keep = _edge_keep(q, indices, seed, dropout).numpy()  # (1, E)
    rows = [x.detach().flatten(0, 1).contiguous().numpy() for x in (grad, q, k, v, w, z, *grads)]
    for t, e in _groups(indptr):
        ptr, keys = (indptr[t] - e.start).numpy(), indices[e].numpy()
        by_key = transpose(ptr, keys, k.shape[2])
        do, x, y, u, a, b, dx, dy, du, da, db = (array[t] for array in rows)
        none, ones, kept = x[0, :0, :0], np.ones((1, len(keys) * gated), x.dtype), keep[:, e]
        gate, weight = (none, kept if dropout else ones) if ste == "post" else (ones, kept)
        dgate, dweight = np.empty_like(gate), np.empty_like(weight)
        edge_backward(do, x, y, u, ptr, keys, gate, weight, by_key, scale, (dx, dy, du, dgate, dweight))
        if gated:
            dp = dgate if ste != "post" else dweight * kept if dropout else dweight  # (1, E)
            if reach >= 0:
                dp *= _free(torch.from_numpy(ptr), indices[e], reach).numpy()
            launch(sum_kernel, a.shape, dp, b, ptr, keys, da)
            launch(sum_kernel, b.shape, moved(dp, by_key[2]), a, *by_key[:2], db)
    return tuple(grads)


def _groups(indptr: Tensor) -> Iterator[tuple[slice, slice]]:
    """Consecutive graphs with about GROUP edges together, at least one: which graphs, which edges."""
    ends, first = indptr[:, -1].tolist(), 0
    starts = [0, *ends[:-1]]
    for last in range(1, len(ends) + 1):
        if last == len(ends) or ends[last] - starts[first] > GROUP:
            yield slice(first, last), slice(starts[first], ends[last - 1])
            first = last


# ---- the operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("subquad::graph_attention", mutates_args=(), device_types="cpu")
def _attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    z: Tensor,
    indptr: Tensor,
    indices: Tensor,
    mask: Tensor,
    seed: Tensor,
    scale: float,
    dropout: float,
    ste: str,
    causal: bool,
    reach: int,
) -> Tensor:
    parts = [_dense_forward(q, k, v, mask, seed, scale, dropout, causal)] if mask.numel() else []
    if indices.numel() or not parts:
        keep = _edge_keep(q, indices, seed, dropout)
        parts.append(torch.ops.subquad.edge_attention(q, k, v, indptr, indices, q.new_empty(0, 0), keep, scale))
    return sum(parts[1:], parts[0])


@torch.library.custom_op("subquad::graph_attention_backward", mutates_args=(), device_types="cpu")
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    z: Tensor,
    indptr: Tensor,
    indices: Tensor,
    mask: Tensor,
    seed: Tensor,
    scale: float,
    dropout: float,
    ste: str,
    causal: bool,
    reach: int,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`gated`: the gradient of p is wanted; without it dw and dz are 0."""
    tensors, settings, parts = (grad, q, k, v, w, z), (scale, dropout, ste), []
    if mask.numel():
        parts.append(_dense_backward(*tensors, mask, seed, *settings, causal, reach, gated))
    if indices.numel() or not parts:
        parts.append(_edge_backward(*tensors, indptr, indices, seed, *settings, reach, gated))
    return tuple(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True))


@_attention_op.register_fake
def _(q, k, v, w, z, indptr, indices, mask, seed, scale, dropout, ste, causal, reach):
    return q.new_empty(*q.shape[:3], v.shape[3])


@_backward_op.register_fake
def _(grad, q, k, v, w, z, indptr, indices, mask, seed, scale, dropout, ste, causal, reach, gated):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, w, z))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:9])
    ctx.settings = inputs[9:]


def _backward(ctx, grad):
    gated = any(ctx.needs_input_grad[3:5])
    grads = _backward_op(grad, *ctx.saved_tensors, *ctx.settings, gated)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, *[None] * 9


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("graph_attention has no second derivative")


_attention_op.register_autograd(_backward, setup_context=_save)
_backward_op.register_autograd(_no_second_derivative)


def _pairs(q: Tensor, k: Tensor, indices: Tensor, mask: Tensor) -> int:
    """Pairs that are multiplied: the edges of a list, all of them under a mask."""
    return indices.numel() + (q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] if mask.numel() else 0)


@register_flop_formula(torch.ops.subquad.graph_attention, get_raw=True)
def _flops(q, k, v, w, z, indptr, indices, mask, *args, out_val=None, **kwargs) -> int:
    return 4 * q.shape[3] * _pairs(q, k, indices, mask)


@register_flop_formula(torch.ops.subquad.graph_attention_backward, get_raw=True)
def _backward_flops(grad, q, k, v, w, z, indptr, indices, mask, *args, out_val=None, **kwargs) -> int:
    return (10 * q.shape[3] + 4 * w.shape[3]) * _pairs(q, k, indices, mask)
