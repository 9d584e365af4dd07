"""Maxima along the lines of a grid and over binary blocks: the CPU kernels against whole-tensor steps."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels.pools.groups import group_pool, group_pools


def tensors(n: int, dtype: torch.dtype, heads_inside: bool) -> list[torch.Tensor]:
    """Two tensors (2, 3, n, 16), or of a width that is no multiple of a vector's, with many equal values."""
    shape = (2, n, 3, 16) if heads_inside else (2, 3, n, 13)
    found = [torch.randn(shape, dtype=dtype).mul(3).round() for _ in range(2)]
    return [(x.transpose(1, 2) if heads_inside else x).requires_grad_() for x in found]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "c"), [(37, 6), (36, 6), (13, 12)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["nodes", "column", "row", "left", "right"])
def test_equals_whole_tensor_steps(kind, causal, n, c, masked):
    torch.manual_seed(0)
    for dtype, heads_inside in ((torch.float32, True), (torch.float64, False)):
        xs = tensors(n, dtype, heads_inside)
        exists = None
        if masked:
            exists = torch.rand(2, 1, n) > 0.4
            exists[1, :, n // 2 :] = False
        expected = [group_pool(x, exists, "max", kind, c, causal) for x in xs]
        found = group_pools(xs, exists, "max", kind, c, causal)
        assert all(map(torch.equal, found, expected))
        grads = [torch.randn_like(x) for x in found]
        for x, y in zip(*(torch.autograd.grad(outs, xs, grads) for outs in (found, expected)), strict=True):
            torch.testing.assert_close(x, y)


def test_nan_stays_and_heads_may_differ():
    q, k = torch.randn(1, 4, 30, 16), torch.randn(1, 2, 30, 16)
    q[0, 0, 3] = torch.nan
    for kind in ("nodes", "column", "row", "left", "right"):
        found = group_pools([q, k], None, "max", kind, 5, True)
        for x, y in zip(found, (group_pool(x, None, "max", kind, 5, True) for x in (q, k)), strict=True):
            torch.testing.assert_close(x, y, equal_nan=True)
            assert torch.isnan(x).any() == (y.shape[1] == 4)
