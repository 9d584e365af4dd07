"""The sparsity patterns of the papers, each described once; `pattern` says what follows from a description."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from subquad.core.numbers import root
from subquad.supports.builders import columns, diagonal, rows_to_keys, selves, windows
from subquad.supports.kept import EVERYTHING, Kept, Ranges, first_ones, recent
from subquad.supports.parts import FAR
from subquad.supports.pattern import Pattern, pointers
from subquad.supports.placed import Placed, on_device, united, wrapped


@dataclass(frozen=True, kw_only=True)
class Strided(Pattern):
    """Eq. 4 (Child et al.): ⌈w/2⌉ neighbours to the left and ⌊w/2⌋ to the right; then every w-th token."""

    w: int | None = None
    families = 2

    def sized(self, n):
        return replace(self, w=self.w or root(n))

    @property
    def is_nested(self):
        return self.w is not None

    def reach(self, n: int) -> tuple[int, int, int]:
        w = self.w or root(n)
        return w, -(-w // 2), w // 2

    def allows(self, family, i, j, n):
        w, left, right = self.reach(n)
        return ((j >= i - left) & (j <= i + right)) if family == 0 else (i - j) % w == 0

    def parts(self, n, family):
        w, left, right = self.reach(n)
        window = windows(0, n, left, 0 if self.causal else right)
        if family == 0:
            return window
        if family == 1:
            return columns(n, w, causal=self.causal)
        return window + columns(n, w, causal=self.causal, xlo=-left, xhi=right)

    def kept(self, families, margin):
        return (recent(self.reach(0)[1], margin),) if set(families) == {0} else EVERYTHING

    def ranges(self, families, i):
        return [(0, range(max(0, i - self.reach(0)[1]), i + 1))] if set(families) == {0} else None

    def named(self, family, i):
        w, left, _ = self.reach(0)
        near = np.arange(left + 1)  # distances
        column = w * np.arange(int(i.max()) // w + 1)
        steps = near if family == 0 else column if family == 1 else np.union1d(near, column)
        return np.maximum(i[..., None] - steps[::-1], -1)


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Eq. 5 (Child et al.): the query's segment of w tokens; then itself and the last token of every segment.

    A partial last segment has no summary token, so the tokens in it reach nobody (Assumption 1.3 fails);
    `close=True` makes the last token of the sequence a summary token too.
    """

    w: int | None = None
    close: bool = False
    families = 2

    def sized(self, n):
        return replace(self, w=self.w or root(n))

    @property
    def is_nested(self):
        return self.w is not None and (self.causal or not self.close)

    def allows(self, family, i, j, n):
        w = self.w or root(n)
        if family == 0:
            return i // w == j // w
        summary = j % w == w - 1
        if self.close:
            summary = summary | (j == n - 1)
        return summary | (i == j)

    def parts(self, n, family):
        w, hi = self.w or root(n), 0 if self.causal else FAR
        summaries, rest = range(w - 1, n, w), n % w
        segments = diagonal(0, n, w, causal=self.causal)
        if family == 0:
            return segments
        if family == 1:
            parts = selves(n) + rows_to_keys(range(n), summaries, hi=hi, xlo=0, xhi=0)
            lonely = range(n - 1)  # queries that the closing token is new to
        else:
            parts = segments + rows_to_keys(range(n), summaries, hi=hi, xlo=0, xhi=w - 1)
            lonely = range(n - rest)
        if self.close and rest and not self.causal:
            parts += rows_to_keys(lonely, range(n - 1, n))
        return parts

    def common(self, n, family):
        return replace(self, close=False).parts(n, family)

    def placed(self, n, family, lengths):
        """The closing token, where it is no summary token anyway."""
        if family == 0:
            return []
        lengths = lengths[:, None]  # (B, 1)
        rest, place = lengths % self.w, torch.arange(n, device=lengths.device)
        lonely = (rest > 0) & (place < lengths - (1 if family == 1 else rest))  # (B, n)
        return [Placed(place[None, None], lengths[:, None] - 1, lonely[:, None, :, None])]

    def listed(self, n, family, lengths):
        place, last, w = torch.arange(n, device=lengths.device)[:, None], lengths[:, None, None] - 1, self.w
        segment, keys = place // w * w + torch.arange(w, device=place.device), []
        if family != 1:
            keys.append(segment)
        if family != 0:
            summaries = torch.arange(n // w, device=place.device) * w + w - 1
            keys += [place, summaries.expand(n, -1), last.expand(-1, n, 1)]
        keys = torch.cat([x.expand(len(lengths), n, -1) for x in keys], 2)
        return united(torch.where((place <= last) & (keys <= last), keys, n), n)

    def kept(self, families, margin):
        near = recent(0 if set(families) == {1} else self.w - 1, margin)
        return (near,) if set(families) == {0} else (Kept(start=self.w - 1, step=self.w), near)

    def ranges(self, families, i):
        w, first = self.w, i // self.w * self.w
        if set(families) == {0}:
            return [(0, range(first, i + 1))]
        stop = i + 1 if i % w < w - 1 else i  # the last token of a segment is a summary token
        return [(0, range(w - 1, i + 1, w)), (1, range(i if set(families) == {1} else first, stop))]


@dataclass(frozen=True, kw_only=True)
class Star(Pattern):
    """Eq. 6 (Guo et al.): a ring in which everyone sees w neighbours on each side, and a relay token that sees everyone
    and is seen by everyone. The relay is the last token. Causal: the ring is cut, and nobody could see a relay at the
    end, so there is none; `relay="first"` puts it in front.
    """

    w: int = 8
    relay: str = "last"

    def allows(self, family, i, j, n):
        if self.causal:
            near = (i - j >= 0) & (i - j <= self.w)
            return near | (j == 0) if self.relay == "first" else near
        relay = n - 1 if self.relay == "last" else 0
        ring = n - 1 + (n == 1)
        around = (i - j) % ring  # positions on the ring differ by a shift only: the relay is at an end
        near = (around <= self.w) | (around >= ring - self.w)
        return (i == relay) | (j == relay) | near

    def parts(self, n, family):
        w, m = self.w, n - 1
        if self.causal:
            if self.relay == "last":
                return windows(0, n, w, 0)
            return windows(1, n, w, 0) + rows_to_keys(range(1, n), range(1)) + rows_to_keys(range(1), range(1))
        relay, first = (n - 1, 0) if self.relay == "last" else (0, 1)
        ring = range(first, first + m)
        if 2 * w + 1 >= m:
            parts = rows_to_keys(ring, ring)
        else:
            parts = windows(first, first + m, w, w)
            parts += rows_to_keys(ring[-w:], ring[:w], hi=w - m)  # round the end of the ring …
            parts += rows_to_keys(ring[:w], ring[-w:], lo=m - w)  # … and back
        parts += rows_to_keys(ring, range(relay, relay + 1))
        return parts + rows_to_keys(range(relay, relay + 1), range(n))

    def common(self, n, family):
        """Windows, and a relay in front."""
        if self.relay == "last":
            return windows(0, n, self.w, self.w)
        relay = rows_to_keys(range(1, n), range(1)) + rows_to_keys(range(1), range(n))
        return windows(1, n, self.w, self.w) + relay

    def placed(self, n, family, lengths):
        """The end of the ring, and a relay at the end."""
        found = wrapped(int(self.relay == "first"), lengths - 1, min(self.w, n))
        if self.relay == "last":
            relay, place = lengths[:, None, None] - 1, torch.arange(n, device=lengths.device)[None, None]
            far = place < relay - self.w  # (B, 1, n): not in a window with it
            found += [Placed(place, relay, far[..., None]), Placed(relay, place, far[:, :, None])]
        return found

    def global_queries(self, n, lengths):
        """The relay."""
        return (lengths[:, None] - 1).clamp(min=0) if self.relay == "last" else torch.zeros_like(lengths)[:, None]

    def listed(self, n, family, lengths):
        place, length = torch.arange(n, device=lengths.device)[:, None], lengths[:, None, None]
        relay, first = (length - 1, 0) if self.relay == "last" else (torch.zeros_like(length), 1)
        ring, step = length - 1, torch.arange(min(2 * self.w + 1, n), device=place.device)
        around = (place - first + step - self.w) % ring.clamp(min=1) + first  # (B, n, most): a short ring comes again
        keys = torch.cat((torch.where(step < ring, around, n), relay.expand(-1, n, 1)), 2)
        return torch.where((place < length) & (place != relay), keys, n).sort(2).values

    def kept(self, families, margin):
        near = recent(self.w, margin)
        return (first_ones(1), near) if self.relay == "first" else (near,)

    def ranges(self, families, i):
        return _window_ranges(i, self.w, int(self.relay == "first"))

    def begin(self, i):
        return i - self.w if i - self.w >= 1 else None


@dataclass(frozen=True, kw_only=True)
class Longformer(Pattern):
    """Beltagy et al.: a window of ⌈window/2⌉ to the left and ⌊window/2⌋ to the right; the first `global_tokens`
    tokens see everyone and are seen by everyone.
    """

    window: int = 128
    global_tokens: int = 0
    is_nested = True

    def allows(self, family, i, j, n):
        near = (j >= i - -(-self.window // 2)) & (j <= i + self.window // 2)
        return near | (i < self.global_tokens) | (j < self.global_tokens)

    def parts(self, n, family):
        g, hi = min(self.global_tokens, n), 0 if self.causal else FAR
        left, right = -(-self.window // 2), 0 if self.causal else self.window // 2
        parts = windows(g, n, left, right) + rows_to_keys(range(g, n), range(g))
        return parts + rows_to_keys(range(g), range(n), hi=hi)

    def kept(self, families, margin):
        near = recent(-(-self.window // 2), margin)
        return (first_ones(self.global_tokens), near) if self.global_tokens else (near,)

    def ranges(self, families, i):
        return _window_ranges(i, -(-self.window // 2), self.global_tokens)

    def begin(self, i):
        first = i - -(-self.window // 2)
        return first if first >= self.global_tokens else None


def _window_ranges(i: int, left: int, first: int) -> Ranges:
    """Of the `first` tokens and the last ones."""
    near = range(max(first, i - left), i + 1)
    return [(0, range(min(first, i + 1))), (1, near)] if first else [(0, near)]


@dataclass(frozen=True, kw_only=True)
class Blocks(Pattern):
    """The query's block of `size` tokens, and nothing else."""

    size: int = 128
    is_nested = True

    def allows(self, family, i, j, n):
        return i // self.size == j // self.size

    def parts(self, n, family):
        return diagonal(0, n, self.size, causal=self.causal)

    def kept(self, families, margin):
        return (recent(self.size - 1, margin),)

    def ranges(self, families, i):
        return [(0, range(i // self.size * self.size, i + 1))]

    def begin(self, i):
        return i // self.size * self.size


@dataclass(frozen=True, kw_only=True)
class Axial(Pattern):
    """Ho et al.: tokens row-major on a grid with `cols` columns (default ⌈√n⌉); the query's row; then its column."""

    cols: int | None = None
    families = 2

    def sized(self, n):
        return replace(self, cols=self.cols or root(n))

    @property
    def is_nested(self):
        return self.cols is not None

    def allows(self, family, i, j, n):
        cols = self.cols or root(n)
        return i // cols == j // cols if family == 0 else i % cols == j % cols

    def parts(self, n, family):
        cols = self.cols or root(n)
        row = diagonal(0, n, cols, causal=self.causal)
        if family == 0:
            return row
        if family == 1:
            return columns(n, cols, causal=self.causal)
        return row + columns(n, cols, causal=self.causal, xlo=0, xhi=0)

    def kept(self, families, margin):
        return (recent(self.cols - 1, margin),) if set(families) == {0} else EVERYTHING

    def ranges(self, families, i):
        return [(0, range(i // self.cols * self.cols, i + 1))] if set(families) == {0} else None

    def named(self, family, i):
        c = self.cols
        row, column = i[..., None] - np.arange(c), i[..., None] - c * np.arange(int(i.max()) // c + 1)
        row = np.where(row >= i[..., None] // c * c, row, -1)
        column = np.maximum(column, -1)
        keys = row if family == 0 else column if family == 1 else np.concatenate((row, column[..., 1:]), -1)
        return np.sort(keys, -1)


@dataclass(frozen=True, kw_only=True)
class Logsparse(Pattern):
    """`suffix` (Ren et al. 2021, section 4.2 and Figure 1B): i itself and, for every suffix sum c > 0 of the binary
    digits of i (i first, then i without its lowest set bit, and so on), the token c - 1: the last token of every block
    of Combiner-Logsparse; bidirectional also the mirror image, the same on n-1-i.
    `powers` (Li et al. 2019): i itself and the tokens 1, 2, 4, 8 … steps away, to both sides when bidirectional.
    """

    sets: str = "suffix"

    @property
    def is_nested(self):
        return self.causal or self.sets == "powers"

    def allows(self, family, i, j, n):
        if self.sets == "powers":
            gap = abs(i - j)
            return (gap & (gap - 1)) == 0  # 0 or a power of two
        before = self._ends_a_block(i, j)
        return before if self.causal else before | self._ends_a_block(n - 1 - i, n - 1 - j)

    @staticmethod
    def _ends_a_block(i, j):
        """j = i, or j + 1 is what is left of i when some of its lowest bits are cleared."""
        c = j + 1
        return (i == j) | ((c <= i) & ((i & -(c & -c)) == c))

    def csr(self, n, family=None):
        if self.sets == "powers":
            steps = np.array([0] + [1 << b for b in range((n - 1).bit_length())])
            offsets = -steps[::-1] if self.causal else np.concatenate([-steps[::-1], steps[1:]])
            keys = np.arange(n)[:, None] + offsets  # (n, ≤ 2 log n + 1), ascending
        else:
            keys = self._suffixes(n)
            if not self.causal:
                both = np.concatenate([keys, np.where(keys < 0, -1, n - 1 - keys)[::-1]], 1)
                keys = np.sort(both, 1)
                keys[:, 1:][keys[:, 1:] == keys[:, :-1]] = -1  # oneself is in both halves
                keys = np.sort(keys, 1)
        real = (keys >= 0) & (keys < n)
        return pointers(real.sum(1)), keys[real].astype(np.int32)

    def listed(self, n, family, lengths):
        ahead = on_device(self._suffixes(n), lengths)  # (n, most), -1 = none
        place, last = torch.arange(n, device=lengths.device), lengths[:, None] - 1  # (n,), (B, 1)
        back = ahead[(last - place).clamp(min=0)]  # (B, n, most): counted from the end of the row
        again = (back < 0) | (back == (last - place)[..., None])  # oneself is in both halves
        back = torch.where(again, n, last[..., None] - back)
        keys = torch.cat((torch.where(ahead < 0, n, ahead).expand(back.shape), back), 2)
        return torch.where((place <= last)[..., None], keys, n).sort(2).values

    @staticmethod
    def _suffixes(n: int) -> np.ndarray:
        """The keys before and at i, (n, bits + 1), ascending, -1 where there is none."""
        left = np.arange(n)
        keys = [left]
        for _ in range(max(1, (n - 1).bit_length())):
            keys.append(np.where(left > 0, left - 1, -1))
            left = left & (left - 1)
        return np.sort(np.stack(keys, 1), 1)
