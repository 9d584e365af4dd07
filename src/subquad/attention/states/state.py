"""What a state is: buffers with a row per batch element, and how many positions each row has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from subquad.core.memory import show_bytes
from subquad.kernels.values import readable, require

if TYPE_CHECKING:
    from subquad.attention.base import Attention

ROLLBACK = 64  # tokens that `crop` can take back, unless `start` is told otherwise
LEAST = 16  # room for new tokens beside those that are still named: so many are written at a time
Buffers = dict[str, Tensor]


class Chunk(NamedTuple):
    """New tokens, rows moved so that each begins with its first real token; what a memory is extended with.

    A slot that is not `here` does not exist: rows that began with padding have fewer new slots than others. A slot
    that is here and not real is padding inside a row: it has a position, and is a key for nobody.
    """

    q: Tensor  # (B, H, t, d)
    k: Tensor  # (B, H or H/g, t, d), 0 where not real
    v: Tensor
    position: Tensor  # int64 (B, t)
    real: Tensor | None  # bool (B, t); None = all
    here: Tensor | None  # bool (B, t); None = all
    added: Tensor  # int64 (B,) or (1,): new slots of a row
    even: int | None = None  # positions of every row before it, where the host knows: nothing was ever padded
    bound: int | None = None  # no row has more positions with it: all slots that were ever given

    def longest(self, after: Tensor) -> int:
        """How long the longest row is with it; `after` (B,) says it of every row. A device is not asked: there it is
        what the longest row can have.
        """
        if self.even is not None:
            return self.even + self.k.shape[2]
        return int(after.max()) if self.bound is None or readable(after) else self.bound

    def completes(self, unit: int, length: Tensor, after: Tensor) -> int:
        """How many blocks of so many tokens it completes at most."""
        t = self.k.shape[2]
        if self.even is not None:
            return (self.even + t) // unit - self.even // unit
        if self.bound is None or readable(after):
            return int((after // unit - length // unit).max())
        return t // unit if self.bound == t else -(-t // unit)  # the first tokens begin a block, others end one

    def part(self, first: int, last: int) -> Chunk:
        """Slots first … last-1."""
        q, k, v = (x[:, :, first:last] for x in (self.q, self.k, self.v))
        real, here = (None if x is None else x[:, first:last] for x in (self.real, self.here))
        added = (self.added - first).clamp(0, last - first)
        even = None if self.even is None else self.even + first
        return Chunk(q, k, v, self.position[:, first:last], real, here, added, even, self.bound)

    def pieces(self, size: int) -> list[Chunk]:
        """One after the other, of at most `size` slots each."""
        t = self.k.shape[2]
        return [self] if t <= size else [self.part(first, first + size) for first in range(0, t, size)]

    def walked(
        self,
        size: int,
        buffers: Buffers,
        length: Tensor,
        step: Callable[[Chunk, Buffers, Tensor], tuple[Tensor, Buffers]],
    ) -> tuple[Tensor, Buffers]:
        """The outputs (B, H, t, d) of all pieces, and the buffers after them: `step` takes a piece, the buffers before
        it, and the length (B,) of the rows before it.
        """
        outs = []
        for piece in self.pieces(size):
            out, buffers = step(piece, buffers, length)
            outs.append(out.to(self.q.dtype))
            length = length + piece.added
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2), buffers


class Memory:
    """What a mechanism keeps of the tokens so far. A value of sizes alone: the tensors are in the state."""

    def extend(self, module: Attention, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        """The output (B, H, t, d) of the new tokens, and the buffers that have them."""
        raise NotImplementedError

    def earliest(self, state: State) -> Tensor:
        """The shortest length that each row can be cropped to, (B,); 0 is always possible beside it."""
        return torch.zeros_like(state.length)

    @property
    def forgets(self) -> bool:
        """Is a token ever given up? Else rows can be cropped to any length."""
        return True

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        """The buffers with room for rows of `length` positions."""
        return buffers

    def room(self, buffers: Buffers) -> int | None:
        """How long rows can become before buffers have to grow, which a compiled graph cannot do; None = any length."""
        return None


class Unmade(Memory):
    """Stands for the memory of a state that comes out of a graph: a graph returns tensors. Its mechanism makes another
    before it goes on; until then nothing can be taken back.
    """

    def earliest(self, state: State) -> Tensor:
        return state.length


@dataclass(frozen=True, eq=False)
class State:
    """What a causal mechanism knows of the tokens so far. A value: every method returns another state.

        state.length            int64 (B,): positions of each row, counted from its first real token
        state.earliest          int64 (B,): the shortest length that rows can be cropped to without recomputation
        state.nbytes            bytes of all buffers
        state.reorder(index)    the rows `index`, int64 (B',), as beam search asks for
        state.repeat(times)     every row `times` times in a row
        state.crop(length)      the state that rows had at that length, an integer or int64 (B,)
        state.reserve(length)   with room for rows of that length: extending allocates nothing up to there
        state.to(device)

    Without gradients `extend` writes into the buffers of the state it is given, so a state is used once,
    `y, state = a.extend(…, state)`; `clone` keeps one for another continuation. A second use raises.
    """

    mechanism: str
    memory: Memory
    length: Tensor
    high: Tensor  # int64 (B,): the greatest length that rows have had; behind it nothing was ever written
    seed: Tensor | None
    rollback: int | None
    dtype: torch.dtype
    key_heads: int | None = None  # known from the first tokens on
    even: int | None = None  # the length of all rows, where it is one and nothing was ever padded
    bound: int | None = None  # what no row is longer than, known to the host
    buffers: Buffers = field(default_factory=dict)
    tokens: Buffers | None = None  # with rollback=None all tokens by position, to recompute the buffers from
    stale: bool = False  # cropped beyond what the buffers keep: they are recomputed before the next tokens

    def __repr__(self) -> str:
        if self.length.is_meta or not self.length.numel():
            length = "?"
        else:
            low, high = (int(x) for x in self.length.aminmax())
            length = f"{low}" if low == high else f"{low} … {high}"
        return f"State({self.mechanism}, rows={self.batch_size}, length={length}, {show_bytes(self.nbytes)})"

    def sealed(self, like: State | None = None) -> State:
        """This state, remembering how often its buffers were written to so far, or what `like` remembers of the same
        buffers. No field: a graph would be one for these numbers, and a copy has buffers of its own.
        """
        if not torch.compiler.is_compiling():
            self.__dict__["_writes"] = self._written() if like is None else like.__dict__.get("_writes")
        return self

    def _written(self) -> list[int] | None:
        own = (*self.buffers.values(), *(self.tokens or {}).values())
        return (
            None if any(x.is_inference() for x in own) else [x._version for x in own]
        )  # inference mode does not count

    def check_unused(self) -> None:
        """Refuse a state whose buffers were written to by an `extend` since it was made."""
        if torch.compiler.is_compiling():
            return
        before = self.__dict__.get("_writes")
        if before is not None and before != self._written():
            raise ValueError(
                "state was used before: extend has written the tokens that followed it into its buffers. Go on with "
                "the state that extend returned (y, state = a.extend(…, state)); for a second continuation, clone "
                "the state before it is used"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_writes"}

    def part(self, memory: Memory, buffers: Buffers) -> State:
        """The same rows with some of the buffers, for a memory that is made of several."""
        # a graph that read the host's numbers would be one for that length
        even, bound = (None, None) if torch.compiler.is_compiling() else (self.even, self.bound)
        return replace(self, memory=memory, buffers=buffers, even=even, bound=bound)

    @property
    def batch_size(self) -> int:
        return self.length.shape[0]

    @property
    def device(self) -> torch.device:
        return self.length.device

    @property
    def nbytes(self) -> int:
        own = (*self.buffers.values(), *(self.tokens or {}).values(), self.length, self.high)
        return sum(x.nbytes for x in own)

    @property
    def earliest(self) -> Tensor:
        """The shortest length that each row can be cropped to without recomputation, (B,); 0 is possible beside it."""
        return self.length if self.stale else self.memory.earliest(self).minimum(self.length)

    def _each(self, change: Callable[[Tensor], Tensor]) -> State:
        self.check_unused()
        buffers = {name: change(x) for name, x in self.buffers.items()}
        tokens = None if self.tokens is None else {name: change(x) for name, x in self.tokens.items()}
        new = replace(self, length=change(self.length), high=change(self.high), buffers=buffers, tokens=tokens)
        return new.sealed()

    def reorder(self, index: Tensor) -> State:
        """The rows `index` of this state, in that order; a row may stand there several times."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
            kind = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"index must be an int64 tensor of row numbers, (B',), not {kind}")
        message, inside = (
            f"index must hold row numbers 0 … {self.batch_size - 1}",
            (index >= 0) & (index < self.batch_size),
        )
        if not index.numel() or (readable(index) and not bool(inside.all())):
            raise ValueError(f"{message}, not {index.tolist()}")
        if not readable(index):
            require(inside.all(), message)
        index = index.to(self.device)
        return self._each(lambda x: x.index_select(0, index))

    def repeat(self, times: int) -> State:
        """Every row `times` times in a row, as `torch.repeat_interleave`."""
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ValueError(f"times must be an integer ≥ 1, not {times!r}")
        return self._each(lambda x: x.repeat_interleave(times, 0))

    def crop(self, length: int | Tensor) -> State:
        """As if rows had never been longer than `length`, an integer or int64 (B,); shorter rows stay as they are.

        Down to `earliest` nothing is computed, and 0 is an empty state again. In between the state has to be
        recomputed: the next `extend` does that where the tokens are kept, `start(…, rollback=None)`; else it raises.
        """
        wanted = self._wanted(length).minimum(self.length)
        earliest = self.earliest
        lost = (wanted < earliest) & (wanted > 0)
        stale = self.stale or bool(lost.any())
        if stale and self.tokens is None:
            row = int(lost.nonzero()[0, 0])
            raise ValueError(
                f"length: row {row} can be cropped to {int(earliest[row])} … {int(self.length[row])}, or to 0, not to "
                f"{int(wanted[row])}; start(…, rollback={self.rollback}) says how many tokens can be taken back at "
                "least, a greater rollback keeps more, and rollback=None keeps all tokens"
            )
        emptied = not bool(wanted.any())
        if emptied:
            stale = False  # nothing is left to recompute
        else:
            self.check_unused()
        high = torch.where(wanted > 0, self.high, 0)
        even = min(self.even, length) if isinstance(length, int) and self.even is not None else None
        bound = min(self.bound, length) if isinstance(length, int) and self.bound is not None else self.bound
        return replace(self, length=wanted, high=high, even=even, bound=bound, stale=stale).sealed(
            None if emptied else self
        )

    def _wanted(self, length: int | Tensor) -> Tensor:
        if isinstance(length, bool) or not isinstance(length, (int, Tensor)):
            raise TypeError(f"length must be an integer or an int64 tensor (B,), not {type(length).__name__}")
        if isinstance(length, Tensor) and (length.dtype != torch.int64 or length.shape not in ((), self.length.shape)):
            shape = tuple(self.length.shape)
            raise TypeError(f"length must be int64 {shape}, not {length.dtype} {tuple(length.shape)}")
        wanted = torch.as_tensor(length, device=self.device).expand(self.length.shape)
        if bool((wanted < 0).any()) or bool((wanted > self.length.max()).any()):
            raise ValueError(f"length must be between 0 and {int(self.length.max())}, not {wanted.tolist()}")
        return wanted

    def reserve(self, length: int) -> State:
        """With room for rows of `length` positions; before the first tokens there is nothing to make room in."""
        if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or length < 0:
            raise ValueError(f"length must be an integer ≥ 0, not {length!r}")
        tokens = None if self.tokens is None else with_room(self.tokens, length)
        self.check_unused()
        return replace(self, buffers=self.memory.reserve(dict(self.buffers), length), tokens=tokens).sealed()

    def clone(self) -> State:
        return self._each(torch.clone)

    def detach(self) -> State:
        """Without the graph of earlier chunks, for truncated backpropagation."""
        return self._each(torch.detach)

    def to(self, device: Any) -> State:
        moved = self._each(lambda x: x.to(device))
        return replace(moved, seed=None if self.seed is None else self.seed.to(device))


