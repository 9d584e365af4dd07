"""`subquad study gpu-time`: how long the merge kernel would take on GPUs, from a model. Predicted, not measured.

    time = max(operations / (peak · efficiency), bytes / bandwidth) + launches · LAUNCH

Operations are 4·d per (query, key) pair of the tiles that the kernel really visits, masked pairs included. Full
attention has n² pairs, causal half of them. For merge, queries and outputs cross the memory once
per pass, keys and values at every visit; for full attention everything does once. The efficiencies are assumptions and
stand in the table's heading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from subquad.core.console import out

FLASH = 0.6  # of the peak: FlashAttention-2 reports 50 to 73 % on A100, assumed for all GPUs
MERGE = 0.3  # of the peak: assumed, half of it, because rules are evaluated and runs of keys are short
LAUNCH = 5e-6  # seconds per kernel


@dataclass(frozen=True)
class Gpu:
    """Dense float16 or bfloat16 operations per second with float32 sums, and bytes per second; the SXM versions."""

    peak: float
    bandwidth: float


GPUS = {"A100": Gpu(312e12, 2.039e12), "H100": Gpu(989e12, 3.35e12), "B200": Gpu(2250e12, 7.7e12)}


def show(specs: list[str], lengths: list[int], heads: int, head_dim: int) -> None:
    """Predict the forward time of causal attention on GPUs from a model. Nothing here is measured."""
    wanted = specs or ["combiner-fixed", "combiner-window:span=64,window=256", "longformer:window=512", "fixed"]
    out().print(markdown(wanted, lengths, heads, head_dim), markup=False, soft_wrap=True)


def markdown(specs: list[str], lengths: list[int], heads: int, width: int) -> str:
    """The table of docs/gpu.md."""
    lines = [
        f"Predicted, not measured: forward, causal, float16, batch 1, {heads} heads × {width}; {FLASH:.0%} of the peak "
        f"assumed for full attention, {MERGE:.0%} for merge.",
        "",
        "| attention | n | pairs / full | " + " | ".join(GPUS) + " |",
        "|---|---|---|" + "---|" * len(GPUS),
    ]
    for length in lengths:
        full = length * (length + 1) / 2
        baseline = [predicted(gpu, full, 4 * length, 1, heads, width, FLASH) for gpu in GPUS.values()]
        lines.append(f"| full | {length:,} | 1 | " + " | ".join(f"{1e3 * t:.2f} ms" for t in baseline) + " |")
        for spec in specs:
            work = visited(spec, length, width)
            times = [predicted(gpu, *work, heads, width, MERGE) for gpu in GPUS.values()]
            cells = [f"{1e3 * t:.3f} ms ({b / t:.1f}×)" for t, b in zip(times, baseline, strict=True)]
            lines.append(f"| {spec} | {length:,} | {work[0] / full:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def predicted(gpu: Gpu, pairs: float, rows: float, launches: int, heads: int, width: int, efficiency: float) -> float:
    """Seconds; `rows` of `width` half-precision numbers cross the memory per head."""
    return max(4 * width * pairs * heads / (gpu.peak * efficiency), 2 * width * rows * heads / gpu.bandwidth) + (
        launches * LAUNCH
    )


def visited(spec: str, n: int, width: int) -> tuple[float, float, int]:
    """Pairs, rows that cross the memory and launches of all merge calls of one head's forward pass at n tokens."""
    import torch

    from subquad.kernels.merge import gpu, schedule
    from subquad.supports.support import plan_of

    shape = gpu.shapes(width, torch.float16)["forward"]
    pairs, rows, launches = 0.0, 0.0, 0
    for support, which, length, sources in merge_calls(spec, n, width):
        plan = plan_of(support, length, which)
        for taken in schedule.by_queries(plan, sources, shape.queries, shape.keys):
            launches += 1
            rows += 2 * len(taken.tiles) * shape.queries  # queries and outputs
            for visits in taken.rectangles:
                steps = sum(-(-r.k_count // shape.keys) for source in visits for r in source)
                pairs += steps * shape.queries * shape.keys
                rows += 2 * steps * shape.keys  # keys and values
    return pairs, rows, launches


def merge_calls(spec: str, n: int, width: int) -> list[tuple[str, str, int, int]]:
    """What a mechanism asks the merge operator for, found by a trace without numbers."""
    from torch import empty
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from subquad.attention.registry import for_length

    found: list[tuple[str, str, int, int]] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "subquad.merge." in str(func):
                found.append((args[6], args[7], args[8], len(args[1])))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), Spy():
        chosen = for_length(spec, n, causal=True, num_heads=1, head_dim=width)
        chosen(*(empty(1, 1, n, width) for _ in range(3)))
    if not found:
        raise ValueError(f"{spec} does not run on the merge operator: the model says nothing of it")
    return found
