"""Linear attention (Katharopoulos et al. 2020), and the base of the mechanisms whose scores are products of features.

    w_ij = φ(q_i)·φ(k_j)         out_i = Σ_j w_ij v_j / Σ_j w_ij = φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j)

    φ(x) = elu(x) + 1            O(n·d²): the sums over j are one matrix, or causal a running sum

Choices. The paper's code adds 10⁻⁶ to the denominator; here rows sum to exactly 1, and a denominator that vanishes in
the arithmetic of the call (below √tiny) gives 0. Dropout drops a key for all queries of a head at once: there is no
matrix of weights to drop from. `scale` has no meaning here and must be left open.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call
from subquad.attention.full import drop_keys
from subquad.attention.states.state import Memory
from subquad.attention.states.sums import Sums, quotient
from subquad.kernels.linear import kernel_sums
from subquad.kernels.linear.reference import elu_plus_one, kernel_weights, normalised

LONG = 1024  # queries from which heads are worked on one after the other


class Features(NamedTuple):
    """Scores as products: w_ij = a_i·b_j e^(s_j - s_i)."""

    a: Tensor  # (B, H, n, f), of the queries
    b: Tensor  # (B, H, m, f), of the keys; 0 where a key does not exist
    scales: Tensor | None = None  # s (B, H, m), never falling along the sequence; None = all 0
    ends: Tensor | None = None  # (p, B, H): of a divided sequence, the scales at the ends of all processes


class KernelAttention(Attention):
    """Attention whose scores are products of features; a subclass writes `features`."""

    family = "kernel"
    theory_reason = "its weights are products of features, not a probability map of scores"
    exponent = 1.0
    positional = False
    boundary = "one matrix of sums per head"
    at_once = False  # are all heads worked on together, however long the sequence?

    def features(self, q: Tensor, k: Tensor, call: Call) -> Features:
        """q and k in at least float32."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        v = drop_keys(v, call)
        if self.at_once or q.shape[2] < LONG:
            return self._attend(q, k, v, call)
        heads = (slice(h, h + 1) for h in range(q.shape[1]))  # one at a time: its features stay in the cache
        return torch.cat([self._attend(q[:, one], k[:, one], v[:, one], call) for one in heads], 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        a, b, scales, _ = self._features(q, k, call)
        return kernel_sums(a, b, v, scales, causal=self.options.causal)

    def attend_shard(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The sums over the keys of this process, and those of earlier (or all) processes, sent as one matrix."""
        shard, work, causal = call.shard, torch.promote_types(q.dtype, torch.float32), self.options.causal
        a, b, scales, ends = self._features(q, k, call)
        v = drop_keys(v, call).to(work)
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # (B, H, t, d + 1): with the denominator
        if not causal:
            return quotient(a @ shard.total(b.mT @ v)).to(q.dtype)
        sums = kernel_sums(a, b, v, scales, causal=True, normalise=False) if v.shape[2] else a @ (b.mT @ v)
        if scales is None or ends is None:
            return quotient(sums + a @ shard.earlier(b.mT @ v).sum(0)).to(q.dtype)
        last, start = ends[shard.rank], ends[max(shard.rank - 1, 0)]  # (B, H)
        every = shard.earlier((b * (scales - last[..., None]).exp()[..., None]).mT @ v)  # (rank, B, H, f, d + 1)
        before = (every * (ends[: shard.rank] - start).exp()[..., None, None]).sum(0)
        fall = (start[..., None] - scales).clamp(max=0).exp()  # (B, H, t); the first process has nothing before it
        return quotient(sums + (a * fall[..., None]) @ before).to(q.dtype)

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return normalised(kernel_weights(*self._features(q, k, call)[:3], causal=self.options.causal))

    def _features(self, q: Tensor, k: Tensor, call: Call) -> Features:
        work = torch.promote_types(q.dtype, torch.float32)
        return self.features(q.to(work), k.to(work), call)

    def make_memory(self, margin: int) -> Memory:
        return Sums(margin)

    @property
    def kept_width(self) -> int:
        """A tail of features, and the matrix of their sums."""
        return self.options.head_dim

    def kept_keys(self, n: int) -> float:
        return float(self.kept_width)

    def features_from(
        self, q: Tensor, k: Tensor, real: Tensor | None, position: Tensor, before: Tensor | None
    ) -> Features:
        """The features of new tokens at their positions (B, t), real (B, t) or all; `before` (B, H, 1, 1) is s of the
        last token so far, where keys have scales.
        """
        return self.features(q, k, Call(real))

    def connections(self, n: int) -> float:
        """Scores are never computed: n queries and n keys meet the features, once each."""
        return 2.0 * n * self.options.head_dim


def refuse_scale(name: str, options: Any) -> None:
    if options.scale is not None:
        raise ValueError(f"{name}: scale must be None, not {options.scale}: its scores are not scaled")


class Linear(KernelAttention):
    __doc__ = __doc__

    capabilities = Capabilities(cross=True)
    paper = "Katharopoulos et al. 2020"
    cost = "n·d"
    at_once = True  # its features are never written

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        refuse_scale(self.name, options)

    def features(self, q: Tensor, k: Tensor, call: Call) -> Features:
        a, b = elu_plus_one(q), elu_plus_one(k)
        return Features(a, b if call.key_mask is None else b * call.key_mask[:, None, :, None])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Where no key is missing, the operator makes the features."""
        if call.key_mask is not None:
            return super()._attend(q, k, v, call)
        return kernel_sums(q, k, v, causal=self.options.causal, elu=True)
