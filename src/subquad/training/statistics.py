"""Running averages of a model (such as the centroids of routing attention) move once per optimiser step.

A model returns the sums that its averages need as `outputs.statistics`, a nested tuple of tensors. The trainer adds
them over the parts of a batch and over the processes, and hands the total to `model.update_statistics`. So a batch
has the same effect however it is divided, and `forward` writes nothing.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from subquad.training.processes import together

Sums = Any  # a tensor, None, or a tuple of Sums


def add(left: Sums, right: Sums) -> Sums:
    """Two nests of the same shape, leaf by leaf; None counts as zero."""
    if left is None or right is None:
        return detached(right if left is None else left)
    if isinstance(left, Tensor):
        return left + right.detach()
    if len(left) != len(right):
        raise ValueError(
            f"statistics must have the same structure in every call, not {len(left)} and {len(right)} items"
        )
    return tuple(add(*pair) for pair in zip(left, right, strict=True))


def detached(sums: Sums) -> Sums:
    if sums is None or isinstance(sums, Tensor):
        return None if sums is None else sums.detach().clone()
    return tuple(detached(each) for each in sums)


def over_processes(sums: Sums) -> Sums:
    """The total over all processes; in place."""
    if isinstance(sums, Tensor) and together():
        dist.all_reduce(sums)
    elif isinstance(sums, tuple):
        for each in sums:
            over_processes(each)
    return sums
