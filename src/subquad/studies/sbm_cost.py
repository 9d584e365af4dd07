"""What a training step of SBM attention costs at a constant degree: time and memory linear in the edges.

Every query has the same expected number of edges at every length, so the edges grow with n, the pairs with n². Each
length runs in a process of its own, on one thread:

time      CPU seconds of a step, forward and backward, sampling included; the best of some
memory    how far the peak of the process rises over its inputs: output, gradients, edges, workspace
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from subquad.attention.call import Record
from subquad.attention.registry import attention
from subquad.attention.sbm import Sbm
from subquad.core import child, memory
from subquad.core.numbers import growth_exponent

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


@torch.no_grad()
def set_density(layer: Sbm, density: float) -> Sbm:
    """Parameters for which every p_ij is about `density`, whatever the tokens; clusters differ a little."""
    heads, _, d = layer.clusters.shape
    draw = torch.Generator().manual_seed(0)
    along = torch.nn.functional.normalize(torch.randn(heads, 1, d, generator=draw), dim=-1)  # (H, 1, d)
    layer.clusters.copy_(along + 0.05 * torch.randn(layer.clusters.shape, generator=draw))
    layer.mlp["weight2"].zero_()
    layer.mlp["bias2"].copy_(along * math.log(density**0.5 / (1 - density**0.5)))
    return layer


def step_cost(n: int, degree: float, heads: int = 8, head_dim: int = 64, repeats: int = 3) -> dict[str, Any]:
    """In this process: n, edges of all heads, seconds and bytes of a step."""
    torch.manual_seed(0)
    layer = cast(Sbm, attention("sbm", num_heads=heads, head_dim=head_dim, exploration=0.0))
    records: list[Record] = []

    def step(tokens: int) -> float:
        """The CPU seconds of one step; inputs are made before."""
        set_density(layer, min(0.9, degree / tokens))
        xs = [torch.randn(1, heads, tokens, head_dim, requires_grad=True) for _ in range(3)]
        start = time.process_time()
        out, record = layer.observe(*xs)
        out.sum().backward()
        layer.zero_grad()
        records.append(record)
        return time.process_time() - start

    step(LENGTHS[0])  # loads what is loaded once
    before = memory.reset_peak()
    first = step(n)
    grown = memory.peak() - before - 3 * heads * n * head_dim * 4  # without the inputs
    seconds = min([first, *(step(n) for _ in range(repeats))])
    density, path = records[-1].density, records[-1].path
    assert density is not None
    edges = round(float(density.double().sum()) * n * n)
    return {"n": n, "edges": edges, "seconds": seconds, "bytes": grown, "path": path}


def run(lengths: Sequence[int] = LENGTHS, degree: float = 64, repeats: int = 3) -> list[dict[str, Any]]:
    """A record per length, each from a fresh process."""
    records = []
    for n in lengths:
        command = child.command("subquad.studies.sbm_cost", str(n), str(degree), str(repeats))
        environment = {
            **os.environ,
            "PYTHONPATH": child.paths(working_folder=False),
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"n = {n} could not be measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        records.append(json.loads(done.stdout))
    return records


def exponent(records: Sequence[dict[str, Any]], key: str) -> float:
    """The slope b of log(records[key]) over log(n): key ~ n^b."""
    return growth_exponent([record["n"] for record in records], [record[key] for record in records])


def draw_cost(records: Sequence[dict[str, Any]], path: Path | str) -> Path:
    """Time and memory over the length, with lines of slope 1 and 2 through the first point."""
    from matplotlib.figure import Figure

    from subquad.plots import save

    n = [record["n"] for record in records]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    parts = (("seconds", 1, "CPU seconds of a step"), ("bytes", 2**20, "peak memory of a step, MiB"))
    for axis, (key, unit, title) in zip(figure.subplots(1, 2), parts, strict=True):
        y = [record[key] / unit for record in records]
        for power, style in ((1, "--"), (2, ":")):
            line = [y[0] * (m / n[0]) ** power for m in n]
            axis.plot(n, line, style, color="grey", linewidth=1, label=f"slope {power}")
        axis.plot(n, y, "o-", label=f"measured, slope {exponent(records, key):.2f}")
        axis.set(xscale="log", yscale="log", xlabel="length n", title=title, ylim=(y[0] / 2, 4 * y[-1]))
        axis.set_xticks(n, [f"{m // 1024}k" for m in n], minor=False)
        axis.minorticks_off()
        axis.legend(fontsize=8)
    return save(figure, path, dpi=130)


def show(png: Path, degree: float, longest: int, repeats: int) -> None:
    """Time and memory of SBM attention at a constant number of edges per query: a table and a plot."""
    records = run([n for n in LENGTHS if n <= longest], degree, repeats)
    print(f"{'n':>7} {'edges':>10} {'seconds':>9} {'ns/edge':>8} {'MiB':>7} {'B/edge':>7} path")
    for r in records:
        time_, memory = f"{r['seconds']:>9.3f} {1e9 * r['seconds'] / r['edges']:>8.0f}", f"{r['bytes'] / 2**20:>7.0f}"
        print(f"{r['n']:>7} {r['edges']:>10} {time_} {memory} {r['bytes'] / r['edges']:>7.0f} {r['path']}")
    print("slopes: " + ", ".join(f"{key} {exponent(records, key):.2f}" for key in ("edges", "seconds", "bytes")))
    print(f"drawn: {draw_cost(records, png)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(step_cost(int(sys.argv[1]), float(sys.argv[2]), repeats=int(sys.argv[3]))))
