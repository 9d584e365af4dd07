"""Entrance and schema of the sampler; see the package for the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.edges import EdgeList
from subquad.kernels.sampler import cpu, reference
from subquad.kernels.sampler.rules import Rules, Sample, pinned_reach

sample_op = torch.library.custom_op("subquad::sample_graphs", mutates_args=())(reference.sample)
sample_op.register_kernel("cpu")(cpu.sample)


def sample(w: Tensor, z: Tensor, seed: Tensor, key_mask: Tensor | None, rules: Rules) -> Sample:
    """Graphs of p = W·Zᵀ: w (B, H, n, k) = Y·B, z (B, H, m, k). The same seed draws the same graphs."""
    settings = (rules.sampler, rules.causal, rules.exploration, rules.reach, rules.crossover, rules.alike)
    return Sample(*sample_op(w.detach(), z.detach(), seed, key_mask, *settings))


def sample_edges(
    y: Tensor,
    block: Tensor,
    z: Tensor,
    *,
    seed: Tensor,
    key_mask: Tensor | None = None,
    sampler: str = "exact",
    causal: bool = False,
    exploration: float = 0.0,
    self_loops: bool = False,
    window: int | None = None,
) -> tuple[EdgeList, dict[str, float]]:
    """Graphs from memberships y (B, H, n, k), z (B, H, m, k) and the block matrix (H, k, k), and their statistics."""
    rules = Rules(sampler, causal, exploration, pinned_reach(self_loops, window))
    with torch.no_grad():
        drawn = sample(y @ block, z, seed, key_mask, rules)
    return EdgeList(drawn.indptr, drawn.indices, z.shape[2]), statistics(drawn)


def statistics(drawn: Sample) -> dict[str, float]:
    """What the sampler did: edges, edges proposed, and the share of rows sampled by looking at every key."""
    dense, proposals = drawn.counts.sum(0).tolist()
    return {"edges": int(drawn.degrees.sum()), "proposals": proposals, "dense_rows": dense / drawn.degrees.numel()}


@sample_op.register_fake
def _(w, z, seed, key_mask, sampler, causal, exploration, reach, crossover, alike):
    graphs, n = w.shape[0] * w.shape[1], w.shape[2]
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(2)]
    return (
        w.new_empty(graphs, n + 1, dtype=torch.int64),
        w.new_empty(sizes[0], dtype=torch.int32),
        w.new_empty(sizes[1], dtype=torch.uint8),
        w.new_empty(graphs, n, dtype=torch.int64),
        w.new_empty(graphs, 2, dtype=torch.int64),
    )
