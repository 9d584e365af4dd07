"""The derivative of an operator that another operator computes, and what derivatives have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.eager import flattened


def no_second_derivative(name: str) -> Callable[..., Any]:
    """The derivative of a derivative that has none: says so."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{name} has no second derivative")

    return refuse


def contiguous(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def derive(
    operator: Any,
    backward: Any,
    name: str,
    *,
    of: tuple[int, ...],
    behind: int,
    kept: slice = slice(None),
    gradients: int = 1,
    empty: Callable[[Tensor], Tensor] = contiguous,
    flops: Callable[..., int] | None = None,
    call: Callable | None = None,
) -> tuple[Callable, Callable]:
    """Registers `backward` as the first derivative of an operator; there is no second one.

        backward(gradients of the first outputs, inputs[:behind], outputs[kept], inputs[behind:])

    gives the gradients of the inputs `of`, lists of tensors spread out, in the memory that `empty` makes. `flops` of
    the inputs are those of the operator, which multiplies every pair twice (scores, sums); a backward does so five
    times. `call` runs in place of `backward`. Returns what keeps the tensors and what calls it, as `register_autograd`
    takes them.
    """
    count, call = len(operator._opoverload._schema.arguments), call or backward

    def save(ctx: Any, inputs: Sequence, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        tensors: list[Tensor] = []
        ctx.layout = []  # per argument of the backward: how many tensors a list has, 0 = a tensor, or what it is itself
        for x in (*inputs[:behind], *outputs[kept], *inputs[behind:]):
            if isinstance(x, Tensor):
                tensors.append(x)
                ctx.layout.append((0, None))
            elif _is_list(x) and x:
                tensors += x
                ctx.layout.append((len(x), None))
            else:
                ctx.layout.append((None, x))
        ctx.save_for_backward(*tensors)

    def gradient(ctx: Any, *grads: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)  # read once: a checkpoint hands them over only once
        given = [
            setting if size is None else list(islice(saved, size)) if size else next(saved)
            for size, setting in ctx.layout
        ]
        found = call(*grads[:gradients], *given)
        changes = iter([found] if isinstance(found, Tensor) else found)
        result: list[Any] = []
        for i, x in enumerate((*given[:behind], *given[len(given) - (count - behind) :])):
            if i in of:
                result.append(list(islice(changes, len(x))) if isinstance(x, list) else next(changes))
            else:
                result.append([None] * len(x) if _is_list(x) else None)
        return tuple(result)

    def inputs_of(arguments: tuple) -> tuple:
        return *arguments[gradients : gradients + behind], *arguments[len(arguments) - (count - behind) :]

    def shapes(*arguments: Any) -> Any:
        inputs = inputs_of(arguments)
        found = [empty(x) for x in flattened([inputs[i] for i in of])[1]]
        returns = [str(x.type) for x in backward._opoverload._schema.returns]
        return found[0] if returns == ["Tensor"] else found if len(returns) == 1 else tuple(found)

    backward.register_fake(shapes)
    backward.register_autograd(no_second_derivative(name))
    operator.register_autograd(gradient, setup_context=save)
    if flops is not None:
        _count(operator, flops)
        _count(backward, lambda *arguments, **_: 5 * flops(*inputs_of(arguments)) // 2)
    return save, gradient


def _is_list(x: Any) -> bool:
    """Of tensors? Numbers come in lists too."""
    return isinstance(x, list) and (not x or isinstance(x[0], Tensor))


def _count(operator: Any, flops: Callable[..., int]) -> None:
    register_flop_formula(operator._opoverload.overloadpacket, get_raw=True)(flops)
