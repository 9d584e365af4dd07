"""Attention to entries in plain torch, on any device: two matrix products, and five for the gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (B, H, r, d), k, v (B, H, m, d), bias (B or 1, 1, r, m) → (B, H, r, d) and the logsumexp (B, H, r)."""
    scores = q @ k.mT * scale + bias  # (B, H, r, m)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp() @ v, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the merged out and a finite lse: ds = p·(grad·v - grad·out), p = exp(s - lse)."""
    p = (q @ k.mT * scale + bias - lse[..., None]).exp()  # (B, H, r, m)
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ grad
