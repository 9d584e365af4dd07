"""How many pairs the patterns of Yun et al. 2020 connect, and the w with which a pattern comes near to a share of them.

`supports.patterns` counts the same from the sets themselves, but needs torch, which a declaration must not import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from subquad.core.numbers import possible_pairs, root

NEAR = 0.03  # a share that is further away than this is not at the level

Counts = tuple[int, int, int]  # pairs of the first sets, of the second ones, and of both together


def strided(w: int, n: int, causal: bool) -> Counts:
    """Eq. 4: ⌈w/2⌉ neighbours to the left and ⌊w/2⌋ to the right; then every w-th token."""
    left, right, steps = min(-(-w // 2), n - 1), min(w // 2, n - 1), (n - 1) // w
    to_the_left = n * left - left * (left + 1) // 2
    to_the_right = 0 if causal else n * right - right * (right + 1) // 2
    every_wth = n * steps - w * steps * (steps + 1) // 2  # to one side
    near, far = n + to_the_left + to_the_right, n + every_wth * (1 if causal else 2)
    return near, far, far if w == 1 else near + far - n  # both have oneself; w = 1: and the neighbours


def fixed(w: int, n: int, causal: bool) -> Counts:
    """Eq. 5: the segment of w tokens; then oneself and the last token of every whole segment."""
    segments, rest = divmod(n, w)
    near = segments * possible_pairs(w, causal) + possible_pairs(rest, causal)
    earlier = w * segments * (segments + 1) // 2 - segments  # queries that stand before a last token, over all of them
    summaries = segments * n - (earlier if causal else 0)
    twice = segments * (1 if causal else w)  # queries in the segment that they see the last token of
    return near, summaries + n - segments, near + summaries - twice


def star(w: int, n: int, causal: bool) -> Counts:
    """Eq. 6: a ring with w neighbours on each side, and a relay at the end, which nobody sees if it is causal."""
    near = min(w, n - 1)
    ring = n + n * near - near * (near + 1) // 2 if causal else (n - 1) * (min(2 * w + 1, n - 1) + 1) + n
    return ring, ring, ring


PATTERNS: dict[str, Callable[[int, int, bool], Counts]] = {"strided": strided, "fixed": fixed, "star": star}


def share(pattern: str, heads: str, w: int, n: int, causal: Sequence[bool]) -> float:
    """The share of pairs that are connected: the mean of the kinds of self-attention that a model has, which are causal
    or not, and where heads or layers take turns with the two sets, the mean of both.
    """
    found = []
    for one in causal:
        first, second, union = PATTERNS[pattern](w, n, one)
        found.append((union if heads in ("", "union") else (first + second) / 2) / possible_pairs(n, one))
    return sum(found) / len(found)


@lru_cache(maxsize=64)
def shares(pattern: str, heads: str, n: int, causal: tuple[bool, ...]) -> dict[int, float]:
    return {w: share(pattern, heads, w, n, causal) for w in range(1, n + 1)}


def w_at(level: float, pattern: str, heads: str, n: int, causal: tuple[bool, ...]) -> int:
    """The w whose share of connected pairs is nearest to `level`.

    STRIDED and FIXED have most shares twice, since w tokens are near and n/w are far. The smaller w, up to √n, is taken
    where it is NEAR: sentences are shorter than n, and a window that is most of n would see all of them.
    """
    known = shares(pattern, heads, n, causal)

    def away(w: int) -> float:
        return abs(known[w] - level)

    nearest = min(known, key=away)
    if pattern == "star":
        return nearest
    smaller = min(range(1, root(n) + 1), key=away)
    return smaller if away(smaller) < NEAR else nearest
