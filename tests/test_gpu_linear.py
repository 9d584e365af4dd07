"""The causal kernel sums of a GPU in Triton's interpreter, against the formula: values and gradients."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels import devices
from subquad.kernels.linear import chunks, gpu, op
from subquad.kernels.linear.op import room
from subquad.kernels.linear.reference import kernel_weights, normalised

pytestmark = pytest.mark.skipif(not devices.has_triton(), reason=devices.MISSING)


def drawn(count, n, features, width, scaled):
    draw = torch.Generator().manual_seed(n)
    a, b = (torch.rand(count, n, features, generator=draw) for _ in range(2))
    v, grad = (torch.randn(count, n, width, generator=draw) for _ in range(2))
    scales = torch.rand(count, n, generator=draw).cumsum(1) if scaled else None
    return a, b, v, grad, scales


def check(count, n, features, width, scaled, normalise):
    a, b, v, grad, scales = drawn(count, n, features, width, scaled)
    x, y, z = (t.double()[None].requires_grad_() for t in (a, b, v))
    weights = kernel_weights(x, y, None if scales is None else scales.double()[None], causal=True)
    want = ((normalised(weights) if normalise else weights) @ z)[0]
    out, den = gpu.causal_forward(a, b, v, scales, normalise)
    torch.testing.assert_close(out, want.detach().float(), rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(want, (x, y, z), grad.double())
    found = gpu.causal_backward(grad, a, b, v, scales, out, den, normalise)
    for name, one, exact in zip(("a", "b", "v"), found, expected, strict=True):
        torch.testing.assert_close(one, exact[0].float(), rtol=1e-5, atol=1e-5, msg=lambda m, x=name: f"{x}: {m}")


@pytest.fixture(params=["ieee", "tf32"])
def precision(request, monkeypatch):
    """Features in blocks or as one matrix; the interpreter multiplies float32 in both."""
    monkeypatch.setattr(devices, "precision", lambda x: request.param)


@pytest.mark.parametrize("scaled, normalise", [(False, True), (True, True), (True, False)])
def test_the_walk_equals_the_formula(scaled, normalise, precision):
    """Chunks and a part of one, features and values whose widths are no powers of 2, two blocks of columns."""
    check(2, 71, 20, 40, scaled, normalise)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("features, width", [(1, 1), (16, 16), (64, 32), (130, 65)])
def test_the_walk_equals_the_formula_at_other_sizes(n, features, width, precision):
    for scaled in (False, True):
        check(1, n, features, width, scaled, normalise=True)


@pytest.mark.parametrize("elu", [False, True])
def test_half_precision_is_computed_in_float32(elu, monkeypatch):
    """The whole operator in float16, features included: within the rounding of its inputs and outputs."""
    monkeypatch.setattr(op, "room", lambda a, v: gpu)
    monkeypatch.setattr(op.cpu, "takes", lambda *tensors: False)
    a, b, v, grad, _ = (x if x is None else x[None].half() for x in drawn(2, 71, 20, 40, False))
    exact = [x.double().requires_grad_() for x in (a, b, v)]
    given = [x.requires_grad_() for x in (a, b, v)]
    features = [op.elu_plus_one(x) for x in exact[:2]] if elu else exact[:2]
    want = normalised(kernel_weights(*features, None, causal=True)) @ exact[2]
    out = op.kernel_sums(*given, causal=True, elu=elu)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)
    found, expected = torch.autograd.grad(out, given, grad), torch.autograd.grad(want, exact, grad.double())
    for name, x, y in zip(("a", "b", "v"), found, expected, strict=True):
        assert x.dtype == torch.float16
        torch.testing.assert_close(x.double(), y, rtol=2e-3, atol=2e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_a_query_without_weight_gets_nothing():
    a, b, v, grad, _ = drawn(1, 9, 4, 4, False)
    a[:, 3] = 0
    out, den = gpu.causal_forward(a, b, v, None, True)
    assert not out[:, 3].any() and out[:, 4].any()
    assert all(torch.isfinite(t).all() for t in gpu.causal_backward(grad, a, b, v, None, out, den, True))


def test_the_route_of_the_linear_operator():
    assert devices.route("linear", torch.float32, devices.WIDEST + 1).impl == "reference"
    assert devices.route("linear", torch.float32, 64).impl == "triton"
    a, _, v, _, _ = drawn(1, 9, 4, 4, False)
    assert room(a, v) is chunks  # on a CPU
