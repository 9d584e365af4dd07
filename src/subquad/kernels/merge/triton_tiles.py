"""The merge operators in Triton: a program per tile of queries (or of keys), which visits its rectangles one by one.

One running softmax goes through all parts: no output per part, no merging afterwards. Statistics are float32 whatever
the tensors are; scores are kept in units of log 2. See `schedule` for tiles, passes and rectangles.

Tables on the device, int32: `spans` (B or 1, 2): the first tile and the number of tiles of a batch element;
`tiles` (T, 4): start, unit, count, 0; `starts` (T·SOURCES + 1,): rectangles by tile and source; `rectangles` (R, 28).
A source is a tuple (keys, its strides (batch, head, row), values, strides, valid, stride of its batch, group): `group`
query heads in a row share a key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.device_functions import chance, streams

FIELDS = tl.constexpr(28)
SOURCE = tl.constexpr(1 << 26)  # dropout counts the keys of source s from s·SOURCE on, as `reference` does
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def seen_by_rule(R, i, t, RULES: tl.constexpr):
    """`Rectangle.seen` for queries i and keys t, two index tensors that broadcast against each other."""
    shift, per, blocks, q_length = tl.load(R + 7), tl.load(R + 8), tl.load(R + 9), tl.load(R + 10)
    s_start, s_shift, s_length = tl.load(R + 11), tl.load(R + 12), tl.load(R + 13)
    p_start, p_step, p_unit = tl.load(R + 14), tl.load(R + 15), tl.load(R + 16)
    lo, hi, xlo, xhi = tl.load(R + 17), tl.load(R + 18), tl.load(R + 19), tl.load(R + 20)
    u = i + shift
    a = tl.maximum(u, 0) // per
    r = u - a * per
    s = s_start + t - a * s_shift
    inside = ((u >= 0) & (a < blocks) & (r < q_length)) & ((s >= 0) & (s < s_length))
    offset = (p_start + a * p_step - i * tl.load(R + 1)) + s * p_unit
    allowed = (offset >= lo) & (offset <= hi) & ((offset < xlo) | (offset > xhi))
    if RULES >= 2:  # spans
        rule, span, past = tl.load(R + 21), tl.load(R + 22), tl.load(R + 23)
        if rule >= 4:
            row, key = tl.load(R) + i * tl.load(R + 1), tl.load(R + 3) + t * tl.load(R + 4)
            first = key // span * span
            near = (first + (span - 1) - row >= lo) & (first - row <= hi)
            allowed = (near == (rule == 4)) & ((key <= row) | (past == 0))
    if RULES % 2 == 1:  # binary trees
        rule = tl.load(R + 21)
        if (rule >= 1) & (rule <= 3):
            row, key = r * tl.load(R + 26), tl.load(R + 24) + s * tl.load(R + 25)
            back = q_length - key
            node = tl.where(rule == 3, row + 1, tl.where(rule == 2, back, key + 1))
            low = node & -node
            asked = tl.where(rule == 2, q_length - 1 - row, row)
            member = (key >= node - low) & (key < node)
            itself = (key == row) & (key % 2 == 0) & (rule == 1)
            allowed = tl.where(rule == 3, member, ((asked & -low) == node) | itself)
    return inside & allowed


@triton.jit
def load_rows(X, places, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """Rows of a (…, d) tensor, (size, DP), 0 outside."""
    feature = tl.arange(0, DP)
    at = X + places.to(tl.int64)[:, None] * stride + feature[None, :]
    if D == DP:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at, mask=inside[:, None] & (feature < D)[None, :], other=0.0)


@triton.jit
def store_rows(X, places, stride, inside, value, D: tl.constexpr, DP: tl.constexpr, ADD: tl.constexpr):
    feature = tl.arange(0, DP)
    at = X + places.to(tl.int64)[:, None] * stride + feature[None, :]
    mask = inside[:, None] & (feature < D)[None, :]
    if ADD:
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, value.to(X.dtype.element_ty), mask=mask)


@triton.jit
def forward_tiles(
    Q, Out, Lse, sources, spans, tiles, starts, rectangles, seed,
    q_batch, q_head, q_row, heads, rows, span_step, scale, rate, up,
    SOURCES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr, VALID: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out (B, H, rows, d) and Lse (B, H, rows), both contiguous; ADD: go on from what stands there."""
    h, b = tl.program_id(1), tl.program_id(2)
    if tl.program_id(0) >= tl.load(spans + b * span_step + 1):
        return
    tile = tl.load(spans + b * span_step) + tl.program_id(0)
    i = tl.arange(0, BM)
    inside, places = i < tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4) + i * tl.load(tiles + tile * 4 + 1)
    instance = b * heads + h
    own = instance.to(tl.int64) * rows
    q = load_rows(Q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head, places, q_row, inside, D, DP)
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    if ADD:
        top = tl.load(Lse + own + places, mask=inside, other=float("-inf")) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = load_rows(Out + own * D, places, D, inside, D, DP).to(tl.float32)
    low, high = i.to(tl.uint32), i.to(tl.uint32)
    if DROP:
        low, high = streams(tl.load(seed).to(tl.uint64, bitcast=True), instance, places)
    for source in tl.static_range(SOURCES):
        K, k_batch, k_head, k_row, V, v_batch, v_head, v_row, Valid, valid_batch, group = sources[source]
        K += b.to(tl.int64) * k_batch + (h // group).to(tl.int64) * k_head
        V += b.to(tl.int64) * v_batch + (h // group).to(tl.int64) * v_head
        for number in range(tl.load(starts + tile * SOURCES + source), tl.load(starts + tile * SOURCES + source + 1)):
            R = rectangles + number * FIELDS
            k_start, k_unit, k_count, full = tl.load(R + 3), tl.load(R + 4), tl.load(R + 5), tl.load(R + 6)
            for first in range(0, k_count, BN):
                t = first + tl.arange(0, BN)
                exists, j = t < k_count, k_start + t * k_unit
                k = load_rows(K, j, k_row, exists, D, DP)  # (BN, D)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
                if VALID:
                    exists = exists & (tl.load(Valid + b * valid_batch + j, mask=exists, other=0) != 0)
                s = tl.where(exists[None, :], s, float("-inf"))
                if full == 0:
                    s = tl.where(seen_by_rule(R, i[:, None], t[None, :], RULES), s, float("-inf"))
                new = tl.maximum(top, tl.max(s, 1))
                base = tl.where(new == float("-inf"), 0.0, new)
                p, shrink = tl.exp2(s - base[:, None]), tl.exp2(top - base)
                total = total * shrink + tl.sum(p, 1)
                if DROP:
                    kept = chance(low[:, None], high[:, None], (j + source * SOURCE).to(tl.uint32)[None, :]) >= rate
                    p = tl.where(kept, p * up, 0.0)
                v = load_rows(V, j, v_row, t < k_count, D, DP)
                acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
                top = new
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    out = acc / total[:, None]
    store_rows(Out + own * D, places, D, inside, out, D, DP, False)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) / LOG2E)
    tl.store(Lse + own + places, lse, mask=inside)


