"""Parts and merge: parts cover what they say, one softmax over several key sets equals dense attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.kernels.compressed.index import choose as index_choice
from subquad.kernels.maxima import others_max, running_max
from subquad.kernels.merge import aten, cpu, gpu, merge_attention, reference
from subquad.kernels.merge.cpu import KEPT, program_of
from subquad.kernels.merge.op import merge
from subquad.kernels.mixture import mixture_merge
from subquad.kernels.pools import span_pool
from subquad.kernels.pools.groups import group_pool, pool_op
from subquad.kernels.pools.lines import line_max
from subquad.kernels.pools.nodes import _nodes, node_max
from subquad.kernels.pools.spans import _pool
from subquad.kernels.pools.summaries import span_summaries, takes
from subquad.kernels.selected.choice import choose as block_choice
from subquad.kernels.tables import _edges, _edges_by_length, _mask, _mask_by_length, _partition_edges
from subquad.supports import patterns
from subquad.supports.builders import columns, diagonal, rows_to_keys, selves, windows
from subquad.supports.grids import AxialMixture
from subquad.supports.parts import Grid, Part, make_plan
from subquad.supports.spans import Fixed, Tree, Window
from subquad.supports.support import GivenSupport, parse


def cover(parts: list[Part], n: int, drawn: tuple[int, ...] = ()) -> torch.Tensor:
    """How often each (query, key) pair occurs in the parts, by walking through them."""
    count = np.zeros((n, n), np.int64)
    for p in parts:
        seen = np.broadcast_to(p.allowed(), (p.queries.blocks, p.queries.length, p.keys.length))
        block, row, key = seen.nonzero()
        q, k = p.queries, p.keys
        query = q.start + block * q.step + row * q.stride
        at = k.start + block * k.step + key * k.stride
        if p.draws:
            size = k.length // p.draws
            at = np.array(drawn)[k.start + block * k.step + key // size] * size + key % size
        np.add.at(count, (query, at), 1)
    return torch.from_numpy(count)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces(GivenSupport):
    """A support of any parts, for tests."""

    parts: Callable[[int], list[Part]]
    drawn: tuple[int, ...] = ()

    def plan(self, n, which):
        return make_plan(self.parts(n), n, self.drawn)


lengths = st.integers(1, 150)


@given(n=lengths, left=st.integers(0, 60), right=st.integers(0, 60), block=st.sampled_from([None, 1, 4, 7, 16]))
def test_windows(n, left, right, block):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    expected = (j >= i - left) & (j <= i + right)
    assert torch.equal(cover(windows(0, n, left, right, block=block), n), expected.long())


@given(n=lengths, size=st.integers(1, 160), causal=st.booleans())
def test_diagonal_and_columns(n, size, causal):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    past = (j <= i) | (not causal)
    assert torch.equal(cover(diagonal(0, n, size, causal=causal), n), ((i // size == j // size) & past).long())
    assert torch.equal(cover(columns(n, size, causal=causal), n), (((i - j) % size == 0) & past).long())
    strict = columns(n, size, causal=causal, xlo=0, xhi=0)
    assert torch.equal(cover(strict, n), (((i - j) % size == 0) & past & (i != j)).long())


@given(n=st.integers(1, 600), first=st.integers(0, 20), step=st.integers(1, 9), hi=st.sampled_from([-3, 0, 1 << 40]))
def test_rows_to_keys(n, first, step, hi):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    expected = (j >= first) & ((j - first) % step == 0) & (j - i <= hi)
    assert torch.equal(cover(rows_to_keys(range(n), range(first, n, step), hi=hi), n), expected.long())


@given(n=st.integers(1, 80), size=st.integers(1, 20))
def test_triangle_and_everything_are_recognised(n, size):
    for p in diagonal(0, n, size, causal=True) + columns(n, size, causal=True) + windows(0, n, 3, 5, block=4):
        seen = p.allowed()
        assert p.sees_everything == bool(seen.all()) or not p.sees_everything  # never claims too much
        if p.is_triangle:
            assert np.array_equal(seen, np.tril(np.ones_like(seen)))


def test_plan_marks_the_first_visit():
    parts = [*diagonal(0, 10, 4, causal=False), *columns(10, 3, causal=False, xlo=0, xhi=0)]
    plan = make_plan(parts, 10)
    assert [replace(p, fresh=False) for p in plan.parts] == parts
    assert [p.fresh for p in plan.parts] == [True, True, False, False]


def test_a_plan_keeps_few_programs():
    """Padded batches of many lengths ask the plan of a short row for a program each."""
    plan = make_plan(rows_to_keys(range(4), range(4)), 4)
    for rows in range(4, 4 + 3 * KEPT):
        assert program_of(plan, rows, 1 << 12) is program_of(plan, rows, 1 << 12)
    assert len(plan.lowered) <= KEPT


@pytest.mark.parametrize(
    "support", [Fixed(span=4), Window(causal=True, span=3, sinks=2), Tree(depth=3), patterns.Star()]
)
def test_texts_round_trip(support):
    assert parse(support.text) == support


def summaries_case(n: int, dtype: torch.dtype, seed: int = 0):
    """Own span of 4 up to i, and one summary per earlier span: two sources, as Combiner uses them."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 8, generator=draw, dtype=dtype) for _ in range(3))
    m = max(1, n // 4)
    ks, vs = (torch.randn(2, 3, m, 8, generator=draw, dtype=dtype) for _ in range(2))
    i = torch.arange(n)[:, None]
    own = (i // 4 == torch.arange(n) // 4) & (torch.arange(n) <= i)
    far = torch.arange(m) < i // 4

    def parts(n):
        far = rows_to_keys(range(n), range(m), positions=range(4, 4 * m + 1, 4), source=1, hi=0)
        return diagonal(0, n, 4, causal=True) + far

    return [q, k, v, ks, vs], torch.cat([own, far], 1), Pieces(parts=parts)


def dense(q, k, v, ks, vs, seen, scale):
    scores = (q @ torch.cat([k, ks], 2).mT * scale).masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1, keepdim=True), scores, 0).softmax(-1) * seen
    return weights @ torch.cat([v, vs], 2)


