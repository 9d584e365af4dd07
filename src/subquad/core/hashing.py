"""Random numbers by counting: a hash of (seed, instance, row, column), the same in Numba and in torch, on any device.

What is drawn for a pair depends on nothing but its own numbers: not on the batch, the order of work or the path taken.
Seeds become streams by splitmix64 (Steele et al. 2014); inside a stream, numbers come from a 32-bit hash that
compilers vectorise.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

GAMMA = np.uint64(0x9E3779B97F4A7C15)
_GAMMA = int(GAMMA) - 2**64  # the same bits as a signed number, as torch has them
_DROPOUT = 0x5851F42D4C957F2D
_inline = numba.njit(error_model="numpy")


def dropout_seed(seed: Tensor) -> Tensor:
    """A seed for dropout that has nothing to do with what else is drawn from `seed`."""
    return _mix(seed ^ _DROPOUT)


def seed_from(seed: Tensor, instance: int) -> Tensor:
    """The seed under which instances 0, 1, … drop what `instance`, `instance` + 1, … drop under `seed`.

    A stream begins with mix(dropout_seed + γ·instance): the hash is undone, moved along, and done again.
    """
    if not instance:
        return seed
    x = (int(dropout_seed(seed)) + int(GAMMA) * instance) % 2**64
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        x ^= x >> shift ^ x >> 2 * shift
        x = x * pow(factor, -1, 2**64) % 2**64
    x ^= _DROPOUT
    return torch.tensor(x - 2**64 if x >= 2**63 else x, device=seed.device)


# ---- Numba ----


@numba.njit(cache=True)
def mix(x):
    """splitmix64's finaliser: a 64-bit hash whose sequence over x + i·γ is a good generator."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_inline
def stream(seed, instance, row):
    """The random stream of a row of an instance."""
    return mix(mix(np.uint64(seed) + GAMMA * np.uint64(instance + 1)) + GAMMA * np.uint64(row + 1))


@_inline
def halves(state):
    return np.uint32(state & np.uint64(0xFFFFFFFF)), np.uint32(state >> np.uint64(32))


@_inline
def chance(a, b, j):
    """A number in [0, 1] for entry j of a row, in 32-bit arithmetic that LLVM vectorises.

    (a, b) are the two halves of the row's stream; b enters after the first round, so that no two rows share a stretch.
    """
    x = np.uint32(np.uint32(j) * np.uint32(0x9E3779B9) + a)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) + b)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x846CA68B))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB))
    x = np.uint32(x ^ (x >> np.uint32(14)))
    return np.float32(np.int32(x >> np.uint32(1))) * np.float32(2.0**-31)


# ---- torch: the same numbers in int64, which wraps around as uint64 does ----


def _shift(x: Tensor, places: int) -> Tensor:
    """The bits of x moved to the right, zeros from the left."""
    return x >> places & (1 << (64 - places)) - 1


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def streams(seed: Tensor, instances: Tensor, rows: Tensor) -> Tensor:
    """`stream` for int64 tensors that broadcast."""
    return _mix(_mix(seed + _GAMMA * (instances + 1)) + _GAMMA * (rows + 1))


def bits(state: Tensor, steps: Tensor) -> Tensor:
    """Number `steps` of splitmix64's sequence of a stream, int64 tensors that broadcast: 64 bits."""
    return _mix(state + _GAMMA * steps)


def uniforms(state: Tensor, steps: Tensor) -> Tensor:
    """`bits` as float64 in (0, 1]."""
    return (_shift(bits(state, steps), 11).double() + 1) * 2.0**-53


def chances(state: Tensor, columns: Tensor) -> Tensor:
    """`chance` for streams and entries, int64 tensors that broadcast: float32."""
    low = 0xFFFFFFFF
    x = (columns * 0x9E3779B9 + (state & low)) & low
    x = (x ^ x >> 16) * 0x7FEB352D & low
    x = ((x ^ x >> 15) + _shift(state, 32)) & low
    x = (x ^ x >> 16) * 0x846CA68B & low
    x = (x ^ x >> 15) * 0x31848BAB & low
    x = x ^ x >> 14
    return (x >> 1).to(torch.float32) * 2.0**-31


def dropout_factors(
    seed: Tensor, dropout: float, instances: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype
) -> Tensor:
    """0 where a pair is dropped, 1 / (1 - dropout) where it is kept, of the broadcast shape; the seed is sent there."""
    seed = seed.to(columns.device, non_blocking=True)
    kept = chances(streams(dropout_seed(seed), instances, rows), columns) >= dropout
    return kept.to(dtype) * (1 / (1 - dropout))


def key_factors(seed: Tensor, dropout: float, v: Tensor, columns: Tensor) -> Tensor:
    """Where there is no matrix of weights a key is dropped for all queries of a head: (B, H, m, 1) for v (B, H, m, d).

    columns int64 (B, m): the numbers of the keys.
    """
    instance = torch.arange(v.shape[0] * v.shape[1], device=v.device).view(*v.shape[:2], 1)
    columns = columns[:, None]
    return dropout_factors(seed, dropout, instance, torch.zeros_like(columns), columns, v.dtype)[..., None]


def ranks(key_mask: Tensor | None, batch: int, n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """By which numbers rows and columns are counted in random draws: int64 (B, n) and (B, m).

    The rank among the real tokens of the row: padding moves no random number. A padded query has a number of its own,
    below 0.
    Where n ≠ m the mask says nothing of the queries, which count by their slots.
    """
    slots = torch.arange(n, device=device).expand(batch, n)
    if key_mask is None:
        return slots, torch.arange(m, device=device).expand(batch, m)
    rank = key_mask.cumsum(1) - key_mask.long()
    return torch.where(key_mask, rank, ~slots) if n == m else slots, rank
