"""Checks of what must not be seen: the future, padding, other rows, numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from subquad.testing.case import Case, NotApplicable, close, gradient_names, gradients, masks


def causal_by_value_and_gradient(case: Case) -> None:
    """Token t changes no output before t, and no gradient says it would.

    Every t has a batch element of its own, in which token t is moved.
    """
    if not case.causal:
        raise NotApplicable
    module = case.make()
    for n in (2, 9, 17, 33):
        one = case.inputs(n, batch=1)
        xs = [x.expand(n, *x.shape[1:]).clone().requires_grad_() for x in one]
        before = torch.ones(n, n).tril(-1).bool()  # [t, i]: output i of element t is before t
        base = case.run(module, xs)
        after = case.run(module, [case.spoil(x.detach(), torch.eye(n, dtype=torch.bool), 3.0) for x in xs])
        changed = (case.rows(after, before) != case.rows(base, before)).flatten(1).any(1)
        if changed.any():
            t = int(before.nonzero()[changed][0, 0])
            raise AssertionError(f"n={n}: token {t} changes an earlier output")
        if not base.requires_grad:
            continue
        grads = torch.autograd.grad(case.rows(base, before).sum(), xs, allow_unused=True)
        for name, g in zip(case.names, grads, strict=True):
            if g is not None:
                assert not case.rows(g, ~before).any(), f"n={n}: an output has a gradient for a later {name}"


def padding_is_invisible(case: Case) -> None:
    """What stands in padded slots, NaN included, reaches no output and no gradient; empty rows give 0.

    The definition is held to it as well, so that a mistake made in both is found. What is read in a padded slot is 0
    for every mechanism of the library, and causal queries stand before padding on the right: there only the
    normaliser tells that a padded slot was counted.
    """
    if not case.able.padding:
        raise NotApplicable
    module = case.make(**_sized(case))
    for n in (2, 9, 33):
        mask = masks(n)
        xs = case.inputs(n, batch=len(mask))
        for what, run in {"fast path": case.run, "definition": case.dense}.items():
            base = case.rows(run(module, xs, mask), mask)
            slots_weigh_nothing(case, module, run, xs, mask, f"n={n}, {what}")
            if n == 9 and not case.able.stochastic:  # without the padded slots: left, right, both
                for b in (1, 2, 3):
                    alone = run(
                        module, [x[b : b + 1].movedim(case.time, 1)[:, mask[b]].movedim(1, case.time) for x in xs]
                    )
                    padded = case.rows(run(module, xs, mask)[b : b + 1], mask[b : b + 1])
                    every = torch.ones(1, int(mask[b].sum()), dtype=torch.bool)
                    close(
                        padded,
                        case.rows(alone, every),
                        1e-9,
                        f"n={n}, {what}: padding in padded slots changes real tokens",
                    )
            for value in (1e9, math.nan, math.inf):
                spoilt = [case.spoil(x, ~mask, value).requires_grad_() for x in xs]
                out = run(module, spoilt, mask)
                close(case.rows(out, mask), base, 1e-12, f"n={n}, {what}: {value} in padded slots changes real tokens")
                if what == "fast path" and out.requires_grad:
                    for name, g in zip(case.names, gradients(out * case.spread(mask).to(out), spoilt), strict=True):
                        assert g.isfinite().all(), f"n={n}: {value} in padded slots reaches the gradient of {name}"
        nobody = torch.zeros(2, n, dtype=torch.bool)
        ys = [x.requires_grad_() for x in case.inputs(n)]
        out = case.run(module, ys, nobody)
        close(out, case.dense(module, ys, nobody), 1e-9, f"n={n}: nothing but padding")
        if not case.is_layer:
            assert not out.any(), f"n={n}: a query with nothing to attend to must give 0"
        for name, g in zip(gradient_names(case, module), gradients(out, ys, module), strict=True):
            assert g.isfinite().all(), f"n={n}: gradient of {name} where there is nothing but padding"


def slots_weigh_nothing(
    case: Case, module: Any, run: Any, xs: Sequence[torch.Tensor], mask: torch.Tensor, what: str
) -> None:
    """Where weights sum to 1, values of 1 at every real token give 1, or 0 where there is nothing to attend to."""
    declared = case.cannot | set(case.exceptions)
    if case.is_layer or not case.able.weights or "weights_are_probabilities" in declared:
        return
    q, k, v = xs
    out = case.rows(run(module, [q, k, torch.ones_like(v)], mask), mask).detach()
    off = torch.minimum(out.abs(), (out - 1).abs())
    value = out.flatten()[off.argmax()].item()
    assert off.max() <= 1e-9, (
        f"{what}: padded slots have weights (values of 1 at every real token give {value:.3g}, not 1)"
    )


def padded_row_equals_alone(case: Case) -> None:
    """A row padded to any longer length, on either side, gives what it gives alone, values and gradients."""
    if not case.able.padding:
        raise NotApplicable
    module = case.make(**_sized(case))
    for n in (1, 8, 21):
        row = [x.requires_grad_() for x in case.inputs(n, batch=1)]
        for left, right in ((0, 1), (0, 37), (3, 0), (19, 14)):
            total = left + n + right
            others = case.inputs(total, batch=3, seed=5)
            mask = torch.ones(3, total, dtype=torch.bool)
            mask[1, :left], mask[1, total - right :] = False, False
            mask[2, total // 2 :] = False
            dims = (slice(1, 2),) + (slice(None),) * (case.time - 1) + (slice(left, left + n),)
            whole = [x.clone() for x in others]
            for x, y in zip(whole, row, strict=True):
                x[dims] = y
            alone = case.run(module, row, torch.ones(1, n, dtype=torch.bool))
            if case.able.stochastic:
                continue  # each batch element samples for itself: its own tests say how
            inside = case.run(module, whole, mask)[dims]
            close(inside, alone, 1e-9, f"{n} tokens behind {left} and before {right} padded slots")
            free = case.run(module, row)
            close(free, alone, 1e-9, f"{n} tokens with a key mask that hides nothing")
            for name, a, b in zip(case.names, gradients(inside, row), gradients(alone, row), strict=True):
                close(a, b, 1e-9, f"gradient of {name}, {n} tokens behind {left} and before {right} padded slots")


def _sized(case: Case) -> dict[str, Any]:
    """With the longest length known, sizes do not follow from the batch."""
    return {} if "max_length" in case.options else {"max_length": 1 << 16}


def nan_stays_where_it_is(case: Case) -> None:
    """A query that is not a number gives NaN, never 0, and NaN in one batch element never reaches another."""
    module = case.make()
    for n in (1, 9, 33):
        xs = case.inputs(n)
        base = case.run(module, xs)
        spoilt = [x.clone() for x in xs]
        spoilt[0][0].fill_(math.nan)
        try:
            out = case.run(module, spoilt)
        except ValueError as error:
            assert "finite" in str(error), f"n={n}: {error}"
            continue
        assert out[0].isnan().all(), f"n={n}: a query that is not a number gives a number"
        close(out[1], base[1], 1e-12, f"n={n}: NaN in another batch element")
