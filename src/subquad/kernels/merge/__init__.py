"""One softmax over several key sets, without materialising the scores.

For a query with key sets K_1 … K_m (its parts, see `supports.parts`),

    lse = log Σ_p exp(lse_p),    out = Σ_p exp(lse_p - lse) · out_p,

where (out_p, lse_p) are the output and the logsumexp of part p. The backward of one part needs of the other parts only
the row's merged (out, lse): per part with the merged values it is the exact gradient of the joint softmax.

`op` holds the operators and their derivatives, `reference` the same in plain torch, for any device. On a CPU `cpu`
divides the work, `cpu_program` makes tables of a plan, `cpu_forward` and `cpu_backward` do it with what `cpu_tiles` has
for both. On a GPU (`cuda`) they are Triton kernels (`gpu` launches the `triton_tiles` of a `schedule`) or torch's own
(`aten`). Key masks, the rows' own lengths, grouped heads and dropout all live inside. There is no second derivative:
asking for one raises.
"""

from subquad.kernels.merge.op import merge_attention

__all__ = ["merge_attention"]
