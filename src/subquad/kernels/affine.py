"""Affine maps of many rows, x Wᵀ + b, by the faster of the two libraries that torch has for them.

torch multiplies float32 matrices with MKL. On AMD processors its other library, oneDNN, takes about 10 % less time for
the outputs and for the gradient of x; the gradient of W stays with MKL, which is the faster one there. Everything
else (other processors, devices and dtypes, autocast, compiled graphs, small products) is `F.linear`.

Several maps of the same rows (queries, keys and values) are products of their own, each with a tensor of its own: that
takes less time than one large product, later kernels read rows that stand nearer to each other, and the backward does
not have to put the gradients side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    return _Affine.apply(x, weight, bias) if pays(x, weight, bias) else F.linear(x, weight, bias)


def affine_parts(x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`affine` with several maps below each other in `weight` (f of all, e), as wide as `widths` says: (…, f) each."""
    if pays(x, weight, bias):
        biases = [None] * len(widths) if bias is None else bias.split(list(widths))
        return _AffineParts.apply(x, *weight.split(list(widths)), *biases)
    return F.linear(x, weight, bias).split(list(widths), -1)


def apply_linear(module: Any, x: Tensor) -> Tensor:
    """What module(x) gives; by `affine` where nobody has replaced, wrapped or hooked the `nn.Linear`."""
    return affine(x, module.weight, module.bias) if is_untouched(module, nn.Linear) else module(x)


def apply_linears(modules: Sequence[Any], x: Tensor) -> tuple[Tensor, ...]:
    """What several modules give for the same rows, by one function where all of them are plain `nn.Linear`s."""
    if all(is_untouched(module, nn.Linear) and pays(x, module.weight, module.bias) for module in modules):
        return _AffineParts.apply(x, *(module.weight for module in modules), *(module.bias for module in modules))
    return tuple(apply_linear(module, x) for module in modules)


def is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Is it of exactly this kind, does nobody want to be told of its calls, and is no graph traced?"""
    if torch.compiler.is_compiling() or type(module) is not kind or "forward" in vars(module):
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not torch.nn.modules.module._has_any_global_hook()


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

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


class _AffineParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *maps: Any) -> tuple[Tensor, ...]:
        """maps: all weights, then all biases."""
        weights, biases = maps[: len(maps) // 2], maps[len(maps) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted, rows = ctx.needs_input_grad[1:], x.flatten(0, -2)  # (N, e)
        flat = [None if g is None else g.flatten(0, -2) for g in grads]  # (N, f)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _sum_of_products([(g, w) for g, w in zip(grads, weights, strict=True) if g is not None])
        dw = (g.mT @ rows if g is not None and want else None for g, want in zip(flat, wanted, strict=False))
        db = (g.sum(0) if g is not None and want else None for g, want in zip(flat, wanted[len(flat) :], strict=True))
        return dx, *dw, *db


def _sum_of_products(pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Σ g·w. The sum is made inside the products, unless a second derivative is wanted."""
    total = None
    for g, w in pairs:
        if total is None:
            total = affine(g, w.mT)
        elif torch.is_grad_enabled() or not pays(g, w, None):
            total = total + affine(g, w.mT)
        else:
            total = torch.ops.mkldnn._linear_pointwise.binary(g, total, w.mT, None, "add")
    return total


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by oneDNN, without a derivative."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Is the product large, and may oneDNN make it?"""
    return x.numel() * weight.shape[0] >= LEAST and is_allowed(x, weight, bias)


def is_allowed(*given: Tensor | None) -> bool:
    """Are these plain tensors in float32, is nobody tracing, and is oneDNN the faster library here?"""
    tensors = [t for t in given if t is not None]
    return (
        all(type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
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
    def _flops(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * x_shape.numel() * out_shape[-1]
