"""The processes that share a sequence, and the one way in which they exchange tensors.

Everything that travels goes through `Group.exchange`: each process hands over one piece for every other, and knows what
sizes it gets. It is asynchronous, works on gloo and on NCCL, and counts the bytes that a process sends. `DryGroup` does
the same without other processes and without data, on meta tensors: what is counted there is what would travel. When a
process dies, the exchanges of the others fail with a page about sockets, and one line says who died (`Members`).
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Member = tuple[str, int]  # host name and process id
PATIENCE = 5.0  # seconds in which a dead process is noticed by the operating system


@dataclass(frozen=True)
class Members:
    """Where the processes of a group run, and their ranks in the world."""

    where: tuple[Member, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: Any = None) -> Members:
        """Asks all of them: every process of the group must call it."""
        size = dist.get_world_size(group)
        where: list[Any] = [None] * size
        dist.all_gather_object(where, (socket.gethostname(), os.getpid()), group=group)
        ranks = range(size) if group is None else dist.get_process_group_ranks(group)
        return cls(tuple(where), tuple(ranks))

    def dead(self, patience: float = PATIENCE) -> list[int]:
        """The numbers of members on this machine that have ended, as soon as there is one."""
        here, end = socket.gethostname(), time.monotonic() + patience
        while True:
            found = [i for i, (host, pid) in enumerate(self.where) if host == here and not alive(pid)]
            if found or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def obituary(self) -> str | None:
        """Which process has died, in words; None if none has on this machine."""
        dead = self.dead()
        if not dead:
            return None
        return f"process {self.ranks[dead[0]]} (pid {self.where[dead[0]][1]}) has died"


@contextmanager
def naming(members: Members) -> Iterator[None]:
    """An exchange: where it fails because a process has died, the error says which."""
    try:
        yield
    except RuntimeError as error:
        said = members.obituary()
        if said is None:
            hosts = ", ".join(f"{rank} on {host}" for rank, (host, _) in zip(members.ranks, members.where, strict=True))
            said = f"a process does not answer or is on another machine (processes {hosts})"
        raise ConnectionError(f"{said}: this sequence is divided among {len(members.ranks)} processes") from error


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or not Linux
        return True
    return status.rsplit(")", 1)[1].split()[0] not in "ZX"  # a zombie is dead, and waits for its parent to notice


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
