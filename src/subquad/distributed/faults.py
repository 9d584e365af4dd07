"""When a process dies: the exchanges of the others fail with a page about sockets, and one line says who died."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

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
