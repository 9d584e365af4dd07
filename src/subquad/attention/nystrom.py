"""Nyströmformer (Xiong et al. 2021): softmax attention rebuilt from a few landmarks.

    out = softmax(q K̃ᵀ) Z softmax(Q̃ kᵀ) v + DConv(v)          Z ≈ pseudo-inverse of A = softmax(Q̃ K̃ᵀ)          O(n·m)

Q̃ and K̃ are the means of segments of queries and keys, m of them. Z comes from the paper's iteration,

    Z ← Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4          from Z = Aᵀ / (‖A‖₁ ‖A‖∞),

and DConv is a depthwise convolution of the values along the sequence, one filter per head. There is no causal form:
every landmark mixes later tokens.

Choices. A row of L tokens has segments of ⌈L/m⌉, its last one may be shorter, so a row of at most m tokens has every
token as a landmark. Padding belongs to no segment, and a segment without tokens is no landmark. The norms are those
of each matrix; the published code takes their maximum over the batch, where one sequence changes another.
Dropout acts on the first factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Call, Capabilities
from subquad.attention.full import drop
from subquad.attention.outputs import OutputAttention, within_rows
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.convolution import convolve


class Nystrom(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(causal=False, streaming=False, weights=False)
    family = "low rank"
    paper = "Xiong et al. 2021"
    cost = "n·m"
    exponent = 1.0
    examples = ({"landmarks": 4, "conv": 3}, {"landmarks": 8, "conv": None})

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        landmarks: int = option(64, "number m of segments", ge=1)
        iterations: int = option(6, "steps towards the pseudo-inverse", ge=1)
        conv: int | None = option(33, "length of the convolution's filter (odd); None = no convolution", ge=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.conv is not None and self.conv % 2 == 0:
                raise ValueError(f"conv must be odd or None, not {self.conv}")

    filters: nn.Parameter | None

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.filters = None  # (H, 1, conv)
        if options.conv is not None:
            bound = options.conv**-0.5
            self.filters = nn.Parameter(torch.empty(options.num_heads, 1, options.conv).uniform_(-bound, bound))

    # ---- the fast path ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work, scale = q.dtype, torch.promote_types(q.dtype, torch.float32), self.options.softmax_scale
        q, k, v = q.to(work), k.to(work), v.to(work)
        marks, keys, exist = self._landmarks(q, k, call)  # (B, H, m, d) twice, bool (B, m) or None
        marks = marks * scale
        seen = None if call.key_mask is None else call.key_mask[:, None, None]  # (B, 1, 1, n)
        also = None if exist is None else exist[:, None, None]  # (B, 1, 1, m)
        inner = _softmax(marks @ keys.mT, also)  # (B, H, m, m)
        inner = inner if exist is None else inner * exist[:, None, :, None]
        read = self._inverse(inner) @ (_softmax(marks @ k.mT, seen) @ v)  # (B, H, m, d)
        out = drop(_softmax(q @ (keys * scale).mT, also), call) @ read
        return within_rows(self._with_convolution(out, v), call).to(kind)

    def _landmarks(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        b, _, n, _ = q.shape
        m = self.options.landmarks
        if call.key_mask is None:
            return _means(q, -(-n // m)), _means(k, -(-n // m)), None
        lengths = torch.full((b,), n, device=q.device) if call.lengths is None else call.lengths
        size = -(-lengths // m).clamp(max=-1)[:, None]  # (B, 1): ⌈L/m⌉, at least 1
        segment = (torch.arange(n, device=q.device) // size).clamp(max=m - 1)  # (B, n); behind a row nothing is real
        weights = (F.one_hot(segment, m).mT * call.key_mask[:, None]).to(q.dtype)  # (B, m, n): who is in which segment
        count = weights.sum(-1)  # (B, m)
        share = (weights / count.clamp(min=1)[..., None])[:, None]
        return share @ q, share @ k, count > 0

    def _inverse(self, a: Tensor) -> Tensor:
        """(B, H, m, m): rows and columns of 0 stay 0. In float64: rounding errors grow with every step."""
        kind, shape, a = a.dtype, a.shape, a.double().flatten(0, -3)  # (G, m, m)
        one, inf = a.sum(-2).amax(-1), a.sum(-1).amax(-1)  # the norms, (G,)
        z = a.mT / (one * inf).clamp(min=torch.finfo(a.dtype).tiny)[..., None, None]
        eye = torch.eye(shape[-1], dtype=a.dtype, device=a.device)
        for _ in range(self.options.iterations):
            az = a @ z
            inner = torch.baddbmm(eye, az, 7 * eye - az, beta=15, alpha=-1)  # 15 I - A Z (7 I - A Z)
            z = z @ torch.baddbmm(eye, az, inner, beta=13 / 4, alpha=-1 / 4)
        return z.view(shape).to(kind)

    def _with_convolution(self, out: Tensor, v: Tensor) -> Tensor:
        """out + DConv(v)."""
        return out if self.filters is None else convolve(v, self.filters[:, 0].to(v.dtype), out)

    # ---- the definition ----

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, n = q * self.options.softmax_scale, q.shape[2]
        size, outs = -(-n // self.options.landmarks), []
        for b in range(len(q)):
            real = torch.ones(n, dtype=torch.bool) if call.key_mask is None else call.key_mask[b].cpu()
            segments = [real[s : s + size].nonzero()[:, 0] + s for s in range(0, n, size)]
            segments = [s for s in segments if len(s)]
            if not segments:
                outs.append(torch.zeros_like(q[b]))
                continue
            marks, keys = (torch.stack([x[b, :, s].mean(1) for s in segments], 1) for x in (q, k))  # (H, m, d)
            places = real.nonzero()[:, 0]
            z = self._inverse((marks @ keys.mT).softmax(-1))
            weights = (q[b] @ keys.mT).softmax(-1) @ z @ (marks @ k[b, :, places].mT).softmax(-1)  # (H, n, real)
            outs.append(weights @ v[b, :, places])
        out = torch.stack(outs)
        for tap in range(0 if self.filters is None else self.filters.shape[-1]):
            assert self.filters is not None
            shift = tap - self.filters.shape[-1] // 2
            moved = torch.zeros_like(v)
            if abs(shift) < n:
                moved[:, :, max(0, -shift) : n - max(0, shift)] = v[:, :, max(0, shift) : n - max(0, -shift)]
            out = out + self.filters[:, 0, tap].to(v.dtype)[:, None, None] * moved
        return out

    def connections(self, n: int) -> float:
        m = min(n, self.options.landmarks)
        return 2.0 * n * m + m * m


def _means(x: Tensor, size: int) -> Tensor:
    """Means of segments of `size` tokens, the last one may have fewer: (B, H, n, d) → (B, H, m, d)."""
    n = x.shape[2]
    whole, rest = n // size, n % size
    means = x[:, :, : n - rest].unflatten(2, (whole, size)).mean(3)
    return torch.cat((means, x[:, :, n - rest :].mean(2, keepdim=True)), 2) if rest else means


def _softmax(scores: Tensor, exists: Tensor | None) -> Tensor:
    """Over the keys that exist; 0 where there is none."""
    if exists is None:
        return scores.softmax(-1)
    return scores.masked_fill(~exists, torch.finfo(scores.dtype).min).softmax(-1) * exists
