"""A GPU that is not there: tensors of device "cuda" with shapes, dtypes and strides but no contents.

What would make a program wait for the device (`.item()`, `.tolist()`, `bool(x)`) raises here, because there is nothing
to read; what moves data to the CPU is recorded. A build of torch without CUDA cannot index such tensors in C++, so
indexing is spelled out in operators that it can trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subquad.kernels import devices
from subquad.kernels.pools import groups
from subquad.kernels.pools.nodes import nodes_of_pairs


class Moves(TorchDispatchMode):
    """Records the operators that take tensors of the device and give tensors of the CPU, and copies to the device that
    the host waits for.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = device
        self.operators: list[str] = []
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.append(str(func))
        inside, outside = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in ((args, kwargs), out))
        given, taken = ({x.device.type for x in tensors} for tensors in (inside, outside))
        waits = func is torch.ops.aten._to_copy.default and "cpu" in given and not (kwargs or {}).get("non_blocking")
        if (self.device in given and "cpu" in taken) or (waits and self.device in taken):
            self.found.append(str(func))
        return out


class Bodies(Moves):
    """The same, with the operators of the library carried out as on a GPU, where a trace knows but their shapes."""

    ON_HOST = ("pattern_edges", "pattern_mask", "partition_edges")  # what they make of a support has contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = str(func).split(".")[:2]
        if space != "subquad":
            return super().__torch_dispatch__(func, types, args, kwargs)
        known = OPDEFS[f"subquad::{name}"]._backend_fns
        self.operators.append(str(func))
        with unset_fake_temporarily() if name in self.ON_HOST else self:
            return known["cuda" if "cuda" in known else None](*args, **(kwargs or {}))


GUARDED = {  # methods whose bindings ask the driver for its device
    Tensor.__invert__: torch.bitwise_not,
    Tensor.copy_: torch.ops.aten.copy_.default,
    Tensor.contiguous: lambda x: x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format),
}


class Indexing(TorchFunctionMode):
    """x[…] and x[…] = y as slices, selections and gathers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].device.type == "cuda":
            return indexed(*args)
        if func in GUARDED and args[0].device.type == "cuda":
            return GUARDED[func](*args, **(kwargs or {}))
        if func is Tensor.__setitem__ and args[0].device.type == "cuda":
            x, where, value = args
            lists = [w for w in (where if isinstance(where, tuple) else (where,)) if isinstance(w, Tensor)]
            if lists:
                assert len(lists) == 1, "more than one list of places"
                view, (dim, places) = _viewed(x, where)
                if places.dtype == torch.bool:
                    return view.masked_fill_(places, value) if not isinstance(value, Tensor) else view
                return view.index_copy_(dim, places, value.expand(places.numel(), *value.shape[1:]))
            view = indexed(x, where)
            return view.copy_(value) if isinstance(value, Tensor) else view.fill_(value)
        return func(*args, **(kwargs or {}))


def indexed(x: Tensor, where: Any) -> Tensor:
    view, places = _viewed(x, where)
    if not places:
        return view
    found = [None] * view.dim()
    for dim, at in zip(places[::2], places[1::2], strict=True):
        found[dim] = at
    return torch.ops.aten.index.Tensor(view, found)


def _viewed(x: Tensor, where: Any) -> tuple[Tensor, list[Any]]:
    """The view that slices, integers, None and … make, and (dimension, places) of the tensors among them."""
    where = where if isinstance(where, tuple) else (where,)
    if not any(w is ... for w in where):
        where = (*where, ...)
    behind = sum(_dims(w) for w in where[[w is ... for w in where].index(True) + 1 :])
    dim, places = 0, []
    for w in where:
        if w is ...:
            dim = x.dim() - behind
        elif w is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(w, slice) and w == slice(None):
            dim += 1
        elif isinstance(w, slice):
            start, stop, step = w.indices(int(x.shape[dim]))
            x, dim = torch.ops.aten.slice.Tensor(x, dim, start, max(start, stop), step), dim + 1
        elif isinstance(w, Tensor):
            places += [dim, w]
            dim += _dims(w)
        else:
            x = x.select(dim, int(w))
    return x, places


def _dims(w: Any) -> int:
    """How many dimensions an index takes."""
    return w.dim() if isinstance(w, Tensor) and w.dtype == torch.bool else int(w is not None)


@contextmanager
def fake_gpu() -> Iterator[Moves]:
    """Inside, `device="cuda"` makes tensors without contents; how many edges a graph has is left open there."""
    moves = Moves()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
        stack.enter_context(moves)
        stack.enter_context(Indexing())
        yield moves


@contextmanager
def fake_device(bodies: bool = False) -> Iterator[Moves]:
    """The same on the device "meta", on which autograd runs without a driver: for backward passes.

    bodies: look into the operators of the library.
    """
    moves = (Bodies if bodies else Moves)("meta")
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), moves:
        yield moves


@contextmanager
def as_on_a_gpu(impl: str = "reference") -> Iterator[None]:
    """Inside, tensors of the CPU, with their contents, take the way of those of a GPU: for values and gradients."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "is_host", return_value=False))
        stack.enter_context(mock.patch.object(groups.lines, "takes", return_value=False))  # kernels of a CPU alone
        stack.enter_context(mock.patch.object(groups, "binary_nodes", nodes_of_pairs))
        stack.enter_context(devices.use(impl))
        stack.enter_context(Bodies("cuda"))
        yield


def on_fake_gpu(module: nn.Module, device: str = "cuda") -> nn.Module:
    """The module with parameters and buffers of a device that is not there; `Module.to` would ask the driver."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device))
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device=device)
    return module
