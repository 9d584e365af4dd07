"""Padded batches on a GPU under a plan and its mirror image (`Support.halves`), without reading the lengths of rows.

The first half follows the plan of the whole batch with rows that begin at slot 0, the second with rows that end at the
last slot, and both are merged by their logsumexps. A backward pass per half with the merged output and logsumexp is
exact. Dropout counts tokens from the start of their row, so where there is any the second half runs in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor]]


class _Turn(NamedTuple):
    """Moves rows to the end of their slots, and back."""

    order: Tensor  # (B, n): which slot goes to a slot
    back: Tensor  # (B, n): the inverse
    inside: Tensor  # bool (B, 1, n): where the rows are after the move
    behind: Tensor  # bool (B, 1, n): what lies behind their end before it
    shift: Tensor  # (B,): how far they move

    @classmethod
    def of(cls, lengths: Tensor, n: int) -> _Turn:
        place, shift = torch.arange(n, device=lengths.device), n - lengths[:, None]
        inside = place >= shift
        order, back = (place - shift) % n, (place + shift) % n
        return cls(order, back, inside[:, None], ~inside.flip(1)[:, None], shift[:, 0])

    def to_end(self, x: Tensor) -> Tensor:
        """(B, H, n) or (B, H, n, d)."""
        return _take(x, self.order)

    def to_start(self, x: Tensor) -> Tensor:
        return _take(x, self.back)

    def dropout(self, rest: Sequence) -> Tensor | None:
        """What dropout has to know: it counts tokens from the start of their row."""
        return self.shift if rest[-1] else None


def _take(x: Tensor, order: Tensor) -> Tensor:
    where = order[:, None] if x.dim() == 3 else order[:, None, :, None]
    return x.gather(2, where.expand(x.shape))


def forward(run: Forward, halves: tuple[str, str], q, keys, values, valid, lengths, seed, support, n, *rest):
    """`run` is the operator for one plan; of the second half only the last source is attended to."""
    turn = _Turn.of(lengths, q.shape[2])
    first = run(q, keys, values, valid, lengths, seed, support, halves[0], n, *rest)
    sources = [_turned(turn, x) for x in (keys, values)]
    about = (_existing(turn, valid, keys), None, seed, support, halves[1], n, *rest)
    out, lse = run(turn.to_end(q), *sources, *about, moved=turn.dropout(rest))
    out, lse = turn.to_start(out), turn.to_start(lse)
    return merged(first, (out.masked_fill(turn.behind[..., None], 0), lse.masked_fill(turn.behind, -torch.inf)))


def backward(
    run, halves: tuple[str, str], grad, q, keys, values, out, lse, valid, lengths, seed, support, n, *rest
) -> list[Tensor]:
    turn = _Turn.of(lengths, q.shape[2])
    first = run(grad, q, keys, values, out, lse, valid, lengths, seed, support, halves[0], n, *rest)
    lse = lse.masked_fill(turn.behind | (lse == -torch.inf), torch.inf)  # weights are exp(s - lse)
    moved = [turn.to_end(x) for x in (grad.masked_fill(turn.behind[..., None], 0), q, out, lse)]
    sources = [_turned(turn, x) for x in (keys, values)]
    about = (_existing(turn, valid, keys), None, seed, support, halves[1], n, *rest)
    second = run(*moved[:2], *sources, *moved[2:], *about, moved=turn.dropout(rest))
    for at in (0, len(keys), 2 * len(keys)):  # queries, and the last source of keys and of values
        first[at] = first[at] + turn.to_start(second[at])
    return first


def _turned(turn: _Turn, sources: Sequence[Tensor]) -> list[Tensor]:
    return [*sources[:-1], turn.to_end(sources[-1])]


def _existing(turn: _Turn, valid: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
    """The masks of the sources after the move, (B or 1, 1, m)."""
    if not valid:
        return [*(torch.ones_like(x[:1, :1, :, 0], dtype=torch.bool) for x in keys[:-1]), turn.inside]
    return [*valid[:-1], turn.to_end(valid[-1].expand(turn.inside.shape)) & turn.inside]


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of both."""
    (a, one), (b, other) = first, second
    total = torch.logaddexp(one, other)  # (B, H, n)
    base = total.masked_fill(total == -torch.inf, 0)
    shares = [(lse - base).exp()[..., None] for lse in (one, other)]
    return (a * shares[0] + b * shares[1]).to(a.dtype), total
