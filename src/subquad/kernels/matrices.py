"""Tensors as the CPU kernels take them: the entries of a row side by side, rows by address and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.vectors import BYTES


def fits(*tensors: Tensor) -> bool:
    """On a CPU, of a type and a width that there are vectors of?"""
    kinds = (torch.float32, torch.float64)
    return all(devices.is_host(x) and x.dtype in kinds and x.shape[-1] * x.element_size() % BYTES == 0 for x in tensors)


def ready(x: Tensor) -> Tensor:
    """With the entries of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def matrix(x: Tensor) -> tuple[int, ...]:
    """The address, and the strides of all dimensions but the last."""
    assert x.stride(-1) == 1 and x.device.type == "cpu"  # a kernel follows the address
    return x.data_ptr(), *x.stride()[:-1]
