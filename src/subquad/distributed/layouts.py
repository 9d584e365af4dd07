"""How a batch is divided: how long the whole sequence is, who has which places of it, and what is padding.

Processes agree on it once per forward pass of a model (`sequence_parallel` does), or once per call of a mechanism.

Padding between the tokens of a row: a model closes such gaps before its attention sees the row, so a token may belong
to another process than the one it was given to. Tokens move once, before the model, and outputs move back behind it
(`Closing`): in between rows are solid, and padding stands at their end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from subquad.distributed import exchange
from subquad.distributed.groups import Group
from subquad.kernels import devices
from subquad.packing import closed_order, has_gaps
from subquad.supports.shards import Cut, Range, divide

_current: ContextVar[Layout | None] = ContextVar("layout", default=None)
_divided = 0  # layouts in use: torch.compile cannot read a ContextVar, and need not where there is none


@dataclass(frozen=True, eq=False)
class Layout:
    """One batch: n slots, divided among the processes of a group."""

    group: Group
    n: int
    key_mask: Tensor | None = None  # bool (B, n) of the whole batch, True = a real token; None = all are
    seed: int = 0  # drawn by the first process: the same for all
    zigzag: bool = False

    @cached_property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """The slots of every process: one range each, or two with zig-zag (`zigzag_ranges`)."""
        if self.zigzag:
            return zigzag_ranges(self.n, self.group.size)
        return tuple((one,) for one in divide(self.n, self.group.size))

    @property
    def cut(self) -> Cut:
        if self.zigzag:
            raise ValueError("layout='zigzag' is for full attention; every other mechanism takes contiguous shards")
        return divide(self.n, self.group.size)

    @property
    def mine(self) -> tuple[Range, ...]:
        return self.ranges[self.group.rank]

    @property
    def length(self) -> int:
        """Slots of this process."""
        return sum(hi - lo for lo, hi in self.mine)

    def take(self, x: Tensor) -> Tensor:
        """This process's slots of a whole (B, n, …)."""
        pieces = [x[:, lo:hi] for lo, hi in self.mine]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def places(self, device: torch.device | None = None) -> Tensor:
        """The numbers of this process's slots, (t,)."""
        return self.slots(device)[self.group.rank]

    def slots(self, device: torch.device | None = None) -> list[Tensor]:
        """The numbers of the slots of every process, (t,) each."""
        return [torch.cat([torch.arange(lo, hi, device=device) for lo, hi in some]) for some in self.ranges]

    def joined(self, x: Tensor) -> Tensor:
        """(B, t, …) of every process as a whole (B, n, …). No gradient."""
        return join(self.group, x, self.ranges)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Positions count real tokens, from 0: (B or 1, t)."""
        if self.key_mask is None:
            return self.places(device)[None]
        return self.take((self.key_mask.long().cumsum(1) - 1).clamp(min=0))

    @contextmanager
    def active(self) -> Iterator[None]:
        """The mechanisms that are called inside need not ask the other processes again."""
        token = enter(self)
        try:
            yield
        finally:
            leave(token)


def enter(layout: Layout) -> Any:
    """Make it the current layout, until `leave` is called with what this returns."""
    global _divided
    _divided += 1
    return _current.set(layout)


def leave(token: Any) -> None:
    global _divided
    _divided -= 1
    _current.reset(token)


def current() -> Layout | None:
    return _current.get() if _divided else None


def zigzag_ranges(n: int, processes: int) -> tuple[tuple[Range, ...], ...]:
    """Of 2p chunks process r has number r and number 2p-1-r: of causal full attention all then have the same work."""
    chunks = divide(n, 2 * processes)
    return tuple((chunks[r], chunks[2 * processes - 1 - r]) for r in range(processes))


def join(group: Group, x: Tensor, ranges: tuple[tuple[Range, ...], ...]) -> Tensor:
    """(B, t, …) of every process, in the order of the sequence."""
    sizes = [sum(hi - lo for lo, hi in some) for some in ranges]
    longest = max(sizes)
    padded = x.new_zeros(x.shape[0], longest, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    every = group.gather(padded)  # (p, B, longest, …)
    pieces = []
    for r, some in enumerate(ranges):
        at = 0
        for lo, hi in some:
            pieces.append((lo, every[r][:, at : at + hi - lo]))
            at += hi - lo
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], 1)


def agree(
    group: Group, length: int, batch: int, key_mask: Tensor | None, seed: int = 0, zigzag: bool = False
) -> Layout:
    """The layout of a batch of which this process has `length` slots. Where they do not fit, all processes raise."""
    device = torch.device("cpu") if key_mask is None else key_mask.device
    told = torch.tensor([length, batch, key_mask is not None, seed], device=_device(group, device))
    table = group.gather(told).cpu()  # (p, 4)
    lengths, batches = table[:, 0].tolist(), table[:, 1].tolist()
    n = sum(lengths)
    if len(set(batches)) > 1:
        raise ValueError(f"batch sizes differ between the processes of a sequence: {', '.join(map(str, batches))}")
    layout = Layout(group, n, None, int(table[0, 3]), zigzag)
    wanted = [sum(hi - lo for lo, hi in some) for some in layout.ranges]
    if lengths != wanted:
        raise ValueError(
            f"lengths differ between the processes of a sequence: {', '.join(map(str, lengths))} tokens; a sequence of "
            f"{n} is divided as {', '.join(map(str, wanted))} (subquad.distributed.shard does it)"
        )
    if not bool(table[:, 2].any()):
        return layout
    local = torch.ones(batch, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    whole = layout.joined(local.to(_device(group, device)).byte()).bool().to(device)
    return layout if bool(whole.all()) else Layout(group, n, whole, layout.seed, zigzag)


def _device(group: Group, device: torch.device) -> torch.device:
    """Where the group's backend takes tensors: NCCL has none on the CPU."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend(group.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return devices.with_contents(device)


@dataclass(frozen=True, eq=False)
class Closing:
    """How the rows of a batch are closed and opened again."""

    layout: Layout  # the batch as it came
    order: Tensor  # int64 (B, n): the slot whose token stands at each place of a closed row

    @classmethod
    def of(cls, layout: Layout) -> Closing | None:
        """None where no row has a gap."""
        if layout.key_mask is None or not has_gaps(layout.key_mask):
            return None
        return cls(layout, closed_order(layout.key_mask))

    @property
    def inside(self) -> Layout:
        """The batch as the model sees it."""
        assert self.layout.key_mask is not None
        return replace(self.layout, key_mask=self.layout.key_mask.gather(1, self.order))

    def close(self, x: Any) -> Any:
        """This process's part of closed rows, from its slots (B, t, …); what is no such tensor stays as it is."""
        return self._moved(x, self.order)

    def open(self, x: Any) -> Any:
        """The slots of this process again, from its part of closed rows; also inside of tuples."""
        if isinstance(x, tuple):
            return tuple(self.open(each) for each in x)
        return self._moved(x, torch.argsort(self.order, dim=1)) if _has_width(x) else x

    def _moved(self, x: Any, order: Tensor) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] not in ((len(order), self.layout.length), (1, self.layout.length)):
            return x
        x = x.expand(len(order), *x.shape[1:])
        return exchange.reorder(self.layout.group, x, order.to(x.device), self.layout.slots(x.device))


def _has_width(x: Any) -> bool:
    """Is it one vector per token? Outputs (B, classes) are no tokens, whatever their sizes."""
    return isinstance(x, Tensor) and x.dim() > 2
