"""Routing and Combiner-Routing: clusters, centroids, seeds, padding, and values that are not finite."""

import math

import pytest
import torch
import torch.nn.functional as F

import subquad
from subquad.kernels.clusters import cluster_attention, cpu, nearest, reference
from subquad.kernels.clusters.op import attention_op

SEED = torch.tensor(3)
NAMES = ("routing", "combiner-routing")


def make(name, causal=False, dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {"num_heads": 2, "head_dim": 8, "clusters": 3, **options}
    return subquad.attention(name, causal=causal, **options).to(dtype).eval()


def inputs(n, batch=2, dtype=torch.float64, heads=2, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, 8, generator=draw, dtype=dtype) for _ in range(3)]


def some_clusters(g=3, n=70, clusters=5, seed=0):
    """order, cluster and real as the kernels take them; one cluster is empty, one all padding."""
    draw = torch.Generator().manual_seed(seed)
    cluster = torch.randint(0, clusters - 1, (g, n), generator=draw)
    real = (torch.rand(g, n, generator=draw) < 0.8) & (cluster != 1)
    order = (torch.arange(g)[:, None] * clusters + cluster).flatten().argsort(stable=True)
    return order, cluster, real


# ---- the room ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n, clusters", [(1, 1), (47, 3), (49, 8), (130, 17)])
def test_nearest_centroids_of_kernel_and_torch_agree(n, clusters, dtype):
    draw = torch.Generator().manual_seed(n)
    q, k = (torch.randn(2, n, 3, 8, generator=draw, dtype=dtype).transpose(1, 2) for _ in range(2))  # as a layer has it
    centroids = F.normalize(torch.randn(3, clusters, 8, generator=draw, dtype=dtype), dim=-1)
    directions = F.normalize(q, dim=-1) + F.normalize(k, dim=-1)
    found, scores = nearest.nearest_centroids(q, k, centroids), directions @ centroids.mT
    assert torch.equal(found, nearest._in_torch(q, k, centroids))
    torch.testing.assert_close(scores.gather(-1, found[..., None])[..., 0], scores.amax(-1))


def test_nearest_centroids_where_all_are_on_the_other_side_and_of_nothing():
    """Columns that fill up a vector are no centroids; a token without a direction and a NaN have a cluster too."""
    centroids = F.normalize(torch.rand(1, 3, 8) + 0.1, dim=-1)
    far = -torch.rand(1, 1, 5, 8) - 0.1
    far[0, 0, 3], far[0, 0, 4] = 0, torch.nan
    found = nearest.nearest_centroids(far, far, centroids)
    assert torch.equal(found, nearest._in_torch(far, far, centroids)) and int(found.max()) < 3
    torch.library.opcheck(nearest.nearest, (far[:, :, :3], far[:, :, :3], centroids))


