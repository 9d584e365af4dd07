"""Attention over edge lists against dense masked softmax, values and gradients."""

import copy
import pickle

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from subquad.core import hashing
from subquad.kernels import dropout as dropout_room
from subquad.kernels import gathers
from subquad.kernels.edges import (
    EdgeList,
    edge_attention,
    edge_map,
    edge_mapped_attention,
    edge_scores,
    edge_sum,
    loops,
    reference,
)
from subquad.kernels.edges.op import attention_op
from subquad.probability import probability_map

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
SEED = torch.tensor(-11)


def dense_edges(x, edges, batch, heads):
    """Numbers per edge (B·H // g, E) as a dense (B, H, n, m), 0 off the edges."""
    full = x.new_zeros(x.shape[0], edges.num_graphs * edges.num_queries, edges.num_keys)
    full[:, edges.rows, edges.indices.long()] = x
    full = full.unflatten(1, (edges.num_graphs, edges.num_queries))
    return edges.by_instance(full).unflatten(0, (batch, heads))


def dense_attention(q, k, v, edges, *, scale, key_mask=None, dropout=0.0, seed=None):
    batch, heads = q.shape[:2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    one = q.new_ones(batch * heads // edges.num_graphs, edges.num_edges)
    mask = dense_edges(one, edges, batch, heads).bool()
    if key_mask is not None:
        mask = mask & key_mask[:, None, None]
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    p = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1) * mask
    if dropout:
        numbers, columns = hashing.ranks(key_mask, batch, q.shape[2], k.shape[2], q.device)
        instance = torch.arange(batch * heads).view(batch, heads, 1, 1)
        p = p * hashing.dropout_factors(
            seed, dropout, instance, numbers[:, None, :, None], columns[:, None, None], p.dtype
        )
    return p @ v


def reference_attention(q, k, v, edges, *, scale, key_mask=None, dropout=0.0, seed=None):
    if key_mask is not None:
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (k, v))
    lists = edges.indptr, edges.indices, edges.share
    return reference.attention(q, k, v, *lists, key_mask, seed, scale, dropout)


def case(
    graphs="one",
    n=11,
    m=None,
    d=5,
    d_v=None,
    batch=2,
    heads=4,
    key_heads=None,
    density=0.4,
    dtype=torch.float64,
    seed=0,
):
    """q, k, v, edges (row 0 empty), a number per edge, and the gradient of the output."""
    m, d_v, key_heads = m or n, d_v or d, key_heads or heads
    random = torch.Generator().manual_seed(seed)
    g = {"one": 1, "heads": heads, "all": batch * heads, "batch": batch}[graphs]
    mask = torch.rand(g, n, m, generator=random) < density
    mask[:, 0] = False
    edges = EdgeList.from_mask(mask)
    if graphs == "batch":
        edges = EdgeList(edges.indptr, edges.indices, m, share=heads)
    sizes = [(batch, heads, n, d), (batch, key_heads, m, d), (batch, key_heads, m, d_v)]
    q, k, v = (torch.randn(s, generator=random, dtype=dtype).requires_grad_() for s in sizes)
    number = torch.rand(batch * heads // g, edges.num_edges, generator=random, dtype=dtype).add(0.5).requires_grad_()
    return q, k, v, edges, number, torch.randn(batch, heads, n, d_v, generator=random, dtype=dtype)


def with_gradients(function, inputs, dout):
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, dout)


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE[x.dtype], atol=TOLERANCE[x.dtype])


def attention_of(implementation, edges, **options):
    return lambda q, k, v: implementation(q, k, v, edges, scale=0.3, **options)


KEY_MASK = torch.rand(2, 53, generator=torch.Generator().manual_seed(5)) < 0.7
GRAPHS = ["one", "heads", "all", "batch"]


# ---- attention ----


