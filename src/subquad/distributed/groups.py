"""The processes that share a sequence, and the one way in which they exchange tensors.

Everything that travels goes through `Group.exchange`: each process hands over one piece for every other, and knows what
sizes it gets. It is asynchronous, works on gloo and on NCCL, and counts the bytes that a process sends. `DryGroup` does
the same without other processes and without data, on meta tensors: what is counted there is what would travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from subquad.distributed.faults import Members, naming


@dataclass
class Traffic:
    """What this process has sent to others: bytes, and exchanges in which it took part."""

    sent: int = 0
    exchanges: int = 0
    parts: list[int] = field(default_factory=list)  # bytes of each exchange

    def add(self, size: int) -> None:
        self.sent += size
        self.exchanges += 1
        self.parts.append(size)


_counters: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what this process sends inside, in forward and backward passes."""
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


def count(size: int) -> None:
    for traffic in _counters:
        traffic.add(size)


class Group:
    """The processes of one dimension of a mesh, in order."""

    def __init__(self, mesh: Any) -> None:
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                names = ", ".join(mesh.mesh_dim_names or ()) or "no names"
                raise ValueError(f"mesh must have one dimension, not {mesh.ndim} ({names}): pass mesh['sequence']")
            mesh = mesh.get_group()
        if not isinstance(mesh, dist.ProcessGroup):
            raise TypeError(f"mesh must be a DeviceMesh or a ProcessGroup, not {type(mesh).__name__}")
        self.group = mesh
        self.size, self.rank = dist.get_world_size(mesh), dist.get_rank(mesh)
        self.members = Members.of(mesh)

    def __deepcopy__(self, memo: Any) -> Group:
        return self  # a copy of a model talks to the same processes

    def __reduce__(self) -> Any:
        raise TypeError("a model that shares its sequence with other processes cannot be pickled: save its state_dict")

    def exchange(self, pieces: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], like: Tensor):
        """Start to send pieces[r] to process r, and to receive tensors of shapes[r] from it; `like` has their dtype.

        What a process has for itself does not travel: pieces[self.rank] and shapes[self.rank] are empty.
        """
        flat = [[x.reshape(-1) for x in some] for some in pieces]
        sizes_in = [sum(x.numel() for x in some) for some in flat]
        sizes_out = [sum(math.prod(shape) for shape in some) for some in shapes]
        everything = [x for some in flat for x in some]
        sent = torch.cat(everything) if everything else like.new_empty(0)
        count(sent.numel() * sent.element_size())
        return self._start(sent, like.new_empty(sum(sizes_out)), sizes_in, sizes_out, shapes)

    def _start(self, sent: Tensor, received: Tensor, sizes_in: list[int], sizes_out: list[int], shapes) -> Pending:
        with naming(self.members):
            work = dist.all_to_all_single(received, sent, sizes_out, sizes_in, group=self.group, async_op=True)
        return Pending(self, work, received, shapes, sent)

    def gather(self, x: Tensor) -> Tensor:
        """x of every process, (p, …): the same shape everywhere. No gradient."""
        count((self.size - 1) * x.numel() * x.element_size())
        if self.size == 1:
            return x[None]
        found = [torch.empty_like(x) for _ in range(self.size)]
        with naming(self.members):
            dist.all_gather(found, x.contiguous(), group=self.group)
        return torch.stack(found)

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the processes. No gradient."""
        count(2 * (self.size - 1) * x.numel() * x.element_size() // self.size)
        x = x.detach().clone(memory_format=torch.contiguous_format)
        with naming(self.members):
            dist.all_reduce(x, group=self.group)
        return x


class DryGroup(Group):
    """A group of which only this process exists: nothing travels, everything is counted. For meta tensors."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def _start(self, sent, received, sizes_in, sizes_out, shapes):
        return Pending(self, None, received, shapes, sent)

    def gather(self, x: Tensor) -> Tensor:
        count((self.size - 1) * x.numel() * x.element_size())
        return x[None].expand(self.size, *x.shape)

    def total(self, x: Tensor) -> Tensor:
        count(2 * (self.size - 1) * x.numel() * x.element_size() // self.size)
        return x.clone()


class Pending:
    """An exchange under way."""

    def __init__(self, group: Group, work: Any, received: Tensor, shapes, sent: Tensor) -> None:
        self.group, self.work, self.received, self.shapes, self.sent = group, work, received, shapes, sent

    def wait(self) -> list[list[Tensor]]:
        """What each process has sent."""
        if self.work is not None:
            with naming(self.group.members):
                self.work.wait()
        found, at = [], 0
        for some in self.shapes:
            tensors = []
            for shape in some:
                size = math.prod(shape)
                tensors.append(self.received[at : at + size].view(*shape))
                at += size
            found.append(tensors)
        return found
