"""Attention over edge lists against dense masked softmax, values and gradients."""

import copy
import pickle

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from subquad.kernels import edge_loops
from subquad.kernels import edges as module
from subquad.kernels.edges import EdgeList, edge_attention, edge_map, edge_scores, edge_sum, segment_attention

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def dense_edges(x, edges, batch, heads):
    """Numbers per edge (B·H // g, E) as a dense (B, H, n, m), 0 off the edges."""
    full = x.new_zeros(x.shape[0], edges.num_graphs * edges.num_queries, edges.num_keys)
    full[:, edges.rows, edges.indices.long()] = x
    return full.view(batch, heads, edges.num_queries, edges.num_keys)


def dense_attention(q, k, v, edges, *, scale, score_gate=None, weight_gate=None):
    batch, heads = q.shape[:2]
    one = q.new_ones(batch * heads // edges.num_graphs, edges.num_edges)
    mask = dense_edges(one, edges, batch, heads).bool()
    scores = scale * q @ k.transpose(-1, -2)
    if score_gate is not None:
        scores = scores * dense_edges(score_gate, edges, batch, heads)
    p = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1) * mask
    if weight_gate is not None:
        p = p * dense_edges(weight_gate, edges, batch, heads)
    return p @ v


def case(graphs="one", n=11, m=None, d=5, d_v=None, batch=2, heads=3, density=0.4, dtype=torch.float64, seed=0):
    """q, k, v, edges (row 0 empty), both gates, and the gradient of the output."""
    m, d_v = m or n, d_v or d
    random = torch.Generator().manual_seed(seed)
    g = {"one": 1, "heads": heads, "all": batch * heads}[graphs]
    mask = torch.rand(g, n, m, generator=random) < density
    mask[:, 0] = False
    edges = EdgeList.from_mask(mask)
    sizes = [(batch, heads, n, d), (batch, heads, m, d), (batch, heads, m, d_v)]
    q, k, v = (torch.randn(s, generator=random, dtype=dtype).requires_grad_() for s in sizes)
    shape = (batch * heads // g, edges.num_edges)
    gates = [torch.rand(shape, generator=random, dtype=dtype).add(0.5).requires_grad_() for _ in range(2)]
    return q, k, v, edges, gates, torch.randn(batch, heads, n, d_v, generator=random, dtype=dtype)


def with_gradients(function, inputs, dout):
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, dout)


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE[x.dtype], atol=TOLERANCE[x.dtype])


def attention_of(implementation, edges, gated):
    def run(q, k, v, *gates):
        named = dict(zip(("score_gate", "weight_gate"), gates, strict=True)) if gated else {}
        return implementation(q, k, v, edges, scale=0.3, **named)

    return run


# ---- attention ----


@pytest.mark.parametrize("implementation", [edge_attention, segment_attention])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("graphs", ["one", "heads", "all"])
def test_equals_dense_softmax(graphs, gated, dtype, implementation):
    q, k, v, edges, gates, dout = case(graphs, n=37, m=53, d=9, d_v=7, dtype=dtype)
    inputs = (q, k, v, *(gates if gated else ()))
    actual = with_gradients(attention_of(implementation, edges, gated), inputs, dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges, gated), inputs, dout))
    assert not actual[0][:, :, 0].any() and not actual[1][:, :, 0].any()  # the empty row: output and gradient 0


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["one", "heads", "all"]),
    st.integers(1, 70),
    st.integers(1, 140),
    st.integers(1, 17),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_any_size(graphs, n, m, d, density, seed):
    q, k, v, edges, gates, dout = case(graphs, n, m, d, density=density, batch=1, heads=2, seed=seed)
    inputs = (q, k, v, *gates)
    actual = with_gradients(attention_of(edge_attention, edges, True), inputs, dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges, True), inputs, dout))


def test_rows_longer_than_a_part():
    q, k, v, edges, _, dout = case(n=130, m=700, d=64, density=0.7, batch=1, heads=1, dtype=torch.float32)
    actual = with_gradients(attention_of(edge_attention, edges, False), (q, k, v), dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges, False), (q, k, v), dout))


