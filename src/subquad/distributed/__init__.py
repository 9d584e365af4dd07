"""One sequence over several processes: only summaries travel.

    mesh = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))
    model = subquad.distributed.sequence_parallel(model, mesh["sequence"])   # each process has n/4 tokens of a sequence

A mechanism says beside its support what crosses a boundary: its plan, cut to the queries of a process, names the keys
and summaries that the process lacks, and exactly these are sent to it (`supports.shards`, `merging`). Outputs, losses
and gradients are those of one process. See docs/distributed.md.
"""

from subquad.distributed.groups import Traffic, counted
from subquad.distributed.layouts import Layout
from subquad.distributed.parallel import average_gradients, same_batches, sequence_parallel, shard, total, whole

__all__ = [
    "Layout",
    "Traffic",
    "average_gradients",
    "counted",
    "same_batches",
    "sequence_parallel",
    "shard",
    "total",
    "whole",
]
