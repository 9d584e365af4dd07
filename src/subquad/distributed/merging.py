"""One softmax over the parts of a plan, when its keys lie with several processes.

Each process has a range of the queries and of the keys. What its queries need of others is sent to it (`Lists`); its
own keys are attended to while that travels, then those that have come, and the two results are merged by their
logsumexps. The backward pass begins with the keys that had come: their gradients go back to whom they belong while the
own part is computed. Both parts take the merged (out, lse), which makes them exact (see `kernels.merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.distributed.groups import Group, Pending
from subquad.kernels.merge.op import merge, merge_backward
from subquad.kernels.merge.views import absorb
from subquad.supports.shards import Cut, Shard


@dataclass(frozen=True)
class Lists:
    """Who sends which keys to whom, for one plan: every process works it out for itself."""

    text: str  # of this process's shard
    send: tuple[tuple[np.ndarray, ...], ...]  # [to][source]: places in the process's own range; none to itself
    receive: tuple[tuple[int, ...], ...]  # [from][source]: how many
    needed: tuple[np.ndarray, ...]  # [source]: the keys that come, ascending
    silent: bool  # no process needs anything


@lru_cache(maxsize=128)
def lists(text: str, which: str, n: int, queries: Cut, sources: tuple[Cut, ...], rank: int) -> Lists:
    everyone = range(len(queries))
    shards = [Shard(of=text, rows=queries[r], sources=tuple(cut[r] for cut in sources)) for r in everyone]
    needs = [shard.needed(n, which) for shard in shards]
    send = tuple(
        tuple(_within(needs[r][s], *cut[rank]) - cut[rank][0] for s, cut in enumerate(sources)) for r in everyone
    )
    receive = tuple(
        tuple(len(_within(needs[rank][s], *cut[r])) if r != rank else 0 for s, cut in enumerate(sources))
        for r in everyone
    )
    return Lists(shards[rank].text, send, receive, needs[rank], not any(len(x) for need in needs for x in need))


def _within(places: np.ndarray, lo: int, hi: int) -> np.ndarray:
    return places[np.searchsorted(places, lo) : np.searchsorted(places, hi)]


@dataclass(frozen=True)
class Job:
    """Everything about one call that is no tensor with a gradient."""

    group: Group
    lists: Lists
    which: str
    n: int
    scale: float
    dropout: float
    seed: Tensor | None
    own_valid: list[Tensor]  # per source (B or 1, 1, m); [] = all exist
    their_valid: list[Tensor]

    @property
    def send(self) -> tuple[tuple[np.ndarray, ...], ...]:
        return self.lists.send

    def about(self, place: str) -> tuple[Any, ...]:
        valid = self.own_valid if place == "local" else self.their_valid
        return valid, None, self.seed, self.lists.text, f"{self.which}:{place}", self.n, self.scale, self.dropout

    def start(self, keys: list[Tensor], values: list[Tensor]) -> Pending:
        """Send what others need of these keys and values."""
        both = list(zip(keys, values, strict=True))
        pieces = [
            [_take(x, places) for pair, places in zip(both, some, strict=True) for x in pair] for some in self.send
        ]
        return self.group.exchange(pieces, _shapes(both, self.lists.receive), keys[0])

    def arrived(self, received: list[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values per source, those of the first process first: in ascending order."""
        joined = [torch.cat(some, 2) for some in zip(*received, strict=True)]
        return joined[0::2], joined[1::2]

    def start_back(self, keys: list[Tensor], values: list[Tensor]) -> Pending:
        """Send the gradients of what has come back to where it came from."""
        both = list(zip(keys, values, strict=True))
        sizes = zip(*self.lists.receive, strict=True)  # per source, from each process
        parts = [x.split(some, 2) for pair, some in zip(both, sizes, strict=True) for x in pair]
        counts = [tuple(len(places) for places in some) for some in self.send]
        return self.group.exchange(list(zip(*parts, strict=True)), _shapes(both, counts), keys[0])

    def add_back(self, received: list[list[Tensor]], keys: list[Tensor], values: list[Tensor]) -> None:
        """Gradients from other processes on top of this one's."""
        both = [x for pair in zip(keys, values, strict=True) for x in pair]
        for some, lists_ in zip(received, self.send, strict=True):
            for at, (x, grad) in enumerate(zip(both, some, strict=True)):
                _add(x, lists_[at // 2], grad)


def _shapes(both: list[tuple[Tensor, Tensor]], counts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """What comes from each process: so many keys and values of every source."""
    return [
        [(*x.shape[:2], size, x.shape[3]) for pair, size in zip(both, some, strict=True) for x in pair]
        for some in counts
    ]


def _take(x: Tensor, places: np.ndarray) -> Tensor:
    if len(places) and places[-1] - places[0] + 1 == len(places):
        return x[:, :, int(places[0]) : int(places[-1]) + 1]
    return x.index_select(2, torch.from_numpy(places).to(x.device))


def _add(x: Tensor, places: np.ndarray, grad: Tensor) -> None:
    if not len(places):
        return
    if places[-1] - places[0] + 1 == len(places):
        x[:, :, int(places[0]) : int(places[-1]) + 1] += grad
    else:
        x.index_add_(2, torch.from_numpy(places).to(x.device), grad)


def attend(job: Job, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """q (B, H, r, d) of this process, keys and values per source (B, H or H/g, m, d) → (B, H, r, d)."""
    return _Attend.apply(job, len(keys), q, *keys, *values)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, m: int, q: Tensor, *tensors: Tensor) -> Tensor:
        keys, values = list(tensors[:m]), list(tensors[m:])
        pending = None if job.lists.silent else job.start(keys, values)
        out, lse = merge(q, keys, values, *job.about("local"))
        their_keys: list[Tensor] = []
        their_values: list[Tensor] = []
        if pending is not None:
            their_keys, their_values = job.arrived(pending.wait())
        if any(len(need) for need in job.lists.needed):
            found, here = merge(q, their_keys, their_values, *job.about("remote"))
            absorb(out, lse, found, here)
        ctx.job, ctx.sources = job, m
        ctx.save_for_backward(q, out, lse, *tensors, *their_keys, *their_values)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        job, m, (q, out, lse, *tensors) = ctx.job, ctx.sources, ctx.saved_tensors
        keys, values, theirs = tensors[:m], tensors[m : 2 * m], tensors[2 * m :]
        pending, dq = None, None
        if theirs:
            if any(len(need) for need in job.lists.needed):
                dq, *back = merge_backward(grad, q, theirs[:m], theirs[m:], out, lse, *job.about("remote"))
            else:
                back = [torch.zeros_like(x) for x in theirs]
            pending = job.start_back(back[:m], back[m:])
        own, *dkv = merge_backward(grad, q, keys, values, out, lse, *job.about("local"))
        dq = own if dq is None else own.add_(dq)
        if pending is not None:
            job.add_back(pending.wait(), dkv[:m], dkv[m:])
        return None, None, dq, *dkv