def test_non_contiguous_inputs():
    q, k, v, edges, gates, dout = case("heads")
    inputs = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for x in (q, k, v)]
    inputs += [x.detach().T.contiguous().T.requires_grad_() for x in gates]
    assert not any(x.is_contiguous() for x in (*inputs[:3], inputs[3]))
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    actual = with_gradients(attention_of(edge_attention, edges, True), inputs, dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges, True), inputs, dout))


@pytest.mark.parametrize("wanted", range(5))
def test_gradient_of_only_one_input(wanted):
    q, k, v, edges, gates, dout = case()
    inputs = [x.detach().requires_grad_(i == wanted) for i, x in enumerate((q, k, v, *gates))]
    grads = [
        torch.autograd.grad(attention_of(f, edges, True)(*inputs), inputs[wanted], dout)
        for f in (edge_attention, dense_attention)
    ]
    assert_same(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_inside(dtype):
    q, k, v, edges, gates, dout = case(dtype=torch.float32)
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *gates)]
    actual = with_gradients(attention_of(edge_attention, edges, True), inputs, dout.to(dtype))
    wide = [x.detach().float().requires_grad_() for x in inputs]
    expected = with_gradients(attention_of(edge_attention, edges, True), wide, dout.to(dtype).float())
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == dtype and torch.equal(x, y.to(dtype))


@pytest.mark.parametrize("implementation", [edge_attention, segment_attention])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_logits_stay_finite(dtype, implementation):
    q, k, v, edges, _, dout = case(dtype=dtype)
    big = (q.detach() * 1e2).requires_grad_(), (k.detach() * 1e3).requires_grad_(), v
    assert (edge_scores(big[0], big[1], edges, scale=0.3).abs() > 1e4).any()
    actual = with_gradients(attention_of(implementation, edges, False), big, dout)
    assert all(x.isfinite().all() for x in actual)
    expected = with_gradients(attention_of(dense_attention, edges, False), big, dout)
    torch.testing.assert_close(actual[0], expected[0], rtol=0.0, atol=0.05 if dtype == torch.float32 else 1e-8)


@pytest.mark.parametrize("implementation", [edge_attention, segment_attention])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_infinite_scores_and_nan(dtype, implementation):
    edges = EdgeList.from_mask(torch.ones(2, 3, dtype=torch.bool))
    q, v = torch.ones(1, 1, 2, 1, dtype=dtype), torch.tensor([1.0, 2.0, 4.0], dtype=dtype).view(1, 1, 3, 1)
    k = torch.tensor([-torch.inf, 0.0, 0.0], dtype=dtype).view(1, 1, 3, 1)
    assert torch.equal(implementation(q, k, v, edges, scale=1.0), torch.full_like(q, 3.0))
    k[:] = -torch.inf  # every score is -inf: nothing to attend to
    assert torch.equal(implementation(q, k, v, edges, scale=1.0), torch.zeros_like(q))
    q[0, 0, 0], k[:] = torch.nan, 1.0  # a NaN query shows in its own row and no other
    out = implementation(q, k, v, edges, scale=1.0)
    assert out[0, 0, 0].isnan().all() and out[0, 0, 1].isfinite().all()


@pytest.mark.parametrize("graphs", ["one", "all"])
def test_gradcheck(graphs):
    q, k, v, edges, gates, _ = case(graphs, n=3, m=4, d=2, d_v=1, batch=1, heads=2)
    assert gradcheck(attention_of(edge_attention, edges, True), (q, k, v, *gates))


def test_second_derivative_is_refused():
    q, k, v, edges, _, _ = case()
    out = edge_attention(q, k, v, edges, scale=0.3)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


def test_no_edges_at_all():
    q, k, v, edges, _, dout = case(density=0.0)
    assert edges.num_edges == 0
    for x in with_gradients(attention_of(edge_attention, edges, False), (q, k, v), dout):
        assert not x.any()
    scores = edge_scores(q, k, edges, scale=1.0)
    assert scores.shape == (6, 0) and edge_map(scores, edges, softmax, 3).shape == (6, 0)


