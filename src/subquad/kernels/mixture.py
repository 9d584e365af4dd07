"""The mean of several softmaxes that have a part of their keys in common.

Component m of M attends to the shared keys and to keys of its own. With (o, l) output and logsumexp of a set of keys,

    l_m = log(exp l_shared + exp l_own),  o_m = exp(l_shared - l_m) o_shared + exp(l_own - l_m) o_own,  out = 1/M Σ o_m

so the shared keys are attended once. They need one backward too: exp(s - l_m)(g·v - g·o_m), the score's gradient in
component m, summed over m is what one softmax would have with

    l' = -log Σ_m exp(-l_m),   o' = Σ_m exp(l' - l_m) o_m

Everything runs through the merge operators, whose backward takes any merged (o, l): the same code on every device. On a
CPU every component goes on from (o, l) of the shared keys inside the tile kernels: nothing is put together outside of
them. In the backward a factor of 1/M on the weights, and so on all gradients, is a logsumexp that is larger by log M;
the gradient of q is one tensor to which all add.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.merge import cpu
from subquad.kernels.merge.cpu_backward import WANTED
from subquad.kernels.merge.op import merge, merge_backward
from subquad.kernels.operators import derive
from subquad.kernels.parallel import cut, filled
from subquad.supports.support import plan_of, plans

SHARED = "direct"  # the plan of the shared keys; component m follows the plan groups:m


def component(m: int) -> str:
    return f"groups:{m}"


@torch.library.custom_op("subquad::mixture", mutates_args=())
def mixture_merge(
    q: Tensor,
    tokens: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    exists: list[Tensor],
    alive: list[Tensor],
    lengths: Tensor | None,
    sources: list[int],
    support: str,
    n: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, H, n, d), and what the backward needs: all o_m (M, B, H, n, d) and l_m (M, B, H, n).

    q (B, H, n, d); tokens = [k, v], the shared keys, of which `exists` ([] = all). Component m has the next sources[m]
    of keys, values and alive ([] = all). Plans are those of the support, for n tokens or for each row's own length.
    """
    o, l_shared = merge(q, tokens[:1], tokens[1:], exists, lengths, None, support, SHARED, n, scale, 0.0)
    outs, lses = q.new_empty(len(sources), *q.shape), q.new_empty(len(sources), *q.shape[:3])
    for m, part in enumerate(_cuts(sources)):
        about = (lengths, None, support, component(m), n, scale, 0.0)
        o_own, l_own = merge(q, keys[part], values[part], alive[part], *about)
        total = torch.logaddexp(l_shared, l_own, out=lses[m])
        base = total.masked_fill(total == -torch.inf, 0)  # a row with no key: 0
        torch.mul(o, (l_shared - base).exp_()[..., None], out=outs[m])
        outs[m].addcmul_(o_own, (l_own - base).exp_()[..., None])
    return outs.mean(0), outs, lses


def _cuts(sources: list[int]) -> list[slice]:
    return [slice(sum(sources[:m]), sum(sources[: m + 1])) for m in range(len(sources))]


@mixture_merge.register_fake
def _(q, tokens, keys, values, exists, alive, lengths, sources, support, n, scale):
    m = len(sources)
    return q.new_empty(q.shape), q.new_empty(m, *q.shape), q.new_empty(m, *q.shape[:3])


