"""Where the host must not wait for a GPU (`devices.without_waiting`), gone on tensors of the CPU: values and gradients.

What would be read is bounded instead: all pairs for the pairs that are drawn or meet, slots that were given for the
lengths of rows, rows of T, T/2, T/4 … slots for packed sequences.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

import subquad
from fake_gpu import as_on_a_gpu
from subquad.attention.combiner_plans import eights
from subquad.attention.patterns import window_and_relay
from subquad.attention.registry import mechanism
from subquad.kernels import devices
from subquad.kernels.clusters.layout import StaticLayout
from subquad.kernels.graphs import reference as graphs_reference
from subquad.kernels.masks import unpack_mask
from subquad.kernels.sampler import Rules, sample, sample_rows
from subquad.kernels.sampler import reference as sampler_reference
from subquad.packing import packing_of
from subquad.supports.binary import Logsparse
from subquad.testing import cases
from subquad.testing.case import close, masks
from test_gpu_values import check_dropped, check_streaming, compare


def test_the_switch(monkeypatch):
    assert devices.may_wait() and not devices.is_short(None) and not devices.is_short(devices.FEW + 1)
    with devices.without_waiting(), devices.without_waiting():
        assert not devices.may_wait() and devices.is_short(None)
    assert devices.may_wait()
    monkeypatch.setenv("SUBQUAD_WAIT", "never")
    assert not devices.may_wait()
    monkeypatch.setenv("SUBQUAD_WAIT", "sometimes")
    with pytest.raises(ValueError, match="SUBQUAD_WAIT must be one of auto, never"):
        devices.may_wait()


def test_the_capture_of_a_graph_is_noticed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for captures in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        assert devices.may_wait() != captures


ALL_PAIRS = [
    ("sbm", {}), ("sbm", {"ste": "published"}), ("sbm", {"sampler": "fastrg"}), ("scatterbrain", {}), ("routing", {}),
    ("combiner-routing", {}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", ALL_PAIRS, ids=str)
def test_all_pairs_some_rows_at_a_time(name, options, monkeypatch):
    """Where the host must not read, long sequences have all pairs too; the same is dropped as on a CPU."""
    monkeypatch.setattr(devices, "FEW", 8)
    for module, size in ((sampler_reference, "PAIRS"), (graphs_reference, "PAIRS")):
        monkeypatch.setattr(module, size, 300)
    monkeypatch.setattr(StaticLayout, "batch", 300)
    with devices.without_waiting():
        for case in cases(name, **mechanism(name).examples[0], **options):
            compare(case, 33, padded=False)
            compare(case, 33, padded=True)
        check_dropped(name, **options)


def test_rows_of_a_graph_drawn_alone(monkeypatch):
    """`sample_rows`: of new queries in streaming, what a call draws for them."""
    monkeypatch.setattr(sampler_reference, "PAIRS", 100)
    draw = torch.Generator().manual_seed(0)
    w, z = (torch.rand(2, 3, 29, 5, generator=draw) * scale for scale in (0.3, 1))
    real, position = torch.rand(2, 29, generator=draw) > 0.2, torch.tensor([[3, 9, 28], [0, 1, 17]])
    for sampler in ("exact", "fastrg", "bernoulli"):
        rules = Rules(sampler, causal=True, exploration=0.1, reach=1, crossover=-1.0, alike=True)
        drawn = sample(w, z, torch.tensor(7), real, rules)
        whole = unpack_mask(drawn.mask, (2, 3, 29, 29))
        at = position[:, None, :, None].expand(-1, 3, -1, 29)
        some = w.gather(2, position[:, None, :, None].expand(-1, 3, -1, 5))
        found = sample_rows(some, z, torch.tensor(7), real, position, rules)
        assert found.any() and torch.equal(found, whole.gather(2, at))


NESTED = [
    ("pattern", {"sets": window_and_relay}), ("pattern", {"sets": window_and_relay, "map": "topk", "topk": 2}),
    ("pattern", {"sets": torch.ones(21, 21).tril(3).bool()}), ("combiner-plan", {"plan": eights}),
    ("combiner-plan", {"plan": eights, "abstraction": "mean"}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", NESTED, ids=("sets", "sets-topk", "mask", "plan", "plan-mean"))
def test_nested_sets_of_ones_own(name, options, monkeypatch):
    """Rows of their own length share one list, on a CPU too where it is a plan."""
    monkeypatch.setattr(devices, "FEW", 8)
    for case in cases(name, nested=True, **options):
        with devices.without_waiting():
            compare(case, 21, padded=True)
        module, mask = case.make(torch.float64), masks(21)
        xs = case.inputs(21, torch.float64, len(mask))
        close(case.run(module, xs, mask), case.dense(module, xs, mask), 1e-9, case.title)


def test_what_is_not_nested_is_refused():
    def last(n):
        return torch.arange(n).expand(n, n) >= n - 2

    with pytest.raises(ValueError, match="nested=True"):
        subquad.attention("pattern", num_heads=2, head_dim=4, sets=last, nested=True)
    with pytest.raises(ValueError, match="nested=True"):
        subquad.attention("combiner-plan", num_heads=2, head_dim=4, plan=halves, nested=True)
    with pytest.raises(ValueError, match="nested=True"):  # the mirror image follows the length
        subquad.attention("combiner-plan", num_heads=2, head_dim=4, plan=Logsparse(causal=False), nested=True)
    attention = subquad.attention("pattern", num_heads=2, head_dim=4, sets=last)
    q = torch.randn(2, 2, 9, 4)
    with as_on_a_gpu(), devices.without_waiting(), pytest.raises(ValueError, match="nested=True"):
        attention(q, q, q, key_mask=torch.ones(2, 9, dtype=torch.bool))


def halves(n):
    """The first half directly, the others as a group."""
    return [range(n // 2)] * n, [[range(n // 2, n)]] * n


@pytest.mark.parametrize("name", ["sbm", "longformer", "bigbird", "combiner-window", "composite-slice", "csa"])
def test_streaming_without_waiting(name):
    """The host knows what no row is longer than, and not whether there is padding."""
    with devices.without_waiting():
        check_streaming(name)


@pytest.mark.parametrize("ends", [[0, 33], [0, 5, 6, 20, 33], [0, *range(1, 34)], [0, 30, 31, 32, 33]], ids=len)
def test_packed_batches_without_waiting(ends):
    """Rows of the bounds have room for all sequences: values and gradients."""
    torch.manual_seed(0)
    starts, x = torch.tensor(ends), torch.randn(1, 33, 32, dtype=torch.float64, requires_grad=True)
    layer = subquad.MultiheadAttention(32, 4, attention="combiner-fixed", max_length=64, batch_first=True).double()
    run = partial(layer, x, x, x, cu_seqlens=starts, need_weights=False)
    want = run()[0]
    (wanted,) = torch.autograd.grad(want.square().sum(), x)
    with as_on_a_gpu(), devices.without_waiting():
        got = run()[0]
        (grad,) = torch.autograd.grad(got.square().sum(), x)
    close(got, want, 1e-9, str(ends))
    close(grad, wanted, 1e-9, f"gradient: {ends}")


@pytest.mark.parametrize("longest", [None, 30])
def test_bounds_of_packed_sequences(longest):
    """Every token has a place of its own, and slots stay below T·(1 + log₂ S)."""
    for ends in ([0, 5, 6, 20, 33], [0, 3, 33], [0, 30, 31, 32, 33], [0, *range(1, 34)]):
        with as_on_a_gpu(), devices.without_waiting():
            packing = packing_of((1, 33), cu_seqlens=torch.tensor(ends), longest=longest)
            whole = packing.join([bucket.rows(torch.arange(33.0)[None, :, None]) for bucket in packing.buckets])
        assert whole.flatten().tolist() == list(range(33)) and packing.lengths.tolist() == list(np.diff(ends))
        assert sum(int(bucket.mask.sum()) for bucket in packing.buckets) == 33
        assert sum(bucket.mask.numel() for bucket in packing.buckets) <= 33 * (1 + math.log2(len(ends) - 1))
