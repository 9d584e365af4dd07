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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Capabilities
from subquad.attention.call import Call, Record
from subquad.attention.checks import check_lengths, refuse_tangents
from subquad.attention.full import drop
from subquad.attention.outputs import OutputAttention, within_rows
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.affine import affine, affine_parts
from subquad.kernels.landmarks import gather, maps_tokens, pseudo_inverse, spread
from subquad.kernels.landmarks.reference import convolved
from subquad.kernels.landmarks.reference import pseudo_inverse as reference_inverse

ABSENT = -1e30  # the score of a landmark that does not exist


class Nystrom(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(causal=False, streaming=False, weights=False)
    family = "low rank"
    theory_reason = "its weights are a product of three matrices, made from landmarks"
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
        kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):  # the inverse needs more digits than autocast leaves
            return self._attend(q.to(work), k.to(work), v.to(work), call).to(kind)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.key_mask is not None or call.dropout:
            return self._masked(q, k, v, call)
        size = -(-q.shape[2] // self.options.landmarks)
        marks, keys, absent = self._whole_vectors(_means(q, size), _means(k, size))
        scores = q @ (keys * self.options.softmax_scale).mT + absent  # (B, H, n, m)
        return self._through(scores, k @ (marks * self.options.softmax_scale).mT, v, marks, keys, absent)

    def attend_tokens(self, query, key, value, project, key_mask, seed=None, *, want_record=False):
        """q K̃ᵀ = X (Wᵀ K̃ᵀ): tokens are mapped to their scores, and never to queries and keys."""
        o, n, same = self.options, query.shape[1], query is key and key is value
        whole = key_mask is None and self.across is None and query.dtype in (torch.float32, torch.float64)
        plain = not want_record and not self.is_random
        pays = n > o.landmarks and o.landmarks * query.shape[2] <= o.head_dim * (query.shape[2] + o.landmarks)
        able = getattr(project, "affine", False) and hasattr(project, "matrix")
        if (
            not (whole and plain and maps_tokens(query) and same and pays and able)
            or project.layer.num_kv_heads != o.num_heads
        ):
            return super().attend_tokens(query, key, value, project, key_mask, seed, want_record=want_record)
        check_lengths(self, n, n)
        refuse_tangents(self, query, project=project)
        means = _means(query[:, None], -(-n // o.landmarks))[:, 0]  # (B, m, E): those of queries are queries of means
        marks, keys, absent = self._whole_vectors(project.queries(means), project.keys(means))
        (wq, bq), (wk, _), (wv, bv) = (project.matrix(which) for which in range(3))
        to, from_ = keys * o.softmax_scale, marks * o.softmax_scale
        left, right = ((x @ w.unflatten(0, (o.num_heads, -1))).flatten(1, 2) for x, w in ((to, wq), (from_, wk)))
        bias = absent.expand(to.shape[:3]) if bq is None else (to @ bq.view(o.num_heads, -1, 1))[..., 0] + absent
        parts = _scores(query, left, right, bias.flatten(1), wv, bv)  # bias (B, H, m)
        scores, others, v = (x.unflatten(-1, (o.num_heads, -1)).transpose(1, 2) for x in parts)
        return self._through(scores, others, v, marks, keys, absent).transpose(1, 2).flatten(2), Record()

    def _through(self, scores: Tensor, others: Tensor, v: Tensor, marks: Tensor, keys: Tensor, absent: Tensor):
        """scores (B, H, n, m) of queries and landmarks' keys, `others` of keys and landmarks' queries."""
        inner = (marks * self.options.softmax_scale @ keys.mT + absent).softmax(-1)  # (B, H, m, m)
        there = absent == 0
        inner = inner * (there[:, None] & there)
        read = pseudo_inverse(inner, self.options.iterations) @ gather(others, v)  # (B, H, m, d)
        return spread(scores, read, v, None if self.filters is None else self.filters[:, 0])

    def _whole_vectors(self, marks: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Landmarks (B, H, m, d) filled up to a multiple of 8, for kernels, and what is added to their scores, (m,)."""
        count = marks.shape[2]
        rest = -count % 8
        absent = torch.zeros(count + rest, dtype=marks.dtype, device=marks.device)
        absent[count:] = ABSENT
        return F.pad(marks, (0, 0, 0, rest)), F.pad(keys, (0, 0, 0, rest)), absent

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """With padding or dropout."""
        marks, keys, exist = self._landmarks(q, k, call)  # (B, H, m, d) twice, bool (B, m) or None
        marks, scale = marks * self.options.softmax_scale, self.options.softmax_scale
        seen = None if call.key_mask is None else call.key_mask[:, None, None]  # (B, 1, 1, n)
        also = None if exist is None else exist[:, None, None]  # (B, 1, 1, m)
        inner = _softmax(marks @ keys.mT, also)  # (B, H, m, m)
        inner = inner if exist is None else inner * exist[:, None, :, None]
        read = pseudo_inverse(inner, self.options.iterations) @ (_softmax(marks @ k.mT, seen) @ v)  # (B, H, m, d)
        out = drop(_softmax(q @ (keys * scale).mT, also), call) @ read
        return within_rows(convolved(out, v, None if self.filters is None else self.filters[:, 0]), call)

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

    # ---- the definition ----

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, n = q * self.options.softmax_scale, q.shape[2]
        size, outs = -(-n // self.options.landmarks), []
        for b in range(len(q)):
            real = torch.ones(n, dtype=torch.bool, device="cpu") if call.key_mask is None else call.key_mask[b].cpu()
            segments = [real[s : s + size].nonzero()[:, 0] + s for s in range(0, n, size)]
            segments = [s for s in segments if len(s)]
            if not segments:
                outs.append(torch.zeros_like(q[b]))
                continue
            marks, keys = (torch.stack([x[b, :, s].mean(1) for s in segments], 1) for x in (q, k))  # (H, m, d)
            places = real.nonzero()[:, 0]
            z = reference_inverse((marks @ keys.mT).softmax(-1), self.options.iterations)
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


def _scores(x: Tensor, left: Tensor, right: Tensor, bias: Tensor, wv: Tensor, bv: Tensor | None) -> Sequence[Tensor]:
    """Tokens (B, n, E) by left and right (B, H·m, E), with a bias (B, H·m) on the left, and by the value projection."""
    if len(x) > 1:  # every sequence has landmarks of its own
        return torch.baddbmm(bias[:, None], x, left.mT), x @ right.mT, affine(x, wv, bv)
    biases = torch.cat((bias[0], torch.zeros_like(bias[0]), wv.new_zeros(len(wv)) if bv is None else bv))
    return affine_parts(x, torch.cat((left[0], right[0], wv)), biases, (left.shape[1], right.shape[1], len(wv)))


def _softmax(scores: Tensor, exists: Tensor | None) -> Tensor:
    """Over the keys that exist; 0 where there is none."""
    if exists is None:
        return scores.softmax(-1)
    return scores.masked_fill(~exists, torch.finfo(scores.dtype).min).softmax(-1) * exists