# ---- buffers ------------------------------------------------------------------------------------------------


def write(buffer: Tensor, slot: Tensor, new: Tensor) -> Tensor:
    """buffer[b, …, slot[b, j], …] = new[b, …, j, …]: buffer (B, H, m, d) or (B, m), slot (B, t).

    In place where no gradient is asked for; a graph needs what was there before.
    """
    new = new.to(buffer.dtype)  # autocast computes in a dtype of its own
    if buffer.dim() == 4:
        slot = slot[:, None, :, None].expand(new.shape)
    if torch.is_grad_enabled() or buffer.requires_grad:
        return buffer.scatter(buffer.dim() // 2, slot, new)
    return buffer.scatter_(buffer.dim() // 2, slot, new)


def read(buffer: Tensor, slot: Tensor) -> Tensor:
    """buffer (B, H, m, d) or (B, m) at slot (B, t): (B, H, t, d) or (B, t)."""
    if buffer.dim() == 4:
        slot = slot[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    return buffer.gather(buffer.dim() // 2, slot)


def shifted(runs: list[slice], by: int) -> list[slice]:
    """Runs of slots, `by` slots further on."""
    return [slice(run.start + by, run.stop + by) for run in runs]


def taken(buffer: Tensor, runs: list[slice]) -> Tensor:
    """The slots of these runs of a buffer (B, H, m, d) or (B, m): a view where they are one run."""
    dim = buffer.dim() // 2
    pieces = [buffer.narrow(dim, run.start, run.stop - run.start) for run in runs]
    if not pieces:
        return buffer.narrow(dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def put(buffer: Tensor, runs: list[slice], new: Tensor) -> Tensor:
    """The buffer with `new` in the slots of these runs, one run behind the other; in place as in `write`."""
    dim = buffer.dim() // 2
    if torch.is_grad_enabled() or buffer.requires_grad:
        place = torch.cat([torch.arange(run.start, run.stop, device=buffer.device) for run in runs])
        return buffer.index_copy(dim, place, new.to(buffer.dtype))
    pieces = new.split([run.stop - run.start for run in runs], dim) if len(runs) > 1 else (new,)
    for run, piece in zip(runs, pieces, strict=True):
        buffer.narrow(dim, run.start, run.stop - run.start).copy_(piece)
    return buffer


def grown(buffer: Tensor, wanted: int, dim: int) -> Tensor:
    """The buffer with at least `wanted` places along `dim`, or an eighth more: growing costs a constant per token."""
    have = buffer.shape[dim]
    if have >= wanted:
        return buffer
    shape = list(buffer.shape)
    shape[dim] = max(wanted, have + have // 8) - have
    more = buffer.new_ones(shape) if buffer.dtype == torch.bool else buffer.new_zeros(shape)
    return torch.cat((buffer, more), dim)  # nothing is padding until it is written


# ---- buffers of all tokens, by position ---------------------------------------------------------------------

FIRST = 64  # places of a new one


def appended(buffers: Buffers, new: Buffers, chunk: Chunk, n: int) -> Buffers:
    """Buffers by position, with room for n of them and a last place for what does not exist."""
    real = chunk.real
    if real is None:
        real = torch.ones_like(chunk.position, dtype=torch.bool)
    new = {**new, "real": real}
    if not buffers:
        buffers = {name: x.new_zeros(*_shape(x, max(FIRST, n + 1))) for name, x in new.items()}
    found = {}
    for name, x in new.items():
        buffer = grown(buffers[name], n + 1, x.dim() // 2)
        last = buffer.shape[x.dim() // 2] - 1
        slot = chunk.position if chunk.here is None else torch.where(chunk.here, chunk.position, last)
        found[name] = write(buffer, slot, x)
    return found


def with_room(buffers: Buffers, length: int) -> Buffers:
    """The same with room for `length` positions."""
    return {name: grown(x, length + 1, x.dim() // 2) for name, x in buffers.items()}


def smallest_room(rooms: Iterable[int | None]) -> int | None:
    """The smallest of several rooms; None = any length."""
    known = [room for room in rooms if room is not None]
    return min(known) if known else None


def _shape(x: Tensor, places: int) -> tuple[int, ...]:
    return (*x.shape[: x.dim() // 2], places, *x.shape[x.dim() // 2 + 1 :])
