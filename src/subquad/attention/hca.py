"""Heavily compressed attention (DeepSeek-V4): a sliding window, and one learned entry for every `rate` tokens before.

    c_w = norm( Σ_{j in block w} softmax_j(x_j W_z + b_j) ⊙ x_j W_c )           one key and value for all heads
    out_i = R_i⁻¹ Σ_{e ∈ near(i) ∪ entries(i)} e^(q_i·e·scale) e / Z_i          Z_i contains e^sink, learned per head

    near(i)      the last `window` tokens up to i: norm(key projection of x_j), keys and values at once
    entries(i)   the blocks of `rate` tokens that end at i or before
    O(n·(window + n/rate)); x are the tokens, ⊙ goes channel by channel, norms are RMS norms, causal only

Queries are normalised too. The last `rotary` channels of queries, near tokens (at their positions) and entries (at the
position of their block's first token) are rotated, and because keys are values, the output is rotated back by R_i⁻¹, so
that everything depends on distances.

It works on tokens, with the projections of the layer around it: the value projection plays no part. With
num_kv_heads=1 (as published) all heads share the near keys too. The function is that of the eager code in transformers
(`DeepseekV4Attention`), whose low-rank query and output projections are the layer's business here. Dropout drops a key
or an entry for all queries of a head at once. Padding is in no block and in no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, Record, Rows, clean_tokens, real_spans, repeat_heads
from subquad.attention.checks import check_lengths, check_mask, refuse_tangents
from subquad.attention.full import drop_keys
from subquad.attention.states import entrance
from subquad.attention.states.compressed import Compressed
from subquad.attention.states.state import Buffers, Memory
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.compressed import compressed_attention

Pair = tuple[Tensor, Tensor]  # of the tokens in the window, and of the entries


@dataclass(frozen=True, kw_only=True)
class CompressedOptions(BaseOptions):
    window: int = option(128, "tokens that a query sees directly, itself included", ge=1)
    rotary: int | None = option(None, "channels that are rotated, even; None = head_dim/8, at least 2", ge=0)
    theta: float = option(160000.0, "base of the rotation's wavelengths", gt=0)
    epsilon: float = option(1e-6, "added to the mean square in norms", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary is not None and (self.rotary % 2 or self.rotary > self.head_dim):
            raise ValueError(f"rotary must be even and at most head_dim={self.head_dim}, not {self.rotary}")

    @property
    def rotated(self) -> int:
        return min(max(2, self.head_dim // 16 * 2), self.head_dim // 2 * 2) if self.rotary is None else self.rotary


class Entries(NamedTuple):
    """What the blocks of tokens are compressed to."""

    rows: Tensor  # (B, m, d)
    exist: Tensor  # bool (B, m): has it a real token?


class Compressor(nn.Module):
    """Tokens (B, n, E) → one entry for every complete block of `rate` tokens.

    overlap=True: two series of projections; entry w is made of the first series of block w - 1 and the second of
    block w.
    """

    def __init__(self, width: int, head_dim: int, rate: int, *, overlap: bool, options: Any) -> None:
        super().__init__()
        self.rate, self.overlap, self.options, both = rate, overlap, options, head_dim * (1 + overlap)
        self.values = nn.Linear(width, both, bias=False)  # W_c
        self.gates = nn.Linear(width, both, bias=False)  # W_z
        self.bias = nn.Parameter(torch.zeros(rate, both))  # b
        self.norm = nn.Parameter(torch.ones(head_dim))

    def forward(self, x: Tensor, real: Tensor | None, first: Tensor | None = None) -> Entries:
        """In the arithmetic of x; real bool (B, n) or None. The tokens begin with block `first` (B,) of their row."""
        (batch, n, _), rate = x.shape, self.rate
        count = n // rate
        blocks = x[:, : count * rate]
        c = project(blocks, self.values).unflatten(1, (count, rate))  # (B, m, r, d or 2d)
        z = project(blocks, self.gates).unflatten(1, (count, rate)) + self.bias.to(x.dtype)
        there = torch.ones(1, n, dtype=torch.bool, device=x.device) if real is None else real
        there = there[:, : count * rate].unflatten(1, (count, rate))  # (B or 1, m, r)
        if self.overlap:
            c, z = (torch.cat((_later(t[..., : t.shape[-1] // 2]), t[..., t.shape[-1] // 2 :]), 2) for t in (c, z))
            there = torch.cat((_later(there), there), 2)  # (B or 1, m, 2r)
        z = z.masked_fill(~there[..., None], torch.finfo(x.dtype).min)
        rows = rms_norm((z.softmax(2) * there[..., None] * c).sum(2), self.norm, self.options.epsilon)  # (B, m, d)
        block = torch.arange(count, device=x.device)
        rows = rotate(rows, (block if first is None else first[:, None] + block) * rate, self.options)
        own = there[..., rate:] if self.overlap else there  # the block itself
        return Entries(rows, own.any(-1).expand(batch, count))


class HCA(Attention):
    __doc__ = __doc__

    capabilities = Capabilities(bidirectional=False, level="layer", weights=False)
    family = "compressed"
    theory_reason = "beyond its window it attends to compressed entries, not to tokens"
    paper = "DeepSeek-V4"
    cost = "n·(window + n/rate)"
    exponent = 2.0
    overlap = False
    examples: Any = ({"window": 5, "rate": 4}, {"window": 3, "rate": 8, "rotary": 0})
    gallery = {"window": 12, "rate": 8}

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        rate: int = option(128, "tokens that are compressed to one entry", ge=1)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.width = options.num_heads * options.head_dim
        self.compress = Compressor(self.width, options.head_dim, options.rate, overlap=self.overlap, options=options)
        self.norm = nn.Parameter(torch.ones(options.head_dim))
        self.sinks = nn.Parameter(torch.zeros(options.num_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        raise TypeError(
            f"{self.name} works on tokens and their projections, not on q, k, v: use "
            f"subquad.MultiheadAttention(embed_dim, num_heads, attention={self.name!r}, causal=True)"
        )

    def token_weights(self, query, key, project, key_mask, seed=None):
        raise TypeError(f"{self.name} has no weights over tokens, entries mix them: pass need_weights=False")

    # ---- the fast path ----

    def attend_tokens(self, query, key, value, project, key_mask, seed=None, *, want_record=False):
        self._check(query, key, key_mask)
        refuse_tangents(self, query, key, project=project)
        rows = Rows.of(key_mask, align=True)
        x, y = (clean_tokens(rows.align(t[:, None])[:, 0], rows.key_mask) for t in (query, key))  # (B, n, E)
        out = self._attend(x, y, project, self._call(rows, seed, query.shape[1]))
        return rows.restore(out).transpose(1, 2).flatten(2), Record()

    def heads(self, x: Tensor, place: Tensor, project: Any, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries (B, H, n, d) of tokens x and near keys (B, H or fewer, n, d) of y, at positions (n,) or (B, n)."""
        o, work = self.options, torch.promote_types(x.dtype, torch.float32)
        q, k = project.queries(x).to(work), project.keys(x if y is None else y).to(work)
        place = place if place.dim() == 1 else place[:, None]
        return rotate(rms_norm(q, None, o.epsilon), place, o), rotate(rms_norm(k, self.norm, o.epsilon), place, o)

    def _attend(self, x: Tensor, y: Tensor, project: Any, call: Call) -> Tensor:
        q, k = self.heads(x, torch.arange(x.shape[1], device=x.device), project, y)
        with torch.autocast(x.device.type, enabled=False):
            return self._attend_heads(q, k, x.to(q.dtype), y.to(q.dtype), call).to(x.dtype)

    def _attend_heads(self, q: Tensor, k: Tensor, x: Tensor, y: Tensor, call: Call) -> Tensor:
        o, place = self.options, torch.arange(q.shape[2], device=q.device)
        entries, exist = self.compress(y, call.key_mask)
        entries = entries[:, None]  # (B, 1, m, d)
        seen = self._seen(x, y, exist, call)  # (B, n, m)
        v, values = k, entries
        if call.dropout:
            assert call.seed is not None
            v = drop_keys(k, call)
            values = drop_keys(entries, call._replace(key_mask=None, seed=call.seed + 1))
        about: dict[str, Any] = {"window": o.window, "scale": o.softmax_scale}
        about |= {"key_mask": call.key_mask, "lengths": call.lengths}
        out = compressed_attention(q, k, v, entries, values, seen, self.sinks.to(q.dtype), **about)
        return rotate(out, -place, o)

    def _seen(self, x: Tensor, y: Tensor, exist: Tensor, call: Call) -> Tensor:
        """Which entries a query sees, bool (B, n, m)."""
        place = torch.arange(x.shape[1], device=x.device)
        done = (place[:, None] + 1) // self.options.rate > torch.arange(exist.shape[1], device=x.device)  # (n, m)
        seen = done & exist[:, None]
        if call.lengths is not None:
            seen = seen & (place < call.lengths[:, None])[..., None]
        return seen

    # ---- streaming ----

    @property
    def compressors(self) -> dict[str, Compressor]:
        """What makes entries, by the names of the buffers that a state keeps them in."""
        return {"entries": self.compress}

    def make_memory(self, margin: int) -> Memory:
        return Compressed(self.options, margin, overlap=self.overlap)

    def kept_keys(self, n: int) -> float:
        """The tokens that the window or the next entry needs, and the entries."""
        o = self.options
        return max(o.window, (1 + self.overlap) * o.rate) + n / o.rate

    def extend_tokens(self, query, project, state, key_mask=None):
        self._check(query, query, key_mask)
        out, state = entrance.extend_tokens(self, query, state, key_mask, project)  # (B, H, t, d)
        return out.transpose(1, 2).flatten(2), state

    def extend(self, q, k, v, state, *, key_mask=None):
        return self.attend(q, k, v, None)  # raises, and says who can

    def attend_aligned_tokens(
        self, x: Tensor, project: Any, real: Tensor | None, lengths: Tensor, seed: Tensor | None
    ) -> Tensor:
        """Tokens (B, n, E) of rows that begin at slot 0 and have `lengths` positions, real (B, n) of them."""
        rows = Rows(real, None if real is None else lengths, None, None)
        return self._attend(x, x, project, self._call(rows, seed, x.shape[1]))

    def chosen(self, x: Tensor, position: Tensor, buffers: Buffers, possible: Tensor) -> Tensor:
        """Which of the possible entries the queries of tokens x (B, t, E) see, bool (B, t, m)."""
        return possible

    def attend_near_and_far(self, q: Tensor, keys: Pair, values: Pair, seen: Pair, position: Tensor) -> Tensor:
        """New queries at positions (B, t) to kept tokens and entries, as far as they are seen: bool (B, t, m) each."""
        (b, h, t, _), sizes = q.shape, [k.shape[2] for k in keys]

        def by_group(x: Tensor, k: Tensor) -> Tensor:  # (B, H, t, …) → (B, G, H/G·t, …): heads that share keys
            return x.reshape(b, k.shape[1], h // k.shape[1] * t, x.shape[3])

        with torch.autocast(q.device.type, enabled=False):
            scores = torch.cat([(by_group(q, k) @ k.mT).view(b, h, t, k.shape[2]) for k in keys], -1)
            scores = (scores * self.options.softmax_scale).masked_fill(~torch.cat(seen, -1)[:, None], -torch.inf)
            sink = self.sinks.to(q.dtype)[:, None, None].expand(b, h, t, 1)
            parts = torch.cat((scores, sink), -1).softmax(-1)[..., :-1].split(sizes, -1)
            near, far = ((by_group(w, v) @ v).view(q.shape) for w, v in zip(parts, values, strict=True))
            return rotate(near + far, -position[:, None], self.options)

    def _check(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> None:
        check_lengths(self, query.shape[1], key.shape[1])
        if query.shape[0] < 1:
            raise ValueError("query has batch size 0: it must be at least 1")
        for name, x in (("query", query), ("key", key)):
            if x.shape[2] != self.width:
                raise ValueError(
                    f"{self.name}: {name} has width {x.shape[2]}, the heads together {self.width}: they must be equal"
                )
        check_mask(self, key[:, None], key_mask)

    # ---- the definition ----

    def dense_tokens(self, query, key, value, project, key_mask=None):
        """The oracle: every row from its first real token to its last, token by token, with one dense softmax."""
        self._check(query, key, key_mask)
        real = torch.ones_like(query[..., 0], dtype=torch.bool) if key_mask is None else key_mask
        found = query.new_zeros(*query.shape[:2], self.width)
        for b, own in real_spans(real):
            x, y = (clean_tokens(t[b : b + 1, own], real[b : b + 1, own]) for t in (query, key))
            found[b, own] = self._define(x, y, project, real[b, own]).to(found.dtype)
        return found

    def _define(self, x: Tensor, y: Tensor, project: Any, real: Tensor) -> Tensor:
        """One row, tokens (1, n, E) → (n, H·d)."""
        o, n, heads = self.options, x.shape[1], self.options.num_heads
        work = torch.promote_types(x.dtype, torch.float32)
        place = torch.arange(n, device=x.device)
        q = rotate(rms_norm(project.queries(x)[0].to(work), None, o.epsilon), place, o)  # (H, n, d)
        k = rotate(rms_norm(project.keys(y)[0].to(work), self.norm, o.epsilon), place, o)
        k = repeat_heads(k[None], heads)[0]
        entries, exist = self._define_entries(y[0].to(work), real, self.compress)
        everything = torch.cat((k, entries.expand(heads, -1, -1)), 1)  # (H, n + m, d)
        distance = place[:, None] - place
        near = (distance >= 0) & (distance < o.window) & real
        call = Call(real[None], slots=n)
        far = self._seen(x.to(work), y.to(work), exist[None], call)[0]
        scores = q @ everything.mT * o.softmax_scale
        scores = scores.masked_fill(~torch.cat((near, far), 1), -torch.inf)
        sink = self.sinks.to(work)[:, None, None].expand(heads, n, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        return rotate(weights @ everything, -place, o).transpose(0, 1).flatten(1)

    def _define_entries(self, y: Tensor, real: Tensor, compress: Compressor) -> tuple[Tensor, Tensor]:
        """Tokens (n, E) → entries (m, d) and which exist, block by block."""
        rate, rows, exist = compress.rate, [], []
        c, z = (project(y, part) for part in (compress.values, compress.gates))  # (n, d or 2d)
        d = len(compress.norm)
        for first in range(0, len(y) - rate + 1, rate):
            members = [(j, slice(-d, None), j - first) for j in range(first, first + rate) if real[j]]
            if compress.overlap:
                before = range(max(0, first - rate), first)
                members += [(j, slice(0, d), j - first + rate) for j in before if real[j]]
            exist.append(bool(real[first : first + rate].any()))
            if not members:
                rows.append(y.new_zeros(d))
                continue
            gates = torch.stack([z[j, part] + compress.bias[at, part].to(y.dtype) for j, part, at in members])
            mixed = (gates.softmax(0) * torch.stack([c[j, part] for j, part, _ in members])).sum(0)
            mixed = rms_norm(mixed, compress.norm, self.options.epsilon)
            rows.append(rotate(mixed[None], torch.tensor([first], device=y.device), self.options)[0])
        if not rows:
            return y.new_zeros(0, d), torch.zeros(0, dtype=torch.bool, device=y.device)
        return torch.stack(rows), torch.tensor(exist, device=y.device)

    # ---- pictures and counts ----

    def picture(self, n: int) -> Tensor:
        i, j = torch.arange(n)[:, None], torch.arange(n)
        far = j // self.options.rate < (i + 1) // self.options.rate
        return torch.where((i - j < self.options.window) & (j <= i), 1, 2 * far.int())

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """The entries of the blocks that are complete."""
        rate = self.options.rate
        blocks = [range(w * rate, (w + 1) * rate) for w in range(n // rate)]
        return list(blocks), [list(range((i + 1) // rate)) for i in range(n)]

    def connections(self, n: int) -> float:
        return float(n * min(self.options.window, n) + n * (n // self.options.rate) / 2)


def project(x: Tensor, linear: nn.Linear) -> Tensor:
    return x @ linear.weight.to(x.dtype).mT


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return normed if weight is None else normed * weight.to(x.dtype)


def rotate(x: Tensor, place: Tensor, options: Any) -> Tensor:
    """The last channels of x (…, n, d), in pairs of neighbours, by the angles of the positions `place` (…, n)."""
    width = options.rotated
    if not width:
        return x
    steps = torch.arange(0, width, 2, dtype=x.dtype, device=x.device) / width
    angle = place[..., None].to(x.dtype) * options.theta**-steps  # (…, n, width/2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., -width::2], x[..., 1 - width :: 2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned), -1)


def _later(x: Tensor) -> Tensor:
    """Blocks (B, m, …) one place later; nothing (0, False) at the first place."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
