"""Half precision in rooms that compute in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

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
