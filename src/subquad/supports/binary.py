"""Combiner's plan over binary blocks of the sequence: everything before a query as O(log n) blocks of powers of two."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.supports.partitions import Group, GroupSet, Partition
from subquad.supports.parts import MEMBERS, NODES, NODES_BACK, Grid, Part, Plan, make_plan
from subquad.supports.support import Within

RADICES = ((256, 16), (512, 32))  # up to so many tokens positions are read in this base, above in base 64


def _radix(n: int) -> int:
    """The base in which the positions of n tokens are read."""
    return next((radix for longest, radix in RADICES if n <= longest), 64)


@dataclass(frozen=True, kw_only=True)
class Logsparse(Partition):
    """Section 4.2 and appendix B: i itself and, for every set bit l of i, block (i>>l)-1 of size 2^l.

    A block of level 0 is one token, hence direct. Bidirectional adds the mirror image, the same on n-1-i.

    Blocks with an even number are the only ones ever asked for. Of these exactly one ends with each token, so all
    levels fit one array as long as the sequence, a Fenwick tree, and the blocks of i are read off the bits of i: i,
    then i without its lowest bit, and so on. In base 64 these are, per digit of i, some of 63 nodes: one masked block
    attention per digit, 64 queries × 63 nodes for the lowest, 4096 × 63 for the next. n·63 products per digit. Short
    sequences take a smaller base: fewer products, in blocks that are smaller.
    """

    def blocks(self, n: int, i: int) -> list[range]:
        def before(i: int) -> list[range]:
            levels = [level for level in range(i.bit_length()) if i >> level & 1]
            return [range(((i >> level) - 1) << level, (i >> level) << level) for level in levels]

        found = before(i)
        if not self.causal:
            found += [range(n - block.stop, n - block.start) for block in before(n - 1 - i)]
        return found

    def direct(self, n, i):
        return [i, *(block.start for block in self.blocks(n, i) if len(block) == 1)]

    def groups(self, n, i):
        return [Group(block) for block in self.blocks(n, i) if len(block) > 1]

    def group_sets(self, n):
        return (GroupSet("nodes"),) if self.causal else (GroupSet("nodes"), GroupSet("nodes-back"))

    def plan(self, n, which):
        """Sources: 0 the tokens, 1 the nodes, 2 the mirrored nodes. An even token is a node and sees itself there."""
        if which.startswith("members"):
            return self._members(n)
        if which == "back":
            return make_plan(self._digits(n, 2, True), n)
        parts = self._digits(n, 1, False)
        if n > 1:
            odd = Grid(1, n // 2, 2)
            parts.append(Part(odd, odd))
        return make_plan(parts if self.causal or which == "ahead" else parts + self._digits(n, 2, True), n)

    def within(self, which, length):
        if which.startswith("members"):
            return Within(length, (length,))
        return Within(length, (length, length, length)) if self.causal or which == "ahead" else None

    def halves(self, which):
        return ("ahead", "back") if which == "main" and not self.causal else None

    @staticmethod
    def _digits(n: int, source: int, back: bool) -> list[Part]:
        """Queries to nodes, one digit after the other; a last block that is not full is a part of its own.

        `back` mirrors it: blocks are counted from the end, and so are the nodes.
        """
        parts, unit, radix = [], 1, _radix(n)
        while unit < max(n, 2):
            width = unit * radix
            full, rest = divmod(n, width)
            starts = (rest, 0) if back else (0, full * width)
            for start, blocks, rows in zip(starts, (full, 1), (width, rest), strict=True):
                nodes = (rows - 1) // unit  # of the block, at distances unit, 2·unit … from where it is counted
                if unit == 1 and rows % 2 and not back:  # nobody else asks for the last one
                    nodes = rows
                if not blocks or nodes < 1:
                    continue
                first = start + rows - nodes * unit if back else start + unit - 1
                queries, keys = Grid(start, blocks, width, rows), Grid(first, blocks, width, nodes, unit)
                parts.append(Part(queries, keys, source, rule=NODES_BACK if back else NODES))
            unit = width
        return parts

    @staticmethod
    def _members(n: int) -> Plan:
        """Nodes to their tokens: those inside a block of a digit by one masked block, larger ones by one query each."""
        radix = _radix(n)
        full, rest = divmod(n, radix)
        parts = []
        if full:
            inside = Grid(0, full, radix, radix - 1)
            parts.append(Part(inside, inside, rule=MEMBERS))
        if rest:
            inside = Grid.of(range(full * radix, n))
            parts.append(Part(inside, inside, rule=MEMBERS))
        size = radix
        while size <= n:
            count = (n // size + 1) // 2  # blocks of this size with an even number
            parts.append(Part(Grid(size - 1, count, 2 * size), Grid(0, count, 2 * size, size)))
            size *= 2
        return make_plan(parts, n)
