"""The merge operators on a GPU: by Triton, by torch's kernels, or in plain torch, as `devices.route` says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.merge import padded, reference
from subquad.supports.support import parse


def forward(
    q, keys, values, valid, lengths, seed, support, which, n, scale, dropout, moved=None
) -> tuple[Tensor, Tensor]:
    """`moved`: as in `reference`, which alone counts so."""
    ways = None if lengths is None else _ways(support, which, n, lengths)
    if ways is not None:
        way, _, apart = ways
        return way(forward, apart, q, keys, values, valid, lengths, seed, support, n, scale, dropout)
    rows = None if lengths is None else padded.padded(q, keys, valid, lengths, support, which)
    if rows is not None:
        valid, lengths = rows.valid, None
    room, about = _room(q, dropout, moved), (valid, lengths, seed, support, which, n, scale, dropout)
    if room is reference:  # statistics are never of half precision
        work = torch.promote_types(q.dtype, torch.float32)
        given = (q.to(work), [x.to(work) for x in keys], [x.to(work) for x in values])
        out, lse = reference.forward(*given, *about, moved)
        out = out.to(q.dtype)
    else:
        out, lse = room.forward(q, keys, values, *about)
    return (out, lse) if rows is None else rows.cut(out, lse)


def backward(
    grad, q, keys, values, out, lse, valid, lengths, seed, support, which, n, scale, dropout, moved=None
) -> list[Tensor]:
    ways = None if lengths is None else _ways(support, which, n, lengths)
    if ways is not None:
        _, way, apart = ways
        given = (grad, q, keys, values, out, lse, valid, lengths, seed, support, n, scale, dropout)
        return way(backward, apart, *given)
    rows = None if lengths is None else padded.padded(q, keys, valid, lengths, support, which)
    if rows is not None:
        valid, lengths = rows.valid, None
        grad, lse = rows.give_nothing(grad, lse)
    room, about = _room(q, dropout, moved), (valid, lengths, seed, support, which, n, scale, dropout)
    if room is reference:
        work = torch.promote_types(q.dtype, torch.float32)
        many = ([x.to(work) for x in keys], [x.to(work) for x in values])
        found = reference.backward(grad.to(work), q.to(work), many[0], many[1], out.to(work), lse, *about, moved)
        return [g.to(x.dtype) for g, x in zip(found, (q, *keys, *values), strict=True)]
    return room.backward(grad, q, keys, values, out, lse, *about)


def _ways(support: str, which: str, n: int, lengths: Tensor) -> tuple[Any, Any, Any] | None:
    """How rows of their own length follow more than one plan, forward and backward, and which; None: they do not."""
    halves, pieces = parse(support).halves(which), parse(support).beside(which, n, lengths)
    if halves is not None:
        return padded.mirrored_forward, padded.mirrored_backward, halves
    return None if pieces is None else (padded.beside_forward, padded.beside_backward, pieces)


def _room(q: Tensor, dropout: float, moved: Tensor | None) -> Any:
    if moved is not None:
        return reference
    impl = devices.route("merge", q.dtype, q.shape[3], dropout=dropout).impl
    if impl == "triton":
        from subquad.kernels.merge import gpu

        return gpu
    if impl == "aten":
        from subquad.kernels.merge import aten

        return aten
    return reference
