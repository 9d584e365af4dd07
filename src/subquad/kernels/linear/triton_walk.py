"""The causal kernel sums in Triton: one walk along the sequence, of which forward and backward are four uses.

    out_t = Σ_{u ≤ t} (x_t·y_u + p_t r_u) e^(s_u - s_t) z_u          total_t = Σ_{u ≤ t} x_t·y_u e^(s_u - s_t)

A program takes one sequence and a block of the columns of z and goes from chunk to chunk. It keeps Σ_u y_u z_uᵀ,
Σ_u r_u z_u and Σ_u y_u in registers; inside a chunk it multiplies masked matrices. With REVERSE it comes from the end:
u ≥ t, and the factor is e^(s_t - s_u). Tensors are contiguous float32: x, y (G, n, f), z (G, n, d), s, p, r (G, n).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(X, first, t, n, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows t of a sequence that begins at `first`, (C, PADDED); 0 beyond its end and beyond its width."""
    f = tl.arange(0, PADDED)
    inside = (t < n)[:, None] & (f < WIDTH)[None, :]
    return tl.load(X + (first + t)[:, None] * WIDTH + f[None, :], mask=inside, other=0.0)


@triton.jit
def walk(
    X, Y, Z, S, P, R, Out, Total, n, chunks,
    F: tl.constexpr, FP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    REVERSE: tl.constexpr, SCALED: tl.constexpr, EXTRA: tl.constexpr, TOTAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0).to(tl.int64) * n
    c = tl.arange(0, C)
    if REVERSE:
        seen = c[None, :] >= c[:, None]
    else:
        seen = c[None, :] <= c[:, None]
    state, extra, sums = tl.zeros([FP, BD], tl.float32), tl.zeros([BD], tl.float32), tl.zeros([FP], tl.float32)
    reference = 0.0  # the scale of what is kept: that of the last token before this chunk, in the order of the walk
    if SCALED:
        reference = tl.load(S + first + (n - 1 if REVERSE else 0))
    for number in range(chunks):
        at = (chunks - 1 - number if REVERSE else number) * C
        t = at + c
        x, y = rows_of(X, first, t, n, F, FP), rows_of(Y, first, t, n, F, FP)
        inside = (t < n)[:, None] & (columns < D)[None, :]
        z = tl.load(Z + (first + t)[:, None] * D + columns[None, :], mask=inside, other=0.0)
        weights = tl.dot(x, tl.trans(y), input_precision=PRECISION)  # (C, C)
        if TOTAL:
            pairs = weights
        if EXTRA:
            p = tl.load(P + first + t, mask=t < n, other=0.0)
            r = tl.load(R + first + t, mask=t < n, other=0.0)
            weights += p[:, None] * r[None, :]
        if SCALED:
            s = tl.load(S + first + tl.minimum(t, n - 1))
            last = tl.load(S + first + (at if REVERSE else tl.minimum(at + C - 1, n - 1)))
            if REVERSE:
                between, own, kept, step = s[:, None] - s[None, :], s - reference, last - s, last - reference
            else:
                between, own, kept, step = s[None, :] - s[:, None], reference - s, s - last, reference - last
            decay = tl.exp(tl.minimum(between, 0.0))
            weights *= decay
            if TOTAL:
                pairs *= decay
            x *= tl.exp(own)[:, None]
            y *= tl.exp(kept)[:, None]
            if EXTRA:
                p *= tl.exp(own)
                r *= tl.exp(kept)
            reference = last
        out = tl.dot(tl.where(seen, weights, 0.0), z, input_precision=PRECISION)
        out += tl.dot(x, state, input_precision=PRECISION)
        if EXTRA:
            out += p[:, None] * extra[None, :]
        tl.store(Out + (first + t)[:, None] * D + columns[None, :], out, mask=inside)
        if TOTAL:
            total = tl.sum(tl.where(seen, pairs, 0.0), 1) + tl.sum(x * sums[None, :], 1)
            if tl.program_id(1) == 0:
                tl.store(Total + first + t, total, mask=t < n)
        if SCALED:
            shrink = tl.exp(step)
            state, extra, sums = state * shrink, extra * shrink, sums * shrink
        state += tl.dot(tl.trans(y), z, input_precision=PRECISION)
        if EXTRA:
            extra += tl.sum(r[:, None] * z, 0)
        if TOTAL:
            sums += tl.sum(y, 0)
