"""Rows of sampled graphs that come as bits, on a CPU: scores in tiles of all pairs, everything else by the edges."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.edges import cpu
from subquad.kernels.graphs import tiles
from subquad.kernels.graphs.list_route import CREDIT
from subquad.kernels.parallel import launch
from subquad.kernels.vectors import BYTES


def forward(q, k, v, mask, key_mask, seed, scale, dropout) -> Tensor:
    x, y, u = map(_rows, (q, k, v))
    out = u.new_empty(len(x), x.shape[1], u.shape[2])
    words = _words(mask, x, y)
    dropped = cpu.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    with launch() as workers:
        tiles.attention_kernel(
            workers, len(x) * -(-x.shape[1] // tiles.ROWS), x.numpy(), _across(y), u.numpy(), words, q.shape[1],
            dropped, scale, out.numpy(),
        )  # fmt: skip
    return _like(out, q.shape[:3] + v.shape[3:])


def backward(grad, q, k, v, w, z, mask, key_mask, seed, scale, dropout, ste, reach, gated) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz; ste=difference only where p needs no gradient (`gated` False)."""
    do, x, y, u, a, b = map(_rows, (grad, q, k, v, w, z))
    words = _words(mask, x, y)
    dropped = cpu.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    row_grads = [torch.zeros_like(r) for r in (x, a)]
    with launch() as workers:
        splits = min(-(-2 * workers // len(x)), -(-x.shape[1] // tiles.ROWS)) if len(x) < workers else 1
        key_grads = [r.new_zeros(len(r) * splits, *r.shape[1:]) for r in (y, u, b)]
        keys = (_across(y), _across(u), y.numpy(), b.numpy())
        tiles.backward_kernel(
            workers, len(x) * splits, splits, do.numpy(), x.numpy(), a.numpy(), keys, words, q.shape[1], dropped,
            scale, CREDIT[ste] if gated else 0, reach, tuple(r.numpy() for r in row_grads),
            tuple(r.numpy() for r in key_grads),
        )  # fmt: skip
    dk, dv, dz = (r if splits == 1 else r.unflatten(0, (-1, splits)).sum(1) for r in key_grads)
    dq, dw = row_grads
    return tuple(_like(r, like.shape) for r, like in zip((dq, dk, dv, dw, dz), (q, k, v, w, z), strict=True))


def _rows(x: Tensor) -> Tensor:
    """(B, H, n, d) → (B·H, n, d), contiguous, d filled up with zeros to a multiple of the lanes."""
    x = x.detach().flatten(0, 1)
    return F.pad(x, (0, -x.shape[2] % (BYTES // x.itemsize))).contiguous()


def _like(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_rows`."""
    return x[..., : shape[3]].contiguous().view(shape)


def _across(x: Tensor) -> np.ndarray:
    """(g, m, d) → (g, tiles, d, 64): keys tile by tile, transposed."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % tiles.KEYS))
    return x.unflatten(1, (-1, tiles.KEYS)).mT.contiguous().numpy()


def _words(mask: Tensor, x: Tensor, y: Tensor) -> np.ndarray:
    """The packed mask as words, (g, n, ⌈m / 64⌉) uint64."""
    bits = mask.view(len(x), x.shape[1], -(-y.shape[1] // 8))
    return F.pad(bits, (0, -bits.shape[2] % 8)).contiguous().numpy().view(np.uint64)
