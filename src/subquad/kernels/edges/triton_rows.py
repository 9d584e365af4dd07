"""The edge operators in Triton: a program per row of a list, which gathers the rows of its keys some at a time.

Tensors are contiguous: queries (B·H, n, d), keys and values (B·H/group, m, d), a number per edge (B·H // g, E); see
`EdgeList` for indptr, indices and share. `real` is bool (B, m) as uint8; `numbers` (B, n) and `columns` (B, m), int64,
are what dropout counts by. Nothing is added atomically: the same bits at every run.
Queries, keys, values and their gradients may be of half precision, a number per edge is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.device_functions import chance, streams


@triton.jit
def row_scores(q, K, indices, real, columns, e, stop, base, low, high, scale, rate,
               D: tl.constexpr, DP: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Keys, scores (-inf where there is no key) and which weights are kept, for the edges e of a row."""
    f = tl.arange(0, DP)
    inside = e < stop
    j = tl.load(indices + e, mask=inside, other=0)
    k = tl.load(K + j.to(tl.int64)[:, None] * D + f[None, :], mask=inside[:, None] & (f < D)[None, :], other=0.0)
    s = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
    seen = inside
    if MASK:
        seen = seen & (tl.load(real + base + j, mask=inside, other=0) != 0)
    kept = inside
    if DROP:
        number = tl.load(columns + base + j, mask=inside, other=0).to(tl.uint32)
        kept = chance(low, high, number) >= rate
    return j, inside, tl.where(seen, s, float("-inf")), s, kept


