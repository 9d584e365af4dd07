"""Checks of long sequences: a fast path that begins at some length keeps the contract too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.testing.case import Case, NotApplicable, close, gradient_names, gradients
from subquad.testing.masking import slots_weigh_nothing

# More than one block of the usual sizes: a multiple of them, for paths that need one, and no multiple. Some definitions
# take seconds for 1,000 tokens.
COMPARED = (256, 257, 401)
PADDED = 1000
MOVED = {256: (1, 63, 64, 65, 100, 128, 192, 255), 1000: (1, 64, 100, 256, 500, 512, 768, 999)}  # borders of blocks


def long_equals_dense(case: Case) -> None:
    """Values and gradients of the fast path are those of the dense definition at long lengths, one of them padded."""
    module = _make(case)
    for n in COMPARED:
        padded = n == COMPARED[1] and case.able.padding
        xs = [x.requires_grad_() for x in case.inputs(n, batch=1)]
        mask = _padding(n) if padded else None
        what = f"n={n}, {'some' if padded else 'no'} padding"
        fast, slow = case.run(module, xs, mask), case.dense(module, xs, mask)
        close(fast, slow, 1e-9, f"value at {what}")
        pairs = zip(gradients(fast, xs, module), gradients(slow, xs, module), strict=True)
        for name, (a, b) in zip(gradient_names(case, module), pairs, strict=True):
            close(a, b, 1e-9, f"gradient of {name} at {what}")


def long_is_causal(case: Case) -> None:
    """At long lengths, other tokens from t on change no output before t. Every t has a batch element of its own."""
    if not case.causal:
        raise NotApplicable
    module = _make(case)
    for n, places in MOVED.items():
        cuts = torch.tensor(places)
        before = torch.arange(n) < cuts[:, None]  # [b, i]: output i of element b is before its cut
        xs, others = ([x.repeat_interleave(len(cuts), 0) for x in case.inputs(n, batch=1, seed=s)] for s in (1, 7))
        with torch.no_grad():
            base = case.run(module, xs)
            changed = [
                torch.where(before[..., None] if case.is_layer else before[:, None, :, None], x, y)
                for x, y in zip(xs, others, strict=True)
            ]
            after = case.run(module, changed)
        moved = (case.rows(after, before) - case.rows(base, before)).abs().flatten(1)
        wrong = ~(moved <= 1e-12).all(1)  # a product over all tokens may round by its size
        if wrong.any():
            b, i = before.nonzero()[wrong][0].tolist()
            raise AssertionError(f"n={n}: tokens from {cuts[b]} on change output {i}")


def long_padding_is_invisible(case: Case) -> None:
    """At a long length padded slots have no weight, and a row padded on either side gives what it gives alone.

    Only the fast path runs, so this costs little; `long_equals_dense` compares it with the definition.
    """
    if not case.able.padding:
        raise NotApplicable
    longest = max(case.options.get("max_length", 1 << 16), PADDED)  # sizes do not follow from the batch
    module = case.make(max_length=longest)
    place = torch.arange(PADDED)
    kinds = {"left": place < 350, "right": place >= 650, "inside": (place >= 350) & (place < 650)}
    mask = ~torch.stack(list(kinds.values()))  # (3, n)
    xs = case.inputs(PADDED, batch=len(mask))
    with torch.no_grad():
        slots_weigh_nothing(case, module, case.run, xs, mask, f"n={PADDED}")
        if case.able.stochastic or "padded_row_equals_alone" in case.exceptions:
            return
        out = case.run(module, xs, mask)
        for b, kind in enumerate(("left", "right")):
            real = mask[b].nonzero().squeeze(1)
            alone = case.run(module, [x[b : b + 1].index_select(case.time, real) for x in xs])
            inside = out[b : b + 1].index_select(case.time, real)
            close(inside, alone, 1e-9, f"n={PADDED}: {len(real)} tokens with padding on the {kind}")


def _make(case: Case) -> Any:
    """With room for the longest."""
    given = case.options.get("max_length")
    return case.make(**({"max_length": max(given, *MOVED)} if given else {}))


def _padding(n: int) -> Tensor:
    """A key mask, bool (1, n): padded on both sides and inside."""
    place = torch.arange(n)[None]
    return (place >= 5) & (place < n - 40) & ((place < n // 2) | (place >= n // 2 + 9))
