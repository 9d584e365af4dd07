"""Several processes of one run (torchrun): who they are, what they agree on, and which one has died."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

Member = tuple[str, int]  # host name and process id
TO_RESUME = "run the same command again with --resume (in Python: resume=True) to continue"
PATIENCE = 5.0  # seconds in which a dead process is noticed by the operating system


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def main_process() -> bool:
    return rank() == 0


def together() -> bool:
    """Whether there are other processes to talk to."""
    return world_size() > 1 and dist.is_available() and dist.is_initialized()


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process: all take the same decision at the same step."""
    if not together():
        return flag
    votes = torch.tensor(float(flag), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes)


@contextlib.contextmanager
def name_dead_processes() -> Iterator[None]:
    """When a process dies, the collectives of the others fail with a page about sockets: one line says who died."""
    if not together():
        yield
        return
    members: list[Member] = [("", 0)] * world_size()
    dist.all_gather_object(members, (socket.gethostname(), os.getpid()))
    try:
        yield
    except (RuntimeError, OSError) as error:
        dead = wait_for_dead(members)
        if not dead:
            raise
        speaker = min(set(range(len(members))) - set(dead))
        if rank() != speaker:
            raise SystemExit(1) from None
        raise ConnectionError(
            f"process {dead[0]} of {len(members)} (pid {members[dead[0]][1]}) has died, so the others stopped; "
            f"{TO_RESUME}"
        ) from error


def wait_for_dead(members: list[Member]) -> list[int]:
    """The ranks of processes on this machine that have ended, as soon as there is one."""
    here, end = socket.gethostname(), time.monotonic() + PATIENCE
    while True:
        dead = [index for index, (host, pid) in enumerate(members) if host == here and not alive(pid)]
        if dead or time.monotonic() > end:
            return dead
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or not Linux
        return True
    return status.rsplit(")", 1)[1].split()[0] not in "ZX"  # a zombie is dead, and waits for its parent to notice
