"""The kernel sums against the formula: the kernels of a CPU, and the steps in torch that odd widths take."""

import pytest
import torch
from torch.testing import assert_close as close

from subquad.kernels.linear import cpu, kernel_sums
from subquad.kernels.linear.reference import elu_plus_one, kernel_weights, normalised


def problem(n: int, m: int, f: int, d: int, elu: bool) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    mixed = torch.randn(2, max(n, m), 3, 2, max(f, d), generator=draw, dtype=torch.float64).transpose(1, 3)
    a, b, v = mixed[:, :, 0, :n, :f], mixed[:, :, 1, :m, :f], mixed[:, :, 2, :m, :d]  # (2, 2, ·, ·), strided
    return [x.detach().requires_grad_() for x in ((a, b, v) if elu else (a.abs(), b.abs(), v))]


@pytest.mark.parametrize("elu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("f", "d"), [(8, 16), (3, 5)])
def test_values_and_gradients_are_those_of_the_formula(f, d, causal, elu):
    a, b, v = problem(101, 101 if causal else 67, f, d, elu)
    assert cpu.takes(a, v, None) == (f == 8)
    x, y = (elu_plus_one(a), elu_plus_one(b)) if elu else (a, b)
    wanted = normalised(kernel_weights(x, y, causal=causal)) @ v
    found = kernel_sums(a, b, v, causal=causal, elu=elu)
    close(found, wanted, atol=1e-11, rtol=1e-9)
    weight = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((out * weight).sum(), (a, b, v)) for out in (found, wanted)]
    close(*grads, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_denominator(causal):
    a, b, v = problem(50, 50, 8, 8, False)
    found = kernel_sums(a, b, v, causal=causal, normalise=False)
    wanted = kernel_weights(a, b, causal=causal) @ v
    close(found, wanted)
    close(*(torch.autograd.grad(out.square().sum(), (a, b, v)) for out in (found, wanted)))


def test_float32_is_as_exact_as_its_sums_and_empty_rows_are_0():
    a, b, v = (x.detach().float() for x in problem(300, 300, 8, 8, True))
    x, y = elu_plus_one(a.double()), elu_plus_one(b.double())
    wanted = normalised(kernel_weights(x, y, causal=True)) @ v.double()
    close(kernel_sums(a, b, v, causal=True, elu=True), wanted.float(), atol=1e-5, rtol=1e-5)
    nothing = torch.zeros_like(a)
    assert not kernel_sums(nothing, b, v, causal=False).any()
