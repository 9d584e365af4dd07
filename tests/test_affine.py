"""Projections by oneDNN: values, gradients and second derivatives of `F.linear`, and only where it is allowed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import affine as module
from subquad.kernels.affine import Linear, affine
from subquad.layers import MultiheadAttention

needs_library = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture
def always(monkeypatch):
    """As if every product were large and the processor one where it pays."""
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "_has_faster", lambda: True)


def inputs(*shape: int):
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=draw) for s in (shape, (6, shape[-1]), (6,)))
    return [t.requires_grad_() for t in (x, weight, bias)]


def is_ours(out: torch.Tensor) -> bool:
    return "Affine" in type(out.grad_fn).__name__


@needs_library
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (2, 7, 4), (1, 1, 4)])
def test_values_and_two_derivatives_are_those_of_torch(always, shape, with_bias):
    given = inputs(*shape)[: 3 if with_bias else 2]
    found, expected = affine(*given), F.linear(*given)
    assert is_ours(found)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    first = [torch.autograd.grad(out, given, grad, create_graph=True) for out in (found, expected)]
    torch.testing.assert_close(*first)
    second = [torch.autograd.grad(sum(g.square().sum() for g in gs), given[:2]) for gs in first]
    torch.testing.assert_close(*second)


@needs_library
def test_expanded_gradients_and_turned_weights(always):
    x, weight, bias = inputs(2, 7, 4)
    turned = weight.detach().mT.contiguous().mT.requires_grad_()
    for w in (weight, turned):
        found = torch.autograd.grad(affine(x, w, bias).sum(), [x, w, bias])
        torch.testing.assert_close(found, torch.autograd.grad(F.linear(x, w, bias).sum(), [x, w, bias]))


@needs_library
def test_other_dtypes_autocast_and_transforms_stay_with_torch(always):
    x, weight, bias = inputs(5, 4)
    assert not is_ours(affine(x.double(), weight.double(), bias.double()))
    with torch.autocast("cpu"):
        assert affine(x, weight, bias).dtype == torch.bfloat16
    rows = torch.func.vmap(lambda row: affine(row, weight, bias))(x)
    torch.testing.assert_close(rows, F.linear(x, weight, bias))


def test_small_products_stay_with_torch():
    assert not is_ours(affine(*inputs(5, 4)))


@needs_library
def test_flops_are_counted(always):
    x, weight, bias = inputs(5, 4)
    with FlopCounterMode(display=False) as counter:
        affine(x, weight, bias)
    assert counter.get_total_flops() == 2 * 5 * 4 * 6


@needs_library
def test_a_layer_is_the_same_with_either_library(always, monkeypatch):
    layer = MultiheadAttention(16, 2, batch_first=True, attention="local:window=3")
    assert isinstance(layer.out_proj, Linear) and isinstance(layer.out_proj, torch.nn.Linear)
    x, results = torch.randn(2, 9, 16), []
    for allowed in (True, False):
        monkeypatch.setattr(module, "_has_faster", lambda allowed=allowed: allowed)
        layer.zero_grad()
        out = layer(x, x, x, need_weights=False)[0]
        out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*results)
