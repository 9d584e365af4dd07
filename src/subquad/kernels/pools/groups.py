"""`group_pool`: the pool of every group of a kind, of the blocks of a binary tree or of the rows and columns of a grid.

How many rows or levels there are follows from the length. Where that is a number they are whole-tensor steps; where it
stands for any length, as `torch.export` traces it, the graph holds one operator that takes these steps when it runs.

A reduction is a function (x, "max" or "sum") → reduced x; `pooled` runs one. Padding is no member: it is left out of
every maximum, sum and count, and what has no member pools to 0 (the caller marks it as absent).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.core.numbers import is_symbolic
from subquad.kernels.maxima import others_max, running_max
from subquad.kernels.pools import lines
from subquad.kernels.pools.nodes import binary_nodes, eager_node_max
from subquad.kernels.vectors import BYTES
from subquad.supports.grids import has_groups

Reduction = Callable[[Tensor, str], Tensor]


def pooled(x: Tensor, pool: str, exists: Tensor | None, reduce: Reduction) -> Tensor:
    """Pool the members that exist. x (B, H, n, d) or (B, H, rows, cols, d); exists broadcasts to x, last dim 1.

    `exists=None`: everything exists and no group is empty.
    """
    if pool == "max":
        if exists is None:
            return reduce(x, "max")
        top = reduce(x.masked_fill(~exists, -torch.inf), "max")
        return top.masked_fill(top == -torch.inf, 0)  # nobody there
    if exists is None:
        exists = torch.ones((1, 1, *x.shape[2:-1], 1), dtype=torch.bool, device=x.device)
    count = reduce(exists.to(x.dtype), "sum").clamp(min=1)
    return reduce(x.masked_fill(~exists, 0), "sum") / count


def anyone(exists: Tensor, reduce: Reduction) -> Tensor:
    """Which groups have a member at all: bool, shaped like the pool."""
    return reduce(exists.float(), "sum") > 0


def prefixes(dim: int, *, backwards: bool = False) -> Reduction:
    """Everything up to and including oneself along `dim` (backwards: from oneself on)."""

    def reduce(x: Tensor, kind: str) -> Tensor:
        if kind == "max":
            return running_max(x, dim, backwards)
        return x.flip(dim).cumsum(dim).flip(dim) if backwards else x.cumsum(dim)

    return reduce


def others(dim: int) -> Reduction:
    """Everything along `dim` except oneself; the maximum of nothing is -inf."""

    def reduce(x: Tensor, kind: str) -> Tensor:
        if kind == "sum":
            return x.sum(dim, keepdim=True) - x
        return others_max(x, dim)[0]

    return reduce


_ROWS = {"row": others(3), "left": prefixes(3), "right": prefixes(3, backwards=True)}


def group_pool(x: Tensor, exists: Tensor | None, pool: str, kind: str, c: int, causal: bool) -> Tensor:
    """x (B, H, n, d), exists bool (B, 1, n) → (B, H, groups, d), "max" or "mean" of the members that exist.

    `kind`: "nodes" (binary blocks), or of a grid with c columns "column" (prefixes of them where causal, else without
    the query's row), "row" (without the token in the query's column), "left" and "right" (of that column). For a length
    that stands for any the result has n + c groups, the last of which nobody asks for.
    """
    if is_symbolic(x.shape[2]):
        return pool_op(x, exists, pool, kind, c, causal)
    return _pool(x, exists, pool, kind, c, causal)


def group_pools(xs: Sequence[Tensor], exists: Tensor | None, pool: str, kind: str, c: int, causal: bool):
    """`group_pool` of several tensors: in one pass, where a CPU has a kernel for it."""
    n, width = xs[0].shape[2:]
    if pool != "max" or is_symbolic(n) or not lines.takes(xs):
        return [group_pool(x, exists, pool, kind, c, causal) for x in xs]
    spare = -width % (BYTES // xs[0].element_size())
    if spare:  # up to whole vectors
        filled = [F.pad(x, (0, spare)) for x in xs]
        return [y[..., :width] for y in group_pools(filled, exists, pool, kind, c, causal)]
    together = [[*xs]] if all(x.shape == xs[0].shape for x in xs) else [[x] for x in xs]
    if kind == "nodes":
        return [y for some in together for y in eager_node_max(some, exists)]
    rows, aside = -(-n // c) - int(causal), kind in ("left", "right")
    about = (rows, c, kind == "column", aside or (kind == "column" and causal), kind == "right")
    found = [y for some in together for y in lines.eager_line_max(some, exists, *about)]
    return [_place(y.unflatten(2, (rows, c)), kind) for y in found] if aside else found


def groups_with_members(x: Tensor, exists: Tensor | None, kind: str, c: int, causal: bool) -> Tensor | None:
    """Which of these groups have a member, bool (B or 1, 1, groups); None = all of them."""
    n = x.shape[2]
    if exists is None:
        if not is_symbolic(n) and (kind == "nodes" or (-(-n // c) - causal) * c <= n):
            return None
        exists = torch.ones(1, 1, n, dtype=torch.bool, device=x.device)  # a partial last row
    return group_pool(exists[..., None].to(x.dtype), exists, "any", kind, c, causal)[..., 0] > 0


def _pool(x: Tensor, exists: Tensor | None, pool: str, kind: str, c: int, causal: bool) -> Tensor:
    if kind == "nodes":
        return _reduced(x, None if exists is None else exists[..., None], pool, binary_nodes)
    n = x.shape[2]
    rows = -(-n // c) - int(causal)  # torch 2.12 cannot subtract a bool from a length that stands for any
    if exists is None and rows * c > n:  # a partial last row
        exists = torch.ones(1, 1, n, dtype=torch.bool, device=x.device)
    real = None if exists is None else grid(exists, rows, c)[..., None]  # (B or 1, 1, rows, c, 1)
    shape = (prefixes(2) if causal else others(2)) if kind == "column" else _ROWS[kind]
    return _place(_reduced(grid(x, rows, c), real, pool, shape), kind)


def _reduced(x: Tensor, real: Tensor | None, pool: str, shape) -> Tensor:
    return anyone(real, shape).to(x.dtype) if pool == "any" and real is not None else pooled(x, pool, real, shape)


def grid(x: Tensor, rows: int, c: int) -> Tensor:
    """(B, H, n, …) → (B, H, rows, c, …), cut or filled up with zeros."""
    n, wanted = x.shape[2], rows * c
    if n < wanted:
        x = torch.cat((x, x.new_zeros(*x.shape[:2], wanted - n, *x.shape[3:])), 2)
    return x[:, :, :wanted].unflatten(2, (rows, c))


def _place(x: Tensor, kind: str) -> Tensor:
    """To where it is asked for: what ends in a column is the left group of the next one, and the reverse."""
    if kind == "left":
        x = F.pad(x[:, :, :, :-1], (0, 0, 1, 0))
    elif kind == "right":
        x = F.pad(x[:, :, :, 1:], (0, 0, 0, 1))
    return x.flatten(2, 3)  # (B, H, rows·c, d)


# ---- for any length -------------------------------------------------------------------------------------------------


@torch.library.custom_op("subquad::group_pool", mutates_args=())
def pool_op(x: Tensor, exists: Tensor | None, pool: str, kind: str, c: int, causal: bool) -> Tensor:
    """(B, H, n, d) → (B, H, n + c, d), 0 behind the groups there are; c is 0 with kind="nodes"."""
    out = x.new_zeros(*x.shape[:2], x.shape[2] + c, x.shape[3])
    if kind == "nodes" or has_groups(x.shape[2], c, kind):
        found = group_pools([x], exists, pool, kind, c, causal)[0]
        out[:, :, : found.shape[2]] = found
    return out


@pool_op.register_fake
def _(x, exists, pool, kind, c, causal):
    return x.new_empty(*x.shape[:2], x.shape[2] + c, x.shape[3])


def _save(ctx, inputs, output):
    x, exists, *ctx.about = inputs
    ctx.save_for_backward(x, exists)


def _gradient(ctx, grad):
    """The steps once more, differentiated."""
    (x, exists), (pool, kind, c, causal) = ctx.saved_tensors, ctx.about
    if torch.is_grad_enabled():
        raise NotImplementedError("group_pool has no second derivative")
    dx = torch.zeros_like(x)
    if kind == "nodes" or has_groups(x.shape[2], c, kind):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = _pool(x, exists, pool, kind, c, causal)  # not group_pools: a trace would come back here
            (dx,) = torch.autograd.grad(found, x, grad[:, :, : found.shape[2]])
    return dx, *[None] * 5


pool_op.register_autograd(_gradient, setup_context=_save)
