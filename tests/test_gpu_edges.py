"""The edge and graph kernels of a GPU in Triton's interpreter, against plain torch: values and gradients."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels import devices
from subquad.kernels.edges import EdgeList, gpu, reference
from subquad.kernels.graphs import cuda as graphs
from subquad.kernels.graphs import reference as graphs_reference

pytestmark = pytest.mark.skipif(not devices.has_triton(), reason=devices.MISSING)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def random_list(graphs: int, n: int, m: int, density=0.3) -> EdgeList:
    mask = torch.rand(graphs, n, m, generator=torch.Generator().manual_seed(n)) < density
    mask[:, 0] = False  # a row without edges
    return EdgeList.from_mask(mask)


def check_edges(n, m, heads, key_heads, graphs, masked, dropout, width=8):
    edges = random_list(graphs, n, m)
    q, k, v = normal(1, heads, n, width), normal(1, key_heads, m, width), normal(1, key_heads, m, width, seed=1)
    key_mask = torch.arange(m)[None] % 4 != 1 if masked else None
    about = (edges.indptr, edges.indices, edges.share, key_mask, torch.tensor(3), 0.4, dropout)
    out = reference.attention(q, k, v, *about)
    torch.testing.assert_close(gpu.attention(q, k, v, *about), out, rtol=1e-5, atol=1e-5)
    assert not out[:, :, 0].any()
    grad = normal(*out.shape, seed=2)
    want = reference.attention_backward(grad, q, k, v, *about)
    for a, b in zip(gpu.attention_backward(grad, q, k, v, *about), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked, dropout, graphs", [(True, 0.0, 1), (False, 0.3, 2)])
def test_edges_equal_the_reference(masked, dropout, graphs):
    check_edges(9, 9, 2, 1, graphs, masked, dropout)


@pytest.mark.slow
@pytest.mark.parametrize("n, m", [(1, 1), (33, 40), (65, 65)])
def test_edges_equal_the_reference_at_other_lengths(n, m):
    check_edges(n, m, 4, 2, 4, n > 1 and n == m, 0.2, width=20)


@pytest.mark.parametrize("ste", ["pre", "published"])
def test_listed_rows_of_sampled_graphs(ste):
    """Straight-through gradients, a pinned neighbourhood, dropout that counts by the key mask."""
    n = 9
    edges = random_list(2, n, n)
    q, k, v, w, z = (normal(1, 2, n, 8, seed=s) for s in range(5))
    key_mask = torch.ones(1, n, dtype=torch.bool)
    lists, random = (edges.indptr, edges.indices), (key_mask, torch.tensor(3), 0.4, 0.2)
    nothing = torch.empty(0, dtype=torch.uint8)
    about = (ste, False, 1)
    out = graphs_reference.attention(q, k, v, w, z, *lists, nothing, *random, *about)
    torch.testing.assert_close(graphs.list_attention(q, k, v, *lists, *random), out, rtol=1e-5, atol=1e-5)
    grad = normal(*out.shape, seed=9)
    want = graphs_reference.attention_backward(grad, q, k, v, w, z, *lists, nothing, *random, *about, True)
    found = graphs.list_backward(grad, q, k, v, w, z, *lists, *random, ste, 1, True)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