@pytest.mark.parametrize("implementation", [edge_attention, reference_attention])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"key_mask": KEY_MASK}, {"dropout": 0.4, "seed": SEED}], ids=lambda x: str([*x])
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_equals_dense_softmax(graphs, key_heads, options, dtype, implementation):
    q, k, v, edges, _, dout = case(graphs, n=37, m=53, d=9, d_v=7, dtype=dtype, key_heads=key_heads)
    actual = with_gradients(attention_of(implementation, edges, **options), (q, k, v), dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges, **options), (q, k, v), dout))
    assert not actual[0][:, :, 0].any() and not actual[1][:, :, 0].any()  # the empty row: output and gradient 0


@pytest.mark.parametrize("graphs", GRAPHS)
def test_the_backward_of_the_reference_is_that_of_autograd(graphs):
    q, k, v, edges, _, dout = case(graphs, m=13, key_heads=2)
    key_mask = KEY_MASK[:, :13]
    tensors = [
        x.detach()
        for x in (q, k.masked_fill(~key_mask[:, None, :, None], 0), v.masked_fill(~key_mask[:, None, :, None], 0))
    ]
    settings = (edges.indptr, edges.indices, edges.share, key_mask, SEED, 0.3, 0.4)
    actual = reference.attention_backward(dout, *tensors, *settings)
    leaves = [x.requires_grad_() for x in tensors]
    assert_same(actual, torch.autograd.grad(reference.attention(*leaves, *settings), leaves, dout))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(GRAPHS),
    st.integers(1, 70),
    st.integers(1, 140),
    st.integers(1, 17),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_any_size(graphs, n, m, d, density, seed):
    q, k, v, edges, _, dout = case(graphs, n, m, d, density=density, batch=2, heads=2, key_heads=1, seed=seed)
    options = {"key_mask": torch.rand(2, m, generator=torch.Generator().manual_seed(seed)) < 0.8}
    options.update(dropout=0.2, seed=torch.tensor(seed))
    actual = with_gradients(attention_of(edge_attention, edges, **options), (q, k, v), dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges, **options), (q, k, v), dout))


def test_rows_longer_than_a_part():
    q, k, v, edges, _, dout = case(n=130, m=700, d=64, density=0.7, batch=1, heads=1, dtype=torch.float32)
    actual = with_gradients(attention_of(edge_attention, edges), (q, k, v), dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges), (q, k, v), dout))


def test_non_contiguous_inputs():
    q, k, v, edges, _, dout = case("heads")
    inputs = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in inputs)
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    actual = with_gradients(attention_of(edge_attention, edges), inputs, dout)
    assert_same(actual, with_gradients(attention_of(dense_attention, edges), inputs, dout))


