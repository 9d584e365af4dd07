"""Operators called without torch's dispatcher, where nobody watches it.

A custom operator costs about 0.1 ms a call in Python, and as much again in the backward: at a few hundred tokens that
is as long as its kernel takes. An `Eager` operator calls the CPU kernel itself, and keeps for the backward what the
operator would keep. It is the operator as soon as anything but the result matters: tensors of another kind or on
another device, a graph that is traced or compiled, a function transform, a mode that counts or records operators, a
profiler, or a second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)


class Eager:
    """`operator` with its kernel for a CPU, and what its derivative consists of: `save` and `gradient`, as given to
    `register_autograd`. Without these it is called where no derivative is wanted.
    """

    def __init__(
        self, operator: Any, kernel: Callable, save: Callable | None = None, gradient: Callable | None = None
    ) -> None:
        self.operator, self.kernel, self.save, self.gradient = operator, kernel, save, gradient

    def __call__(self, *arguments: Any) -> Any:
        sizes, flat = flattened(arguments)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if not is_plain(tensors):
            return self.operator(*arguments)
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
            return self.kernel(*arguments)
        if self.save is None:
            return self.operator(*arguments)
        return _Function.apply(self, sizes, *flat)


def is_plain(tensors: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(x) in PLAIN and x.device.type == "cpu" for x in tensors)


class _Function(torch.autograd.Function):
    """autograd does not look into lists: arguments and results are laid out flat."""

    @staticmethod
    def forward(ctx: Any, eager: Eager, sizes: list[int | None], *flat: Any) -> Any:
        arguments = _nested(sizes, flat)
        result = eager.kernel(*arguments)
        assert eager.save is not None
        eager.save(ctx, arguments, result)
        ctx.eager, ctx.is_list = eager, isinstance(result, list)
        return tuple(result) if ctx.is_list else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.eager.gradient(ctx, list(grads)) if ctx.is_list else ctx.eager.gradient(ctx, *grads)
        return None, None, *flattened(found)[1]


def flattened(arguments: Sequence[Any]) -> tuple[list[int | None], list[Any]]:
    """How long each list among the arguments is (None = it is none), and everything in a row."""
    sizes: list[int | None] = []
    flat: list[Any] = []
    for x in arguments:
        if isinstance(x, (list, tuple)):
            sizes.append(len(x))
            flat += x
        else:
            sizes.append(None)
            flat.append(x)
    return sizes, flat


def _nested(sizes: Sequence[int | None], flat: Sequence[Any]) -> list[Any]:
    arguments: list[Any] = []
    at = 0
    for size in sizes:
        arguments.append(flat[at] if size is None else list(flat[at : at + size]))
        at += 1 if size is None else size
    return arguments
