"""Measurement of divided sequences: bytes that travel against ring attention, time and memory of each process.

bytes     counted exactly, by running the layer as each process on meta tensors: the same code, no data
time      a layer's forward and backward pass and the averaging of its gradients, in p fresh processes with some threads
          each; the slowest process counts, the best of several rounds
memory    how far the resident memory of a process rises during its first step, inputs not included; the largest. These
          processes are others than those that are timed, because they return freed memory to the system at once
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.attention.registry import for_length
from subquad.bench import Setting, growth
from subquad.core import memory
from subquad.core.child import command as child_command
from subquad.core.child import paths as child_paths
from subquad.distributed import average_gradients, counted, sequence_parallel
from subquad.distributed.across import Across
from subquad.distributed.groups import DryGroup, Group
from subquad.distributed.layouts import Layout
from subquad.distributed.parallel import check
from subquad.layers import MultiheadAttention

MODULE = "subquad.bench_processes"


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that a process sends in one layer, in either pass: of the process that sends most in it."""

    spec: str
    n: int
    processes: int
    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


# ---- bytes ----------------------------------------------------------------------------------------------------------


class _Heads:
    """Projections that only split tokens into heads: what travels does not depend on weights."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def queries(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    keys = values = queries

    def together(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries(query), self.keys(key), self.values(value)


def bytes_sent(spec: str, n: int, processes: int, setting: Setting, ranks: Sequence[int] | None = None) -> Sent:
    """What the busiest process (or the busiest of `ranks`) sends in one layer, in float32."""
    found = [_sent_by(rank, spec, n, processes, setting) for rank in ranks or range(processes)]
    forward, backward = (max(some) for some in zip(*found, strict=True))
    return Sent(spec=spec, n=n, processes=processes, forward=forward, backward=backward)


def _sent_by(rank: int, spec: str, n: int, processes: int, setting: Setting) -> tuple[int, int]:
    group = DryGroup(processes, rank)
    heads, width = setting.heads, setting.head_dim
    module = for_length(spec, n, causal=setting.causal, num_heads=heads, head_dim=width).to("meta")
    check(module)
    module.across = Across(group)
    layout = Layout(group, n)
    shape = (setting.batch, layout.length, heads * width)
    x = torch.empty(shape, device="meta", requires_grad=True)
    with layout.active():
        with counted() as forward:
            out, _ = module.attend_tokens(x, x, x, _Heads(width), None)
        with counted() as backward:
            out.backward(torch.empty_like(out))
    return forward.sent, backward.sent


# ---- time and memory ------------------------------------------------------------------------------------------------


def step_seconds(
    spec: str,
    n: int,
    processes: int,
    setting: Setting,
    *,
    layout: str = "contiguous",
    threads: int = 1,
    repeats: int = 3,
) -> float:
    """Seconds of the best step; a step takes as long as its slowest process."""
    answers = _run(spec, n, processes, setting, layout, threads, repeats, {})
    return min(max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True))


def peak_memory(
    spec: str, n: int, processes: int, setting: Setting, *, layout: str = "contiguous", threads: int = 1
) -> int:
    """Bytes by which the largest process grows in its first step."""
    answers = _run(spec, n, processes, setting, layout, threads, 0, memory.RETURNED)
    return max(answer["memory"] for answer in answers)


def _run(
    spec: str, n: int, processes: int, setting: Setting, layout: str, threads: int, repeats: int, variables: dict
) -> list[dict[str, Any]]:
    """What each of the fresh processes says; `variables` are added to their environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    request = {
        "spec": spec,
        "n": n,
        "setting": asdict(setting),
        "layout": layout,
        "threads": threads,
        "repeats": repeats,
    }
    children = []
    for rank in range(processes):
        own = {
            "RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, "PYTHONPATH": child_paths(working_folder=False),
            **variables,
        }  # fmt: skip
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen(child_command(MODULE), env=environment, **pipes)
        assert child.stdin is not None
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        child.stdin = None
        children.append(child)
    answers = []
    for child in children:
        said, wrong = child.communicate()
        if child.returncode:
            last = (wrong.strip().splitlines() or [f"it ended with code {child.returncode}"])[-1]
            raise ValueError(f"{spec} at n = {n} on {processes} processes could not be measured: {last}")
        answers.append(json.loads(said))
    return answers


def _child() -> None:
    """One of the processes: a small step to load what is loaded once, one for the memory, then those that count."""
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(request["threads"])
    dist.init_process_group("gloo")
    group = Group(dist.group.WORLD)
    spec, n, layout, setting = request["spec"], request["n"], request["layout"], Setting(**request["setting"])
    _step(*_layer(spec, 64, setting, group, layout), group)
    layer, x, grad = _layer(spec, n, setting, group, layout)
    grown, seconds = growth(lambda: _step(layer, x, grad, group)), []
    for _ in range(request["repeats"]):
        dist.barrier()
        start = time.perf_counter()
        _step(layer, x, grad, group)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds, "memory": grown}))


def _layer(spec: str, n: int, setting: Setting, group: Group, layout: str) -> tuple[Any, Tensor, Tensor]:
    """A layer, this process's tokens, and the gradient of its output."""
    torch.manual_seed(0)
    width = setting.heads * setting.head_dim
    layer = MultiheadAttention(width, setting.heads, batch_first=True, causal=setting.causal)
    layer.attention = for_length(
        spec, n, causal=setting.causal, num_heads=setting.heads, head_dim=setting.head_dim, max_length=n
    )
    if group.size > 1:
        sequence_parallel(layer, group, layout=layout)
    size = Layout(group, n, zigzag=layout == "zigzag").length
    return layer, torch.randn(setting.batch, size, width, requires_grad=True), torch.randn(setting.batch, size, width)


def _step(layer: Any, x: Tensor, grad: Tensor, group: Group) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x, x, x, need_weights=False)[0].backward(grad)
    if group.size > 1:
        average_gradients(layer, group)


if __name__ == "__main__":
    _child()