@triton.jit
def attention_rows(
    Q, K, V, Out, indptr, indices, real, numbers, columns, seed,
    n, m, heads, group, graphs, share, scale, rate, up,
    D: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    i, t = tl.program_id(0), tl.program_id(1)
    b, r, f = t // heads, t // share % graphs, tl.arange(0, DP)
    start, stop = tl.load(indptr + r * (n + 1) + i), tl.load(indptr + r * (n + 1) + i + 1)
    place = t.to(tl.int64) * n + i
    q = tl.load(Q + place * D + f, mask=f < D, other=0.0).to(tl.float32)
    own = (t // group).to(tl.int64) * m * D
    low, high = i.to(tl.uint32), i.to(tl.uint32)
    if DROP:
        low, high = streams(tl.load(seed).to(tl.uint64, bitcast=True), t, tl.load(numbers + b * n + i))
    top, total, acc = float("-inf"), 0.0, tl.zeros([DP], tl.float32)
    for first in range(start, stop, BE):
        e = first + tl.arange(0, BE)
        j, inside, s, _, kept = row_scores(
            q, K + own, indices, real, columns, e, stop, b * m, low, high, scale, rate, D, DP, MASK, DROP
        )
        new = tl.maximum(top, tl.max(s, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = tl.exp(s - base), tl.exp(top - base)
        total = total * shrink + tl.sum(p, 0)
        if DROP:
            p = tl.where(kept, p * up, 0.0)
        at = V + own + j.to(tl.int64)[:, None] * D + f[None, :]
        v = tl.load(at, mask=inside[:, None] & (f < D)[None, :], other=0.0)
        acc, top = acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0), new
    tl.store(Out + place * D + f, acc / tl.where(total == 0, 1.0, total), mask=f < D)


@triton.jit
def gradient_rows(
    Q, K, V, Grad, Dq, Ds, P, Credit, indptr, indices, real, numbers, columns, seed,
    n, m, edges, heads, group, graphs, share, reach, scale, rate, up,
    D: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """dq, and per edge dL/d(q·k) (Ds), the dropped weight (P) and, with MODE, the gradient of its probability.

    Two walks: the first finds the row's maximum, sum and mean of dL/dp, the second has them.
    """
    i, t = tl.program_id(0), tl.program_id(1)
    b, r, f = t // heads, t // share % graphs, tl.arange(0, DP)
    start, stop = tl.load(indptr + r * (n + 1) + i), tl.load(indptr + r * (n + 1) + i + 1)
    place = t.to(tl.int64) * n + i
    q = tl.load(Q + place * D + f, mask=f < D, other=0.0).to(tl.float32)
    g = tl.load(Grad + place * D + f, mask=f < D, other=0.0).to(tl.float32)
    own = (t // group).to(tl.int64) * m * D
    row = (t // (share * graphs) * share + t % share).to(tl.int64) * edges
    low, high = i.to(tl.uint32), i.to(tl.uint32)
    if DROP:
        low, high = streams(tl.load(seed).to(tl.uint64, bitcast=True), t, tl.load(numbers + b * n + i))
    top, total, mean = float("-inf"), 0.0, 0.0
    for first in range(start, stop, BE):
        e = first + tl.arange(0, BE)
        j, inside, s, _, kept = row_scores(
            q, K + own, indices, real, columns, e, stop, b * m, low, high, scale, rate, D, DP, MASK, DROP
        )
        at = V + own + j.to(tl.int64)[:, None] * D + f[None, :]
        v = tl.load(at, mask=inside[:, None] & (f < D)[None, :], other=0.0)
        dp = tl.sum(v.to(tl.float32) * g[None, :], 1)
        if DROP:
            dp = tl.where(kept, dp * up, 0.0)
        new = tl.maximum(top, tl.max(s, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = tl.exp(s - base), tl.exp(top - base)
        total, mean, top = total * shrink + tl.sum(p, 0), mean * shrink + tl.sum(p * dp, 0), new
    whole = tl.where(total == 0, 1.0, total)
    mean, base = mean / whole, tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([DP], tl.float32)
    for first in range(start, stop, BE):
        e = first + tl.arange(0, BE)
        j, inside, s, plain, kept = row_scores(
            q, K + own, indices, real, columns, e, stop, b * m, low, high, scale, rate, D, DP, MASK, DROP
        )
        spread = j.to(tl.int64)[:, None] * D + f[None, :]
        k = tl.load(K + own + spread, mask=inside[:, None] & (f < D)[None, :], other=0.0)
        v = tl.load(V + own + spread, mask=inside[:, None] & (f < D)[None, :], other=0.0)
        dp, p = tl.sum(v.to(tl.float32) * g[None, :], 1), tl.exp(s - base) / whole
        weight = p
        if DROP:
            dp, weight = tl.where(kept, dp * up, 0.0), tl.where(kept, p * up, 0.0)
        ds = p * (dp - mean)
        acc += tl.sum((ds * scale)[:, None] * k.to(tl.float32), 0)
        tl.store(Ds + row + e, ds * scale, mask=inside)
        tl.store(P + row + e, weight, mask=inside)
        if MODE > 0:
            credit = ds * plain if MODE == 1 else tl.minimum(tl.maximum(ds, -1.0), 1.0)
            tl.store(Credit + row + e, tl.where(tl.abs(j - i) <= reach, 0.0, credit), mask=inside)
    tl.store(Dq + place * D + f, acc, mask=f < D)


@triton.jit
def sum_rows(
    W, X, Out, indptr, places, slots, n, m, edges, spread, gather, graphs, share,
    D: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    """Out[t] = Σ over instances t·gather … and their edges of w·x: `spread` instances read one X (m rows each).

    MOVED: the list is by key, and slots says where the number of each of its edges stands.
    """
    i, t = tl.program_id(0), tl.program_id(1)
    f, acc = tl.arange(0, DP), tl.zeros([DP], tl.float32)
    for member in range(0, gather):
        instance = t * gather + member
        r = instance // share % graphs
        row = (instance // (share * graphs) * share + instance % share).to(tl.int64) * edges
        own = (instance // spread).to(tl.int64) * m * D
        for first in range(tl.load(indptr + r * (n + 1) + i), tl.load(indptr + r * (n + 1) + i + 1), BE):
            e = first + tl.arange(0, BE)
            inside = e < tl.load(indptr + r * (n + 1) + i + 1)
            at = e
            if MOVED:
                at = tl.load(slots + e, mask=inside, other=0)
            j = tl.load(places + e, mask=inside, other=0)
            w = tl.load(W + row + at, mask=inside, other=0.0)
            mask = inside[:, None] & (f < D)[None, :]
            x = tl.load(X + own + j.to(tl.int64)[:, None] * D + f[None, :], mask=mask, other=0.0)
            acc += tl.sum(w[:, None] * x.to(tl.float32), 0)
    tl.store(Out + (t.to(tl.int64) * n + i) * D + f, acc, mask=f < D)
