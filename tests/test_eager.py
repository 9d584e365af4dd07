"""Operators without the dispatcher: the same results, and the operator itself wherever somebody watches."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad
from subquad.kernels import operators

NAMES = ("combiner-fixed", "combiner-logsparse", "combiner-axial:plan=vertical", "combiner-axial:plan=horizontal")


class Seen(TorchDispatchMode):
    """Which of our operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "subquad":
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def step(module, tensors, grad):
    out = module(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


@pytest.mark.parametrize("name", NAMES)
def test_direct_calls_give_what_operators_give(name, monkeypatch):
    torch.manual_seed(0)
    module = subquad.attention(name, num_heads=2, head_dim=16, causal=True)
    tensors = [torch.randn(2, 2, 50, 16, requires_grad=True) for _ in range(3)]
    grad = torch.randn(2, 2, 50, 16)
    direct = step(module, tensors, grad)
    with Seen() as seen:
        through_operators = step(module, tensors, grad)
    assert {"subquad::merge", "subquad::merge_backward"} <= seen.names
    assert all(map(torch.equal, direct, through_operators))
    monkeypatch.setattr(operators, "is_plain", lambda tensors: False)
    assert all(map(torch.equal, direct, step(module, tensors, grad)))


def test_a_profiler_sees_the_operators():
    module = subquad.attention("combiner-fixed", num_heads=2, head_dim=16, causal=True)
    x = torch.randn(1, 2, 40, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        module(x, x, x)
    assert "subquad::merge" in {event.key for event in found.key_averages()}


def test_second_derivatives_go_through_the_operators():
    module = subquad.attention("combiner-fixed", num_heads=2, head_dim=16, causal=True)
    x = torch.randn(1, 2, 40, 16, requires_grad=True)
    (first,) = torch.autograd.grad(module(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()
