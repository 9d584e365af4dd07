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
    call, schema = call or backward, operator._opoverload._schema
    kinds = [str(argument.type) for argument in schema.arguments]
    singles = [i for i, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
    lists = [i for i, kind in enumerate(kinds) if kind == "List[Tensor]"]
    others = [i for i in range(len(kinds)) if i not in singles and i not in lists]
    results, returns = len(schema.returns[kept]), [str(x.type) for x in backward._opoverload._schema.returns]

    def save(ctx: Any, inputs: Sequence, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.sizes, ctx.settings = [len(inputs[i]) for i in lists], [inputs[i] for i in others]
        tensors = [inputs[i] for i in singles] + [x for i in lists for x in inputs[i]]
        ctx.save_for_backward(*outputs[kept], *tensors)

    def gradient(ctx: Any, *grads: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)  # read once: a checkpoint hands them over only once
        outputs = list(islice(saved, results))
        inputs: list[Any] = [None] * len(kinds)
        changed: list[Any] = [None] * len(kinds)
        for i, x in zip(others, ctx.settings, strict=True):
            inputs[i] = x
        for i in singles:
            inputs[i] = next(saved)
        for i, size in zip(lists, ctx.sizes, strict=True):
            inputs[i], changed[i] = list(islice(saved, size)), [None] * size
        found = call(*grads[:gradients], *inputs[:behind], *outputs, *inputs[behind:])
        changes = iter([found] if returns == ["Tensor"] else found)
        for i in of:
            changed[i] = list(islice(changes, len(inputs[i]))) if i in lists else next(changes)
        return tuple(changed)

    def inputs_of(arguments: tuple) -> tuple:
        return *arguments[gradients : gradients + behind], *arguments[len(arguments) - (len(kinds) - behind) :]

    def shapes(*arguments: Any) -> Any:
        inputs = inputs_of(arguments)
        found = [empty(x) for x in flattened([inputs[i] for i in of])[1]]
        return found[0] if returns == ["Tensor"] else found if len(returns) == 1 else tuple(found)

    backward.register_fake(shapes)
    backward.register_autograd(no_second_derivative(name))
    operator.register_autograd(gradient, setup_context=save)
    if flops is not None:
        _count(operator, flops)
        _count(backward, lambda *arguments, **_: 5 * flops(*inputs_of(arguments)) // 2)
    return save, gradient


def _count(operator: Any, flops: Callable[..., int]) -> None:
    register_flop_formula(operator._opoverload.overloadpacket, get_raw=True)(flops)