@torch.library.custom_op("subquad::mixture_backward", mutates_args=())
def mixture_backward(
    grad: Tensor,
    q: Tensor,
    tokens: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    exists: list[Tensor],
    alive: list[Tensor],
    outs: Tensor,
    lses: Tensor,
    lengths: Tensor | None,
    sources: list[int],
    support: str,
    n: int,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, the tokens' k and v, all keys, all values."""
    grad = grad / len(sources)
    finite = lses.masked_fill(lses == -torch.inf, 0)  # where no key is, nothing is shared either
    l_all = -torch.logsumexp(-finite, 0)  # (B, H, n)
    o_all = torch.zeros_like(q)
    for o, l_m in zip(outs, finite, strict=True):
        o_all.addcmul_(o, (l_all - l_m).exp_()[..., None])
    about = (lengths, None, support, SHARED, n, scale, 0.0)
    dq, dk, dv = merge_backward(grad, q, tokens[:1], tokens[1:], o_all, l_all, exists, *about)
    dkeys, dvalues = [], []
    for m, part in enumerate(_cuts(sources)):
        about = (lengths, None, support, component(m), n, scale, 0.0)
        found = merge_backward(grad, q, keys[part], values[part], outs[m], lses[m], alive[part], *about)
        dq += found[0]
        dkeys += found[1 : 1 + sources[m]]
        dvalues += found[1 + sources[m] :]
    return [dq, dk, dv, *dkeys, *dvalues]


def _flops(q, tokens, keys, values, exists, alive, lengths, sources, support, n, *args, **kwargs) -> int:
    plans = (SHARED, *(component(m) for m in range(len(sources))))
    return 4 * q.shape[0] * q.shape[1] * q.shape[3] * sum(plan_of(support, int(n), which).pairs for which in plans)


_kept = slice(1, None)
derive(mixture_merge, mixture_backward, "mixture_merge", of=(0, 1, 2, 3), behind=6, kept=_kept, flops=_flops)


# ---- on a CPU ---------------------------------------------------------------------------------------------


def _chosen(q: Tensor, tokens, keys, values, parts: list[slice], lengths, support: str, n: int) -> list[cpu.Rows]:
    """Which rows follow which plan: of the shared keys, and of every component."""
    own = [plans(q, keys[part], values[part], lengths, support, component(m), n) for m, part in enumerate(parts)]
    return [list(found) for found in (plans(q, tokens[:1], tokens[1:], lengths, support, SHARED, n), *own)]


@mixture_merge.register_kernel("cpu")
def _(q, tokens, keys, values, exists, alive, lengths, sources, support, n, scale) -> tuple[Tensor, Tensor, Tensor]:
    parts, width = _cuts(sources), q.shape[3]
    shared, *own = _chosen(q, tokens, keys, values, parts, lengths, support, n)
    q, k, v, *rest = (filled(x) for x in (q, *tokens, *keys, *values))
    before = cpu.walk_forward(shared, q, [k], [v], exists, scale)
    outs = cpu.fresh(q, shared, len(parts))
    lses = q.new_full(outs.shape[:-1], -torch.inf)
    for m, part in enumerate(parts):
        mine = rest[: len(keys)][part], rest[len(keys) :][part]
        cpu.walk_forward(own[m], q, *mine, alive[part], scale, before=before, into=(outs[m], lses[m]))
    out = torch.lerp(outs[0], outs[1], 0.5) if len(parts) == 2 else outs.mean(0)
    return cut(out, width), cut(outs, width), lses


@mixture_backward.register_kernel("cpu")
def _(grad, q, tokens, keys, values, exists, alive, outs, lses, lengths, sources, support, n, scale) -> list[Tensor]:
    parts, width, count = _cuts(sources), q.shape[3], math.log(len(sources))
    shared, *own = _chosen(q, tokens, keys, values, parts, lengths, support, n)
    grad, q, outs, k, v, *rest = (filled(x) for x in (grad, q, outs, *tokens, *keys, *values))
    deltas = torch.zeros_like(lses)  # dout·o_m
    dq: Tensor | None = None
    dkeys: list[Tensor] = []
    dvalues: list[Tensor] = []
    for m, part in enumerate(parts):
        mine = rest[: len(keys)][part], rest[len(keys) :][part]
        about: dict[str, Any] = {"deltas": cpu.Deltas(deltas[m], WANTED), "onto": dq}
        found = cpu.walk_backward(own[m], grad, q, *mine, outs[m], lses[m] + count, alive[part], scale, **about)
        dq = found[0]
        dkeys += found[1 : 1 + sources[m]]
        dvalues += found[1 + sources[m] :]
    finite = lses.masked_fill(lses == -torch.inf, 0)  # where no key is, nothing is shared either
    total = -torch.logsumexp(-finite, 0)  # (B, H, n)
    delta = ((total - finite).exp_() * deltas).sum(0)  # dout·o' = Σ_m exp(l' - l_m) dout·o_m
    about = {"deltas": cpu.Deltas(delta), "onto": dq}
    found = cpu.walk_backward(shared, grad, q, [k], [v], q, total + count, exists, scale, **about)
    return [cut(x, width) for x in (*found, *dkeys, *dvalues)]
