"""The parts of a plan as views of whole tensors: their queries and keys, and what is put back to where it belongs.

Of G sequences at once; a part has A blocks of L queries and S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.supports.parts import Grid, Part, Plan


def grid_view(x: Tensor, grid: Grid) -> Tensor:
    """The blocks of a sequence as a view: (G, n, d) → (G, blocks, length, d)."""
    group, place, feature = x.stride()
    return x.as_strided(
        (x.shape[0], grid.blocks, grid.length, x.shape[2]),
        (group, grid.step * place, grid.stride * place, feature),
        x.storage_offset() + grid.start * place,
    )


def keys_of(x: Tensor, part: Part, plan: Plan) -> Tensor:
    """(G, A, S, d): a view, or a copy of the drawn blocks."""
    if not part.draws:
        return grid_view(x, part.keys)
    numbers = torch.tensor(_numbers(part, plan), device="cpu").to(x.device, non_blocking=True)
    blocks = _drawn_from(x, part).index_select(1, numbers)
    return blocks.view(x.shape[0], part.keys.blocks, part.keys.length, x.shape[2])


def _drawn_from(x: Tensor, part: Part) -> Tensor:
    """The whole blocks that a part draws from: (G, n, d) → (G, n // size, size, d)."""
    size = part.keys.length // part.draws
    return grid_view(x, Grid(0, x.shape[1] // size, size, size))


def _numbers(part: Part, plan: Plan) -> list[int]:
    starts = (part.keys.start + a * part.keys.step for a in range(part.keys.blocks))
    return [number for start in starts for number in plan.drawn[start : start + part.draws]]


def absorb(out: Tensor, lse: Tensor, new: Tensor, here: Tensor, fresh: bool = False) -> None:
    """One softmax over two sets of keys: (new, here), output and logsumexp of the second, go into (out, lse), in place.

    `fresh`: there is no first.
    """
    if fresh:
        out.copy_(new)
        lse.copy_(here)
        return
    total = torch.logaddexp(lse, here)
    base = total.masked_fill(total == -torch.inf, 0)  # -inf - -inf is not a number
    out.mul_((lse - base).exp_()[..., None]).addcmul_(new, (here - base).exp_()[..., None])
    lse.copy_(total)


def add_keys(total: Tensor, grad: Tensor, part: Part, plan: Plan) -> None:
    """total[key] += grad; where key blocks overlap they are added in slices that do not."""
    keys = part.keys
    if part.draws:
        pieces = grad.reshape(grad.shape[0], keys.blocks * part.draws, -1, grad.shape[3])  # (G, A·draws, size, d)
        blocks = _drawn_from(total, part)
        for at, number in enumerate(_numbers(part, plan)):  # a block may be drawn twice
            blocks[:, number].add_(pieces[:, at])
        return
    overlap = keys.blocks > 1 and keys.stride == 1 and keys.step < keys.length
    if overlap and keys.step == 0:  # the same keys in every block
        grid_view(total, keys._replace(blocks=1))[:, 0].add_(grad.sum(1))
        return
    width = keys.step if overlap else keys.length
    for first in range(0, keys.length, width):
        piece = grad[:, :, first : first + width]
        grid = keys._replace(start=keys.start + first * keys.stride, length=piece.shape[2])
        grid_view(total, grid).add_(piece)
