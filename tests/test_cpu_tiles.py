"""The CPU kernels in tiles, against plain torch: products, transposes, parts of every kind, maxima, pools."""

import numba
import numpy as np
import pytest
import torch

import subquad
from subquad.kernels import maxima
from subquad.kernels.clusters import cpu as clusters_cpu
from subquad.kernels.clusters import tiles as plain
from subquad.kernels.merge import cpu, op, reference
from subquad.kernels.merge import cpu_tiles as tiles
from subquad.kernels.merge.cpu import program_of
from subquad.kernels.parallel import FAST
from subquad.kernels.pools import nodes, spans
from subquad.kernels.running_softmax import BAND
from subquad.kernels.vector_rows import absorb_columns, add_row, exp_row, fill_row, gradient_row
from subquad.kernels.vectors import dot, largest, multiply, multiply_add, multiply_add_turned, scale_row, transpose
from subquad.supports.binary import Logsparse
from subquad.supports.builders import rows_to_keys
from subquad.supports.grids import AxialVertical
from subquad.supports.parts import FAR, Grid, Part, make_plan
from subquad.supports.spans import Fixed, Window

TYPES = [np.float32, np.float64]


@numba.njit(error_model="numpy")
def products(like, size, a, b, c, turned):
    m, depth = a.shape
    sizes = (m, b.shape[1], depth)
    straight = (*sizes, a.ctypes.data, depth, b.ctypes.data, b.shape[1], c.ctypes.data, c.shape[1], size)
    multiply(like[0], *straight)
    multiply_add(like[0], *straight)
    columns = np.ascontiguousarray(a.T)  # depth × m
    across = (*sizes, columns.ctypes.data, m, b.ctypes.data, b.shape[1], c.ctypes.data, c.shape[1], size)
    multiply_add_turned(like[0], *across)
    transpose(like[0], depth, b.shape[1], b.ctypes.data, b.shape[1], turned.ctypes.data, depth, size)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("m", "n", "depth"), [(1, 8, 1), (7, 24, 9), (13, 16, 64), (24, 40, 17)])
