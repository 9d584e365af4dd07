"""Results lie in memory as the fake kernels say, however the inputs lie: compiled graphs read them by those strides."""

import pytest
import torch

from subquad.kernels.clusters import op as clusters
from subquad.kernels.compressed.index import choose as choose_entries
from subquad.kernels.compressed.op import compressed, compressed_backward
from subquad.kernels.edges import EdgeList
from subquad.kernels.edges import op as edges
from subquad.kernels.graphs import op as graphs
from subquad.kernels.linear.op import sums, sums_backward
from subquad.kernels.maxima import others_max, others_max_backward, running_max, running_max_backward
from subquad.kernels.mixture import mixture_backward, mixture_merge
from subquad.kernels.pools.groups import pool_op
from subquad.kernels.pools.nodes import _nodes, _nodes_backward
from subquad.kernels.pools.spans import _pool, _pool_backward
from subquad.kernels.runs import op as runs
from subquad.kernels.selected.op import selected, selected_backward
from subquad.supports.grids import AxialMixture

SEED = torch.tensor(3)


def heads(*shape, dtype=torch.float64):
    """(…, H, n, d) as a layer has it: the heads of a token side by side."""
    order = [*range(len(shape) - 3), -2, -3, -1]
    return torch.randn([shape[i] for i in order], dtype=dtype).transpose(-3, -2)


def turned(*shape, dtype=torch.float64):
    """The entries of a row are not side by side."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT


def check(op, *arguments):
    found = torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))
    assert set(found.values()) == {"SUCCESS"}
    return op(*arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["kernels", "torch"])
@pytest.mark.parametrize("make", [heads, turned])
def test_maxima_and_pools(make, dtype):
    x = make(2, 3, 10, 4, dtype=dtype)
    top = check(running_max, x, 2, False)
    check(running_max_backward, x, x, top, 2, False)
    out, first, second = check(others_max, x, 2)
    check(others_max_backward, out, x, first, second, 2)
    for is_max in (True, False):
        pooled = check(_pool, x, None, None, 4, 0, is_max)
        check(_pool_backward, pooled, x, pooled, None, None, 4, 0, is_max)
    if dtype == torch.float64:
        check(_nodes_backward, check(_nodes, x))
    check(pool_op, x, None, "max", "column", 4, True)


@pytest.mark.parametrize("width", [8, 7])  # whole vectors, and products of small matrices
@pytest.mark.parametrize("make", [heads, turned])
def test_clusters(make, width):
    q, k, v, a, b, grad = (make(3, 12, width) for _ in range(6))
    cluster, real = torch.arange(36).view(3, 12) % 4, torch.arange(36).view(3, 12) % 5 > 0
    order = (torch.arange(3)[:, None] * 4 + cluster).flatten().argsort(stable=True)
    pools = check(clusters.prefix_op, q, cluster, real, 4, True)
    check(clusters.prefix_backward_op, grad, q, pools, cluster, real, 4, True)
    for keys, values, seed, *about in (
        ([k], [v], None, 0.0, 0, False),
        ([k], [v], None, 0.0, 2, True),  # in chunks, avoiding oneself
        ([k], [v], SEED, 0.5, 0, False),
        ([k, a], [v, b], None, 0.0, 0, False),  # with summaries
    ):
        where = (order, cluster, real, seed, 4, True, False, 0.3, *about)
        out, lse = check(clusters.attention_op, q, keys, values, *where)
        check(clusters.attention_backward_op, grad, q, keys, values, out, lse, *where)


@pytest.mark.parametrize("make", [heads, turned])
def test_edges_and_graphs(make):
    q, k, v, grad, w, z = (make(2, 2, 6, d) for d in (8, 8, 8, 8, 3, 3))
    some = EdgeList.from_mask(torch.ones(6, 6).tril().bool().expand(4, 6, 6))
    lists, mask = (some.indptr, some.indices), torch.zeros(0, dtype=torch.uint8)
    random = (None, None, 0.3, 0.0)
    check(edges.scores_op, q, k, *lists, 1, 0.3)
    check(edges.attention_op, q, k, v, *lists, 1, *random)
    check(edges.attention_backward_op, grad, q, k, v, *lists, 1, *random)
    about = (*lists, mask, *random, "pre", False, -1)
    check(graphs.attention_op, q, k, v, w, z, *about)
    check(graphs.backward_op, grad, q, k, v, w, z, *about, True)


@pytest.mark.parametrize("width", [8, 7])
def test_rows_side_by_side(width):
    """Operators whose entrances give them rows whose entries lie side by side."""
    q, k, v, grad = (heads(3, 12, width) for _ in range(4))
    for causal in (True, False):
        out, den = check(sums, q, k, v, None, causal, True, True)
        check(sums_backward, grad, q, k, v, None, out, den, causal, True, True)
    tables = (torch.tensor([[0, 12]]), torch.tensor([[[0, 12, 0, -runs.EVERYTHING]]]))
    out, lse = check(runs.attention, q, [k], [v], None, *tables, [0], [12, 12], 0.3, 144)
    check(
        runs.attention_backward,
        grad,
        torch.zeros_like(lse),
        q,
        [k],
        [v],
        None,
        *tables,
        out,
        lse,
        [0],
        [12, 12],
        0.3,
        144,
    )


@pytest.mark.parametrize("width", [8, 7])
def test_what_is_made_of_merges(width):
    q, k, v, grad = (heads(2, 2, 12, width) for _ in range(4))
    chosen = torch.full((2, 2, 12, 1), -1)
    chosen[:, :, 4:] = 0
    about = (chosen, None, None, 4, 0.3)
    check(selected_backward, grad, q, k, v, *check(selected, q, k, v, *about), *about)
    entries, values = (heads(2, 3, 1, width).transpose(1, 2) for _ in range(2))  # (B, 1, 3, d)
    about = (torch.ones(2, 12, 3).bool(), torch.zeros(2, dtype=q.dtype), None, None, 3, 0.3)
    out, lse = check(compressed, q, k, v, entries, values, *about)
    check(compressed_backward, grad, q, k, v, entries, values, out, lse, *about)
    u, gates, small = heads(2, 2, 12, 4), torch.rand(2, 2, 12).double(), turned(2, 3, 4)
    check(choose_entries, u, gates, small, torch.ones(2, 3, 12).bool().mT, 2)
    both = AxialMixture(causal=True, cols=3, kinds=(("column",), ("row",))).text
    groups = [heads(2, 2, 9, width) for _ in range(4)]
    given = ([k, v], groups[:2], groups[2:], [], [])
    _, outs, lses = check(mixture_merge, q, *given, None, [1, 1], both, 12, 0.3)
    check(mixture_backward, grad, q, *given, outs, lses, None, [1, 1], both, 12, 0.3)
