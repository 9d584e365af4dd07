"""The operators `subquad::runs` and `subquad::runs_backward`: entrance, schema, shapes, derivatives, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.operators import derive
from subquad.kernels.parallel import ready
from subquad.kernels.row_dots import row_dots
from subquad.kernels.runs import cpu, reference

EVERYTHING = 1 << 40  # `last` of a run whose keys all queries see; its negative, `self` of one that hides nobody


class Runs(NamedTuple):
    """Who attends to whom, the same for all instances: every query is in one tile at most."""

    tiles: Tensor  # int64 (T, 2): the first query and how many
    spans: Tensor  # int64 (T, P, 4): first key, how many (0 = no run), last, self; see below
    sources: tuple[int, ...]  # (P,): which keys a run is of
    pairs: int  # of a query and a key of its tile, for the count of FLOPs
    sizes: tuple[
        int, ...
    ]  # (1 + P,): no tile has more queries, and no run more keys, than this; known without the tables

    # query i of a tile sees key j of a run where j ≤ i + last and j ≠ i + self


def attend_runs(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q (G, n, d), keys and values of each source (G, m, d) → out (G, n, d) and the logsumexp of its rows (G, n).

    bias (G or 1, the m of all sources together) is added to the scores of a key and has no gradient. A row that sees
    nothing has out 0 and -inf, and gives no gradient. Both results are differentiable. Under autocast the tensors may
    differ in dtype: the widest one is computed in.
    """
    work = reduce(torch.promote_types, (x.dtype for x in (q, *keys, *values)))
    dense = [[ready(x.to(work)) for x in group] for group in ([q], keys, values)]
    bias = None if bias is None else bias.detach().to(work).contiguous()
    about = (list(runs.sources), list(runs.sizes), scale, runs.pairs)
    out, lse = attention(dense[0][0], *dense[1:], bias, runs.tiles, runs.spans, *about)
    return out.to(q.dtype), lse


@torch.library.custom_op("subquad::runs", mutates_args=())
def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    bias: Tensor | None,
    tiles: Tensor,
    spans: Tensor,
    sources: list[int],
    sizes: list[int],
    scale: float,
    pairs: int,
) -> tuple[Tensor, Tensor]:
    lse = q.new_full(q.shape[:2], -torch.inf)
    if cpu.takes(q):
        out = torch.empty_like(q) if cpu.covers(tiles, q.shape[1]) else torch.zeros_like(q)
        cpu.forward(q, keys, values, bias, (None, None), (tiles, spans, None, sources), scale, out, lse, True)
        return out, lse
    found, totals = reference.forward(q, keys, values, bias, tiles, spans, sources, sizes, scale)
    return torch.empty_like(q).copy_(found), lse.copy_(totals)  # in the order of the memory of q


@torch.library.custom_op("subquad::runs_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    dlse: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    bias: Tensor | None,
    tiles: Tensor,
    spans: Tensor,
    out: Tensor,
    lse: Tensor,
    sources: list[int],
    sizes: list[int],
    scale: float,
    pairs: int,
) -> list[Tensor]:
    """Gradients of q, all keys, all values: with w = exp(s - lse), ds = w·(grad·v - delta), delta = grad·out - dlse."""
    grad = ready(grad)
    delta = row_dots(grad, out) - dlse  # (G, n)
    empty = lse == -torch.inf
    lse, delta = lse.masked_fill(empty, torch.inf), delta.masked_fill(empty, 0).contiguous()
    if cpu.takes(q):
        fresh, once = cpu.covers(tiles, q.shape[1]), cpu.divides(spans, sources, keys)
        made = [(q, fresh), *((x, once) for x in (*keys, *values))]
        found = [torch.empty_like(x) if written else torch.zeros_like(x) for x, written in made]
        about = (None, None), (tiles, spans, None, sources), scale, grad, delta, lse
        cpu.backward(q, keys, values, bias, *about, found, fresh, once)
        return found
    found = reference.backward(grad, delta, lse, q, keys, values, bias, tiles, spans, sources, sizes, scale)
    return [torch.empty_like(x).copy_(dx) for x, dx in zip((q, *keys, *values), found, strict=True)]


@attention.register_fake
def _(q, keys, values, *about):
    return torch.empty_like(q), q.new_empty(q.shape[:2])


def _flops(q, keys, values, bias, tiles, spans, sources, sizes, scale, pairs, *args, **kwargs) -> int:
    return 4 * q.shape[0] * q.shape[2] * pairs


_name, _like = "attend_runs", torch.empty_like
derive(attention, attention_backward, _name, of=(0, 1, 2), behind=6, gradients=2, empty=_like, flops=_flops)
