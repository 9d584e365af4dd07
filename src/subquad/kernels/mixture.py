"""The mean of several softmaxes that have a part of their keys in common.

Component m of M attends to the shared keys and to keys of its own. With (o, l) output and logsumexp of a set of keys,

    l_m = log(exp l_shared + exp l_own),  o_m = exp(l_shared - l_m) o_shared + exp(l_own - l_m) o_own,  out = 1/M Σ o_m

so the shared keys are attended once. They need one backward too: exp(s - l_m)(g·v - g·o_m), the score's gradient in
component m, summed over m is what one softmax would have with

    l' = -log Σ_m exp(-l_m),   o' = Σ_m exp(l' - l_m) o_m

Everything runs through the merge op (`kernels.merge`), whose backward takes any merged (o, l).
"""

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.blocks import unplan
from subquad.kernels.merge import fused_merge, fused_merge_backward


@torch.library.custom_op("subquad::mixture", mutates_args=())
def mixture_merge(
    q: Tensor,
    tokens: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    exists: list[Tensor],
    alive: list[Tensor],
    sources: list[int],
    plans: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, H, n, d), and what the backward needs: all o_m (M, B, H, n, d) and l_m (M, B, H, n).

    q (B, H, n, d); tokens = [k, v], the shared keys, of which `exists` ([] = all). Component m has the next sources[m]
    of keys, values and alive ([] = all). plans: the plan of the shared keys, then one per component, each after its
    length.
    """
    shared, *own = _plans(plans)
    o, l_shared = fused_merge(q, tokens[:1], tokens[1:], exists, shared, scale)
    outs, lses = q.new_empty(len(own), *q.shape), q.new_empty(len(own), *q.shape[:3])
    for m, (part, plan) in enumerate(zip(_cuts(sources), own, strict=True)):
        o_own, l_own = fused_merge(q, keys[part], values[part], alive[part], plan, scale)
        total = torch.logaddexp(l_shared, l_own, out=lses[m])
        base = total.masked_fill(total == -torch.inf, 0)  # a row with no key: 0
        torch.mul(o, (l_shared - base).exp_()[..., None], out=outs[m])
        outs[m].addcmul_(o_own, (l_own - base).exp_()[..., None])
    return outs.mean(0), outs, lses


def _plans(flat: list[int]) -> list[list[int]]:
    found, at = [], 0
    while at < len(flat):
        found.append(flat[at + 1 : at + 1 + flat[at]])
        at += 1 + flat[at]
    return found


def _cuts(sources: list[int]) -> list[slice]:
    return [slice(sum(sources[:m]), sum(sources[: m + 1])) for m in range(len(sources))]


@mixture_merge.register_fake
def _(q, tokens, keys, values, exists, alive, sources, plans, scale):
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
    sources: list[int],
    plans: list[int],
    scale: float,
) -> list[Tensor]:
    """Gradients of q, the tokens' k and v, all keys, all values."""
    shared, *own = _plans(plans)
    grad = grad / len(own)
    finite = lses.masked_fill(lses == -torch.inf, 0)  # where no key is, nothing is shared either
    l_all = -torch.logsumexp(-finite, 0)  # (B, H, n)
    o_all = torch.zeros_like(q)
    for o, l_m in zip(outs, finite, strict=True):
        o_all.addcmul_(o, (l_all - l_m).exp_()[..., None])
    dq, dk, dv = fused_merge_backward(grad, q, tokens[:1], tokens[1:], o_all, l_all, exists, shared, scale)
    dkeys, dvalues = [], []
    for m, (part, plan) in enumerate(zip(_cuts(sources), own, strict=True)):
        found = fused_merge_backward(grad, q, keys[part], values[part], outs[m], lses[m], alive[part], plan, scale)
        dq += found[0]
        dkeys += found[1 : 1 + sources[m]]
        dvalues += found[1 + sources[m] :]
    return [dq, dk, dv, *dkeys, *dvalues]


@mixture_backward.register_fake
def _(grad, q, tokens, keys, values, exists, alive, outs, lses, sources, plans, scale):
    return [torch.empty_like(x) for x in (q, *tokens, *keys, *values)]


def _save(ctx, inputs, output):
    q, tokens, keys, values, exists, alive, ctx.sources, ctx.plans, ctx.scale = inputs
    ctx.save_for_backward(q, *tokens, *keys, *values, *exists, *alive, *output[1:])
    ctx.sizes = [2, len(keys), len(values), len(exists), len(alive)]


def _backward(ctx, grad, grad_outs, grad_lses):
    q, *rest = ctx.saved_tensors
    lists = []
    for size in ctx.sizes:
        lists.append(rest[:size])
        rest = rest[size:]
    dq, dk, dv, *found = mixture_backward(grad, q, *lists, *rest, ctx.sources, ctx.plans, ctx.scale)
    count = ctx.sizes[1]
    none = ([None] * ctx.sizes[3], [None] * ctx.sizes[4])
    return dq, [dk, dv], found[:count], found[count:], *none, None, None, None


mixture_merge.register_autograd(_backward, setup_context=_save)


def _pairs(plans) -> int:
    return sum(p.blocks * p.q_len * p.k_len for plan in _plans(list(plans)) for p in unplan(plan))


@register_flop_formula(torch.ops.subquad.mixture)
def _forward_flops(q_shape, tokens, keys, values, exists, alive, sources, plans, scale, *args, **kwargs) -> int:
    return 4 * math.prod(q_shape[:2]) * q_shape[3] * _pairs(plans)


@register_flop_formula(torch.ops.subquad.mixture_backward)
def _backward_flops(
    grad, q_shape, tokens, keys, values, exists, alive, outs, lses, sources, plans, scale, *args, **kwargs
) -> int:
    return 10 * math.prod(q_shape[:2]) * q_shape[3] * _pairs(plans)