# ---- scores, sums and maps ----


def softmax(scores, mask):
    return scores.masked_fill(~mask, -1e30).softmax(-1)


@pytest.mark.parametrize("graphs", ["one", "heads", "all"])
def test_scores_map_and_sum_make_attention(graphs):
    q, k, v, edges, _, dout = case(graphs, n=37, m=53)

    def composed(q, k, v):
        weights = edge_map(edge_scores(q, k, edges, scale=0.3), edges, softmax, 3)
        return edge_sum(weights, v, edges, 3)

    actual = with_gradients(composed, (q, k, v), dout)
    assert_same(actual, with_gradients(attention_of(edge_attention, edges, False), (q, k, v), dout))


@pytest.mark.parametrize("graphs", ["one", "heads", "all"])
def test_map_sees_heads_in_dimension_1(graphs):
    *_, edges, (gate, _), _ = case(graphs, n=19, m=40)
    factor = torch.tensor([1.0, 2.0, 3.0], dtype=gate.dtype).view(1, 3, 1, 1)
    shapes = []

    def scaled(scores, mask):
        shapes.append((*scores.shape, mask.shape == scores.shape, bool(mask.any(-1).all())))
        return scores * factor

    actual = edge_map(gate, edges, scaled, 3)
    expected = dense_edges(gate, edges, 2, 3) * factor
    assert_same([dense_edges(actual, edges, 2, 3)], [expected])
    assert all(s[:2] == (2, 3) and s[4] and s[5] for s in shapes)
    if graphs == "one":
        assert sum(s[2] * s[3] for s in shapes) < 2 * edges.num_edges


