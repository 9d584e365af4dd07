"""Padded batches on a GPU: rows of their own length under the plan of the whole batch, without reading their lengths.

The plan of a row depends on its length, and to read that the host would have to wait for the device. Most plans of
fewer tokens are the first queries and keys of the plan of more tokens (`Support.within`): there the whole batch follows
one plan, with masks that are made on the device (`padded`). Where sets depend on the length in any other way than in
the two that follow, the lengths are read.

A plan and its mirror image (`Support.halves`): the first half follows the plan of the whole batch with rows that begin
at slot 0, the second with rows that end at the last slot. Dropout counts tokens from the start of their row, so where
there is any the second half runs in plain torch. A plan and pairs beside it (`Support.beside`): what all lengths have
in common follows the plan of the whole batch. Other pairs, such as the end of a ring, have places that are computed on
the device: their queries and keys are gathered. Both ways are merged by their logsumexps, and a backward pass per half
or piece with the merged output and logsumexp is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.core.hashing import dropout_factors
from subquad.supports.placed import Placed
from subquad.supports.support import parse


class Padded(NamedTuple):
    """What takes the place of the lengths."""

    valid: list[Tensor]  # (B, 1, m) per source: the keys that exist
    behind: Tensor  # bool (B, 1, r): the queries behind the end of their row

    def cut(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Queries behind the end of a row see nothing."""
        return out.masked_fill(self.behind[..., None], 0), lse.masked_fill(self.behind, -torch.inf)

    def give_nothing(self, grad: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """They get no gradient: weights are exp(s - lse)."""
        return grad.masked_fill(self.behind[..., None], 0), lse.masked_fill(self.behind, torch.inf)


def padded(
    q: Tensor, keys: list[Tensor], valid: list[Tensor], lengths: Tensor, support: str, which: str
) -> Padded | None:
    """None where rows of their own length need plans of their own."""
    part = parse(support).within(which, lengths)
    if part is None:
        return None
    masks = []
    for source, x in enumerate(keys):
        exists = torch.arange(x.shape[2], device=q.device) < part.keys[source][:, None]  # (B, m)
        masks.append(exists[:, None] & valid[source] if valid else exists[:, None])
    return Padded(masks, (torch.arange(q.shape[2], device=q.device) >= part.rows[:, None])[:, None])


Forward = Callable[..., tuple[Tensor, Tensor]]


# ---- a plan and its mirror image ----------------------------------------------------------------------------


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


def mirrored_forward(run: Forward, halves: tuple[str, str], q, keys, values, valid, lengths, seed, support, n, *rest):
    """`run` is the operator for one plan; of the second half only the last source is attended to."""
    turn = _Turn.of(lengths, q.shape[2])
    first = run(q, keys, values, valid, lengths, seed, support, halves[0], n, *rest)
    sources = [_turned(turn, x) for x in (keys, values)]
    about = (_existing(turn, valid, keys), None, seed, support, halves[1], n, *rest)
    out, lse = run(turn.to_end(q), *sources, *about, moved=turn.dropout(rest))
    out, lse = turn.to_start(out), turn.to_start(lse)
    return merged(first, (out.masked_fill(turn.behind[..., None], 0), lse.masked_fill(turn.behind, -torch.inf)))


def mirrored_backward(
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


# ---- a plan and pairs beside it -----------------------------------------------------------------------------

BATCH = 1 << 24  # scores at a time

Beside = tuple[str, list[Placed]]


def beside_forward(run: Forward, beside: Beside, q, keys, values, valid, lengths, seed, support, n, scale, dropout):
    """`run` is the operator for one plan; pairs beside it are those of the first source."""
    total = run(q, keys, values, valid, lengths, seed, support, beside[0], n, scale, dropout)
    for placed in beside[1]:
        out, lse = _room(q, q.shape[3]), _room(q, 1).fill_(-torch.inf)
        for some in _pieces(placed, q, keys[0], valid, scale):
            s = some.scores
            top = s.amax(-1, keepdim=True)  # (B, H, A, R, 1)
            base = top.masked_fill(top == -torch.inf, 0)
            w = (s - base).exp_()
            weight = w.sum(-1, keepdim=True)
            w = w * some.kept(w, seed, dropout)
            own = _shared(w, some.take(values[0])) / weight.clamp(min=torch.finfo(w.dtype).tiny)
            some.put(out, own)
            some.put(lse, base + weight.log())
        total = merged(total, (out[:, :, :-1], lse[:, :, :-1, 0]))
    return total


def beside_backward(
    run, beside: Beside, grad, q, keys, values, out, lse, valid, lengths, seed, support, n, scale, dropout
) -> list[Tensor]:
    about = (valid, lengths, seed, support, beside[0], n, scale, dropout)
    found = run(grad, q, keys, values, out, lse, *about)
    base = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]  # weights are exp(s - base)
    delta = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)  # (B, H, n, 1)
    sums = [_room(x, x.shape[3]) for x in (q, keys[0], values[0])]
    for some in (piece for placed in beside[1] for piece in _pieces(placed, q, keys[0], valid, scale)):
        g, x, less, whole = (some.ask(t) for t in (grad, q, delta, base))  # (B, H, A, R, …)
        p = (some.scores - whole).exp_()
        kept = some.kept(p, seed, dropout)
        v = some.take(values[0])
        ds = p * (_shared(g, v.mT) * kept - less) * scale
        some.put(sums[0], _shared(ds, some.take(keys[0])), add=True)
        some.give(sums[1], ds.mT @ x)
        some.give(sums[2], (p * kept).mT @ g)
    for at, total in zip((0, 1, 1 + len(keys)), sums, strict=True):
        found[at] = found[at] + total[:, :, :-1].to(found[at].dtype)
    return found


