"""The edge and graph kernels of a GPU in Triton's interpreter, against plain torch: values and gradients."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels import devices
from subquad.kernels.edges import EdgeList, gpu, reference
from subquad.kernels.graphs import cuda as graphs
from subquad.kernels.graphs import reference as graphs_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

pytestmark = pytest.mark.skipif(not devices.has_triton(), reason=devices.MISSING)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(found, want, dtype=torch.float32):
    """Half precision: numbers of its own, within its rounding of what float32 makes of the same numbers."""
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), want, rtol=tolerance, atol=tolerance)


def random_list(graphs: int, n: int, m: int, density=0.3) -> EdgeList:
    mask = torch.rand(graphs, n, m, generator=torch.Generator().manual_seed(n)) < density
    mask[:, 0] = False  # a row without edges
    return EdgeList.from_mask(mask)


def check_edges(n, m, heads, key_heads, graphs, masked, dropout, width=8, dtype=torch.float32):
    edges = random_list(graphs, n, m)
    shapes = ((1, heads, n, width), (1, key_heads, m, width), (1, key_heads, m, width))
    q, k, v = (normal(*shape, seed=s, dtype=dtype) for s, shape in enumerate(shapes))
    key_mask = torch.arange(m)[None] % 4 != 1 if masked else None
    about = (edges.indptr, edges.indices, edges.share, key_mask, torch.tensor(3), 0.4, dropout)
    exact = [x.float() for x in (q, k, v)]
    out = reference.attention(*exact, *about)
    close(gpu.attention(q, k, v, *about), out, dtype)
    assert not out[:, :, 0].any()
    grad = normal(*out.shape, seed=2, dtype=dtype)
    want = reference.attention_backward(grad.float(), *exact, *about)
    for a, b in zip(gpu.attention_backward(grad, q, k, v, *about), want, strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("masked, dropout, graphs", [(True, 0.0, 1), (False, 0.3, 2)])
def test_edges_equal_the_reference(masked, dropout, graphs, dtype):
    check_edges(9, 9, 2, 1, graphs, masked, dropout, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n, m", [(1, 1), (33, 40), (65, 65)])
def test_edges_equal_the_reference_at_other_lengths(n, m, dtype):
    check_edges(n, m, 4, 2, 4, n > 1 and n == m, 0.2, width=20, dtype=dtype)


def test_half_precision_is_summed_in_float32():
    """4,096 equal weights for values of 1: a sum of halves would stop at 2,048."""
    n = 4096
    edges = EdgeList.from_mask(torch.ones(1, 1, n, dtype=torch.bool))
    q, k, v = torch.zeros(1, 1, 1, 8).half(), torch.zeros(1, 1, n, 8).half(), torch.ones(1, 1, n, 8).half()
    about = (edges.indptr, edges.indices, edges.share, None, None, 1.0, 0.0)
    assert (gpu.attention(q, k, v, *about) == 1).all()
    weights = torch.ones(1, n).half().float()
    assert (gpu.sums(weights, v, *about[:3], 1, n, False) == n).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ste", ["pre", "published"])
def test_listed_rows_of_sampled_graphs(ste, dtype):
    """Straight-through gradients, a pinned neighbourhood, dropout that counts by the key mask."""
    n = 9
    edges = random_list(2, n, n)
    q, k, v, w, z = (normal(1, 2, n, 8, seed=s, dtype=dtype) for s in range(5))
    exact = [x.float() for x in (q, k, v, w, z)]
    key_mask = torch.ones(1, n, dtype=torch.bool)
    lists, random = (edges.indptr, edges.indices), (key_mask, torch.tensor(3), 0.4, 0.2)
    nothing = torch.empty(0, dtype=torch.uint8)
    about = (ste, False, 1)
    out = graphs_reference.attention(*exact, *lists, nothing, *random, *about)
    close(graphs.list_attention(q, k, v, *lists, *random), out, dtype)
    grad = normal(*out.shape, seed=9, dtype=dtype)
    want = graphs_reference.attention_backward(grad.float(), *exact, *lists, nothing, *random, *about, True)
    found = graphs.list_backward(grad, q, k, v, w, z, *lists, *random, ste, 1, True)
    for a, b in zip(found, want, strict=True):
        close(a, b, dtype)
