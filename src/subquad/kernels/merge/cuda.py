"""The merge operators on a GPU: by Triton, by torch's kernels, or in plain torch, as `devices.route` says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.merge import beside, mirrored, reference
from subquad.kernels.merge.padded import padded
from subquad.supports.support import parse


def forward(q, keys, values, valid, lengths, seed, support, which, n, scale, dropout) -> tuple[Tensor, Tensor]:
    halves = _halves(support, which, lengths, dropout)
    if halves is not None:
        return mirrored.forward(forward, halves, q, keys, values, valid, lengths, seed, support, n, scale, dropout)
    pieces = None if lengths is None else parse(support).beside(which, n, lengths)
    if pieces is not None:
        return beside.forward(forward, pieces, q, keys, values, valid, lengths, seed, support, n, scale, dropout)
    rows = None if lengths is None else padded(q, keys, valid, lengths, support, which, dropout)
    if rows is not None:
        valid, lengths = rows.valid, None
    room, about = _room(q, dropout), (valid, lengths, seed, support, which, n, scale, dropout)
    if room is reference:  # statistics are never of half precision
        work = torch.promote_types(q.dtype, torch.float32)
        given = (q.to(work), [x.to(work) for x in keys], [x.to(work) for x in values])
        out, lse = reference.forward(*given, *about)
        out = out.to(q.dtype)
    else:
        out, lse = room.forward(q, keys, values, *about)
    return (out, lse) if rows is None else rows.cut(out, lse)


def backward(grad, q, keys, values, out, lse, valid, lengths, seed, support, which, n, scale, dropout) -> list[Tensor]:
    halves = _halves(support, which, lengths, dropout)
    if halves is not None:
        given = (grad, q, keys, values, out, lse, valid, lengths, seed, support, n, scale, dropout)
        return mirrored.backward(backward, halves, *given)
    pieces = None if lengths is None else parse(support).beside(which, n, lengths)
    if pieces is not None:
        given = (grad, q, keys, values, out, lse, valid, lengths, seed, support, n, scale, dropout)
        return beside.backward(backward, pieces, *given)
    rows = None if lengths is None else padded(q, keys, valid, lengths, support, which, dropout)
    if rows is not None:
        valid, lengths = rows.valid, None
        grad, lse = rows.give_nothing(grad, lse)
    room, about = _room(q, dropout), (valid, lengths, seed, support, which, n, scale, dropout)
    if room is reference:
        work = torch.promote_types(q.dtype, torch.float32)
        many = ([x.to(work) for x in keys], [x.to(work) for x in values])
        found = reference.backward(grad.to(work), q.to(work), many[0], many[1], out.to(work), lse, *about)
        return [g.to(x.dtype) for g, x in zip(found, (q, *keys, *values), strict=True)]
    return room.backward(grad, q, keys, values, out, lse, *about)


def _halves(support: str, which: str, lengths: Tensor | None, dropout: float) -> tuple[str, str] | None:
    """The two plans of a mirrored one, where rows have lengths of their own; dropout goes by the places of the plan."""
    return None if lengths is None or dropout else parse(support).halves(which)


def _room(q: Tensor, dropout: float) -> Any:
    impl = devices.route("merge", q.dtype, q.shape[3], dropout=dropout).impl
    if impl == "triton":
        from subquad.kernels.merge import gpu

        return gpu
    if impl == "aten":
        from subquad.kernels.merge import aten

        return aten
    return reference
