"""The kernel sums from the formula, with the whole matrix of scores: what the tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def kernel_weights(a: Tensor, b: Tensor, scales: Tensor | None = None, *, causal: bool) -> Tensor:
    """a_i·b_j e^(s_j - s_i), (B, H, n, m), 0 for what lies ahead; not normalised."""
    weights = a @ b.mT
    if scales is not None:
        weights = weights * (scales[:, :, None, :] - scales[..., None]).clamp(max=0).exp()  # s_j ≤ s_i for j ≤ i
    return weights.tril() if causal else weights


def normalised(weights: Tensor) -> Tensor:
    """Rows that sum to 1, or are 0 where the sum vanishes."""
    total = weights.sum(-1, keepdim=True)
    empty = total <= smallest(total.dtype)
    return (weights / total.masked_fill(empty, 1)).masked_fill(empty, 0)


def smallest(dtype: torch.dtype) -> float:
    """Denominators up to here count as 0: what is divided by more stays finite, in gradients too."""
    return torch.finfo(dtype).tiny ** 0.5


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 = e^x for x ≤ 0, x + 1 beyond; adding the 1 last would round small values away."""
    return x.clamp(max=0).exp() + x.relu()
