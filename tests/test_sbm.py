"""SBM attention: samplers, gradients of eq. 9, options, density, and the study of repeated tokens."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import subquad
from subquad.attention import sbm
from subquad.attention.base import Call
from subquad.kernels.edges import EdgeList
from subquad.kernels.graphs import cpu as graph_cpu
from subquad.kernels.graphs import graph_attention
from subquad.kernels.graphs import memberships as nodes
from subquad.kernels.graphs import reference as graph_reference
from subquad.kernels.masks import pack_mask, unpack_mask
from subquad.kernels.sampler import Rules, pinned_reach, rules, sample, sample_edges, statistics
from subquad.kernels.sampler import reference as plain_sampler
from subquad.studies import repeated_tokens, sbm_cost, sbm_pictures


def model(n=5, m=6, k=3, top=1.0, seed=0):
    """Memberships and block matrix with probabilities up to about `top`: y (n, k), block (k, k), z (m, k)."""
    draw = torch.Generator().manual_seed(seed)
    y, z = torch.rand(n, k, generator=draw), torch.rand(m, k, generator=draw)
    return top * y, torch.softmax(torch.randn(k * k, generator=draw), 0).view(k, k), z


def draw_many(count, y, block, z, **options):
    """`count` independent graphs, (count, n, m) bool."""
    y, z = (x.expand(count, 1, *x.shape) for x in (y, z))
    return sample_edges(y, block[None], z, seed=torch.tensor(7), **options)[0].to_mask()


def draw_torch(count, y, block, z, **options):
    """The same by the path of other devices."""
    asked = Rules(**options)
    w, z = ((y @ block).expand(count, 1, *y.shape), z.expand(count, 1, *z.shape))
    settings = (asked.sampler, asked.causal, asked.exploration, asked.reach, 2.0, False)
    indptr, indices, *_ = plain_sampler.sample(w, z, torch.tensor(7), None, *settings)
    return EdgeList(indptr, indices, z.shape[2]).to_mask()


def check_moments(masks, p):
    """Every frequency within 5 standard errors of p, no two edges correlated."""
    count = len(masks)
    x = masks.flatten(1).double()
    p = p.flatten().double()
    error = (p * (1 - p) / count).sqrt() + 1e-12
    assert ((x.mean(0) - p).abs() / error).max() < 5
    varied = (p > 0) & (p < 1)
    unit = ((x - p) / (p * (1 - p)).sqrt())[:, varied]
    correlation = (unit.mT @ unit / count).fill_diagonal_(0) * math.sqrt(count)
    assert correlation.abs().max() < 5.5  # 435 pairs: 5 is passed by chance now and then


@pytest.mark.parametrize("switch", [0.0, 100.0], ids=["looked-at", "thinned"])
@pytest.mark.parametrize("sampler", ["exact", "fastrg", "bernoulli"])
@pytest.mark.parametrize("top", [0.1, 1.0])
def test_every_edge_has_its_probability_and_no_two_are_correlated(monkeypatch, sampler, top, switch):
    monkeypatch.setattr(rules, "SWITCH", switch)
    y, block, z = model(top=top)
    p = y @ block @ z.mT
    p = -torch.expm1(-p) if sampler == "fastrg" else p
    check_moments(draw_many(20_000, y, block, z, sampler=sampler), p)


@pytest.mark.parametrize("sampler", ["exact", "fastrg", "bernoulli"])
def test_other_devices_draw_the_same_distribution(monkeypatch, sampler):
    monkeypatch.setattr(rules, "SWITCH", 100.0)
    y, block, z = model()
    p = y @ block @ z.mT
    p = -torch.expm1(-p) if sampler == "fastrg" else p
    check_moments(draw_torch(20_000, y, block, z, sampler=sampler), p)
    p = torch.maximum((p + 0.2 * (1 - p)), (torch.arange(5)[:, None] == torch.arange(6)).float()).tril()
    masks = draw_torch(20_000, y, block, z, sampler=sampler, exploration=0.2, reach=0, causal=True)
    check_moments(masks, p)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"exploration": 0.01}, {"self_loops": True}], ids=str)
def test_jumps_by_a_bound_give_every_edge_its_probability(monkeypatch, options, causal):
    """Rows that are thin and nearly even, by jumps: no search tables, as many points as keys are met."""
    monkeypatch.setattr(rules, "LOOSE", 1e9)
    y, block, z = model(6, 6, top=0.1)
    p = y @ block @ z.mT
    p = p + options.get("exploration", 0.0) * (1 - p)
    p = p.masked_fill(torch.eye(6, dtype=torch.bool), 1) if options.get("self_loops") else p
    assert p.masked_fill(p == 1, 0).max() < rules.THIN * 1.5
    monkeypatch.setattr(rules, "THIN", 1.0)
    check_moments(draw_many(40_000, y, block, z, causal=causal, **options), p.tril() if causal else p)


def fastrg(y, block, z, generator):
    """Algorithm 1 as printed, for g graphs at once: y (g, n, k), block (g, k, k), z (g, m, k); D are the column sums.

    Graph, source and destination of every edge, duplicates not yet merged.
    """
    k = block.shape[-1]
    d_y, d_z = y.sum(1), z.sum(1)  # (g, k): line 1; the normalisation of line 2 is in `pick`
    rates = d_y[:, :, None] * block * d_z[:, None, :]  # (g, k, k): line 3
    m = torch.poisson(rates.double().sum((1, 2)), generator).long()  # (g,): line 4
    graph = torch.arange(len(y)).repeat_interleave(m)  # (E,)
    pair = pick(rates.flatten(1), graph, generator)  # line 7
    source = pick(y.mT.flatten(0, 1), graph * k + pair // k, generator)  # line 8
    destination = pick(z.mT.flatten(0, 1), graph * k + pair % k, generator)  # line 9
    return graph, source, destination


def pick(weights, rows, generator):
    """For each entry of `rows` (E,) an index drawn in proportion to that row of weights (r, c)."""
    return torch.multinomial(weights.double()[rows], 1, generator=generator)[:, 0]


def test_algorithm_1_counts_and_merges():
    y, block, z = model()
    graph, source, target = fastrg(*(x.expand(4000, *x.shape) for x in (y, block, z)), torch.Generator().manual_seed(0))
    counts = torch.bincount((graph * 5 + source) * 6 + target, minlength=4000 * 30).view(4000, 5, 6).double()
    p = (y @ block @ z.mT).double()
    assert ((counts.mean(0) - p).abs() / (p / 4000).sqrt()).max() < 5  # Poisson(p): mean and variance are p
    assert ((counts.var(0) - p).abs() / (p * (1 + 2 * p) / 4000).sqrt()).max() < 6


def test_exploration_window_self_loops_and_causality_in_the_moments(monkeypatch):
    y, block, z = model(6, 6)
    p = y @ block @ z.mT
    explored = p + 0.2 * (1 - p)
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    for switch in (0.0, 100.0):
        monkeypatch.setattr(rules, "SWITCH", switch)
        check_moments(draw_many(20_000, y, block, z, exploration=0.2), explored)
        loops = draw_many(20_000, y, block, z, self_loops=True, causal=True)
        check_moments(loops, p.masked_fill(near == 0, 1).tril())
        check_moments(draw_many(20_000, y, block, z, window=2), p.masked_fill(near <= 1, 1))


@pytest.mark.parametrize("sampler", ["exact", "fastrg", "bernoulli"])
def test_degenerate_inputs(sampler):
    def degrees(y, block, z, **options):
        edges, _ = sample_edges(y, block, z, sampler=sampler, seed=torch.tensor(0), **options)
        assert (edges.indices >= 0).all() and (edges.indices < z.shape[2]).all()
        return edges.degrees

    one = torch.ones(1, 1, 1)
    assert degrees(torch.zeros(2, 1, 9, 1), one, torch.ones(2, 1, 9, 1)).sum() == 0  # p = 0
    sure = degrees(torch.ones(1, 1, 300, 1), one, torch.ones(1, 1, 300, 1))  # p = 1
    assert (sure == 300).all() if sampler != "fastrg" else abs(sure.double().mean() / 300 - 1 + math.exp(-1)) < 0.01
    near_one = degrees(torch.full((1, 1, 300, 1), 0.999), one, torch.ones(1, 1, 300, 1))
    assert near_one.double().mean() > (298 if sampler != "fastrg" else 180)
    assert degrees(torch.ones(3, 1, 1, 1) * 0.5, one, torch.ones(3, 1, 1, 1)).shape == (3, 1)  # n = 1
    nobody = torch.zeros(2, 9, dtype=torch.bool)
    everything = {"key_mask": nobody, "exploration": 0.5, "window": 4}
    assert degrees(torch.ones(2, 1, 9, 1), one, torch.ones(2, 1, 9, 1), **everything).sum() == 0
    half = torch.zeros(1, 1, 300, 1)
    half[:, :, ::2] = 0.02
    rows = degrees(half, one, torch.ones(1, 1, 300, 1))[0]
    assert rows[1::2].sum() == 0 and rows[::2].sum() > 0


@given(
    st.integers(1, 70),
    st.sampled_from(["exact", "fastrg", "bernoulli"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
    st.integers(-1, 3),
    st.integers(0, 10_000),
)
def test_lists_are_sorted_and_equal_the_mask_of_the_same_seed(n, sampler, causal, exploration, reach, seed):
    draw = torch.Generator().manual_seed(seed)
    w, z = torch.rand(2, 2, n, 3, generator=draw), torch.rand(2, 2, n, 3, generator=draw)
    w = w * torch.rand(2, 2, n, 1, generator=draw) ** 4 / 3  # some rows are thinned, some looked at
    real = torch.rand(2, n, generator=draw) < 0.8
    settings = (sampler, causal, exploration, reach)
    listed = sample(w, z, torch.tensor(seed), real, Rules(*settings, 2.0))
    masked = sample(w, z, torch.tensor(seed), real, Rules(*settings, -1.0))
    edges = EdgeList(listed.indptr, listed.indices, n)
    mask = unpack_mask(masked.mask, (4, n, n))
    assert torch.equal(edges.to_mask(), mask) and listed.mask.numel() == masked.indices.numel() == 0
    assert torch.equal(listed.degrees, masked.degrees) and torch.equal(edges.degrees, mask.sum(-1))
    assert torch.equal(edges.degrees, listed.degrees) and masked.indptr[-1, -1] == 0
    inside = torch.ones(edges.num_edges, dtype=torch.bool)
    inside[edges.indptr[:, :-1].flatten()[edges.degrees.flatten() > 0]] = False  # not the first of a row
    assert (edges.indices.diff() > 0)[inside[1:]].all() if edges.num_edges > 1 else True
    assert not mask[~real.repeat_interleave(2, 0)[:, None].expand_as(mask)].any()
    assert not causal or not mask.triu(1).any()
    assert torch.equal(unpack_mask(pack_mask(mask), mask.shape), mask)


def test_later_tokens_and_padding_do_not_move_the_random_numbers():
    draw = torch.Generator().manual_seed(0)
    w, z = torch.rand(1, 1, 40, 3, generator=draw) / 20, torch.rand(1, 1, 40, 3, generator=draw)
    seed, asked = torch.tensor(3), Rules("exact", True, 0.05, -1, -1.0)
    mask = unpack_mask(sample(w, z, seed, None, asked).mask, (40, 40))
    w2, z2 = w.clone(), z.clone()
    w2[:, :, 30:], z2[:, :, 30:] = 0.9, 0.9
    assert torch.equal(unpack_mask(sample(w2, z2, seed, None, asked).mask, (40, 40))[:30], mask[:30])
    real = torch.ones(1, 47, dtype=torch.bool)
    real[:, [0, 1, 5, 20, 21, 46, 33]] = False
    w3, z3 = torch.rand(2, 1, 1, 47, 3, generator=draw)
    w3[:, :, real[0]], z3[:, :, real[0]] = w, z
    padded = unpack_mask(sample(w3, z3, seed, real, asked).mask, (47, 47))
    assert torch.equal(padded[real[0]][:, real[0]], mask)


# ---- the mechanism --------------------------------------------------------------------------------------------------


def make(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return subquad.attention("sbm", num_heads=2, head_dim=8, **{"clusters": 5, **options}).to(dtype)


def inputs(n, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, n, 8, generator=draw, dtype=dtype).requires_grad_() for _ in range(3)]


def reference(a, q, k, v, mask):
    """Equations 3-7 and 9, in plain autograd on a given mask."""

    def member(x, h):
        hidden = torch.relu(x @ a.mlp["weight1"][h] + a.mlp["bias1"][h])
        return torch.sigmoid((hidden @ a.mlp["weight2"][h] + a.mlp["bias2"][h]) @ a.clusters[h].mT)

    heads = []
    for h in range(2):
        c = a.clusters[h]
        block = (c @ c.mT).exp() / (c @ c.mT).exp().sum()
        p = member(q[:, h], h) @ block @ member(k[:, h], h).mT
        if a.options.window or a.options.self_loops:
            place, half = torch.arange(len(p[0])), (a.options.window or 0) // 2
            p = p * ((place[:, None] - place).abs() > half)  # pinned edges do not come from p
        through = mask[:, h].double() * (1 + p - p.detach())  # the mask by value, p by gradient
        scores = q[:, h] @ k[:, h].mT / math.sqrt(8)
        scores = scores * through if a.options.ste == "pre" else scores
        e = scores.exp() * mask[:, h]
        weights = e / e.sum(-1, keepdim=True).clamp_min(1e-300)
        if a.options.ste == "published":  # as the authors wrote it: full softmax, times the mask, normalised again
            weights = scores.softmax(-1) * Clipped.apply(through)
            weights = weights / weights.sum(-1, keepdim=True).masked_fill(~mask[:, h].any(-1, keepdim=True), 1)
        heads.append(weights @ v[:, h])
    return torch.stack(heads, 1)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


SEED = torch.tensor(5)


@pytest.mark.parametrize("path", ["edges", "dense"])
@pytest.mark.parametrize(
    "options",
    [{}, {"ste": "published", "self_loops": True}, {"causal": True, "window": 5}, {"sampler": "fastrg"}],
    ids=str,
)
def test_values_and_gradients_of_eq_9(monkeypatch, path, options):
    monkeypatch.setattr(sbm, "CROSSOVER", -1.0 if path == "dense" else 2.0)
    a, xs = make(**options), inputs(37)
    real = torch.rand(2, 37, generator=torch.Generator().manual_seed(2)) < 0.8
    out, record = a.observe(*xs, key_mask=real, seed=SEED)
    assert record.path == path and torch.equal(out, a(*xs, key_mask=real, seed=SEED))
    mask = a.graph(*xs[:2], real, SEED)
    assert not mask[~real[:, None, None].expand_as(mask)].any()
    clean = [x.masked_fill(~real[:, None, :, None], 0) if i else x for i, x in enumerate(xs)]
    expected = reference(a, *clean, mask)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    targets, direction = [*xs, *a.parameters()], 5 * torch.randn(out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, targets, direction)
    for x, y in zip(got, torch.autograd.grad(expected, targets, direction), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
        assert x.abs().max() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_the_difference_is_what_an_edge_is_worth(causal):
    """ste=difference against its words: the output with an edge minus the output without it, pair by pair."""
    a, xs = make(ste="difference", causal=causal, exploration=0.0), inputs(9)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 5:] = False
    (out, record), mask = a.observe(*xs, key_mask=real, seed=SEED), a.graph(*xs[:2], real, SEED)
    assert record.path == "dense" and (mask.sum(-1) == 0).any() and (mask.sum(-1) == 1).any()
    direction = torch.randn(out.shape, dtype=out.dtype)
    q, k, v = (x.detach() for x in xs)
    e = (q @ k.mT / math.sqrt(8)).exp()

    def attend(m):
        return (e * m) @ v / (e * m).sum(-1, keepdim=True).clamp_min(1e-300)

    worth = torch.zeros(2, 2, 9, 9, dtype=torch.float64)
    for i in range(9):
        for j in range(i + 1 if causal else 9):
            m = mask.double()
            m[..., i, j] = 1
            there = attend(m)
            m[..., i, j] = 0
            worth[..., i, j] = ((there - attend(m))[:, :, i] * direction[:, :, i]).sum(-1) * real[:, None, j]
    clean = xs[1].masked_fill(~real[:, None, :, None], 0)
    w, z = a.memberships(xs[0], clean)
    expected = torch.autograd.grad((w @ z.mT * worth).sum(), list(a.parameters()))
    for x, y in zip(torch.autograd.grad(out, list(a.parameters()), direction), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("path", ["edges", "dense"])
@pytest.mark.parametrize("ste", ["pre", "published", "difference"])
def test_kernels_equal_the_reference_with_dropout(monkeypatch, path, ste):
    monkeypatch.setattr(graph_cpu, "GROUP", 200)  # a group of two graphs, and two groups of one
    q, k, v = (x.detach() for x in inputs(19))
    draw = torch.Generator().manual_seed(3)
    w, z = (torch.rand(2, 2, 19, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    real = torch.arange(19) < torch.tensor([19, 14])[:, None]
    drawn = sample(w / 3, z, torch.tensor(1), real, Rules(crossover=-1.0 if path == "dense" else 2.0))
    graphs = (drawn.indptr, drawn.indices, drawn.mask, real, SEED)
    settings = (0.4, 0.3, ste, False, 2)
    out = graph_cpu.attention(q, k, v, w, z, *graphs, *settings)
    torch.testing.assert_close(out, graph_reference.attention(q, k, v, w, z, *graphs, *settings))
    assert not torch.allclose(out, graph_reference.attention(q, k, v, w, z, *graphs, 0.4, 0.0, ste, False, 2))
    direction = 5 * torch.randn(out.shape, generator=draw, dtype=out.dtype)
    rooms = (graph_cpu, graph_reference)
    if (path, ste) == ("edges", "difference"):
        for room in rooms:
            with pytest.raises(NotImplementedError, match="its rows must come as a mask"):
                room.attention_backward(direction, q, k, v, w, z, *graphs, *settings, True)
        return
    grads = [room.attention_backward(direction, q, k, v, w, z, *graphs, *settings, True) for room in rooms]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)
        assert x.abs().max() > 0


@pytest.mark.parametrize(("d", "c"), [(64, 72), (12, 5)], ids=["vectors", "filled-up"])
@pytest.mark.parametrize("threads", [1, 3])
def test_tiles_equal_the_reference(monkeypatch, d, c, threads):
    """Several words of 64 keys, rows without an edge, tiles without one, and fewer graphs than threads."""
    draw = torch.Generator().manual_seed(2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = ((70, d), (150, d), (150, d), (70, c), (150, c), (70, d))
    q, k, v, w, z, direction = (torch.randn(1, 2, *size, generator=draw, dtype=torch.float64) for size in sizes)
    mask = torch.rand(1, 2, 70, 150, generator=draw) < 0.2
    mask[..., 64:128] = False
    mask[:, :, 5] = False
    lists = torch.zeros(2, 71, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    for ste in ("pre", "published"):
        given = (q, k, v, w, z, *lists, pack_mask(mask), None, SEED, 0.3, 0.0, ste, False, 3)
        torch.testing.assert_close(graph_cpu.attention(*given), graph_reference.attention(*given))
        grads = (room.attention_backward(direction, *given, True) for room in (graph_cpu, graph_reference))
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y)
            assert x.abs().max() > 0


@pytest.mark.parametrize("batch, n, chunk", [(1, 1, 2**18), (2, 37, 2**18), (2, 37, 100), (3, 16, 1)])
@pytest.mark.parametrize("multiplied", [False, True])
def test_memberships_in_chunks_equal_the_formula(monkeypatch, batch, n, chunk, multiplied):
    monkeypatch.setattr(nodes, "CHUNK", chunk)
    draw = torch.Generator().manual_seed(5)
    shapes = [(batch, n, 2, 4), (2, 4, 4), (2, 1, 4), (2, 4, 3), (2, 1, 3), (2, 3, 3)][: 5 + multiplied]
    given = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]

    def formula(x, weight, bias, into, shift, block=None):
        found = torch.sigmoid(torch.relu(x @ weight + bias) @ into + shift)
        return found if block is None else found @ block

    results = []
    for function in (nodes.memberships, formula):
        out = function(given[0].transpose(1, 2), *given[1:])  # as a layer's projections stand
        results.append((out, *torch.autograd.grad((out * out).sum(), given)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("crossover", [-1.0, 2.0], ids=["bits", "list"])
@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0])
def test_bounds_decide_as_the_probabilities_do(monkeypatch, crossover, spread):
    """A sieve that leaves next to nothing, some or most pairs open, against all probabilities."""
    draw = torch.Generator().manual_seed(4)
    w, z = (spread * torch.rand(2, 2, 150, 6, generator=draw) + (1 - spread) / 2 for _ in range(2))
    real = torch.arange(150) < torch.tensor([150, 131])[:, None]
    masks = []
    for limit in (2.0, -1.0):
        monkeypatch.setattr(rules, "OPEN", limit)
        given = Rules("bernoulli", exploration=0.05, reach=1, crossover=crossover if limit > 0 else -1.0)
        drawn = sample(w / 6, z, SEED, real, given)
        dense = EdgeList(drawn.indptr, drawn.indices, 150).to_mask().view(2, 2, 150, 150)
        masks.append(unpack_mask(drawn.mask, dense.shape) if drawn.mask.numel() else dense)
        assert torch.equal(drawn.degrees.view(2, 2, 150), masks[-1].sum(-1))
    assert torch.equal(*masks) and 0.01 < masks[0].float().mean() < 0.9


def test_both_routes_drop_the_same_pairs(monkeypatch):
    a, xs = make(dropout=0.5).train(), inputs(40)
    outs = []
    for crossover in (-1.0, 2.0):
        monkeypatch.setattr(sbm, "CROSSOVER", crossover)
        outs.append(a(*xs, seed=SEED))
    torch.testing.assert_close(*outs)
    assert not torch.allclose(outs[0], a.eval()(*xs, seed=SEED))


@pytest.mark.parametrize("operator", ["graph_attention", "graph_attention_backward", "sample_graphs"])
def test_operator_declarations(operator):
    q, k, v = inputs(7)
    draw = torch.Generator().manual_seed(3)
    w, z = (torch.rand(2, 2, 7, 3, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    real = torch.ones(2, 7, dtype=torch.bool)
    drawn = sample(w / 3, z, SEED, real, Rules())
    given = (drawn.indptr, drawn.indices, drawn.mask, real, SEED, 0.4, 0.3, "pre", False, -1)
    plain = [x.detach() for x in (v, q, k, v, w, z)]
    arguments = {
        "graph_attention": (q, k, v, w, z, *given),
        "graph_attention_backward": (*plain, *given, True),
        "sample_graphs": (plain[4], plain[5], SEED, real, "exact", False, 0.1, 0, 2.0, False),
    }[operator]
    result = torch.library.opcheck(getattr(torch.ops.subquad, operator).default, arguments)
    assert len(result) == 4 and set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("crossover", [-1.0, 2.0])  # rows of a mask, rows of a list
def test_half_precision_is_float32_inside(crossover):
    """Memberships may keep their float32: every gradient has the dtype of what it is the gradient of."""
    tensors = [x.detach().half() for x in inputs(7)]
    draw = torch.Generator().manual_seed(3)
    tensors += [torch.rand(2, 2, 7, 3, generator=draw) for _ in range(2)]
    drawn = sample(tensors[3] / 3, tensors[4], SEED, None, Rules(crossover=crossover))
    outs, grads = [], []
    for exact in (False, True):
        leaves = [(x.float() if exact else x.clone()).requires_grad_() for x in tensors]
        outs.append(graph_attention(*leaves, drawn, scale=0.4))
        grads.append(torch.autograd.grad(outs[-1].float().square().sum(), leaves))
    assert [x.dtype for x in grads[0]] == [x.dtype for x in tensors]
    torch.testing.assert_close(outs[0], outs[1].half(), rtol=0, atol=0)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sampler", ["exact", "fastrg", "bernoulli"])
@pytest.mark.parametrize("causal", [False, True])
def test_other_devices_draw_the_graphs_of_the_cpu(monkeypatch, causal, sampler, dtype):
    """Dense and thinned rows, padding, exploration, pinned edges, lists and masks: every field of the sample."""
    draw = torch.Generator().manual_seed(3)
    w, z = (torch.rand(2, 3, 200, 8, generator=draw, dtype=dtype) for _ in range(2))
    w = w * torch.logspace(-3, -1, 200, dtype=dtype)[:, None]  # from few edges to many
    real = torch.rand(2, 200, generator=draw) > 0.2
    kinds = set()
    for switch, held in ((1 / 32, 2**22), (8.0, 2**12)):  # 8: never
        monkeypatch.setattr(rules, "SWITCH", switch)
        monkeypatch.setattr(plain_sampler, "HELD", held)
        for settings in ((0.0, -1, 2.0, False), (0.05, 1, 0.1, True), (0.05, 1, -1.0, False)):
            for mask in (None, real):
                drawn = sample(w, z, SEED, mask, Rules(sampler, causal, *settings))
                fields = (drawn.indptr, drawn.indices, drawn.mask, drawn.degrees, drawn.counts)
                for x, y in zip(
                    fields, plain_sampler.sample(w, z, SEED, mask, sampler, causal, *settings), strict=True
                ):
                    assert x.dtype == y.dtype and torch.equal(x, y)
                kinds |= {bool(drawn.counts[:, 0].any()), bool(drawn.mask.numel()), bool(drawn.indices.numel())}
    assert kinds == {False, True}


# ---- seeds, padding, precision ----


def test_the_weights_of_a_seed_are_those_of_its_output():
    a, xs = make().eval(), inputs(33)
    out, weights = a(*xs, seed=SEED), a.weights(*xs[:2], seed=SEED)
    torch.testing.assert_close(weights @ xs[2], out)
    assert torch.equal(weights > 0, a.graph(*xs[:2], seed=SEED))
    assert torch.equal(out, a(*xs, seed=SEED)) and not torch.equal(out, a(*xs, seed=SEED + 1))
    torch.manual_seed(4)
    first = a(*xs)
    torch.manual_seed(4)
    assert torch.equal(a(*xs), first) and not torch.equal(a(*xs), first)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("length", [40, 200])
def test_a_padded_row_gives_what_it_gives_alone(causal, first, length):
    """Left or right padding, any padded length, batch of one or more, dropout and exploration included."""
    a = make(causal=causal, window=3, dropout=0.3, exploration=0.05).train()
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 29, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    alone = a(q, k, v, seed=SEED)
    wide = [torch.full((3, 2, length, 8), torch.nan, dtype=torch.float64) for _ in range(3)]
    real = torch.zeros(3, length, dtype=torch.bool)
    real[0, first : first + 29] = True
    real[1, :11] = True
    for x, y in zip(wide, (q, k, v), strict=True):
        x[0, :, first : first + 29] = y
        x[1, :, :11] = 0.5
    padded = a(*wide, key_mask=real, seed=SEED)
    torch.testing.assert_close(padded[:1, :, first : first + 29], alone, rtol=1e-9, atol=1e-9)
    assert padded.isfinite().all()


def test_a_causal_prefix_does_not_know_what_follows():
    a, (q, k, v) = make(causal=True, exploration=0.05, dropout=0.2).train(), inputs(64)
    whole = a(q, k, v, seed=SEED)
    for n in (1, 17, 63):
        torch.testing.assert_close(a(q[:, :, :n], k[:, :, :n], v[:, :, :n], seed=SEED), whole[:, :, :n])


def test_a_call_writes_nothing():
    a, xs = make().train(), inputs(12)
    before = {key: copy.copy(value) for key, value in vars(a).items()}
    a.observe(*xs)[0].sum().backward()
    a.weights(*xs[:2])
    assert vars(a).keys() == before.keys()
    assert all(vars(a)[key] is value or vars(a)[key] == value for key, value in before.items())


def test_values_that_are_not_finite_are_refused_by_name():
    a, (q, k, v) = make().eval(), (x.detach() for x in inputs(20))
    for name, place, wrong in (("q", 0, torch.nan), ("k", 1, torch.nan), ("k", 1, torch.inf)):
        xs = [q.clone(), k.clone(), v]
        xs[place][1, 0, 3] = wrong
        with pytest.raises(ValueError, match=f"^{name} must be finite"):
            a(*xs)
        real = torch.ones(2, 20, dtype=torch.bool)
        real[1, 3] = False
        assert a(*xs, key_mask=real).isfinite().all()
    broken = v.clone()
    broken[1, 0, 3] = torch.nan
    out = a(q, k, broken, seed=SEED)
    assert out[0].isfinite().all() and out[1].isnan().any()


def test_autocast():
    a, xs = make(torch.float32).train(), inputs(40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, record = a.observe(*(x.bfloat16() for x in xs), seed=SEED)
        weights = a.weights(*(x.detach().bfloat16() for x in xs[:2]), seed=SEED)
    (out.float().sum() + record.auxiliary_loss).backward()
    assert out.dtype == torch.bfloat16 and out.isfinite().all() and a.clusters.grad.isfinite().all()
    rounded = [x.detach().bfloat16().float() for x in xs]
    torch.testing.assert_close(out.float(), a(*rounded, seed=SEED), rtol=0.02, atol=0.02)
    assert torch.equal(weights > 0, a.graph(*rounded[:2], seed=SEED))


def test_causal_rows_choose_their_path_without_later_tokens():
    """A token whose first number is large has edges everywhere: rows from it on run dense, rows before it as edges."""
    a, n = make(torch.float32, causal=True, exploration=0.0), 200
    with torch.no_grad():
        for name, x in a.mlp.items():
            x.copy_(torch.eye(8) if "weight" in name else torch.zeros(8))
        a.mlp["bias2"][..., 0] = -3
        a.clusters.zero_()[..., 0] = 1
    twin, (q, k, v) = copy.deepcopy(a).double(), inputs(n, torch.float32)
    outs, paths = [], []
    for place in (n, 150, 137, 20):
        x, y = q.detach().clone(), k.detach().clone()
        x[..., 0], y[..., 0] = 1.5, 1.5
        x[:, :, place:, 0], y[:, :, place:, 0] = 9, 9
        out, record = a.observe(x.requires_grad_(), y, v, seed=SEED)
        outs.append(out)
        paths.append(record.path)
        expected = reference(twin, x.double(), y.double(), v.double(), a.graph(x, y, seed=SEED))
        torch.testing.assert_close(outs[-1].double(), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(outs[-1][:, :, :place], outs[0][:, :, :place])
        (grad,) = torch.autograd.grad(outs[-1].sum(), x)
        (dense,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(grad, dense, rtol=1e-3, atol=1e-4)
    assert paths == ["edges", "both", "both", "both"]


@pytest.mark.parametrize(("start", "low", "high"), [("per-head", 0.23, 0.27), ("published", 0.24, 0.26)])
def test_initial_density_is_a_quarter(start, low, high):
    torch.manual_seed(0)
    a = subquad.attention("sbm", num_heads=8, head_dim=64, cluster_init=start).eval()
    q, k, v = torch.randn(3, 1, 8, 512, 64)
    with torch.no_grad():
        _, record = a.observe(q, k, v)
    assert a.options.clusters == 128 and record.path == "dense" and record.auxiliary_loss is None
    assert low < record.density.mean() < high and record.density.shape == (8,)
    wide = torch.randn(8, 128, 64).std() * (2 / 64) ** 0.5
    assert abs(a.clusters.std() / wide - (1 if start == "per-head" else 128**-0.5)) < 0.02
    assert a.connections(512) == pytest.approx(float(record.density.mean()) * 512**2, rel=0.1)


def test_exploration_only_in_training_and_the_sampler_reports_what_it_did():
    a, xs = make(exploration=0.5, clusters=3), inputs(200)
    with torch.no_grad():
        a.mlp["weight2"].zero_()
        a.mlp["bias2"].copy_(-4 * a.clusters.mean(1, keepdim=True))
        a.clusters.copy_(a.clusters.mean(1, keepdim=True).expand_as(a.clusters))
        a.mlp["bias2"].mul_(3 / (a.clusters[:, :1] * a.mlp["bias2"]).sum(-1, keepdim=True).abs())  # p = sigmoid(-3)²
    _, record = a.train().observe(*xs)
    assert abs(record.density.mean() - 0.5) < 0.05 and record.path == "dense"
    _, record = a.eval().observe(*xs)
    p = 1 / (1 + math.exp(3))
    assert abs(record.density.mean() - p * p) < 0.005 and record.path == "edges"
    report = statistics(sample(*a.memberships(*xs[:2]), SEED, None, a.rules(False, 2.0)))
    assert report["dense_rows"] == 0 and report["proposals"] >= report["edges"] > 0


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": 4}, {"self_loops": True, "causal": True}], ids=str
)
def test_density_loss(options):
    a, xs = make(exploration=0.0, **options), inputs(21)
    real = torch.arange(21) < torch.tensor([21, 13])[:, None]
    _, record = a.train().observe(*xs, key_mask=real, seed=SEED)
    seen = (real[:, None, None] & real[:, None, :, None]).expand(2, 2, 21, 21)
    seen = seen.tril() if a.options.causal else seen
    density = (a.graph(*xs[:2], real, SEED) & seen).sum((0, 2, 3)) / seen.sum((0, 2, 3))
    torch.testing.assert_close(record.density, density)
    loss = record.auxiliary_loss
    torch.testing.assert_close(loss.item(), density.mean().item())
    near = (torch.arange(21)[:, None] - torch.arange(21)).abs()
    free = seen & (near > pinned_reach(a.options.self_loops, a.options.window))
    w, z = a.memberships(xs[0], xs[1].masked_fill(~real[:, None, :, None], 0))
    expected = ((w @ z.mT) * free).sum() / seen.sum()
    targets = [xs[0], xs[1], *a.parameters()]
    for x, y in zip(torch.autograd.grad(loss, targets), torch.autograd.grad(expected, targets), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-12)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        make_layer = lambda: subquad.MultiheadAttention(8, 2, attention="sbm:clusters=4", batch_first=True)  # noqa: E731
        self.layers = nn.ModuleList(make_layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def test_the_density_loss_makes_it_sparse():
    a, xs = make(exploration=0.0), [x.detach() for x in inputs(30)]
    optimizer = torch.optim.Adam(a.parameters(), 0.1)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        _, record = a.observe(*xs, seed=SEED + step)
        record.auxiliary_loss.backward()
        optimizer.step()
        losses.append(record.auxiliary_loss.item())
    assert losses[-1] < losses[0] / 2
    with pytest.raises(ValueError, match="seed must be given"):
        a.attend(*xs, Call())


def test_options_that_do_not_exist_are_refused():
    for wrong in ({"sampler": "gumbel"}, {"exploration": 1.0}, {"clusters": 0}, {"ste": "post"}, {"window": 0}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            make(**wrong)
    with pytest.raises(ValueError, match="sampler"):
        Rules("gumbel")


# ---- the study and the pictures -------------------------------------------------------------------------------------


def test_the_study_trains_goes_on_and_draws(tmp_path):
    names, settings = ["sbm:clusters=4", "full"], ("length=8", "batch=4", "steps=5", "evaluate=2", "eval_size=4")
    first = repeated_tokens.results(tmp_path, names[:1], settings)
    found = repeated_tokens.results(tmp_path, names, settings)
    assert found[names[0]] == first[names[0]] and 0 < first[names[0]]["density"][0][0] < 1
    assert found["full"]["density"] is None and found["full"]["recipe"] == "paper"
    assert repeated_tokens.draw_training(tmp_path, names).stat().st_size > 1000


def test_placements_are_drawn_on_the_scale_of_probabilities(tmp_path, monkeypatch):
    """A grey block stands for what its title says; divided by its maximum it would be as black as certain edges."""
    drawn = []
    monkeypatch.setattr(sbm_pictures, "save", lambda figure, path, **about: drawn.append(figure) or path)
    sbm_pictures.draw_placements(tmp_path / "3.png")
    cases = sbm_pictures.placements().values()
    for axis, place in zip(drawn[0].axes[len(cases) :], cases, strict=True):
        p, (image,) = sbm_pictures.block_model(*place), axis.images
        assert image.get_clim() == (0, 1) and torch.allclose(torch.as_tensor(image.get_array()), p)
        assert axis.get_title() == f"P(edge): mean {p.mean():.2f}, largest {p.max():.2f}"


def test_pictures(tmp_path):
    means = [float(sbm_pictures.block_model(*place).mean()) for place in sbm_pictures.placements().values()]
    assert means[0] > 0.9 > 0.2 > means[1] > 0.1 > 0.01 > means[2]
    p = sbm_pictures.block_model(*sbm_pictures.placements()["in groups: blocks"])
    groups = p.view(3, 8, 3, 8).mean((1, 3))
    assert groups.diagonal().min() > 3 * (groups - groups.diagonal().diag()).max()
    net = Two()
    batches = [(torch.randn(2, 12, 8),) for _ in range(3)]
    found = sbm_pictures.densities(net, batches)
    assert found.shape == (3, 2, 2) and ((found > 0) & (found < 1)).all()
    q, k, _ = (x.detach() for x in inputs(12))
    files = [
        sbm_pictures.draw_placements(tmp_path / "3.png"),
        sbm_pictures.draw_masks(make().eval(), q, k, tmp_path / "masks.png"),
        sbm_pictures.draw_densities({"two": found}, tmp_path / "5.png"),
        sbm_pictures.draw_attended(net, batches[0], tmp_path / "7.png", height=3),
    ]
    assert all(file.stat().st_size > 1000 for file in files)
    trained = sbm_pictures.train_small(length=8, batch=4, steps=2)
    path, accuracy = sbm_pictures.draw_trained(trained, tmp_path / "trained.png", length=8)
    assert path.stat().st_size > 1000 and 0 < accuracy <= 1
    with pytest.raises(ValueError, match="height must divide"):
        sbm_pictures.draw_attended(net, batches[0], tmp_path / "7.png", height=5)


def test_the_cost_study_measures_a_step_and_fits_its_growth(tmp_path):
    record = sbm_cost.step_cost(300, degree=6, heads=2, head_dim=8, repeats=1)
    assert record["path"] == "edges" and record["seconds"] > 0 and abs(record["edges"] / (2 * 300 * 6) - 1) < 0.2
    records = [{"n": n, "seconds": 3e-6 * n, "bytes": 5 * n**2} for n in (1024, 2048, 4096)]
    assert sbm_cost.exponent(records, "seconds") == pytest.approx(1)
    assert sbm_cost.exponent(records, "bytes") == pytest.approx(2)
    assert sbm_cost.draw_cost(records, tmp_path / "new" / "cost.png").stat().st_size > 1000


def test_half_precision_and_frozen_clusters():
    a = make(dtype=torch.float32).requires_grad_(False)
    q, k, v = inputs(40, torch.float32)
    out = a(q, k, v)
    loss = F.mse_loss(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(loss, v)
    assert grad.abs().max() > 0
    half = make(dtype=torch.bfloat16)(*(x.detach().bfloat16() for x in (q, k, v)))
    assert half.dtype == torch.bfloat16 and half.isfinite().all()
