"""Tensors that a compiled graph takes as constants: index lists and masks that follow from a length alone.

`torch.compiler.assume_constant_result` hands over numbers any number of times, but a tensor only once per graph.
So a tensor is put into a table while the graph is traced, and the graph fetches it by its number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TABLE: list[Tensor] = []


def constant(make: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """make(*arguments), where the arguments are plain or frozen values; in a compiled graph made while tracing."""
    return _fetch(_keep(make, *arguments)) if torch.compiler.is_compiling() else make(*arguments)


@torch.compiler.assume_constant_result
def _keep(make: Callable[..., Tensor], *arguments: Any) -> int:
    _TABLE.append(make(*arguments))
    return len(_TABLE) - 1


@torch.library.custom_op("subquad::constant", mutates_args=())
def _fetch(number: int) -> Tensor:
    return _TABLE[number].clone()  # a graph may write into what an operator returned


@_fetch.register_fake
def _(number):
    return torch.empty(_TABLE[number].shape, dtype=_TABLE[number].dtype)
