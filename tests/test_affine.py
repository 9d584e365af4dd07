"""Projections by oneDNN: values, gradients and second derivatives of `F.linear`, and only where it is allowed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import affine as module
from subquad.kernels.affine import affine, affine_parts, apply_linear
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
    x, results = torch.randn(2, 9, 16), []
    for allowed in (True, False):
        monkeypatch.setattr(module, "_has_faster", lambda allowed=allowed: allowed)
        layer.zero_grad()
        out = layer(x, x, x, need_weights=False)[0]
        out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*results)


@needs_library
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1,)])
def test_parts_are_those_of_one_product(always, used, with_bias):
    given = inputs(2, 7, 4)[: 3 if with_bias else 2]
    bias = given[2] if with_bias else None
    parts, expected = affine_parts(given[0], given[1], bias, (1, 3, 2)), F.linear(*given).split((1, 3, 2), -1)
    assert is_ours(parts[0]) and all(part.is_contiguous() for part in parts)
    torch.testing.assert_close(parts, expected)
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(part.shape, generator=draw).requires_grad_() for part in parts]
    results = []
    for outs in (parts, expected):
        chosen = [outs[i] for i in used], given, [grads[i] for i in used]
        results.append([torch.autograd.grad(*chosen, retain_graph=True)])
        first = torch.autograd.grad(*chosen, create_graph=True)
        results[-1] += [
            first,
            torch.autograd.grad(sum(g.square().sum() for g in first), [*given[:2], *(grads[i] for i in used)]),
        ]
    torch.testing.assert_close(*results)


@needs_library
def test_flops_of_parts_are_those_of_one_product(always):
    x, weight, bias = inputs(5, 4)
    counts = []
    for many in (True, False):
        with FlopCounterMode(display=False) as counter:
            outs = affine_parts(x, weight, bias, (1, 3, 2)) if many else [F.linear(x, weight, bias)]
            sum(out.sum() for out in outs).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 5 * 4 * 6


@needs_library
def test_an_output_projection_that_was_changed_is_called(always):
    linear, x, calls = torch.nn.Linear(4, 6), inputs(5, 4)[0], []
    assert is_ours(apply_linear(linear, x))
    hook = linear.register_forward_hook(lambda *args: calls.append(1))
    assert not is_ours(apply_linear(linear, x)) and calls == [1]
    hook.remove()
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *args: calls.append(1))
    assert not is_ours(apply_linear(linear, x)) and calls == [1, 1]
    everywhere.remove()
    torch.nn.utils.parametrizations.weight_norm(linear)
    assert not is_ours(apply_linear(linear, x))
    torch.testing.assert_close(apply_linear(torch.nn.Identity(), x), x)
