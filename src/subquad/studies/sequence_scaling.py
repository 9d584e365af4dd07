"""Where a divided sequence stops scaling: a model of the time of one layer on 8, 64 and 512 GPUs.

    time = operations of the busiest process / rate + bytes that it sends / bandwidth + exchanges · latency

Bytes and exchanges are counted (`bench_processes`), operations follow from the pairs of the plan; nothing overlaps, so
the communication is an upper bound. Rates are those of data sheets times an assumed share. Everything that comes out is
predicted, not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from subquad.attention.registry import for_length
from subquad.bench import Setting
from subquad.bench_processes import bytes_sent
from subquad.supports.shards import Shard, divide

# NVIDIA H100 SXM data sheet: 989 TFLOP/s dense in bfloat16, NVLink 900 GB/s in both directions together;
# ConnectX-7 data sheet: 400 Gb/s, one adapter per GPU as in a DGX H100.
PEAK, NVLINK, NETWORK = 989e12, 450e9, 50e9
SHARE = 0.4  # of the peak that matrix kernels reach: an assumption
LATENCY = {True: 10e-6, False: 30e-6}  # of one exchange inside a machine, and between machines: an assumption
MACHINE = 8  # GPUs that NVLink joins
BYTES = 2 / 4  # bfloat16 travels; counted is float32


class Time(NamedTuple):
    """Seconds of one layer's forward and backward pass, of the busiest process."""

    compute: float
    communicate: float

    @property
    def efficiency(self) -> float:
        return self.compute / (self.compute + self.communicate)


def predict(spec: str, n: int, processes: int, setting: Setting) -> Time:
    """The attention of one layer, without its projections."""
    width = setting.heads * setting.head_dim
    operations = 14 * width * busiest_pairs(spec, n, processes, setting)  # 4 forward, 10 backward per pair and feature
    sent = bytes_sent(spec, n, processes, setting, ranks=(0, processes - 1))
    bandwidth = NVLINK if processes <= MACHINE else NETWORK
    exchanges = 3 * (processes - 1) if spec == "full" else 4
    waiting = exchanges * LATENCY[processes <= MACHINE]
    return Time(operations / (SHARE * PEAK), sent.both * BYTES / bandwidth + waiting)


def busiest_pairs(spec: str, n: int, processes: int, setting: Setting) -> float:
    """(query, key) pairs of the process that has most of them, for one head; full attention with zig-zag shards."""
    if spec == "full":
        return n * n / processes / (2 if setting.causal else 1)
    module = for_length(spec, n, causal=setting.causal, num_heads=setting.heads, head_dim=setting.head_dim)
    text, group_sets = module.described(n, n)  # type: ignore[operator]
    rows = divide(n, processes)[-1]
    kinds = ((0, n), *((0, -(-n // one.size)) for one in group_sets))
    main = Shard(of=text, rows=rows, sources=kinds).plan(n, "main:local").pairs
    return main + (rows[1] - rows[0]) * len(group_sets)  # and each token once in every summary


def show(n: int, heads: int, head_dim: int) -> None:
    """Predict the time of one causal layer on 8, 64 and 512 GPUs from a model. Nothing here is measured."""
    setting = Setting(heads=heads, head_dim=head_dim, causal=True, backward=True)
    print(f"predicted, not measured: n = {n:,}, {heads} heads × {head_dim}, causal, bfloat16, forward and backward")
    print(f"{'attention':<16} {'GPUs':>5} {'compute':>12} {'communicate':>12} {'efficiency':>11}")
    for spec in ("full", "combiner-fixed", "combiner-tree", "combiner-window"):
        for processes in (8, 64, 512):
            time = predict(spec, n, processes, setting)
            shown = f"{1e3 * time.compute:>9.2f} ms {1e3 * time.communicate:>9.2f} ms {time.efficiency:>10.0%}"
            print(f"{spec:<16} {processes:>5} {shown}")
