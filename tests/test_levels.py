"""Attention on several levels: the kernels and the reference agree, and both with the definition."""

import pytest
import torch
from torch.testing import assert_close as close

import subquad
from subquad.kernels.levels import attend_levels
from subquad.kernels.levels.op import attention
from subquad.kernels.runs import cpu


def problem(n: int, d: int, masked: bool, kind: torch.dtype = torch.float64):
    draw = torch.Generator().manual_seed(n)
    q, k, v, grad = torch.randn(4, 2, 2, n, d, generator=draw, dtype=kind).unbind(0)
    mask = torch.rand(2, n, generator=draw) > 0.4 if masked else None
    if mask is not None:
        mask[0, :12], mask[1] = False, mask[1] | (torch.arange(n) == 0)
    return [x.requires_grad_() for x in (q, k, v)], grad, mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("d", [8, 3])  # vectors of the kernel, and none
@pytest.mark.parametrize("n", [1, 8, 13, 31, 64, 97])
def test_values_and_gradients_are_those_of_the_definition(n, d, masked):
    given, grad, mask = problem(n, d, masked)
    module = subquad.attention("h-transformer-1d", num_heads=2, head_dim=d, block=4)
    found, wanted = module(*given, key_mask=mask), module.dense(*given, key_mask=mask)
    close(found, wanted, atol=1e-11, rtol=1e-9)
    bounds = {"atol": 1e-10, "rtol": 1e-8}
    close(torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), **bounds)


@pytest.mark.parametrize("masked", [False, True])
def test_the_reference_is_the_kernel(masked, monkeypatch):
    given, grad, mask = problem(53, 8, masked, torch.float32)
    tensors = [x.detach().flatten(0, 1).requires_grad_() for x in given]
    real = None if mask is None else mask.float().repeat_interleave(2, 0)

    def results():
        out = attend_levels(*tensors, real, 4, 4, 0.4)
        return out, *torch.autograd.grad(out, tensors, grad.flatten(0, 1))

    found = results()
    monkeypatch.setattr(cpu, "takes", lambda q: False)
    close(found, results(), atol=1e-5, rtol=1e-5)


def test_large_scores_stay_finite():
    given, grad, _ = problem(100, 8, False, torch.float32)
    out = attend_levels(*(x.flatten(0, 1) for x in given), None, 4, 5, 1e3)
    found = torch.autograd.grad(out, given, grad.flatten(0, 1))
    assert all(x.isfinite().all() for x in (out, *found))


def test_the_operator_keeps_its_promises():
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in problem(21, 8, False)[0])
    torch.library.opcheck(attention, (q, k, v, None, 4, 3, 0.5))
    (first,) = torch.autograd.grad(attend_levels(q, k, v, None, 4, 3, 0.5).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()
