"""Attention through landmarks: n tokens are gathered to m landmarks, and spread to n tokens again.

    gathered_a = Σ_i softmax_i(s_ia) v_i          out_i = Σ_a softmax_a(t_ia) read_a + Σ_t f_t v_(i + t - T // 2)

The scores s and t (B, H, n, m) are given, v and out are (B, H, n, d), gathered and read (B, H, m, d), the filters f
(H, T) with T odd. `pseudo_inverse` is the iteration that Nyströmformer puts between the two.

`op` has the entrances, the schemas and the derivatives, `cpu` and `cpu_tiles` the kernels of a CPU (Numba), and
`reference` the same in plain torch, for everything else. The kernels have no second derivative.
"""

from subquad.kernels.landmarks.op import gather, maps_tokens, pseudo_inverse, spread, takes

__all__ = ["gather", "maps_tokens", "pseudo_inverse", "spread", "takes"]
