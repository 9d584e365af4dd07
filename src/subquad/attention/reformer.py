"""Reformer (Kitaev et al. 2020): attention among tokens that locality-sensitive hashing puts into the same bucket.

    out_i = Σ_{j ∈ P_i} softmax_j(q_i·k_j·scale) v_j          k_j = q_j / |q_j|: queries and keys are shared

    P_i = ∪_r {j : h_r(q_j) = h_r(q_i)}  (causal: j ≤ i)      h_r(x) = argmax [xR_r ; -xR_r], R_r (d, b/2) Gaussian

    O(n·rounds·(chunk + buckets/2)): the hashes of all tokens with all rotations, then sorted chunks

In every round tokens are sorted by bucket and time and cut into chunks; a query sees its own chunk and the one before.
A token attends to itself only where it meets nobody else. The rotations are drawn anew in every call, from its seed,
for every head. With buckets=1 everybody meets everybody: full attention with shared queries and keys.

Choices. The keys that are handed in play no part, and inside a layer they are not computed. Chunks are cut inside each
bucket: cut through the whole sorted sequence, as published, whom a query meets depends on how many later tokens sort
before it, which leaks. Who is met in several rounds counts as often (the paper's log N_ij would count it once; the
public versions leave that out by default). Padding is in no bucket; a padded query gives 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, Record
from subquad.core.hashing import chances, streams
from subquad.core.numbers import settled
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.clusters import cluster_attention

PADDED = 64  # padded tokens of a bucket of their own


class Reformer(Attention):
    __doc__ = __doc__

    capabilities = Capabilities(stochastic=True)
    family = "learned clusters"
    paper = "Kitaev et al. 2020"
    cost = "n·rounds·(chunk + buckets/2)"
    positional = False  # causality needs the order of the tokens alone
    data_dependent = True
    sparse = True
    theory_view = "other"
    theory_reason = "its keys are its queries at length 1, and a token that meets others does not attend to itself"
    examples = ({"rounds": 2, "chunk": 4}, {"rounds": 3, "buckets": 4, "chunk": 40})
    gallery = {"buckets": 4, "rounds": 1}
    picture_note = "Who meets whom follows from hashes of the tokens. Here the hashes are random."

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        rounds: int = option(8, "how many times all tokens are hashed", ge=1)
        chunk: int | None = option(None, "tokens of a chunk; None = 2·length/buckets, or 64 without buckets", ge=1)
        buckets: int | None = option(None, "buckets of a round, even or 1; None = 2·length/chunk", ge=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.buckets is not None and self.buckets > 1 and self.buckets % 2:
                raise ValueError(f"buckets must be even, or 1, not {self.buckets}")

    @property
    def exponent(self) -> float:
        """1 when both sizes are fixed; else buckets or chunks grow with the length."""
        return 1.0 if self.options.buckets is not None and self.options.chunk is not None else 2.0

    @property
    def open_size(self) -> str | None:
        o = self.options
        open_sizes = [size for size in ("buckets", "chunk") if getattr(o, size) is None]
        return None if o.max_length or not open_sizes else open_sizes[0]

    def sizes(self, slots: int) -> tuple[int, int]:
        """Buckets and tokens of a chunk, from max_length, or from the length of the batch without it."""
        length = self.options.max_length or settled(slots, self.name, "the number of buckets", "give max_length")
        buckets, chunk = self.options.buckets, self.options.chunk
        if buckets is None:
            buckets = 2 * -(-length // (chunk or 64))
        return buckets, chunk or -(-2 * length // buckets)

    # ---- buckets ----

    @torch.no_grad()
    def hashes(self, q: Tensor, buckets: int, seed: Tensor) -> Tensor:
        """The bucket of every token in every round, int64 (rounds, B, H, n)."""
        b, h, n, d = q.shape
        if buckets == 1:
            return torch.zeros(self.options.rounds, b, h, n, dtype=torch.int64, device=q.device)
        half, found = buckets // 2, []
        for number in range(self.options.rounds):
            x = q @ gaussian(seed, number, (h, d, half), q.device).to(q.dtype)  # (B, H, n, half)
            nearest = x.abs().argmax(-1)
            other_side = x.gather(-1, nearest[..., None])[..., 0] < 0
            found.append(nearest + half * other_side)
        return torch.stack(found)

    # ---- attention ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work = v.dtype, torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            q, v = q.to(work), v.to(work)
            x, y, z = (t.flatten(0, 1) for t in (q, F.normalize(q, dim=-1), v))  # (B·H, n, d)
            out = self._met(x, y, z, q, call)
        return out.unflatten(0, q.shape[:2]).to(kind)

    def _met(self, x: Tensor, y: Tensor, z: Tensor, q: Tensor, call: Call) -> Tensor:
        assert call.seed is not None
        (b, h, n, _), o = q.shape, self.options
        buckets, chunk = self.sizes(call.slots)
        bucket = self.hashes(q, buckets, call.seed.to(q.device, non_blocking=True))  # (rounds, B, H, n)
        real = torch.ones(b * h, n, dtype=torch.bool, device=q.device)
        if call.exists is not None:
            aside = buckets + torch.arange(n, device=q.device) // PADDED
            bucket = torch.where(call.exists, bucket, aside)
            real = call.exists.expand(b, h, n).flatten(0, 1)
            buckets += -(-n // PADDED)
        cluster = bucket.flatten(1, 2)  # (rounds, B·H, n)
        sequence = torch.arange(b * h, device=q.device)[:, None]
        order = (sequence * buckets + cluster).flatten(1).argsort(dim=1, stable=True)  # (rounds, B·H·n)
        return cluster_attention(
            x, [y], [z], (order, cluster, real), buckets, causal=o.causal, scale=o.softmax_scale, avoid_self=True,
            chunk=chunk, dropout=call.dropout, seed=call.seed,
        )  # fmt: skip

    def attend_tokens(self, query, key, value, project, key_mask, seed=None, *, want_record=False):
        q, v = project.queries(query), project.values(value)  # (B, H, n, d); the keys are made of the queries
        out = self(q, v, v, key_mask=key_mask, seed=seed)
        return out.transpose(1, 2).flatten(2), Record()

    # ---- the definition ----

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        assert call.seed is not None
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        (b, h, n, _), (buckets, chunk) = q.shape, self.sizes(call.slots)
        real = torch.ones(b, n, dtype=torch.bool, device=q.device) if call.key_mask is None else call.key_mask
        time = torch.ones(n, n, dtype=torch.bool, device=q.device)
        pairs = real[:, None, :, None] & real[:, None, None] & (time.tril() if self.options.causal else time)
        met = torch.zeros(b, h, n, n, dtype=q.dtype, device=q.device)  # in how many rounds
        for bucket in self.hashes(q, buckets, call.seed.to(q.device, non_blocking=True)):
            same = (bucket[..., :, None] == bucket[..., None, :]) & real[:, None, None]  # (B, H, n, n)
            place = (same & time.tril(-1)).sum(-1) // chunk  # (B, H, n): which chunk of its bucket
            back = place[..., :, None] - place[..., None, :]
            met += same & pairs & (back >= 0) & (back <= 1)
        alone = torch.eye(n, dtype=torch.bool, device=q.device) & ((met > 0).sum(-1, keepdim=True) > 1)
        met = met.masked_fill(alone, 0)
        scores = q @ F.normalize(q, dim=-1).mT * self.options.softmax_scale + met.clamp(min=1).log()
        weights = scores.masked_fill(met == 0, torch.finfo(q.dtype).min).softmax(-1)
        return weights * (met > 0)

    # ---- for pictures and counts: the real buckets depend on q ----

    def picture(self, n: int) -> Tensor:
        """One round of tokens with random hashes."""
        buckets, chunk = self.sizes(n)
        bucket = (chances(streams(torch.tensor(0), torch.tensor(0), torch.tensor(0)), torch.arange(n)) * buckets).long()
        same = bucket[:, None] == bucket
        place = (same & torch.ones(n, n, dtype=torch.bool).tril(-1)).sum(-1) // chunk
        back = place[:, None] - place
        seen = (same & (back >= 0) & (back <= 1)).int()
        return seen.tril() if self.options.causal else seen

    def connections(self, n: int) -> float:
        buckets, chunk = self.sizes(n)
        met = min(2.0 * chunk, n / buckets) / (2 if self.options.causal else 1)
        return float(self.options.rounds * n * (max(1.0, met) + buckets / 2))


def gaussian(seed: Tensor, number: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Standard Gaussian numbers of a shape by counting (Box and Muller), float32: the same on any device."""
    a, b, c = shape
    instance = torch.arange(a, device=device)[:, None, None]
    row = torch.arange(b, device=device)[:, None] + number * b
    column = 2 * torch.arange(c, device=device)
    state = streams(seed, instance, row)
    radius = (-2 * chances(state, column).clamp(min=2.0**-31).log()).sqrt()
    return radius * (2 * math.pi * chances(state, column + 1)).cos()
