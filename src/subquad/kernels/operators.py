"""What operators have in common: the derivative that another one computes, calls without the dispatcher, precision.

A custom operator costs about 0.1 ms a call in Python, and as much again in the backward: at a few hundred tokens that
is as long as its kernel takes. An `Eager` operator calls the CPU kernel itself, and keeps for the backward what the
operator would keep. It is the operator as soon as anything but the result matters: tensors of another kind or on
another device, a graph that is traced or compiled, a function transform, a mode that counts or records operators, a
profiler, or a second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def no_second_derivative(name: str) -> Callable[..., Any]:
    """The derivative of a derivative that has none: says so."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{name} has no second derivative")

    return refuse


def without_autocast(tensors: Sequence[Any]) -> AbstractContextManager:
    """An operator computes in the dtypes of its tensors. Autocast, which torch's products inside it would follow, is
    also on in a backward pass that is called under it.
    """
    kind = next(x.device.type for x in tensors if isinstance(x, Tensor))
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


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

    gives the gradients of the inputs `of`, lists of tensors spread out, in the memory that `empty` makes. Where the
    output is a list of tensors, so are its gradients, 0 for those that none is asked of. `flops` of the inputs are
    those of the operator, which multiplies every pair twice (scores, sums); a backward does so five times. `call` runs
    in place of `backward`. Returns what keeps the tensors and what calls it, as `register_autograd` takes them.
    """
    call, schema = call or backward, operator._opoverload._schema
    kinds = [str(argument.type) for argument in schema.arguments]
    singles = [i for i, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
    lists = [i for i, kind in enumerate(kinds) if kind == "List[Tensor]"]
    others = [i for i in range(len(kinds)) if i not in singles and i not in lists]
    returns = [str(x.type) for x in backward._opoverload._schema.returns]

    def save(ctx: Any, inputs: Sequence, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        ctx.sizes, ctx.settings = [len(inputs[i]) for i in lists], [inputs[i] for i in others]
        ctx.results, ctx.is_list = len(outputs[kept]), isinstance(output, list)
        tensors = [inputs[i] for i in singles] + [x for i in lists for x in inputs[i]]
        ctx.save_for_backward(*outputs[kept], *tensors)

    def gradient(ctx: Any, *grads: Any) -> Any:
        saved = iter(ctx.saved_tensors)  # read once: a checkpoint hands them over only once
        outputs: list[Any] = list(islice(saved, ctx.results))
        if ctx.is_list:
            given = [torch.zeros_like(x) if g is None else g for g, x in zip(grads[0], outputs, strict=True)]
            grads, outputs = (given,), [outputs]
        inputs: list[Any] = [None] * len(kinds)
        changed: list[Any] = [None] * len(kinds)
        for i, x in zip(others, ctx.settings, strict=True):
            inputs[i] = x
        for i in singles:
            inputs[i] = next(saved)
        for i, size in zip(lists, ctx.sizes, strict=True):
            inputs[i], changed[i] = list(islice(saved, size)), [None] * size
        with without_autocast(flattened(inputs)[1]):
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


HALF = (torch.float16, torch.bfloat16)


def in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` for half precision too: tensors are widened on the way in, and narrowed on the way out.

    A result has the dtype of the first argument. Several are gradients of the arguments behind it, and have theirs.
    """

    @wraps(compute)
    def widened(first: Tensor, *rest: Any) -> Any:
        if first.dtype not in HALF:
            return compute(first, *rest)
        out = compute(*(x.float() if isinstance(x, Tensor) and x.dtype in HALF else x for x in (first, *rest)))
        return (
            out.to(first.dtype)
            if isinstance(out, Tensor)
            else tuple(x.to(like.dtype) for x, like in zip(out, rest, strict=False))
        )

    return widened
