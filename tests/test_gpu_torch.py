"""What operators without a GPU kernel run on a GPU, in plain torch: equal to what they run on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close as close

from subquad.kernels.compressed import op as compressed
from subquad.kernels.compressed import reference as compressed_reference
from subquad.kernels.merge.op import merge, merge_backward
from subquad.kernels.selected import op as selected
from subquad.kernels.selected import reference as selected_reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n, block, count", [(1, 4, 1), (9, 4, 2), (70, 16, 3), (33, 8, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_chosen_blocks(n, block, count, masked, monkeypatch):
    """Blocks of the past, some of them not there; batches of a few queries."""
    monkeypatch.setattr(selected_reference, "BATCH", 4 * count * block * 8 * 5)
    q, k, v, grad = (normal(2, 2, n, 8, seed=s) for s in range(4))
    own = torch.arange(n)[:, None] // block
    drawn = torch.rand(2, 2, n, -(-n // block), generator=torch.Generator().manual_seed(0))
    chosen = drawn.argsort(-1)[..., :count]
    chosen = chosen.masked_fill(chosen >= own, -1)  # (B, H, n, t)
    key_mask = torch.arange(n).expand(2, n) % 5 != 1 if masked else None
    want = selected.selected(q, k, v, chosen, key_mask, None, block, 0.3)
    about = selected._own(key_mask, None, block, n, 0.3)
    out, lse = merge(q, [k], [v], *about)
    flat = [x.flatten(0, 1) for x in (q, k, v, chosen)]
    real = selected._real(key_mask, q)
    selected_reference.forward(*flat, real, block, 0.3, out.flatten(0, 1), lse.flatten(0, 1))
    close((out, lse), want)
    found = merge_backward(grad, q, [k], [v], *want, *about)
    given = [x.flatten(0, 1) for x in (grad, q, k, v, *want, chosen)]
    selected_reference.backward(*given, real, block, 0.3, [x.flatten(0, 1) for x in found])
    close(tuple(found), selected.selected_backward(grad, q, k, v, *want, chosen, key_mask, None, block, 0.3))


@pytest.mark.parametrize("rows, entries", [(1, 1), (9, 5), (33, 20)])
def test_entries(rows, entries):
    q, grad = (normal(2, 3, rows, 8, seed=s) for s in (0, 1))
    k, v = (normal(2, 1, entries, 8, seed=s).expand(-1, 3, -1, -1) for s in (2, 3))
    seen = torch.rand(2, 1, rows, entries, generator=torch.Generator().manual_seed(4)) < 0.6
    seen[..., 0] = True
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    want = compressed._attend(q, k, v, bias, 0.3)
    close(compressed_reference.attend(q, k, v, bias, 0.3), want)
    whole = torch.logaddexp(want[1], torch.tensor(0.2))  # with a sink
    out = want[0] * (want[1] - whole).exp()[..., None]
    given = (grad, q, k, v, out, whole)
    wanted = compressed._attend_backward(*given, bias=bias, scale=0.3)
    close(compressed_reference.attend_backward(*given, bias, 0.3), wanted)


def test_a_query_without_entries_gets_nothing():
    q, k, v = normal(1, 1, 2, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)
    bias = torch.tensor([[0.0, 0.0, 0.0], [-torch.inf] * 3], dtype=q.dtype)[None, None]
    out, lse = compressed_reference.attend(q, k, v, bias, 0.5)
    assert not out[0, 0, 1].any() and lse[0, 0, 1] == -torch.inf and lse[0, 0, 0].isfinite()