@pytest.mark.parametrize("graphs", ["one", "heads", "all"])
def test_map_without_some_edges(graphs):
    *_, edges, (gate, _), _ = case(graphs, n=19, m=40)
    allowed = torch.rand(gate.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    weights = edge_map(gate, edges, softmax, 3, allowed=allowed, buckets=edges.buckets)
    mask = dense_edges(allowed.to(gate.dtype), edges, 2, 3).bool()
    expected = dense_edges(gate, edges, 2, 3).masked_fill(~mask, -torch.inf).softmax(-1)
    some = mask.any(-1, keepdim=True)  # what a map makes of a row with nothing left is its own affair
    assert_same([dense_edges(weights, edges, 2, 3) * some], [expected.masked_fill(~some, 0.0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_and_sum_keep_the_dtype(dtype):
    q, k, v, edges, (gate, _), _ = case(dtype=torch.float32)
    assert edge_scores(q.to(dtype), k.to(dtype), edges, scale=1.0).dtype == dtype
    assert edge_sum(gate, v.to(dtype), edges, 3).dtype == dtype


@pytest.mark.parametrize("graphs", ["one", "heads"])
def test_scores_and_sum_differentiate_twice(graphs):
    q, k, v, edges, (gate, _), _ = case(graphs, n=4, m=5, d=2, heads=2, batch=1)
    for function, inputs in (
        (lambda q, k: edge_scores(q, k, edges, scale=0.3), (q, k)),
        (lambda w, v: edge_sum(w, v, edges, 2), (gate, v)),
    ):
        assert gradcheck(function, inputs, fast_mode=True)
        assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("graphs", ["one", "heads", "all"])
def test_segment_scores_and_sum(graphs):
    q, k, v, edges, (gate, _), dout = case(graphs)
    pairs = (
        (lambda q, k: edge_scores(q, k, edges, scale=0.3), (q, k), gate.detach()),
        (lambda q, k: module.segment_scores(q, k, edges, scale=0.3), (q, k), gate.detach()),
        (lambda w, v: edge_sum(w, v, edges, 3), (gate, v), dout),
        (lambda w, v: module.segment_sum(w, v, edges), (gate, v), dout),
    )
    scores, plain_scores, sums, plain_sums = (with_gradients(*p) for p in pairs)
    assert_same(scores, plain_scores)
    assert_same(sums, plain_sums)


# ---- the list ----


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.integers(0, 999))
def test_mask_round_trip(g, n, m, seed):
    mask = torch.rand(g, n, m, generator=torch.Generator().manual_seed(seed)) < 0.5
    edges = EdgeList.from_mask(mask)
    assert torch.equal(edges.to_mask(), mask)
    assert torch.equal(edges.degrees, mask.sum(-1))
    assert (edges.num_graphs, edges.num_queries, edges.num_keys) == (g, n, m)
    assert edges.num_edges == mask.sum() == edges.indptr[-1, -1]
    assert edges.indptr.dtype == torch.int64 and edges.indices.dtype == torch.int32
    assert torch.equal(EdgeList.from_mask(mask[0]).to_mask(), mask[:1])


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["one", "heads", "all"]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 999))
def test_masked_removes_edges_to_padding(graphs, batch, heads, seed):
    random = torch.Generator().manual_seed(seed)
    g = {"one": 1, "heads": heads, "all": batch * heads}[graphs]
    mask = torch.rand(g, 5, 7, generator=random) < 0.5
    key_mask = torch.rand(batch, 7, generator=random) < 0.6
    edges = EdgeList.from_mask(mask).masked(key_mask, heads)
    expected = mask.repeat(batch * heads // g, 1, 1) & key_mask.repeat_interleave(heads, 0)[:, None]
    assert torch.equal(edges.to_mask(), expected)


def test_nan_in_padding_is_harmless():
    q, k, v, edges, _, dout = case(dtype=torch.float32)
    key_mask = torch.arange(11) < torch.tensor([[8], [11]])
    real = key_mask[:, None, :, None]
    inputs = q, *(x.detach().masked_fill(~real, torch.nan).requires_grad_() for x in (k, v))
    actual = with_gradients(attention_of(edge_attention, edges.masked(key_mask, 3), False), inputs, dout)
    assert all(x.isfinite().all() for x in actual)
    zeros = q, *(x.detach().masked_fill(~real, 0.0).requires_grad_() for x in (k, v))
    assert_same(actual, with_gradients(attention_of(edge_attention, edges.masked(key_mask, 3), False), zeros, dout))


def test_copies_are_equal():
    edges = EdgeList.from_mask(torch.rand(2, 5, 6) < 0.5)
    for twin in (copy.deepcopy(edges), pickle.loads(pickle.dumps(edges)), edges.to("cpu")):
        assert torch.equal(twin.to_mask(), edges.to_mask())


# ---- inside torch ----


def test_compiles_to_one_graph():
    q, k, v, edges, gates, dout = case("heads")
    run = attention_of(edge_attention, edges, True)
    inputs = (q, k, v, *gates)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(with_gradients(compiled, inputs, dout), with_gradients(run, inputs, dout))


def test_compiles_with_padding_and_a_map():
    q, k, v, edges, _, dout = case("one")
    assert edges.buckets
    key_mask = torch.arange(11) < torch.tensor([[8], [11]])

    def run(q, k, v):
        weights = edge_map(edge_scores(q, k, edges, scale=0.3), edges, softmax, 3)
        padded = edge_attention(q, k, v, edges.masked(key_mask, 3), scale=0.3)
        return edge_sum(weights, v, edges, 3) + padded

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(with_gradients(compiled, (q, k, v), dout), with_gradients(run, (q, k, v), dout))


@pytest.mark.parametrize("operator", ["edge_scores", "edge_sum", "edge_attention", "edge_attention_backward"])
def test_operator_declarations(operator):
    q, k, v, edges, (gate, weight), dout = case(n=5)
    lists = edges.indptr, edges.indices
    arguments = {
        "edge_scores": (q, k, *lists, 0.3),
        "edge_sum": (gate, v, *lists, edges.num_keys, False),
        "edge_attention": (q, k, v, *lists, gate, weight, 0.3),
        "edge_attention_backward": (*(x.detach() for x in (dout, q, k, v, *lists, gate, weight)), 0.3),
    }[operator]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    result = torch.library.opcheck(getattr(torch.ops.subquad, operator).default, arguments, test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}


def test_uses_the_threads_of_torch(monkeypatch):
    q, k, v, edges, _, dout = case()
    seen = set()

    def watch(kernel):
        def spy(*arguments):
            seen.add(numba.get_num_threads())
            kernel(*arguments)

        return spy

    for name in ("attention_kernel", "scores_kernel", "sum_kernel", "transpose_kernel"):
        monkeypatch.setattr(edge_loops, name, watch(getattr(edge_loops, name)))
    before, limit = torch.get_num_threads(), numba.get_num_threads()
    try:
        for threads in (1, before):
            seen.clear()
            torch.set_num_threads(threads)
            with_gradients(attention_of(edge_attention, edges, False), (q, k, v), dout)
            assert seen == {min(threads, numba.config.NUMBA_NUM_THREADS)}
            assert numba.get_num_threads() == limit
    finally:
        torch.set_num_threads(before)


# ---- errors ----


def test_errors_name_the_argument():
    q, k, v, edges, (gate, _), _ = case("heads")
    lists, integers = (edges.indptr, edges.indices), gate.detach().long()

    def attend(q=q, k=k, v=v, edges=edges, **gates):
        return edge_attention(q, k, v, edges, scale=1.0, **gates)

    for error, name, call in (
        (ValueError, "q must be", lambda: attend(q=q[:, :, 1:])),
        (ValueError, "k must be", lambda: attend(k=k[:, :2])),
        (ValueError, "v must be", lambda: attend(v=v[0])),
        (ValueError, "k must have the head dimension", lambda: attend(k=k[..., 1:])),
        (TypeError, "v must be floating", lambda: attend(v=v.float())),
        (TypeError, "q must be floating", lambda: attend(q=q.detach().int())),
        (ValueError, "score_gate must be", lambda: attend(score_gate=gate[:, 1:])),
        (TypeError, "weight_gate must be floating", lambda: attend(weight_gate=integers)),
        (ValueError, "edges must have 1, H", lambda: attend(q=q[:, :2], k=k[:, :2], v=v[:, :2])),
        (ValueError, "q must be on the device", lambda: attend(edges=edges.to("meta"))),
        (ValueError, "edges.indices", lambda: attend(edges=EdgeList(lists[0], lists[1] + 5, 11))),
        (ValueError, "edges.indices", lambda: attend(edges=EdgeList(lists[0], lists[1] - 5, 11))),
        (ValueError, "edges.indptr", lambda: attend(edges=EdgeList(lists[0] + 1, lists[1], 11))),
        (ValueError, "edges.indptr", lambda: attend(edges=EdgeList(lists[0].flip(1), lists[1], 11))),
        (ValueError, "edges.indptr", lambda: attend(edges=EdgeList(lists[0].flip(0), lists[1], 11))),
        (TypeError, "indptr must be 2-D", lambda: EdgeList(lists[0][0], lists[1], 11)),
        (TypeError, "indices must be 1-D", lambda: EdgeList(lists[0], lists[1].long(), 11)),
        (ValueError, "indptr must be", lambda: EdgeList(lists[0][:0], lists[1], 11)),
        (TypeError, "mask must be", lambda: EdgeList.from_mask(torch.ones(3, 3))),
        (ValueError, "key_mask must be", lambda: edges.masked(torch.ones(2, 10).bool(), 3)),
        (ValueError, "edges must have 1, H", lambda: edges.masked(torch.ones(2, 11).bool(), 4)),
        (ValueError, "num_heads must be", lambda: edge_sum(gate, v, edges, 2)),
        (ValueError, "weights must be", lambda: edge_sum(gate[:1], v, edges, 3)),
        (ValueError, "k must be", lambda: edge_scores(q, k[:1], edges, scale=1.0)),
        (ValueError, "indptr must be on", lambda: EdgeList(lists[0].to("meta"), lists[1], 11)),
        (ValueError, "num_heads must divide", lambda: edge_map(gate, edges, softmax, 4)),
        (ValueError, "scores must be", lambda: edge_map(gate[:, 1:], edges, softmax, 3)),
    ):
        with pytest.raises(error, match=name):
            call()
