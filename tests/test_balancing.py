"""Sinkhorn's balancing: the kernel, the reference and a chain of log_softmax agree."""

import pytest
import torch
from torch.testing import assert_close as close

from subquad.kernels.balancing import balance, balanced, balanced_backward


def chain(logits, iterations):
    for _ in range(iterations):
        logits = logits.log_softmax(-2).log_softmax(-1)
    return logits.exp()


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_a_chain_of_log_softmax(size, kind):
    draw = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(2, 3, size, size, generator=draw, dtype=kind)
    grad, given = torch.randn(logits.shape, generator=draw, dtype=kind), logits.mT.requires_grad_()
    wanted, found = chain(given, 5), balance(given, 5)
    bounds = {"atol": 1e-12, "rtol": 1e-10} if kind == torch.float64 else {"atol": 1e-6, "rtol": 1e-5}
    close(found, wanted, **bounds)
    close(*(torch.autograd.grad(out, given, grad)[0] for out in (found, wanted)), **bounds)


def test_the_reference_is_the_kernel():
    logits, grad = torch.randn(2, 3, 9, 9, dtype=torch.float64).unbind(0)
    found, wanted = balanced(logits, 4), balanced._init_fn(logits, 4)
    close(found, wanted)
    close(balanced_backward(grad, *found[1:]), balanced_backward._init_fn(grad, *wanted[1:]))


def test_distant_logits_stay_finite():
    logits = (1e4 * torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(0))).requires_grad_()
    out = balance(logits, 8)
    close(out, chain(logits, 8), atol=1e-3, rtol=0)
    assert torch.autograd.grad(out.square().sum(), logits)[0].isfinite().all()


def test_the_operator_keeps_its_promises():
    logits = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(balanced, (logits, 3))
    (first,) = torch.autograd.grad(balance(logits, 3).square().sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()
