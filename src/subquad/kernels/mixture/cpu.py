"""The mixture on a CPU: every component goes on from the state of the shared keys, inside the tile kernels.

Nothing is put together outside of them. In the backward a factor of 1/M on the weights, and so on all gradients, is a
logsumexp that is larger by log M; the gradient of q is one tensor to which all add.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.merge import cpu as merge
from subquad.kernels.merge.cpu_backward import WANTED
from subquad.kernels.parallel import ready
from subquad.supports.support import plans

SHARED = "direct"  # the plan of the shared keys; component m follows the plan groups:m


def component(m: int) -> str:
    return f"groups:{m}"


class Chosen:
    """Which rows follow which plan: of the shared keys, and of every component."""

    def __init__(self, q: Tensor, tokens, keys, values, parts: list[slice], lengths, support: str, n: int) -> None:
        self.shared = list(plans(q, tokens[:1], tokens[1:], lengths, support, SHARED, n))
        self.own = [
            list(plans(q, keys[part], values[part], lengths, support, component(m), n)) for m, part in enumerate(parts)
        ]

    def fits(self, q: Tensor) -> bool:
        return all(merge.takes(rows, q) for rows in (self.shared, *self.own))


def forward(chosen: Chosen, q, tokens, keys, values, exists, alive, parts: list[slice], scale: float):
    """The mean (B, H, n, d), all o_m (M, B, H, n, d) and l_m (M, B, H, n)."""
    q, shared = ready(q), [ready(x) for x in tokens]
    before = merge.walk_forward(chosen.shared, q, shared[:1], shared[1:], exists, scale)
    outs = merge.fresh(q, chosen.shared, len(parts))
    lses = q.new_full(outs.shape[:-1], -torch.inf)
    for m, part in enumerate(parts):
        k, v = ([ready(x) for x in xs[part]] for xs in (keys, values))
        merge.walk_forward(chosen.own[m], q, k, v, alive[part], scale, before=before, into=(outs[m], lses[m]))
    out = torch.lerp(outs[0], outs[1], 0.5) if len(parts) == 2 else outs.mean(0)
    return out, outs, lses


def backward(
    chosen: Chosen, grad, q, tokens, keys, values, exists, alive, outs, lses, parts: list[slice], scale: float
) -> list[Tensor]:
    """Gradients of q, the tokens' k and v, all keys, all values."""
    grad, q, shared, count = ready(grad), ready(q), [ready(x) for x in tokens], math.log(len(parts))
    deltas = torch.zeros_like(lses)  # dout·o_m
    dq: Tensor | None = None
    dkeys: list[Tensor] = []
    dvalues: list[Tensor] = []
    for m, part in enumerate(parts):
        k, v = ([ready(x) for x in xs[part]] for xs in (keys, values))
        about: dict[str, Any] = {"deltas": merge.Deltas(deltas[m], WANTED), "onto": dq}
        found = merge.walk_backward(chosen.own[m], grad, q, k, v, outs[m], lses[m] + count, alive[part], scale, **about)
        dq, size = found[0], len(k)
        dkeys += found[1 : 1 + size]
        dvalues += found[1 + size :]
    finite = lses.masked_fill(lses == -torch.inf, 0)  # where no key is, nothing is shared either
    total = -torch.logsumexp(-finite, 0)  # (B, H, n)
    delta = ((total - finite).exp_() * deltas).sum(0)  # dout·o' = Σ_m exp(l' - l_m) dout·o_m
    about = {"deltas": merge.Deltas(delta), "onto": dq}
    found = merge.walk_backward(
        chosen.shared, grad, q, shared[:1], shared[1:], q, total + count, exists, scale, **about
    )
    return [*found, *dkeys, *dvalues]
