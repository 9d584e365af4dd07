"""What a model may be given: an error names the argument, what it was and what is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_ids(name: str, ids: Any) -> None:
    """Ids of tokens are integers, (B, n)."""
    kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
    if kind not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be a tensor (B, n) of dtype torch.int64 or torch.int32, not {kind}")
    if ids.dim() != 2:
        hint = f"; for a batch of one row pass {name}[None]" if ids.dim() == 1 else ""
        raise ValueError(f"{name} must have shape (B, n), not {tuple(ids.shape)}{hint}")


def check_embeds(name: str, embeds: Any, width: int) -> None:
    """Embeddings that take the place of ids, (B, n, D)."""
    if not isinstance(embeds, Tensor) or not embeds.is_floating_point():
        kind = embeds.dtype if isinstance(embeds, Tensor) else type(embeds).__name__
        raise TypeError(f"{name} must be a tensor (B, n, {width}) of a floating-point dtype, not {kind}")
    if embeds.dim() != 3 or embeds.shape[2] != width:
        raise ValueError(f"{name} must have shape (B, n, {width}), not {tuple(embeds.shape)}")


def check_mask(name: str, mask: Any, tokens: Tensor, *, cached: bool = False) -> None:
    """A mask has an entry for every token, (B, n); with a cache also for those before, which the cache counts."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor (B, n), 1 = a real token and 0 = padding, not {type(mask).__name__}")
    batch, length = tokens.shape[:2]
    if mask.dim() != 2 or mask.shape[0] != batch or (not cached and mask.shape[1] != length):
        wanted = f"(B, cached + new tokens), B = {batch}" if cached else f"(B, n) = {(batch, length)}"
        raise ValueError(f"{name} must have shape {wanted}, not {tuple(mask.shape)}")
