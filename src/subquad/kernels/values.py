"""What the host may do with the values of a tensor: look at them, or leave a check to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels import devices


def readable(x: Tensor) -> bool:
    """May the values of x decide what happens next? Not in a traced graph, which is made for all values, and not on a
    device that the host would have to wait for.
    """
    return devices.is_host(x) and not torch.compiler.is_compiling()


def may_look(x: Tensor) -> bool:
    """May the host look at the values of x to find a faster way, even if it has to wait for them?"""
    return not torch.compiler.is_compiling() and (devices.is_host(x) or devices.may_wait())


def require(holds: Tensor, message: str) -> None:
    """Raise a ValueError where a condition, bool (), does not hold; what the host cannot read, the device checks."""
    if not readable(holds):
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


def cut_rows(out: Tensor, lengths: Tensor | None) -> Tensor:
    """0 behind the end of a row: out (B, H, n, d), lengths (B,), None = every row has n tokens."""
    if lengths is None:
        return out
    inside = torch.arange(out.shape[2], device=out.device) < lengths[:, None]  # (B, n)
    return out.masked_fill(~inside[:, None, :, None], 0)


def as_queries_are(out: Tensor, q: Tensor) -> Tensor:
    """NaN where a query is NaN, for what does not look at the queries; torch's fused kernel may give 0 for one."""
    return out.masked_fill(q.sum(-1, keepdim=True).isnan(), torch.nan)
