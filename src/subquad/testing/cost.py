"""The check of growth: counted, not timed."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from subquad.testing.case import Case


def grows_as_declared(case: Case) -> None:
    """Operations, and bytes kept for the backward, grow no faster than n to the declared exponent.

    Counted on tensors without data, from 4,096 to 65,536 tokens; where the work depends on the data, on real ones.
    """
    declared = case.core(case.make(torch.float32))
    sizes = declared.counted_lengths
    counts, kept = zip(*(_count(case, n, declared.data_dependent) for n in sizes), strict=True)
    assert counts[0] > 0, (
        "no matrix product was counted, and products of single numbers with sums are not: write the scores as a matrix "
        'product (@, matmul, einsum), or declare exceptions = {"grows_as_declared": "the reason"}'
    )
    step = math.log(sizes[1] / sizes[0])
    for what, (small, large) in (("operations", counts), ("memory", kept)):
        exponent = math.log(large / small) / step
        limit = max(declared.exponent, 1.0) + 0.25  # logarithms and rounded block sizes
        assert exponent <= limit, f"{what} grow like n^{exponent:.2f}, declared n^{declared.exponent}"


def _count(case: Case, n: int, real: bool) -> tuple[int, int]:
    """Floating-point operations and bytes kept for the backward of one step at length n."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    module = case.make(torch.float32)
    with contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
        if not real:
            _forget_values(module)
        xs = [torch.randn(x.shape, requires_grad=True) for x in case.inputs(n, torch.float32, batch=1)]
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            case.run(module, xs).sum().backward()
    return counter.get_total_flops(), sum(storages.values())


def _forget_values(module: nn.Module) -> None:
    """Parameters without data, as a fake mode wants them; `Module.to` cannot make them there."""
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty_like(p), p.requires_grad))
