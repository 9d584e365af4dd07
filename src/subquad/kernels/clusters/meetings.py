"""Sums over the pairs of a query and a key that are in the same cluster, each sorted for itself.

    exact_i = Σ_j softmax_j(q_i·k_j·scale) v_j, its logsumexp, and over_i = Σ_j a_i·b_j e^(t_j - t_i) v_j

over the keys j (causal: j ≤ i) whose cluster is that of query i. Scores live for one batch of tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.clusters.layout import Tiles
from subquad.kernels.clusters.tiles import add, flattened, layout_of, softmax, take
from subquad.kernels.operators import derive


def met_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor | None,
    where: tuple[Tensor, Tensor, Tensor, int],
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """exact (B, H, n, e), lse (B, H, n), -inf where a query meets no key, and over (B, H, n, e).

    q, k (B, H, n, d), v (B, H, n, e), a, b (B, H, n, f), scales (B, H, n) never falling, or None for 0, without a
    gradient; where: clusters of queries and of keys, int64 (B, H, n), real bool (B, n), and how many clusters.
    """
    asks, answers, real, clusters = where
    real = real[:, None].expand(asks.shape).flatten(0, 1).contiguous()  # (G, n)
    tensors = [t.flatten(0, 1).contiguous() for t in (q, k, v, a, b)]
    scales = None if scales is None else scales.detach().flatten(0, 1).contiguous()
    labels = [t.flatten(0, 1).contiguous() for t in (asks, answers)]
    found = meet(*tensors, scales, *labels, real, clusters, causal, scale)
    exact, lse, over = (t.unflatten(0, q.shape[:2]) for t in found)
    return exact, lse, over


def _tiles(asks: Tensor, answers: Tensor, real: Tensor, clusters: int, causal: bool):
    sequence = torch.arange(len(real), device=real.device)[:, None] * clusters
    kind = layout_of(real)
    layouts = [
        kind((sequence + label).flatten().argsort(stable=True), label, real, clusters, causal)
        for label in (asks, answers)
    ]
    return layouts[0].asked(layouts[1])


def _rough(tiles: Tiles, a: Tensor, b: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """The factors that hide and scale the products of features, and the scaled products: (S, R, M) each."""
    factor = (~tiles.hidden).to(a.dtype)
    if scales is not None:
        ends = take(scales, tiles.keys)[:, None] - take(scales, tiles.rows)[..., None]  # t_j - t_i
        factor = factor * ends.clamp_(max=0).exp_()
    return factor, torch.bmm(a, b.mT).mul_(factor)


@torch.library.custom_op("subquad::meet", mutates_args=())
def meet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor | None,
    asks: Tensor,
    answers: Tensor,
    real: Tensor,
    clusters: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of the module docstring, everything (G, n, …): exact, lse, over."""
    (g, n, e), nobody = v.shape, v.shape[0] * v.shape[1]
    exact, over, lse = v.new_zeros(nobody + 1, e), v.new_zeros(nobody + 1, e), v.new_full((nobody + 1,), -torch.inf)
    x, y, z, f, h = (flattened(t) for t in (q, k, v, a, b))
    t = None if scales is None else scales.flatten()
    for tiles in _tiles(asks, answers, real, clusters, causal):
        values = take(z, tiles.keys)  # (S, M, e)
        p, here = softmax(tiles, take(x, tiles.rows), take(y, tiles.keys), scale)
        rough = _rough(tiles, take(f, tiles.rows), take(h, tiles.keys), t)[1]
        rows = tiles.rows.flatten()
        lse.index_copy_(0, rows, here.flatten())
        p.masked_fill_(here == -torch.inf, 0)
        exact.index_copy_(0, rows, torch.bmm(p, values).flatten(0, 1))
        over.index_copy_(0, rows, torch.bmm(rough, values).flatten(0, 1))
    return exact[:-1].view(g, n, e), lse[:-1].view(g, n), over[:-1].view(g, n, e)


@torch.library.custom_op("subquad::meet_backward", mutates_args=())
def meet_backward(
    d_exact: Tensor,
    d_lse: Tensor,
    d_over: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor | None,
    exact: Tensor,
    lse: Tensor,
    asks: Tensor,
    answers: Tensor,
    real: Tensor,
    clusters: int,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, a and b: ds = p·(grad·v - grad·exact + grad of lse)."""
    x, y, z, f, h, up = (flattened(t) for t in (q, k, v, a, b, d_exact))
    empty = lse == -torch.inf
    shift = ((d_exact * exact).sum(-1) - d_lse).masked_fill(empty, 0).flatten()[:, None]  # (G·n, 1)
    whole = F.pad(lse.masked_fill(empty, torch.inf).flatten(), (0, 1), value=torch.inf)[:, None]  # nobody asks nothing
    rise = F.pad(d_over.flatten(0, 1), (0, 0, 0, 1))  # (G·n + 1, e)
    t = None if scales is None else scales.flatten()
    found = [u.new_zeros(u.shape[0] * u.shape[1] + 1, u.shape[2]) for u in (q, k, v, a, b)]
    for tiles in _tiles(asks, answers, real, clusters, causal):
        rows, keys = tiles.rows, tiles.keys
        ask, answer, values = take(x, rows), take(y, keys), take(z, keys)
        p, here = softmax(tiles, ask, answer, scale)
        p.mul_((here - take(whole, rows)).exp_())
        g, r = take(up, rows), take(rise, rows)  # (S, R, e)
        ds = torch.bmm(g, values.mT).sub_(take(shift, rows)).mul_(p).mul_(scale)
        feature, other = take(f, rows), take(h, keys)
        factor, rough = _rough(tiles, feature, other, t)
        dw = torch.bmm(r, values.mT).mul_(factor)
        changes = [torch.bmm(ds, answer), torch.bmm(ds.mT, ask), torch.bmm(p.mT, g) + torch.bmm(rough.mT, r)]
        changes += [torch.bmm(dw, other), torch.bmm(dw.mT, feature)]
        for total, places, change in zip(found, (rows, keys, keys, rows, keys), changes, strict=True):
            add(total, places, change)
    return [total[:-1].view(u.shape) for total, u in zip(found, (q, k, v, a, b), strict=True)]


@meet.register_fake
def _(q, k, v, *about):
    return v.new_empty(v.shape), v.new_empty(v.shape[:2]), v.new_empty(v.shape)


def _flops(q, k, v, a, b, scales, asks, answers, real, clusters, causal, *args, **kwargs) -> int:
    found = _tiles(asks, answers, real, clusters, causal)
    pairs = sum(len(t.rows) * t.rows.shape[1] * t.keys.shape[1] for t in found)
    return 2 * pairs * (q.shape[2] + a.shape[2] + 2 * v.shape[2])


derive(meet, meet_backward, "met_sums", of=(0, 1, 2, 3, 4), behind=6, kept=slice(2), gradients=3, flops=_flops)
