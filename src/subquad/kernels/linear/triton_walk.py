"""The causal kernel sums in Triton: one walk along the sequence, of which forward and backward are four uses.

    out_t = Σ_{u ≤ t} (x_t·y_u + p_t r_u) e^(s_u - s_t) z_u          total_t = Σ_{u ≤ t} x_t·y_u e^(s_u - s_t)

A program takes one sequence and a block of the columns of z and goes from chunk to chunk. It keeps Σ_u y_u z_uᵀ,
Σ_u r_u z_u and Σ_u y_u in registers; inside a chunk it multiplies masked matrices. With REVERSE it comes from the end:
u ≥ t, and the factor is e^(s_t - s_u). Tensors are contiguous float32: x, y (G, n, f), z (G, n, d), s, p, r (G, n).

The features come in NB blocks of FB. One block suits tensor cores: the products are those of matrices. Multiply-adds
keep everything that a product sums over in the registers of a thread, so that many features would spill: they are a
batch of small blocks, which the warps share and whose products are added up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(X, first, t, n, WIDTH: tl.constexpr, NB: tl.constexpr, FB: tl.constexpr):
    """Rows t of a sequence that begins at `first`, (C, FB) or (NB, C, FB); 0 beyond its end and beyond its width."""
    t = t[:, None]
    if NB == 1:
        f = tl.arange(0, FB)[None, :]
    else:
        f = tl.arange(0, NB)[:, None, None] * FB + tl.arange(0, FB)[None, None, :]  # (NB, 1, FB)
    return tl.load(X + (first + t) * WIDTH + f, mask=(t < n) & (f < WIDTH), other=0.0)


@triton.jit
def pairs_of(x, y, NB: tl.constexpr, PRECISION: tl.constexpr):
    """x_t·y_u for all pairs of a chunk, (C, C)."""
    if NB == 1:
        return tl.dot(x, tl.trans(y), input_precision=PRECISION)
    else:
        return tl.sum(tl.dot(x, tl.permute(y, (0, 2, 1)), input_precision=PRECISION), 0)


@triton.jit
def through(x, state, NB: tl.constexpr, PRECISION: tl.constexpr):
    """x_tᵀ · state, (C, BD)."""
    if NB == 1:
        return tl.dot(x, state, input_precision=PRECISION)
    else:
        return tl.sum(tl.dot(x, state, input_precision=PRECISION), 0)


@triton.jit
def outer_sum(y, z, NB: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_t y_t z_tᵀ, (FB, BD) or (NB, FB, BD)."""
    if NB == 1:
        return tl.dot(tl.trans(y), z, input_precision=PRECISION)
    else:
        many = tl.broadcast_to(z[None, :, :], (NB, z.shape[0], z.shape[1]))
        return tl.dot(tl.permute(y, (0, 2, 1)), many, input_precision=PRECISION)


@triton.jit
def weighted(x, sums, NB: tl.constexpr):
    """x_t·sums, (C,)."""
    if NB == 1:
        return tl.sum(x * sums, 1)
    else:
        return tl.sum(tl.sum(x * sums, 2), 0)


@triton.jit
def walk(
    X, Y, Z, S, P, R, Out, Total, n, chunks,
    F: tl.constexpr, NB: tl.constexpr, FB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    REVERSE: tl.constexpr, SCALED: tl.constexpr, EXTRA: tl.constexpr, TOTAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0).to(tl.int64) * n
    c = tl.arange(0, C)
    if REVERSE:
        seen = c[None, :] >= c[:, None]
    else:
        seen = c[None, :] <= c[:, None]
    if NB == 1:
        state, sums = tl.zeros([FB, BD], tl.float32), tl.zeros([1, FB], tl.float32)
    else:
        state, sums = tl.zeros([NB, FB, BD], tl.float32), tl.zeros([NB, 1, FB], tl.float32)
    extra = tl.zeros([BD], tl.float32)
    reference = 0.0  # the scale of what is kept: that of the last token before this chunk, in the order of the walk
    if SCALED:
        reference = tl.load(S + first + (n - 1 if REVERSE else 0))
    for number in range(chunks):
        at = (chunks - 1 - number if REVERSE else number) * C
        t = at + c
        x, y = rows_of(X, first, t, n, F, NB, FB), rows_of(Y, first, t, n, F, NB, FB)
        inside = (t < n)[:, None] & (columns < D)[None, :]
        z = tl.load(Z + (first + t)[:, None] * D + columns[None, :], mask=inside, other=0.0)
        weights = pairs_of(x, y, NB, PRECISION)
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
        out += through(x, state, NB, PRECISION)
        if EXTRA:
            out += p[:, None] * extra[None, :]
        tl.store(Out + (first + t)[:, None] * D + columns[None, :], out, mask=inside)
        if TOTAL:
            total = tl.sum(tl.where(seen, pairs, 0.0), 1) + weighted(x, sums, NB)
            if tl.program_id(1) == 0:
                tl.store(Total + first + t, total, mask=t < n)
        if SCALED:
            shrink = tl.exp(step)
            state, extra, sums = state * shrink, extra * shrink, sums * shrink
        state += outer_sum(y, z, NB, PRECISION)
        if EXTRA:
            extra += tl.sum(r[:, None] * z, 0)
        if TOTAL:
            sums += tl.sum(y, -2, keep_dims=True)