@triton.jit
def query_gradient_tiles(
    Q, Grad, Lse, Delta, Dq, sources, spans, tiles, starts, rectangles, seed,
    q_batch, q_head, q_row, g_batch, g_head, g_row, heads, rows, span_step, scale, rate, up,
    SOURCES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr, VALID: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dq (B, H, rows, d), contiguous: Σ_j p·(kept·g·v - delta)·scale·k, p = exp(s - lse)."""
    h, b = tl.program_id(1), tl.program_id(2)
    if tl.program_id(0) >= tl.load(spans + b * span_step + 1):
        return
    tile = tl.load(spans + b * span_step) + tl.program_id(0)
    i = tl.arange(0, BM)
    inside, places = i < tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4) + i * tl.load(tiles + tile * 4 + 1)
    instance = b * heads + h
    own = instance.to(tl.int64) * rows
    q = load_rows(Q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head, places, q_row, inside, D, DP)
    g = load_rows(Grad + b.to(tl.int64) * g_batch + h.to(tl.int64) * g_head, places, g_row, inside, D, DP)
    lse = tl.load(Lse + own + places, mask=inside, other=0.0)
    base = tl.where(lse == float("-inf"), 0.0, lse) * LOG2E  # exp(-inf - 0) = 0: empty rows get no gradient
    delta = tl.load(Delta + own + places, mask=inside, other=0.0)
    acc = tl.zeros([BM, DP], tl.float32)
    low, high = i.to(tl.uint32), i.to(tl.uint32)
    if DROP:
        low, high = streams(tl.load(seed).to(tl.uint64, bitcast=True), instance, places)
    for source in tl.static_range(SOURCES):
        K, k_batch, k_head, k_row, V, v_batch, v_head, v_row, Valid, valid_batch, group = sources[source]
        K += b.to(tl.int64) * k_batch + (h // group).to(tl.int64) * k_head
        V += b.to(tl.int64) * v_batch + (h // group).to(tl.int64) * v_head
        for number in range(tl.load(starts + tile * SOURCES + source), tl.load(starts + tile * SOURCES + source + 1)):
            R = rectangles + number * FIELDS
            k_start, k_unit, k_count, full = tl.load(R + 3), tl.load(R + 4), tl.load(R + 5), tl.load(R + 6)
            for first in range(0, k_count, BN):
                t = first + tl.arange(0, BN)
                exists, j = t < k_count, k_start + t * k_unit
                k = load_rows(K, j, k_row, exists, D, DP)
                v = load_rows(V, j, v_row, exists, D, DP)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
                if VALID:
                    exists = exists & (tl.load(Valid + b * valid_batch + j, mask=exists, other=0) != 0)
                s = tl.where(exists[None, :], s, float("-inf"))
                if full == 0:
                    s = tl.where(seen_by_rule(R, i[:, None], t[None, :], RULES), s, float("-inf"))
                p = tl.exp2(s - base[:, None])
                dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
                if DROP:
                    kept = chance(low[:, None], high[:, None], (j + source * SOURCE).to(tl.uint32)[None, :]) >= rate
                    dp = tl.where(kept, dp * up, 0.0)
                ds = p * (dp - delta[:, None])
                acc += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    store_rows(Dq + own * D, places, D, inside, acc * scale, D, DP, ADD)


@triton.jit
def key_gradient_tiles(
    Q, Grad, Lse, Delta, Dk, Dv, source, spans, tiles, starts, rectangles, seed,
    q_batch, q_head, q_row, g_batch, g_head, g_row, heads, rows, keys, span_step, scale, rate, up, before,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr, VALID: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dk, Dv (B, H/group, keys, d), contiguous: a tile of keys, all query heads that share it, one after the other."""
    h, b = tl.program_id(1), tl.program_id(2)
    if tl.program_id(0) >= tl.load(spans + b * span_step + 1):
        return
    tile = tl.load(spans + b * span_step) + tl.program_id(0)
    K, k_batch, k_head, k_row, V, v_batch, v_head, v_row, Valid, valid_batch, group = source
    t = tl.arange(0, BN)
    inside, j = t < tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4) + t * tl.load(tiles + tile * 4 + 1)
    k = load_rows(K + b.to(tl.int64) * k_batch + h.to(tl.int64) * k_head, j, k_row, inside, D, DP)  # (BN, D)
    v = load_rows(V + b.to(tl.int64) * v_batch + h.to(tl.int64) * v_head, j, v_row, inside, D, DP)
    exists = inside
    if VALID:
        exists = exists & (tl.load(Valid + b * valid_batch + j, mask=inside, other=0) != 0)
    dk, dv = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, DP], tl.float32)
    column = (j + before).to(tl.uint32)
    for member in range(0, group):
        head = h * group + member
        instance = b * heads + head
        own = instance.to(tl.int64) * rows
        Qh = Q + b.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        Gh = Grad + b.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
        for number in range(tl.load(starts + tile), tl.load(starts + tile + 1)):
            R = rectangles + number * FIELDS
            q_start, q_unit, q_count, full = tl.load(R), tl.load(R + 1), tl.load(R + 2), tl.load(R + 6)
            for first in range(0, q_count, BM):
                i = first + tl.arange(0, BM)
                real, places = i < q_count, q_start + i * q_unit
                q = load_rows(Qh, places, q_row, real, D, DP)  # (BM, D)
                g = load_rows(Gh, places, g_row, real, D, DP)
                lse = tl.load(Lse + own + places, mask=real, other=0.0)
                base = tl.where(lse == float("-inf"), 0.0, lse) * LOG2E
                delta = tl.load(Delta + own + places, mask=real, other=0.0)
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)  # (BN, BM)
                s = tl.where(exists[:, None] & real[None, :], s, float("-inf"))
                if full == 0:
                    s = tl.where(seen_by_rule(R, i[None, :], t[:, None], RULES), s, float("-inf"))
                p = tl.exp2(s - base[None, :])
                dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
                weight = p
                if DROP:
                    low, high = streams(tl.load(seed).to(tl.uint64, bitcast=True), instance, places)
                    kept = chance(low[None, :], high[None, :], column[:, None]) >= rate
                    dp, weight = tl.where(kept, dp * up, 0.0), tl.where(kept, p * up, 0.0)
                dv += tl.dot(weight.to(g.dtype), g, input_precision=PRECISION)
                ds = p * (dp - delta[None, :])
                dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    heads_of_keys = heads // group
    own_keys = (b * heads_of_keys + h).to(tl.int64) * keys * D
    store_rows(Dk + own_keys, j, D, inside, dk * scale, D, DP, ADD)
    store_rows(Dv + own_keys, j, D, inside, dv, D, DP, ADD)