@pytest.mark.parametrize("wanted", range(3))
def test_gradient_of_only_one_input(wanted):
    q, k, v, edges, _, dout = case()
    inputs = [x.detach().requires_grad_(i == wanted) for i, x in enumerate((q, k, v))]
    grads = [
        torch.autograd.grad(attention_of(f, edges)(*inputs), inputs[wanted], dout)
        for f in (edge_attention, dense_attention)
    ]
    assert_same(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_inside(dtype):
    q, k, v, edges, _, dout = case(dtype=torch.float32)
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    actual = with_gradients(attention_of(edge_attention, edges), inputs, dout.to(dtype))
    wide = [x.detach().float().requires_grad_() for x in inputs]
    expected = with_gradients(attention_of(edge_attention, edges), wide, dout.to(dtype).float())
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == dtype and torch.equal(x, y.to(dtype))


@pytest.mark.parametrize("implementation", [edge_attention, reference_attention])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_logits_stay_finite(dtype, implementation):
    q, k, v, edges, _, dout = case(dtype=dtype)
    big = (q.detach() * 1e2).requires_grad_(), (k.detach() * 1e3).requires_grad_(), v
    assert (edge_scores(big[0], big[1], edges, scale=0.3).abs() > 1e4).any()
    actual = with_gradients(attention_of(implementation, edges), big, dout)
    assert all(x.isfinite().all() for x in actual)
    expected = with_gradients(attention_of(dense_attention, edges), big, dout)
    torch.testing.assert_close(actual[0], expected[0], rtol=0.0, atol=0.05 if dtype == torch.float32 else 1e-8)


@pytest.mark.parametrize("implementation", [edge_attention, reference_attention])
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
    q, k, v, edges, _, _ = case(graphs, n=3, m=4, d=2, d_v=1, batch=1, heads=2, key_heads=1)
    assert gradcheck(attention_of(edge_attention, edges, dropout=0.3, seed=SEED), (q, k, v))


def test_second_derivative_is_refused():
    q, k, v, edges, _, _ = case()
    out = edge_attention(q, k, v, edges, scale=0.3)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


def test_no_edges_at_all():
    q, k, v, edges, _, dout = case(density=0.0)
    assert edges.num_edges == 0
    for x in with_gradients(attention_of(edge_attention, edges), (q, k, v), dout):
        assert not x.any()
    scores = edge_scores(q, k, edges, scale=1.0)
    assert scores.shape == (8, 0) and edge_map(scores, edges, softmax, 4).shape == (8, 0)


# ---- scores, sums and maps ----


def softmax(scores, mask):
    return scores.masked_fill(~mask, -1e30).softmax(-1)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_scores_map_and_sum_make_attention(graphs):
    q, k, v, edges, _, dout = case(graphs, n=37, m=53, key_heads=2)

    def composed(q, k, v):
        weights = edge_map(edge_scores(q, k, edges, scale=0.3), edges, softmax, 4)
        return edge_sum(weights, v, edges, 4)

    actual = with_gradients(composed, (q, k, v), dout)
    assert_same(actual, with_gradients(attention_of(edge_attention, edges), (q, k, v), dout))
    options = {"key_mask": KEY_MASK, "dropout": 0.4, "seed": SEED}
    mapped = with_gradients(
        lambda q, k, v: edge_mapped_attention(q, k, v, edges, probability_map("softmax"), scale=0.3, **options),
        (q, k, v),
        dout,
    )
    assert_same(mapped, with_gradients(attention_of(edge_attention, edges, **options), (q, k, v), dout))


@pytest.mark.parametrize("graphs", GRAPHS)
def test_map_sees_heads_in_dimension_1(graphs):
    *_, edges, gate, _ = case(graphs, n=19, m=40)
    factor = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=gate.dtype).view(1, 4, 1, 1)
    shapes = []

    def scaled(scores, mask):
        shapes.append((*scores.shape, mask.shape == scores.shape, bool(mask.any(-1).all())))
        return scores * factor

    actual = edge_map(gate, edges, scaled, 4)
    expected = dense_edges(gate, edges, 2, 4) * factor
    assert_same([dense_edges(actual, edges, 2, 4)], [expected])
    assert all(s[:2] == (2, 4) and s[4] and s[5] for s in shapes)
    if graphs == "one":
        assert sum(s[2] * s[3] for s in shapes) < 2 * edges.num_edges


