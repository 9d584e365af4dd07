"""The feed-forward layer of a Transformer, W₂ gelu(W₁ x + b₁) + b₂, some rows at a time.

What is wide stays in the cache: the activation reads what a product has just written, the backward makes the
activations again from the inner values instead of keeping them, and neither they nor their gradients exist for all
rows at once. The layer keeps half as much for the backward, and writes to far fewer fresh pages of memory. It runs
where `affine` takes the faster library; everything else is torch's operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.affine import affine, is_allowed, pays, product

ROWS = 1024  # at a time


def feedforward(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """x (…, e), w1 (f, e), w2 (g, f) → (…, g), with the exact GELU; differentiable any number of times."""
    given = (x, w1, b1, w2, b2)
    if not (pays(x, w1, b1) and is_allowed(w2, b2)):
        return _in_one_piece(*given)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        return _FeedForward.apply(*given)
    return _in_pieces(*given, None)


def _in_one_piece(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    return affine(F.gelu(affine(x, w1, b1)), w2, b2)


def _in_pieces(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, inner: list[Tensor] | None
) -> Tensor:
    """The output; the inner values (ROWS, f) of each piece are appended to `inner`, if it is given."""
    outs = []
    for rows in x.flatten(0, -2).split(ROWS):  # (ROWS, e)
        h = product(rows, w1, b1)
        if inner is not None:
            inner.append(h)
        outs.append(product(F.gelu(h), w2, b2))
    return torch.cat(outs).unflatten(0, x.shape[:-1])


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        inner: list[Tensor] = []
        out = _in_pieces(x, w1, b1, w2, b2, inner)
        ctx.save_for_backward(x, w1, b1, w2, b2, *inner)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), wanted = grads, ctx.needs_input_grad
        x, w1, b1, w2, b2, *inner = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            return _differentiable((x, w1, b1, w2, b2), grad, wanted)
        rows = grad.flatten(0, -2)  # (N, g)
        dx: list[Tensor] = []
        dw1, db1, dw2 = torch.zeros_like(w1), w1.new_zeros(w1.shape[0]), torch.zeros_like(w2)
        for piece, g, h in zip(x.flatten(0, -2).split(ROWS), rows.split(ROWS), inner, strict=True):
            if wanted[3]:
                torch.addmm(dw2, g.mT, F.gelu(h), out=dw2)
            if not any(wanted[:3]):
                continue
            dh = torch.ops.aten.gelu_backward(product(g, w2.mT), h)  # (ROWS, f)
            if wanted[1]:
                torch.addmm(dw1, dh.mT, piece, out=dw1)
            if wanted[2]:
                db1 += dh.sum(0)
            if wanted[0]:
                dx.append(product(dh, w1.mT))
        found = (
            torch.cat(dx).view_as(x) if dx else None,
            dw1,
            db1,
            dw2,
            rows.sum(0) if wanted[4] else None,
        )
        return tuple(each if want else None for each, want in zip(found, wanted, strict=True))


def _differentiable(given: tuple[Any, ...], grad: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    chosen = [each for each, want in zip(given, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(_in_one_piece(*given), chosen, grad, create_graph=True))
    return tuple(next(found) if want else None for want in wanted)