class _Piece(NamedTuple):
    """Some blocks, with their scores, -inf where a key is not seen. Who sees nothing, or is seen by nobody, stands at
    place n.
    """

    scores: Tensor  # (B, H, A, R, S)
    queries: Tensor  # (B, A, R)
    keys: Tensor  # (B, A, S)

    def take(self, x: Tensor) -> Tensor:
        """(B, heads, n, d) at the keys: (B, heads, A, S, d), 0 where there is none."""
        return _at(x, self.keys).to(self.scores.dtype)

    def ask(self, x: Tensor) -> Tensor:
        """(B, H, n, d) at the queries: (B, H, A, R, d), 0 where there is none."""
        return _at(x, self.queries).to(self.scores.dtype)

    def put(self, room: Tensor, x: Tensor, add: bool = False) -> None:
        """x (B, H, A, R, d) at the places of the queries."""
        where = self.queries.flatten(1)[:, None, :, None].expand(*room.shape[:2], -1, room.shape[3])
        (room.scatter_add_ if add else room.scatter_)(2, where, x.flatten(2, 3))

    def give(self, room: Tensor, x: Tensor) -> None:
        """Add x (B, H, A, S, d) at the places of the keys, summed over the heads that share a key head."""
        x = x.unflatten(1, (room.shape[1], -1)).sum(2).flatten(2, 3)
        where = self.keys.flatten(1)[:, None, :, None].expand(x.shape)
        room.scatter_add_(2, where, x)

    def kept(self, like: Tensor, seed: Tensor | None, dropout: float) -> Any:
        """What dropout multiplies the weights with, by the places of queries and keys as under any plan."""
        if not dropout:
            return 1.0
        assert seed is not None
        instance = torch.arange(like.shape[0] * like.shape[1], device=like.device).view(*like.shape[:2], 1, 1, 1)
        rows, columns = self.queries[:, None, ..., None], self.keys[:, None, :, None]
        return dropout_factors(seed, dropout, instance, rows, columns, like.dtype)


def _pieces(placed: Placed, q: Tensor, k: Tensor, valid: list[Tensor], scale: float) -> Iterator[_Piece]:
    (batch, heads, n), work = q.shape[:3], torch.promote_types(q.dtype, torch.float32)
    for some in placed.split(BATCH // (batch * heads)):
        seen = some.seen
        if valid:
            exists = valid[0].expand(batch, 1, k.shape[2])
            seen = seen & _at(exists[..., None], some.keys.expand(batch, -1, -1).clamp(0, n - 1))[:, 0, :, None, :, 0]
        queries = torch.where(seen.any(3), some.queries, n)
        keys = torch.where(seen.any(2), some.keys, n)
        s = _shared(_at(q, queries).to(work), _at(k, keys).to(work).mT) * scale
        yield _Piece(s.masked_fill(~seen[:, None], -torch.inf), queries, keys)


def _room(like: Tensor, width: int) -> Tensor:
    """Zeros (B, heads, n + 1, width); the last slot is nobody's."""
    shape = (*like.shape[:2], like.shape[2] + 1, width)
    return torch.zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _at(x: Tensor, places: Tensor) -> Tensor:
    """(B, heads, n, d) at (B, A, R): (B, heads, A, R, d), 0 at place n."""
    where = places.clamp(max=x.shape[2] - 1).flatten(1)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])
    found = x.gather(2, where).unflatten(2, places.shape[1:])
    return found.masked_fill((places == x.shape[2])[:, None, ..., None], 0)


def _shared(x: Tensor, y: Tensor) -> Tensor:
    """(B, H, A, R, ·) @ (B, H or H/g, A, ·, ·), where g heads in a row share a key head."""
    return (x.unflatten(1, (y.shape[1], -1)) @ y[:, :, None]).flatten(1, 2)