@pytest.mark.parametrize("graphs", GRAPHS)
def test_map_without_some_edges(graphs):
    *_, edges, gate, _ = case(graphs, n=19, m=40)
    allowed = torch.rand(gate.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    weights = edge_map(gate, edges, softmax, 4, allowed=allowed, buckets=edges.buckets)
    mask = dense_edges(allowed.to(gate.dtype), edges, 2, 4).bool()
    expected = dense_edges(gate, edges, 2, 4).masked_fill(~mask, -torch.inf).softmax(-1)
    some = mask.any(-1, keepdim=True)  # what a map makes of a row with nothing left is its own affair
    assert_same([dense_edges(weights, edges, 2, 4) * some], [expected.masked_fill(~some, 0.0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_and_sum_keep_the_dtype(dtype):
    q, k, v, edges, gate, _ = case(dtype=torch.float32)
    assert edge_scores(q.to(dtype), k.to(dtype), edges, scale=1.0).dtype == dtype
    assert edge_sum(gate, v.to(dtype), edges, 4).dtype == dtype


@pytest.mark.parametrize("graphs", ["one", "heads"])
def test_scores_and_sum_differentiate_twice(graphs):
    q, k, v, edges, gate, _ = case(graphs, n=4, m=5, d=2, heads=2, batch=1)
    for function, inputs in (
        (lambda q, k: edge_scores(q, k, edges, scale=0.3), (q, k)),
        (lambda w, v: edge_sum(w, v, edges, 2), (gate, v)),
    ):
        assert gradcheck(function, inputs, fast_mode=True)
        assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_scores_and_sums_of_the_reference(graphs):
    q, k, v, edges, gate, dout = case(graphs, m=13, key_heads=2)
    lists = edges.indptr, edges.indices, edges.share
    pairs = (
        (lambda q, k: edge_scores(q, k, edges, scale=0.3), (q, k), gate.detach()),
        (lambda q, k: reference.scores(q, k, *lists, 0.3), (q, k), gate.detach()),
        (lambda w, v: edge_sum(w, v, edges, 4), (gate, v), dout),
        (lambda w, v: reference.sums(w, v, *lists, 4, 13, False), (gate, v), dout),
    )
    scores, plain_scores, sums, plain_sums = (with_gradients(*p) for p in pairs)
    assert_same(scores, plain_scores)
    assert_same(sums, plain_sums)


# ---- dropout and padding ----


def test_numba_and_torch_count_the_same_numbers():
    rows, columns = torch.arange(40), torch.tensor([0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1])
    state = hashing.streams(SEED, torch.tensor(3), rows)
    found = hashing.chances(state[:, None], columns)
    for i in range(40):
        expected = np.uint64(hashing.stream(np.uint64(int(SEED) % 2**64), 3, i))
        assert int(state[i]) % 2**64 == expected
        a, b = map(np.uint32, hashing.halves(expected))
        assert found[i].tolist() == [hashing.chance(a, b, j) for j in columns.tolist()]
    assert int(hashing.mix(np.uint64(int(SEED) % 2**64))) == int(hashing._mix(SEED)) % 2**64


def test_dropout_drops_the_share_it_should_and_pairs_independently():
    edges, seeds = EdgeList.from_mask(torch.ones(40, 50, dtype=torch.bool)), range(60)
    kept = torch.stack(
        [reference.edge_dropout(edges, torch.tensor(s), 0.3, None, (1, 1), torch.float64)[0] > 0 for s in seeds]
    ).double()
    assert abs(kept.mean() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    unit = (kept - 0.7) / 0.21**0.5
    for one, two in ((unit[:-1], unit[1:]), (unit[:, :-1], unit[:, 1:]), (unit[:, :-50], unit[:, 50:])):
        assert abs((one * two).mean()) < 5 / one.numel() ** 0.5
    blocks = dropout_room.dropout_blocks(hashing.streams(SEED, torch.zeros(3, 1, dtype=torch.int64), torch.arange(4)),
                                         torch.arange(33).expand(3, 33), 0.3)  # fmt: skip
    twin = hashing.chances(hashing.streams(SEED, torch.tensor(0), torch.arange(4))[:, None], torch.arange(33)) < 0.3
    assert torch.equal(blocks[1], twin) and 0 < twin.sum() < twin.numel()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batching_move_no_dropout(side):
    """A row of 9 tokens alone, and padded to 14 in a batch: the same edges are dropped."""
    q, k, v, edges, _, _ = case("one", n=9)
    alone = edge_attention(q[:1], k[:1], v[:1], edges, scale=0.3, dropout=0.5, seed=SEED)
    first = 5 if side == "left" else 0
    wide = [torch.nn.functional.pad(x, (0, 0, first, 5 - first), value=torch.nan) for x in (q, k, v)]
    mask = torch.nn.functional.pad(edges.to_mask(), (first, 5 - first, first, 5 - first), value=True)
    real = torch.zeros(2, 14, dtype=torch.bool)
    real[:, first : first + 9] = True
    options = {"key_mask": real, "dropout": 0.5, "seed": SEED}
    padded = edge_attention(*wide, EdgeList.from_mask(mask), scale=0.3, **options)[:, :, first : first + 9]
    assert_same([padded[:1]], [alone])
    assert not torch.allclose(padded[1:], edge_attention(q[1:], k[1:], v[1:], edges, scale=0.3))


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


@pytest.mark.parametrize("per_head", [False, True])
def test_lists_of_different_lengths_are_stacked(per_head):
    """A graph per batch element, of its own length: each row as if it were alone."""
    random = torch.Generator().manual_seed(0)
    lengths, graphs = (5, 9, 1), 4 if per_head else 1
    masks = [torch.rand(graphs, n, n, generator=random) < 0.5 for n in lengths]
    lists = [EdgeList.from_mask(mask) for mask in masks]
    stacked = EdgeList.stack(lists, 4)
    assert stacked.num_queries == stacked.num_keys == 9 and stacked.num_graphs == 3 * graphs
    q, k, v = torch.randn(3, 3, 4, 9, 5, generator=random, dtype=torch.float64)
    out = edge_attention(q, k, v, stacked, scale=0.3)
    for b, (n, edges) in enumerate(zip(lengths, lists, strict=True)):
        alone = edge_attention(*(x[b : b + 1, :, :n] for x in (q, k, v)), edges, scale=0.3)
        assert_same([out[b : b + 1, :, :n]], [alone])
        assert not out[b, :, n:].any()
    with pytest.raises(ValueError, match="lists must all have 1 graph or all have 4"):
        EdgeList.stack([lists[0], EdgeList.from_mask(torch.ones(2, 3, 3, dtype=torch.bool))], 4)
    with pytest.raises(ValueError, match="lists must have an EdgeList"):
        EdgeList.stack([], 4)


def test_nan_in_padding_is_harmless():
    q, k, v, edges, _, dout = case(dtype=torch.float32)
    key_mask = torch.arange(11) < torch.tensor([[8], [11]])
    real = key_mask[:, None, :, None]
    run = attention_of(edge_attention, edges, key_mask=key_mask)
    inputs = q, *(x.detach().masked_fill(~real, torch.nan).requires_grad_() for x in (k, v))
    actual = with_gradients(run, inputs, dout)
    assert all(x.isfinite().all() for x in actual)
    zeros = q, *(x.detach().masked_fill(~real, 0.0).requires_grad_() for x in (k, v))
    assert_same(actual, with_gradients(run, zeros, dout))


def test_copies_are_equal():
    edges = EdgeList.from_mask(torch.rand(2, 5, 6) < 0.5)
    for twin in (copy.deepcopy(edges), pickle.loads(pickle.dumps(edges)), edges.to("cpu")):
        assert torch.equal(twin.to_mask(), edges.to_mask())


# ---- inside torch ----


def test_compiles_with_padding_dropout_and_a_map():
    q, k, v, edges, _, dout = case("one", key_heads=2)
    assert edges.buckets
    options = {"key_mask": torch.arange(11) < torch.tensor([[8], [11]]), "dropout": 0.3, "seed": SEED}

    def run(q, k, v):
        mapped = edge_mapped_attention(q, k, v, edges, softmax, scale=0.3, **options)
        return mapped + 2 * edge_attention(q, k, v, edges, scale=0.3, **options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(with_gradients(compiled, (q, k, v), dout), with_gradients(run, (q, k, v), dout))


@pytest.mark.parametrize(
    "operator", ["edge_scores", "edge_sum", "edge_attention", "edge_attention_backward", "dropout_blocks"]
)
def test_operator_declarations(operator):
    q, k, v, edges, number, dout = case(n=5, key_heads=2)
    lists = edges.indptr, edges.indices, edges.share
    random = (torch.ones(2, 5, dtype=torch.bool), SEED, 0.3, 0.4)
    arguments = {
        "edge_scores": (q, k, *lists, 0.3),
        "edge_sum": (number, v, *lists, 4, edges.num_keys, False),
        "edge_attention": (q, k, v, *lists, *random),
        "edge_attention_backward": (*(x.detach() for x in (dout, q, k, v)), *lists, *random),
        "dropout_blocks": (torch.arange(6).view(2, 3), torch.arange(8).view(2, 4), 0.5),
    }[operator]
    result = torch.library.opcheck(getattr(torch.ops.subquad, operator).default, arguments)
    assert len(result) == 4 and set(result.values()) == {"SUCCESS"}


def test_another_device_gets_the_reference():
    """What torch.library picks where there is no kernel: shapes on meta tensors, values by the reference above."""
    q, k, v, edges, _, _ = case()
    out = attention_op(
        *(x.detach().to("meta") for x in (q, k, v, edges.indptr, edges.indices)), 1, None, None, 0.3, 0.0
    )
    assert out.is_meta and out.shape == q.shape


def test_uses_the_threads_of_torch(monkeypatch):
    q, k, v, edges, _, dout = case()
    seen = set()

    def watch(kernel):
        def spy(*arguments):
            seen.add(numba.get_num_threads())
            kernel(*arguments)

        return spy

    for name in ("attention_kernel", "scores_kernel", "sum_kernel", "transpose_kernel"):
        monkeypatch.setattr(loops, name, watch(getattr(loops, name)))
    before, limit = torch.get_num_threads(), numba.get_num_threads()
    try:
        for threads in (1, before):
            seen.clear()
            torch.set_num_threads(threads)
            with_gradients(attention_of(edge_attention, edges), (q, k, v), dout)
            assert seen == {min(threads, numba.config.NUMBA_NUM_THREADS)}
            assert numba.get_num_threads() == limit
    finally:
        torch.set_num_threads(before)


# ---- errors ----


def test_errors_name_the_argument():
    q, k, v, edges, gate, _ = case("heads")
    lists = edges.indptr, edges.indices

    def attend(q=q, k=k, v=v, edges=edges, **options):
        return edge_attention(q, k, v, edges, scale=1.0, **options)

    for error, name, call in (
        (ValueError, "q must be", lambda: attend(q=q[:, :, 1:])),
        (ValueError, "k must be", lambda: attend(k=k[:, :3])),
        (ValueError, "v must be", lambda: attend(v=v[:, :2])),
        (ValueError, "v must be", lambda: attend(v=v[0])),
        (ValueError, "k must have the head dimension", lambda: attend(k=k[..., 1:])),
        (TypeError, "v must be floating", lambda: attend(v=v.float())),
        (TypeError, "q must be floating", lambda: attend(q=q.detach().int())),
        (ValueError, "edges must have 1, H", lambda: attend(q=q[:, :1], k=k[:, :1], v=v[:, :1])),
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
        (ValueError, "key_mask must be", lambda: attend(key_mask=torch.ones(2, 10).bool())),
        (ValueError, "key_mask must be", lambda: attend(key_mask=torch.ones(2, 11))),
        (TypeError, "seed must be", lambda: attend(dropout=0.5)),
        (ValueError, "dropout must be", lambda: attend(dropout=1.0, seed=SEED)),
        (ValueError, "num_heads must be", lambda: edge_sum(gate, v, edges, 2)),
        (ValueError, "weights must be", lambda: edge_sum(gate[:1], v, edges, 4)),
        (ValueError, "k must be", lambda: edge_scores(q, k[:1], edges, scale=1.0)),
        (ValueError, "indptr must be on", lambda: EdgeList(lists[0].to("meta"), lists[1], 11)),
        (ValueError, "num_heads must divide", lambda: edge_map(gate, edges, softmax, 3)),
        (ValueError, "scores must be", lambda: edge_map(gate[:, 1:], edges, softmax, 4)),
    ):
        with pytest.raises(error, match=name):
            call()


@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.float32), (72, torch.float32), (60, torch.float64), (7, torch.float32)]
)
def test_rows_that_do_not_fit_the_cache_are_fetched_ahead(d, dtype):
    """Arrays on both sides of `gathers.CACHE`, whole and odd numbers of vectors, lists that end with the memory."""
    draw = torch.Generator().manual_seed(1)
    for m in (20, gathers.CACHE // (d * dtype.itemsize) + 9):
        edges = EdgeList.from_mask(torch.rand(1, 30, m, generator=draw) < 40 / m)
        q, k, v = (torch.randn(1, 2, n, d, generator=draw, dtype=dtype, requires_grad=True) for n in (30, m, m))
        out, wanted = edge_attention(q, k, v, edges, scale=0.2), dense_attention(q, k, v, edges, scale=0.2)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        direction = torch.randn(out.shape, generator=draw, dtype=dtype)
        for x, y in zip(*(torch.autograd.grad(o, (q, k, v), direction) for o in (out, wanted)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
