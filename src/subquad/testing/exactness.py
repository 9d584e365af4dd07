"""Checks of exactness: the fast path against the definition, weights, grouped heads."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.testing.case import (
    LENGTHS,
    TOLERANCE,
    Case,
    Foreign,
    NotApplicable,
    close,
    gradient_names,
    gradients,
    masks,
)


def fast_equals_dense(case: Case) -> None:
    """Values and gradients of the fast path are those of the dense definition, at every awkward length and padding."""
    for dtype, tolerance in TOLERANCE.items():
        module = case.make(dtype)
        for n in LENGTHS if dtype == torch.float64 else (9, 33):
            for mask in (None, masks(n)) if case.able.padding else (None,):
                xs = [x.requires_grad_() for x in case.inputs(n, dtype, 2 if mask is None else len(mask))]
                what = f"n={n}, {'no' if mask is None else 'every kind of'} padding, {dtype}"
                fast, slow = case.run(module, xs, mask), case.dense(module, xs, mask)
                _real_tokens_first(case, fast, slow, mask, tolerance, what)
                close(fast, slow, tolerance, f"value at {what}")
                pairs = zip(gradients(fast, xs, module), gradients(slow, xs, module), strict=True)
                for name, (a, b) in zip(gradient_names(case, module), pairs, strict=True):
                    close(a, b, tolerance, f"gradient of {name} at {what}")


def _real_tokens_first(
    case: Case, fast: Tensor, slow: Tensor, mask: Tensor | None, tolerance: float, what: str
) -> None:
    """If real tokens are right and padded slots are not, say so: it is the mistake that is made first."""
    if mask is None or fast.shape != slow.shape:
        return
    close(case.rows(fast, mask), case.rows(slow, mask), tolerance, f"value at {what}")
    hint = "value of padded slots (real tokens are right; `attend` must give 0 behind the end of a row, `call.lengths`)"
    close(case.rows(fast, ~mask), case.rows(slow, ~mask), tolerance, f"{hint} at {what}")


def other_sizes(case: Case) -> None:
    """Another number of heads, a width that is no power of two: the fast path gives what the definition gives."""
    if isinstance(case, Foreign):
        raise NotApplicable
    other = Case(case.spec, case.causal, case.options, heads=4, width=5, device=case.device)
    try:
        module = other.make()
    except ValueError:  # not every mechanism has every size
        raise NotApplicable from None
    xs = [x.requires_grad_() for x in other.inputs(17)]
    fast, slow = other.run(module, xs), other.dense(module, xs)
    close(fast, slow, 1e-9, "value with 4 heads of width 5")
    for name, a, b in zip(other.names, gradients(fast, xs), gradients(slow, xs), strict=True):
        close(a, b, 1e-9, f"gradient of {name} with 4 heads of width 5")


def scale_is_used(case: Case) -> None:
    """With a `scale` of one's own the fast path gives what the definition gives."""
    try:
        module = case.make(scale=0.9)  # not 1/√8
    except ValueError as error:
        if "scale must be None" in str(error):  # its scores are not scaled, and it says so
            raise NotApplicable from None
        raise
    xs = case.inputs(33)
    close(case.run(module, xs), case.dense(module, xs), 1e-9, "value with scale=0.9")


def weights_are_probabilities(case: Case) -> None:
    """Weights are ≥ 0, sum to 1 where there is support, and cover exactly the declared support."""
    if not case.able.weights:
        raise NotApplicable
    module = case.make()
    sparse = any(getattr(part, "sparse", False) for part in module.modules()) or case.able.stochastic
    for n in (1, 2, 9, 33):
        for mask in (None, masks(n)) if case.able.padding else (None,):
            q, k, _ = case.inputs(n, batch=2 if mask is None else len(mask))
            torch.manual_seed(2)
            weights = module.weights(q, k, key_mask=mask)  # (B, H, n, n)
            what = f"n={n}, {'no' if mask is None else 'every kind of'} padding"
            assert weights.shape == (len(q), case.heads, n, n), f"weights have shape {tuple(weights.shape)} at {what}"
            assert (weights >= 0).all(), f"negative weight at {what}"
            total, alive = weights.sum(-1), (weights > 0).any(-1)
            close(total, alive.to(total), 1e-9, f"sum of weights at {what}")
            if mask is None:
                support = module.support(n).expand(weights.shape)
                assert (weights[~support] == 0).all(), f"weight outside the support at {what}"
                assert sparse or ((weights > 0) == support).all(), f"weights do not cover the support at {what}"
            else:
                assert (weights.transpose(1, 3)[~mask] == 0).all(), f"weight on a padded key at {what}"
                assert sparse or alive.transpose(1, 2)[mask].all(), f"a real token has no weights at {what}"


def grouped_heads(case: Case) -> None:
    """Fewer key and value heads than query heads give what the repeated ones give, values and gradients."""
    if case.is_layer:
        raise NotApplicable
    wide = Case(case.spec, case.causal, case.options, heads=4, width=case.width)
    module = wide.make()
    for n, mask in ((9, None), (33, masks(33) if case.able.padding else None)):
        batch = 2 if mask is None else len(mask)
        q, k, v = wide.inputs(n, batch=batch)
        for few in (2, 1):
            xs = [x.requires_grad_() for x in (q.clone(), k[:, :few].clone(), v[:, :few].clone())]
            repeated = [xs[0], *(x.repeat_interleave(4 // few, 1) for x in xs[1:])]
            got, want = wide.run(module, xs, mask), wide.run(module, repeated, mask)
            what = f"{few} key heads for 4 query heads, n={n}"
            close(got, want, 1e-9, f"value with {what}")
            for name, a, b in zip(wide.names, gradients(got, xs), gradients(want, xs), strict=True):
                close(a, b, 1e-9, f"gradient of {name} with {what}")
