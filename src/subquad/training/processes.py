"""Several processes of one run (torchrun): who they are, what they agree on, and which one has died."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch
import torch.distributed as dist

from subquad.core.child import AGAIN
from subquad.core.spoken import again
from subquad.distributed.groups import Members

_part: ContextVar[str] = ContextVar("how the comparison is resumed that a run in this process is part of", default="")


@contextlib.contextmanager
def part_of_a_comparison() -> Iterator[None]:
    """Inside, a run is resumed as its comparison is, which has no argument `resume`."""
    token = _part.set(again())
    try:
        yield
    finally:
        _part.reset(token)


def to_resume() -> str:
    """How a run that has stopped goes on, in the words of the command or call that has started it."""
    return f"{_part.get() or os.environ.get(AGAIN) or again('resume')} to continue"


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
    members = Members.of()
    try:
        yield
    except (RuntimeError, OSError) as error:
        dead = members.dead()
        if not dead:
            raise
        speaker = min(set(range(len(members.where))) - set(dead))
        if rank() != speaker:
            raise SystemExit(1) from None
        raise ConnectionError(
            f"process {dead[0]} of {len(members.where)} (pid {members.where[dead[0]][1]}) has died, so the others "
            f"stopped; {to_resume()}"
        ) from error
