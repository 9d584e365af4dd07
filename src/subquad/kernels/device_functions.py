"""What Triton kernels share: random numbers by counting, the same as `core.hashing` draws on a CPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """splitmix64's finaliser, uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def streams(seed, instance, rows):
    """The two halves, uint32, of the random streams of rows; seed uint64, instance and rows integers ≥ 0."""
    own = mix(seed + (instance + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    state = mix(own + (rows + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (state & 0xFFFFFFFF).to(tl.uint32), (state >> 32).to(tl.uint32)


@triton.jit
def chance(low, high, columns):
    """A number in [0, 1] for the entries `columns` (uint32) of rows with the given halves."""
    x = columns * 0x9E3779B9 + low
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + high
    x = (x ^ (x >> 16)) * 0x846CA68B
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = x ^ (x >> 14)
    return (x >> 1).to(tl.int32).to(tl.float32) * 4.656612873077393e-10  # 2^-31