@pytest.mark.parametrize("rounds", [1, 2])
def test_gradients_stand_as_the_inputs_do(rounds):
    """A layer's heads stand side by side: outputs and gradients do too, and equal those of heads one after another."""
    order, cluster, real = some_clusters(g=2)
    where = (order.expand(rounds, -1), cluster.expand(rounds, -1, -1), real) if rounds > 1 else (order, cluster, real)
    xs = [torch.randn(70, 2, 8).transpose(0, 1).requires_grad_() for _ in range(3)]
    ys = [x.detach().contiguous().requires_grad_() for x in xs]
    grad, results = torch.randn(2, 70, 8), []
    for q, k, v in (xs, ys):
        out = cluster_attention(q, [k], [v], where, 5, causal=False, scale=0.5)
        results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    assert all(found.stride() == xs[0].stride() for found in results[0])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def dense_attention(q, keys, values, cluster, real, causal, scale):
    """`cluster_attention` with all pairs written out, (G, n, d): what the tiles are checked against.

    The summary of a cluster that query i sees stands at its last real token (causal: ≤ i).
    """
    n = q.shape[1]
    time = torch.ones(n, n, dtype=torch.bool, device=q.device)
    time = time.tril() if causal else time
    same = cluster[:, :, None] == cluster[:, None]  # (G, n, n)
    seen = [time & real[:, None] & same]
    if keys[1:]:
        visible = time & real[:, None]  # (G, i, p)
        later = (
            visible[:, :, None] & same[:, None] & torch.ones_like(time).triu(1)
        )  # (G, i, p, p'): p' > p, same cluster
        seen.append(visible & ~same & ~later.any(-1))
    s = torch.cat([q @ k.mT * scale for k in keys], -1).masked_fill(~torch.cat(seen, -1), -torch.inf)
    p = s.softmax(-1).masked_fill((s == -torch.inf).all(-1, keepdim=True), 0)
    return p @ torch.cat(values, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("summaries", [False, True])
def test_tiles_equal_all_pairs_written_out(causal, summaries):
    order, cluster, real = some_clusters()
    draw = torch.Generator().manual_seed(4)
    xs = [torch.randn(3, 70, 6, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(5)]
    q, keys, values = xs[0], xs[1 : 2 + summaries], xs[3 : 4 + summaries]
    out = cluster_attention(q, keys, values, (order, cluster, real), 5, causal=causal, scale=0.4)
    expected = dense_attention(q, keys, values, cluster, real, causal, 0.4)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    targets, direction = [q, *keys, *values], torch.randn(out.shape, generator=draw, dtype=out.dtype)
    found = [torch.autograd.grad(x, targets, direction) for x in (out, expected)]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_max", [False, True])
def test_running_pools_equal_the_reference(is_max):
    _, cluster, real = some_clusters()
    draw = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(3, 70, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    x[:, 1::7] = x[:, ::7]  # equal numbers
    settings = (cluster, real, 5, is_max)
    out = cpu.prefix(x, *settings)
    torch.testing.assert_close(out, reference.prefix(x, *settings))
    found = cpu.prefix_backward(grad, x, out, *settings)
    torch.testing.assert_close(found, reference.prefix_backward(grad, x, out, *settings))
    leaf = torch.randn(3, 70, 6, generator=draw, dtype=torch.float64).requires_grad_()  # no equal numbers
    (expected,) = torch.autograd.grad(reference.prefix(leaf, *settings), leaf, grad)
    x = leaf.detach()
    torch.testing.assert_close(cpu.prefix_backward(grad, x, cpu.prefix(x, *settings), *settings), expected)


@pytest.mark.parametrize(
    "operator", ["cluster_attention", "cluster_attention_backward", "cluster_prefix", "cluster_prefix_backward"]
)
def test_operator_declarations(operator):
    order, cluster, real = some_clusters(g=2, n=9)
    q, k, v = (x.flatten(0, 1)[:2, :9].contiguous().requires_grad_() for x in inputs(9))
    settings = (order, cluster, real, SEED, 5, True, False, 0.3, 0.4, 4, True)
    out, lse = attention_op(q.detach(), [k.detach()], [v.detach()], *settings)
    plain = [x.detach() for x in (q, k, v)]
    arguments = {
        "cluster_attention": (q, [k], [v], *settings),
        "cluster_attention_backward": (out, plain[0], plain[1:2], plain[2:], out, lse, *settings),
        "cluster_prefix": (q, cluster, real, 5, True),
        "cluster_prefix_backward": (*plain, cluster, real, 5, True),
    }[operator]
    result = torch.library.opcheck(getattr(torch.ops.subquad, operator).default, arguments)
    assert len(result) == 4 and set(result.values()) == {"SUCCESS"}


# ---- centroids ----


@pytest.mark.parametrize("name", NAMES)
def test_only_update_moves_the_centroids(name):
    module, xs = make(name).train(), inputs(40)
    before = module.centroids.clone()
    out = module(*xs)
    again, record = module.observe(*xs)
    assert torch.equal(out, again) and torch.equal(module.centroids, before)
    assert record.statistics.shape == (2, 3, 9) and record.statistics[..., -1].sum() == 2 * 2 * 40
    module.update(record.statistics)
    assert not torch.equal(module.centroids, before)
    torch.testing.assert_close(module.centroids.norm(dim=-1), torch.ones(2, 3, dtype=torch.float64))
    assert module.eval().observe(*xs)[1].statistics is None
    with pytest.raises(ValueError, match="statistics must have shape"):
        module.update(record.statistics[:1])


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_processes_and_checkpoints_add_up(name):
    """The statistics of the parts are those of the whole, and a call made twice changes nothing."""
    module, xs = make(name).train(), inputs(33, batch=4)
    real = torch.arange(33) < torch.tensor([33, 20, 7, 0])[:, None]
    whole = module.observe(*xs, key_mask=real)[1].statistics
    parts = [module.observe(*(x[b : b + 1] for x in xs), key_mask=real[b : b + 1])[1].statistics for b in range(4)]
    torch.testing.assert_close(sum(parts), whole)
    leaves = [x.requires_grad_() for x in xs]
    run = torch.utils.checkpoint.checkpoint
    kept = torch.autograd.grad(module(*leaves).square().sum(), leaves)
    recomputed = torch.autograd.grad(run(module, *leaves, use_reentrant=False).square().sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(kept, recomputed, strict=True))


def test_update_is_the_declared_average_and_finds_clusters():
    module = make("routing", num_heads=1, clusters=2, decay=0.5).train()
    q, k, v = inputs(6, heads=1)
    cluster = module.assign(q, k, module._call(_rows(None), None, 0))[:, 0]  # (B, n)
    x = ((F.normalize(q, dim=-1) + F.normalize(k, dim=-1)) / math.sqrt(2))[:, 0]
    expected = module.centroids[0].clone()
    for c in range(2):
        if (cluster == c).any():
            expected[c] = F.normalize(0.5 * expected[c] + 0.5 * x[cluster == c].mean(0), dim=-1)
    module.update(module.observe(q, k, v)[1].statistics)
    torch.testing.assert_close(module.centroids[0], expected)
    side = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    label = torch.arange(40) % 2
    q = (side[label] + 0.05 * torch.randn(40, 8, dtype=torch.float64))[None, None]
    for _ in range(50):
        module.update(module.observe(q, q, q)[1].statistics)
    found = module.assign(q, q, module._call(_rows(None), None, 0))[0, 0]
    assert (found == found[0]).equal(label == 0)


def _rows(key_mask):
    from subquad.attention.call import Rows

    return Rows.of(key_mask, align=False)


def test_routing_is_combiner_routing_without_the_summaries():
    xs, call = inputs(30), make("routing")._call(_rows(None), None, 0)
    one, two = make("routing"), make("combiner-routing")
    assert torch.equal(one.centroids, two.centroids)
    own = one.weights(*xs[:2]) > 0
    cluster = one.assign(*xs[:2], call)
    assert torch.equal(own, cluster[..., :, None] == cluster[..., None, :])
    whole = two.weights(*xs[:2])
    assert (whole > 0).all()
    torch.testing.assert_close(F.normalize(whole * own, 1, -1), one.weights(*xs[:2]))


# ---- seeds, padding, values that are not finite ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0, 9])
def test_a_padded_row_gives_what_it_gives_alone(name, causal, first):
    module = make(name, causal, dropout=0.3).train()
    xs = inputs(35, batch=1)
    alone = module(*xs, seed=SEED)
    wide = [torch.full((3, 2, 77, 8), torch.nan, dtype=torch.float64) for _ in range(3)]
    real = torch.zeros(3, 77, dtype=torch.bool)
    real[0, first : first + 35], real[1, :50] = True, True
    for x, y in zip(wide, xs, strict=True):
        x[0, :, first : first + 35], x[1, :, :50] = y, 0.3
    padded = module(*wide, key_mask=real, seed=SEED)
    torch.testing.assert_close(padded[:1, :, first : first + 35], alone, rtol=1e-9, atol=1e-9)
    assert padded.isfinite().all() and not torch.equal(alone, module(*xs, seed=SEED + 1))
    if causal:
        for n in (1, 20):
            torch.testing.assert_close(module(*(x[:, :, :n] for x in xs), seed=SEED), alone[:, :, :n])


@pytest.mark.parametrize("name", NAMES)
def test_huge_scores_do_not_see_the_future(name):
    """A hidden score is -inf, not a large number: at scores of 1e30 and more nothing of the future is seen."""
    module, (q, k, v) = make(name, causal=True, dtype=torch.float64), inputs(20, batch=1)
    q, k = q * 1e16, k * 1e16
    out = module(q, k, v)
    assert out.isfinite().all() and (q @ k.mT * module.options.softmax_scale).abs().max() > 1e31
    later = v.clone()
    later[:, :, 12:] += 5
    assert torch.equal(module(q, k, later)[:, :, :12], out[:, :, :12])
    torch.testing.assert_close(out, module.dense(q, k, v))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_nan_stays_in_its_row_and_is_not_hidden(name, causal):
    module, clean = make(name, causal), inputs(40, batch=3)
    base = module(*clean)
    for place in range(3):
        xs = [x.clone() for x in clean]
        xs[place][1, :, 39] = torch.nan  # the last token of the middle row
        out = module(*xs)
        assert torch.equal(out[[0, 2]], base[[0, 2]])
        if place == 0:
            assert out[1, :, 39].isnan().all()
    xs = [x.clone() for x in clean]
    xs[1][2], xs[2][2] = torch.nan, torch.nan  # the last row, whose last token tiles of others could reach for
    out = module(*xs)
    assert torch.equal(out[:2], base[:2]) and out[2].isnan().any()


@pytest.mark.parametrize("name", ["routing", "combiner-routing"])
def test_far_more_clusters_than_tokens(name):
    module = subquad.attention(f"{name}:clusters=1000000", num_heads=1, head_dim=4)
    q, k, v = torch.randn(3, 1, 1, 20, 4)
    assert module(q, k, v).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    module, xs = make(name, dtype=torch.float32), inputs(40, dtype=torch.float32)
    half = [x.bfloat16() for x in xs]
    with torch.autocast("cpu", torch.bfloat16):
        out = module(*half)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(*(x.float() for x in half)), rtol=0.01, atol=0.01)
