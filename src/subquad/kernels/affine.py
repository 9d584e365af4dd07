"""Affine maps of many rows, x Wᵀ + b, by the faster of the two libraries that torch has for them.

torch multiplies float32 matrices with MKL. On AMD processors its other library, oneDNN, takes about 10 % less time for
the outputs and for the gradient of x; the gradient of W stays with MKL, which is the faster one there. Everything
else (other processors, devices and dtypes, autocast, compiled graphs, small products) is `F.linear`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

LEAST = 1 << 26  # multiply-adds from which the call of the other library pays


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, e), weight (f, e), bias (f,) → (…, f), differentiable any number of times."""
    return _Affine.apply(x, weight, bias) if _pays(x, weight, bias) else F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` with `affine` inside."""

    def forward(self, x: Tensor) -> Tensor:
        return affine(x, self.weight, self.bias)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of differentiable operators, so that a second derivative follows."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        rows = grad.flatten(0, -2)  # (N, f)
        return (
            affine(grad, weight.mT) if ctx.needs_input_grad[0] else None,
            rows.mT @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = [x, weight] if bias is None else [x, weight, bias]
    return (
        x.numel() * weight.shape[0] >= LEAST
        and all(
            type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.device.type == "cpu" for t in given
        )
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and _has_faster()
    )


@cache
def _has_faster() -> bool:
    """Is this an AMD processor, and has this torch oneDNN?"""
    try:
        ours = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        ours = False
    return ours and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


if hasattr(torch.ops.mkldnn, "_linear_pointwise"):

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * x_shape.numel() * weight_shape[0]