def test_products_and_transposes(kind, m, n, depth):
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((m, depth)).astype(kind), draw.standard_normal((depth, n)).astype(kind)
    c, turned = np.full((m, n), np.nan, kind), np.zeros((n, depth), kind)
    products(np.zeros(1, kind), c.itemsize, a, b, c, turned)
    np.testing.assert_allclose(c, 3 * a @ b, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(turned, b.T)


@numba.njit(error_model="numpy")
def rows(like, two, a, b):
    scale_row(two, b.ctypes.data, a.ctypes.data, len(a))
    return dot(like[0], a.ctypes.data, b.ctypes.data, len(a)), largest(like[0], a.ctypes.data, len(a))


@pytest.mark.parametrize("kind", TYPES)
def test_rows(kind):
    a = np.random.default_rng(0).standard_normal(24).astype(kind)
    a[3] = np.nan
    b = np.zeros_like(a)
    total, top = rows(np.zeros(1, kind), kind(2), a, b)
    assert np.isnan(total)
    assert top == np.nanmax(a)
    np.testing.assert_array_equal(b, 2 * a)


@numba.njit(error_model="numpy")
def scores(s, ds, a, base, less, scale):
    total = exp_row(base, a.ctypes.data, len(a))
    gradient_row(base, less, scale, s.ctypes.data, ds.ctypes.data, len(s))
    return total


@numba.njit(error_model="numpy")
def sums(a, b, factor):
    fill_row(factor, a.ctypes.data, len(a))
    add_row(factor, a.ctypes.data, b.ctypes.data, len(a))


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_scores(kind):
    draw = np.random.default_rng(0)
    a = np.concatenate((-100 * draw.random(21), (-np.inf, 0, -90))).astype(kind)
    ds, s, b = draw.standard_normal(24).astype(kind), a.copy(), draw.standard_normal(24).astype(kind)
    weight = np.exp(a.astype(np.float64) - 0.5)
    gradient = weight * (ds - kind(0.25)) * 3
    total = scores(s, ds, a, kind(0.5), kind(0.25), kind(3))
    for found, expected in ((a, weight), (s, weight), (ds, gradient), (total, weight.sum())):
        np.testing.assert_allclose(found, expected, rtol=3e-7 if kind == np.float32 else 1e-15, atol=1e-37)
    sums(a, b, kind(2))
    np.testing.assert_array_equal(a, 2 + 2 * b)
    a[5] = np.nan
    assert np.isnan(scores(s, ds, a, kind(0.5), kind(0.25), kind(3)))


@numba.njit(fastmath=FAST, error_model="numpy")
def row_sum(s, count):
    """Compiled as the kernels are, whose sums may be taken in any order."""
    return exp_row(s.dtype.type(4), s.ctypes.data, count)


@numba.njit(fastmath=FAST, error_model="numpy")
def column_sums(s, count, top, total, less):
    absorb_columns(s[0], s.ctypes.data, len(top), count, top.ctypes.data, total.ctypes.data, less.ctypes.data)


@pytest.mark.parametrize("kind", TYPES)
def test_a_sum_does_not_depend_on_how_many_hidden_keys_follow(kind):
    lanes = 32 // np.dtype(kind).itemsize
    drawn = np.random.default_rng(0).standard_normal(32 * lanes).astype(kind)
    for seen in range(1, 31):
        found = []
        for more in range(32 - seen):
            s = drawn.copy()
            s[seen * lanes :] = -np.inf
            top, total, less = np.full(lanes, -np.inf, kind), np.zeros(lanes, kind), np.zeros(lanes, kind)
            column_sums(s.copy(), seen + more, top, total, less)
            found.append((row_sum(s, (seen + more) * lanes), *total))
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize(("width", "dropout"), [(8, 0.0), (8, 0.2), (5, 0.2)])
@pytest.mark.parametrize(
    "spec",
    ["combiner-fixed:span=7", "combiner-window:span=8,window=20,sinks=3", "bigbird:block=16", "combiner-logsparse"],
)
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_equal_plain_torch(spec, causal, width, dropout, monkeypatch):
    """Values and gradients, with padding inside rows, more keys than a tile has, and heads of whole vectors or not."""
    draw = torch.Generator().manual_seed(0)
    a = subquad.attention(spec, causal=causal, num_heads=2, head_dim=width, dropout=dropout).double()
    q, k, v, g = (torch.randn(3, 2, 331, width, generator=draw, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(3, 331, generator=draw) < 0.8
    found = []
    for forward in (op.eager_merge, reference.forward):
        monkeypatch.setattr(op, "eager_merge", forward)
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        out = a(*x, key_mask=mask, seed=torch.tensor(5))
        found.append([out, *torch.autograd.grad(out, x, g)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    "support",
    [
        Fixed(causal=True, span=7),
        Window(causal=False, span=8, window=20, sinks=3),
        Logsparse(causal=False),
        AxialVertical(causal=True, cols=9),
    ],
)
@pytest.mark.parametrize("most", [1, 1000, 1 << 40])
def test_bands_have_every_pair_once(support, most):
    """The bands of a phase share no row, those of the first phase have all rows, their pieces have all pairs."""
    rows, plan = 331, support.plan(300, "main")
    program = program_of(plan, rows, most)
    found: list[tuple[int, int, int]] = []
    for number, phase in enumerate(program.phases):
        taken = np.zeros(rows, int)
        for at in phase:
            first, behind, place, down, count, fresh = program.bands[at]
            assert count <= BAND
            assert bool(fresh) == (number == 0)
            taken[place : place + count * down : down] += 1
            for piece in program.pieces[first:behind]:
                found += pairs_of(piece, program.parts[piece[0]], plan.joined[piece[0]], place, down)
        assert taken.max() == 1
        assert number or taken.min() == 1
    np.testing.assert_array_equal(sorted(found), seen_pairs(plan.parts))


def pairs_of(piece, fields, part, place, down):
    """The pairs of a piece by the mask of its part; the rows that it names must be those of its band."""
    _, block, row, rows, at = piece.tolist()
    step = row if fields[tiles.SELF] else down
    where, keys = part.queries.places(), part.keys.places()
    seen = np.broadcast_to(part.allowed(), (*where.shape, keys.shape[1]))
    for i in range(rows):
        a, r = (block + i, 0) if fields[tiles.SELF] else (block, row + i)
        assert where[a, r] == place + at * down + i * step
        yield from ((part.source, int(where[a, r]), int(key)) for key in keys[a][seen[a, r]])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("batch", "key_heads"), [(1, 1), (1, 4), (6, 2)])
def test_tasks_that_run_together_touch_no_place_twice(batch, key_heads, threads):
    """Every head goes through every band once; what tasks of a turn share, they have sums of their own for."""
    chosen = [(slice(0, batch), AxialVertical(causal=True, cols=9).plan(300, "main"))]
    work = cpu._Work(chosen, torch.empty(batch, 4, 300, 8), threads)
    shares = work.shares(batch * key_heads, threads)
    met = np.zeros((batch, 4, len(work.program.bands)), int)
    for turn in work.groups_of(key_heads, shares):
        for b, first, last, low, high, own in turn:
            met[b, first:last, low:high] += 1
            assert own // shares == b
        owners = {(own, first) for _, first, _, _, _, own in turn.tolist()}
        assert len(owners) == len(turn)
        if shares > 1:  # these bands run at once: no row is in two of them
            bands = [row for low, high in {tuple(x) for x in turn[:, 3:5].tolist()} for row in range(low, high)]
            phases = [number for number, phase in enumerate(work.ranges[0]) if set(bands) & set(phase)]
            assert len(phases) == 1
    assert (met == 1).all()


def seen_pairs(parts) -> np.ndarray:
    """int (pairs, 3): source, query and key of every pair that some part allows, each once, in order."""
    found = []
    for part in parts:
        allowed = np.broadcast_to(part.allowed(), (part.queries.blocks, part.queries.length, part.keys.length))
        a, r, s = allowed.nonzero()
        queries, keys = part.queries.places()[a, r], part.keys.places()[a, s]
        found.append(np.stack([np.full_like(queries, part.source), queries, keys], 1))
    return np.unique(np.concatenate(found), axis=0)


def test_joined_parts_see_what_their_chunks_saw():
    for plan in (
        Fixed(causal=True, span=8).plan(3000, "main"),
        Window(causal=True, span=8, window=20).plan(3000, "main"),
    ):
        assert len(plan.joined) < len(plan.parts)
        np.testing.assert_array_equal(seen_pairs(plan.joined), seen_pairs(plan.parts))
    free = make_plan([Part(Grid.of(range(4)), Grid.of(range(6))), Part(Grid.of(range(4, 8)), Grid.of(range(9)))], 8)
    assert free.joined == free.parts  # the first four would see three keys more
    assert len(make_plan(rows_to_keys(range(900), range(900), hi=0, lo=-FAR), 900).joined) == 1


def test_limits_say_what_the_mask_says():
    """Whatever a mask allows lies inside the limits; where they say it all, exactly that."""
    for part in Window(causal=False, span=8, window=20, sinks=3).plan(300, "main").parts:
        lo, hi, xlo, xhi, span, end = part.limits
        query, key = part.queries.places()[:, :, None], part.placed.places()[:, None]
        inside = ((query + lo) // span * span <= key) & (key <= (query + hi) // span * span + span - 1)
        inside &= key <= query + end
        if xlo <= xhi:
            inside &= ~(((query + xlo) // span * span <= key) & (key <= (query + xhi) // span * span + span - 1))
        assert part.is_interval
        np.testing.assert_array_equal(np.broadcast_to(part.allowed(), inside.shape), inside)


@numba.njit(error_model="numpy")
def rules(row, limits, first_key, key_stride, first, last):
    """Do all queries see all keys, which keys may some query see, and the keys of the first query."""
    tiles.mask_row(row, len(row), limits, first, first_key, key_stride)
    everything = tiles.everything(limits, len(row), first_key, key_stride, first, last)
    return everything, *tiles.seen(limits, first_key, key_stride, first, last)


def test_rules_of_a_tile_say_what_the_limits_say():
    draw = np.random.default_rng(0)
    found = []
    for _ in range(3000):
        lo, hi, xlo, xhi, span, end = draw.integers((-9, -2, -4, -4, 1, -2), (3, 9, 5, 5, 5, 12)).tolist()
        first_key, stride, first, more = draw.integers((0, 1, 0, 0), (12, 4, 16, 4)).tolist()
        query, key = first + np.arange(more + 1)[:, None], first_key + np.arange(draw.integers(1, 6)) * stride
        seen = ((query + lo) // span <= key // span) & (key // span <= (query + hi) // span) & (key <= query + end)
        seen &= ~(((query + xlo) // span <= key // span) & (key // span <= (query + xhi) // span) & (xlo <= xhi))
        row = np.zeros(len(key))
        everything, low, high = rules(row, (lo, hi, xlo, xhi, span, end), first_key, stride, first, first + more)
        np.testing.assert_array_equal(row == 0, seen[0])
        assert seen.all() or not everything
        assert not seen[:, : max(low, 0)].any() and not seen[:, max(high, 0) :].any()
        found.append(everything)
    assert 100 < sum(found) < 2900


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 7, 5, 4), 2), ((1, 2, 30, 9, 64), 3), ((1, 1, 1, 4, 8), 2)])
def test_maxima_equal_plain_torch(shape, dim, ties):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (2 * x).round() if ties else x
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x.requires_grad_()
    for backwards in (True, False):
        way = [dim] if backwards else []
        found, expected = maxima.running_max(x, dim, backwards), x.flip(way).cummax(dim).values.flip(way)
        assert torch.equal(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(top, x, grad)[0] for top in (found, expected)))
    hidden = torch.eye(shape[dim], dtype=torch.bool).view(-1, *[1] * dim, shape[dim], *[1] * (len(shape) - dim - 1))
    each = x.masked_fill(hidden, -torch.inf).amax(dim + 1)  # (length, …): the maximum of all but one
    found, expected = maxima.others_max(x, dim)[0], each.movedim(0, dim)
    assert torch.equal(found, expected)
    if not ties and shape[dim] > 1:
        torch.testing.assert_close(*(torch.autograd.grad(top, x, grad)[0] for top in (found, expected)))


def test_maxima_keep_nan():
    x = torch.randn(1, 1, 5, 2, 8)
    x[0, 0, 2, 1, 3] = torch.nan
    for backwards in (True, False):
        top = maxima.running_max(x, 2, backwards)[0, 0, :, 1, 3]
        assert torch.equal(top.isnan(), torch.arange(5) <= 2 if backwards else torch.arange(5) >= 2)
    assert maxima.others_max(x, 2)[0][0, 0, :, 1, 3].isnan().all()


@pytest.mark.parametrize("is_max", [True, False])
@pytest.mark.parametrize(("n", "size", "skip"), [(1, 4, 0), (5, 2, 1), (37, 8, 11)])
def test_pooled_gradients_equal_plain_torch(n, size, skip, is_max):
    draw = torch.Generator().manual_seed(0)
    x = (2 * torch.randn(3, 2, n, 8, generator=draw)).round()
    lengths = torch.tensor([n, max(1, n // 2), n])
    mask = (torch.rand(3, n, generator=draw) < 0.7) & (torch.arange(n) < lengths[:, None])
    for about in ((None, None, size, skip, is_max), (mask, lengths, size, skip, is_max)):
        out = spans._pool(x, *about)
        grad = torch.randn(out.shape, generator=draw)
        expected = spans._pool_backward._init_fn(grad, x, out, *about)
        torch.testing.assert_close(spans._pool_backward(grad, x, out, *about), expected)


@pytest.mark.parametrize("kind", ["max", "sum"])
@pytest.mark.parametrize("n", [1, 2, 7, 64, 101])
def test_nodes_in_one_pass_equal_the_nodes_of_pairs(n, kind):
    draw = torch.Generator().manual_seed(0)
    x = (2 * torch.randn(2, 3, n, 4, generator=draw, dtype=torch.float64)).round().requires_grad_()  # ties
    grad = torch.randn(x.shape, generator=draw, dtype=torch.float64)
    found, expected = nodes.binary_nodes(x, kind), nodes.nodes_of_pairs(x, kind)
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(y, x, grad)[0] for y in (found, expected)]
    torch.testing.assert_close(*both)
    spoilt = x.detach().clone()
    spoilt[0, 0, n // 2, 1] = torch.nan
    torch.testing.assert_close(nodes.binary_nodes(spoilt, kind), nodes.nodes_of_pairs(spoilt, kind), equal_nan=True)


@pytest.mark.parametrize("name", ["routing", "combiner-routing"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "clusters"), [(1, 3), (331, 17), (700, 2)])
def test_clusters_in_tiles_equal_plain_torch(name, causal, n, clusters, monkeypatch):
    """Values and gradients; clusters longer than a band, padding inside and behind, a row of nothing but padding."""
    draw = torch.Generator().manual_seed(0)
    a = subquad.attention(name, clusters=clusters, causal=causal, num_heads=2, head_dim=8).double()
    q, k, v, g = (torch.randn(3, 2, n, 8, generator=draw, dtype=torch.float64) for _ in range(4))
    mask = (torch.rand(3, n, generator=draw) < 0.8) & (torch.arange(n) < torch.tensor([[n], [n // 2], [0]]))
    found = []
    for route in (True, False):
        if not route:
            monkeypatch.setattr(clusters_cpu, "room", lambda *about: plain)
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        out = a(*x, key_mask=mask)
        found.append([out, *torch.autograd.grad(out, x, g)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)