def by_reference(q, keys, values, support, which, n, *, scale, valid=(), dropout=0.0, seed=None, lengths=None):
    """The operators in plain torch, and their own backward."""

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, *kv):
            m = len(kv) // 2
            about = ([x for x in valid if x is not None], lengths, seed, support, which, n, scale, dropout)
            out, lse = reference.forward(q, kv[:m], kv[m:], *about)
            ctx.save_for_backward(q, *kv, out, lse)
            ctx.about = about
            return out

        @staticmethod
        def backward(ctx, grad):
            q, *kv, out, lse = ctx.saved_tensors
            m = len(kv) // 2
            return tuple(reference.backward(grad, q, kv[:m], kv[m:], out, lse, *ctx.about))

    return Run.apply(q, *keys, *values)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 4, 5, 37, 64])
@pytest.mark.parametrize("path", [merge_attention, by_reference])
def test_one_softmax_over_two_sources(path, n, masked):
    tensors, seen, support = summaries_case(n, torch.float64)
    tensors = [t.requires_grad_() for t in tensors]
    valid = [None, None]
    if masked:
        draw = torch.Generator().manual_seed(1)
        valid = [torch.rand(2, 1, t.shape[2], generator=draw) < 0.6 for t in (tensors[1], tensors[3])]
        seen = seen & torch.cat(valid, 2)[:, :, None]
    q, k, v, ks, vs = tensors
    out = path(q, [k, ks], [v, vs], support.text, "main", n, scale=0.4, valid=valid)
    expected = dense(*tensors, seen, 0.4)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    direction = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, tensors, direction, allow_unused=True),  # a short sequence asks no summary
        torch.autograd.grad(expected, tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("lengths", [None, [37, 20, 37]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernel_and_reference_drop_the_same_weights(lengths, dtype):
    """Dropout by the seed, in the kernel, the reference and their gradients; grouped heads, rows of any length."""
    support, draw = Fixed(causal=True, span=8), torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 37, 8, generator=draw, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(3, 2, 37, 8, generator=draw, dtype=dtype, requires_grad=True) for _ in range(2))
    ks = torch.randn(3, 2, 5, 8, generator=draw, dtype=dtype, requires_grad=True)
    vs = torch.randn(3, 4, 5, 8, generator=draw, dtype=dtype, requires_grad=True)
    rows = None if lengths is None else torch.tensor(lengths)
    about = {"scale": 0.3, "lengths": rows, "dropout": 0.3, "seed": torch.tensor(5)}
    kernel, plain = (
        path(q, [k, ks], [v, vs], support.text, "main", 37, valid=[None, None], **about)
        for path in (merge_attention, by_reference)
    )
    tolerance = {"atol": 1e-12, "rtol": 0} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(kernel, plain, **tolerance)
    without = merge_attention(q, [k, ks], [v, vs], support.text, "main", 37, scale=0.3, lengths=rows)
    assert (kernel - without).abs().max() > 0.1
    direction = torch.randn(q.shape, generator=draw, dtype=dtype)
    grads = (torch.autograd.grad(out, [q, k, v, ks, vs], direction) for out in (kernel, plain))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_gradcheck_of_overlapping_windows():
    support = Pieces(parts=lambda n: windows(0, n, 3, 2, block=4))
    tensors = [torch.randn(1, 2, 11, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    attend = lambda q, k, v: merge_attention(q, [k], [v], support.text, "main", 11, scale=0.5)  # noqa: E731
    assert torch.autograd.gradcheck(attend, tensors)


def test_drawn_blocks_equal_dense_attention():
    """Query block a sees two blocks that stand in no regular place, one of them drawn by several."""
    drawn = (2, 0, 1, 0, 2, 0)
    parts = [*selves(14), Part(Grid(0, 3, 4, 4), Grid(0, 3, 2, 8), draws=2)]
    support = Pieces(parts=lambda n: parts, drawn=drawn)
    tensors = [torch.randn(2, 2, 14, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    count = cover(parts, 14, drawn).double()  # oneself may be seen twice: it then weighs twice
    scores = (tensors[0] @ tensors[1].mT * 0.5 + count.log()).softmax(-1)
    expected, direction = scores @ tensors[2], torch.randn(2, 2, 14, 4, dtype=torch.float64)
    for path in (merge_attention, by_reference):
        out = path(tensors[0], [tensors[1]], [tensors[2]], support.text, "main", 14, scale=0.5, valid=[None])
        torch.testing.assert_close(out, expected)
        got, want = (torch.autograd.grad(x, tensors, direction, retain_graph=True) for x in (out, expected))
        torch.testing.assert_close(got, want)


def test_a_second_derivative_is_refused():
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = merge_attention(q, [k], [v], Fixed(span=2).text, "members:1", 3, scale=1.0)
    (g,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        g.sum().backward()


@pytest.mark.parametrize("width", [8, 7])  # the tile kernels, and torch's flash attention part by part
def test_strided_heads_give_contiguous_results(width):
    """The layer's heads are (B, n, H, d) in memory; results lie as a compiled graph takes them to lie."""
    x, support = torch.randn(1, 20, 3, width).transpose(1, 2).requires_grad_(), patterns.Fixed(causal=True, w=6).text
    out = merge_attention(x, [x], [x], support, "0", 20, scale=0.3)
    assert out.is_contiguous()
    y = x.detach().contiguous()
    torch.testing.assert_close(out, merge_attention(y, [y], [y], support, "0", 20, scale=0.3))
    given = (x, [x], [x], [], None, None, support, "0", 20, 0.3, 0.0)
    assert set(torch.library.opcheck(torch.ops.subquad.merge.default, given).values()) == {"SUCCESS"}


def test_a_support_of_another_process_is_refused():
    x = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match="does not exist in this process"):
        merge_attention(x, [x], [x], "given:99999", "main", 4, scale=1.0)


@pytest.mark.parametrize("operators", [cpu, reference, aten, gpu])
def test_tensors_that_are_too_short_for_the_plan_are_refused(operators):
    """They would be read beyond their end."""
    support = Fixed(causal=False, span=4)
    q, k, v, short = (torch.randn(1, 2, m, 8) for m in (10, 10, 10, 9))
    groups, fewer = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 2, 8)
    rest = ([], None, None, support.text, "main", 10, 0.3, 0.0)
    for three, wrong in (
        ((q, [short, groups], [v, groups]), r"keys\[0\] has 9 keys, and the plan main of .* for 10 tokens reaches 10"),
        ((q, [k, groups], [v, fewer]), r"values\[1\] has 2 keys, and the plan main of .* for 10 tokens reaches 3"),
        ((short, [k, groups], [v, groups]), r"q has 9 rows, and the plan main of .* for 10 tokens has 10"),
        ((q, [k], [v]), r"keys has 1 source, and the plan main of .* for 10 tokens needs 2"),
    ):
        with pytest.raises(ValueError, match=wrong):
            operators.forward(*three, *rest)
        out, lse = torch.zeros_like(three[0]), torch.zeros(three[0].shape[:3])
        with pytest.raises(ValueError, match=wrong):
            operators.backward(out, *three, out, lse, *rest)
    drawn = Pieces(parts=lambda n: [Part(Grid(0, 2, 4, 4), Grid(0, 2, 1, 4), draws=1)], drawn=(0, 2))
    with pytest.raises(ValueError, match=r"keys\[0\] has 10 keys, and the plan main of .* for 8 tokens reaches 12"):
        operators.forward(q[:, :, :8], [k], [v], [], None, None, drawn.text, "main", 8, 0.3, 0.0)


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("skip", [0, 3, 4, 9])
def test_span_pool_equals_a_loop(pool, skip):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 18, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([18, 10, 0])
    mask = (torch.arange(18) < lengths[:, None]) & (torch.rand(3, 18, generator=draw) < 0.7)
    out = span_pool(x, 4, pool=pool, key_mask=mask, lengths=lengths, skip=skip)
    expected = torch.zeros_like(out)
    for b in range(3):
        for a in range(5):
            inside = [j for j in range(max(skip, 4 * a), min(18, 4 * a + 4)) if mask[b, j]]
            if inside:
                members = x[b, :, inside]
                expected[b, :, a] = members.amax(1) if pool == "max" else members.mean(1)
    torch.testing.assert_close(out, expected)
    direction = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    got, want = (torch.autograd.grad(y, x, direction) for y in (out, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["nodes", "column", "row", "left", "right"])
def test_the_operator_for_any_length_pools_as_the_steps_do(kind, causal):
    """Values and gradients, with padding and without; what is behind the groups is 0."""
    c = 0 if kind == "nodes" else 4
    draw = torch.Generator().manual_seed(0)
    for n in (3, 4, 9, 12):
        x = torch.randn(2, 3, n, 2, generator=draw, dtype=torch.float64, requires_grad=True)
        exists = torch.rand(2, 1, n, generator=draw) < 0.7
        for real, pool in ((None, "max"), (exists, "max"), (exists, "mean")):
            out = pool_op(x, real, pool, kind, c, causal)
            assert out.shape[2] == n + c
            if kind != "nodes" and n <= c:
                assert not out.any()  # one row has no other rows
                continue
            expected = group_pool(x, real, pool, kind, c, causal)
            m = expected.shape[2]
            torch.testing.assert_close(out[:, :, :m], expected)
            assert not out[:, :, m:].any()
            direction = torch.randn(out.shape, generator=draw, dtype=torch.float64)
            got, want = (
                torch.autograd.grad(y, x, d)[0] for y, d in ((out, direction), (expected, direction[:, :, :m]))
            )
            torch.testing.assert_close(got, want)


def opcheck(op, *arguments):
    result = torch.library.opcheck(op, arguments)
    assert len(result) == 4 and set(result.values()) == {"SUCCESS"}


def test_operators_keep_torchs_rules():
    """Schema, shapes without data, and the derivative's registration, as compilers rely on them."""
    q, k, v = (torch.randn(2, 2, 9, 4, requires_grad=True) for _ in range(3))
    summaries = [torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(2)]
    valid = [torch.ones(2, 1, 9, dtype=torch.bool), torch.ones(1, 1, 3, dtype=torch.bool)]
    lengths, seed = torch.tensor([9, 5]), torch.tensor(3)
    support = Fixed(causal=True, span=3).text
    for dropout in (0.0, 0.5):
        about = (valid, lengths, seed, support, "main", 9, 0.5, dropout)
        opcheck(merge, q, [k, summaries[0]], [v, summaries[1]], *about)
    opcheck(_pool, q, torch.ones(2, 9, dtype=torch.bool), lengths, 4, 1, True)
    for kind, columns_ in (("nodes", 0), ("column", 4), ("right", 4)):
        opcheck(pool_op, q, torch.ones(2, 1, 9, dtype=torch.bool), "max", kind, columns_, True)
    opcheck(running_max, q, 2, False)
    opcheck(_nodes, q)
    opcheck(others_max, q, 2)
    opcheck(_mask, q, lengths, patterns.Star(w=2).text, [0], 9)
    both = AxialMixture(causal=True, cols=3, kinds=(("column",), ("row",))).text
    groups = [torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(4)]
    opcheck(mixture_merge, q, [k, v], groups[:2], groups[2:], [], [], lengths, [1, 1], both, 9, 0.5)
    opcheck(_edges, q, lengths, patterns.Logsparse().text, [0], 9)


def test_operators_without_heads_of_their_own_keep_torchs_rules():
    """What chooses keys, makes lists and takes maxima along lines."""
    x, real = torch.randn(2, 2, 9, 16, requires_grad=True), torch.ones(2, 1, 9, dtype=torch.bool)
    opcheck(line_max, [x, x.detach()], real, 3, 3, True, True, False)
    opcheck(line_max, [x], None, 3, 3, False, False, False)
    opcheck(node_max, [x, x.detach()], real)
    q, entries = torch.randn(4, 9, 16), torch.randn(4, 4, 16)
    opcheck(block_choice, q, entries, None, torch.ones(1, 5, dtype=torch.bool), [2, 2, 2, 3], 0.5)
    possible = torch.ones(2, 9, 4, dtype=torch.bool)
    opcheck(index_choice, x.detach(), x.detach()[..., 0].contiguous(), torch.randn(2, 4, 16), possible, 2)
    opcheck(_edges_by_length, torch.tensor([9, 5]), patterns.Logsparse().text, [0], 9)
    opcheck(_mask_by_length, torch.tensor([9, 5]), patterns.Star(w=2).text, [0], 9)
    for members, rows in ((True, 3), (False, 9)):
        opcheck(_partition_edges, x.detach(), Fixed(span=3).text, members, 9, rows)


def test_tensors_of_several_dtypes_are_computed_in_the_widest():
    """Autocast hands over keys in bfloat16 beside queries in float32: the kernels read memory by one type."""
    from subquad.kernels.runs.op import EVERYTHING, Runs, attend_runs

    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 8, 16, generator=draw) for _ in range(3))
    spans = torch.tensor([[[0, 8, EVERYTHING, -EVERYTHING]]])
    runs = Runs(torch.tensor([[0, 8]]), spans, (0,), 64, (8, 8))
    mixed = [q.clone().requires_grad_(), k.bfloat16().requires_grad_(), v.bfloat16().requires_grad_()]
    plain = [x.detach().float().requires_grad_() for x in mixed]
    for xs in (mixed, plain):
        out, lse = attend_runs(xs[0], [xs[1]], [xs[2]], runs, 0.25)
        (out.sum() + lse.sum()).backward()
        assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close([x.grad.float() for x in mixed], [x.grad for x in plain], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("before", [0, 7])
def test_summaries_of_spans_in_one_pass(pool, before):
    """What `span_pool` and a softmax over the members give, from a sequence in two pieces."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 100, 8, dtype=torch.float64)
    q[0, 0, 3, 2] = torch.nan
    past, new = (tuple(x[:, :, part] for x in (q, k, v)) for part in (slice(0, before), slice(before, None)))
    with torch.no_grad():
        assert takes(*past, *new)
        found = span_summaries(past, new, 3, 30, pool, 0.3)
    members = [x[:, :, :90].unflatten(2, (3, 30)) for x in (q, k, v)]
    query, key = (x.amax(3) if pool == "max" else x.mean(3) for x in members[:2])
    weights = ((members[1] @ query[..., None])[..., 0] * 0.3).softmax(-1)
    want = (query, key, (weights[..., None, :] @ members[2])[..., 0, :])
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12, equal_nan=True)
    assert not takes(*past, *new)  # with gradients it is of no use


def test_workers_share_a_queue_of_tasks():
    q, k = torch.randn(2, 1, 2, 300, 8, dtype=torch.float64)
    support = Fixed(causal=True, span=16).text
    outs = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        outs.append(merge_attention(q, [k, k], [q, q], support, "main", 300, scale=0.3))
        torch.set_num_threads(before)
    assert torch.equal(*outs)
