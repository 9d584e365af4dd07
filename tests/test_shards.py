"""Plans that are cut for several processes: together the pieces are the plan, with the same positions and numbers."""

import numpy as np
import pytest
import torch

from subquad.core.hashing import dropout_seed, seed_from
from subquad.supports.longshort import LongShort
from subquad.supports.patterns import Axial, Blocks, Fixed, Longformer, Star, Strided
from subquad.supports.shards import Shard, aligned, divide, in_blocks
from subquad.supports.slices import Slices
from subquad.supports.spans import Fixed as Spans
from subquad.supports.spans import Tree, Window
from subquad.supports.support import plan_of

CASES = [
    *((Spans(causal=c, span=5), "main") for c in (True, False)),
    *((Spans(causal=c, span=5), "members:1") for c in (True, False)),
    *((Window(causal=c, span=4, window=9, sinks=3), "main") for c in (True, False)),
    *((Tree(causal=c, span=3, depth=2), "main") for c in (True, False)),
    (Tree(causal=False, span=3, depth=2), "members:2"),
    *((Slices(causal=c, size=6, reach=2, placed=p), "main") for c in (True, False) for p in (True, False)),
    *((LongShort(causal=c, window=4, rank=2, segment=6), "main") for c in (True, False)),
    *((Strided(causal=c, w=7), which) for c in (True, False) for which in ("0", "1", "union")),
    *((Fixed(causal=c, w=7, close=True), which) for c in (True, False) for which in ("0", "1", "union")),
    *((Longformer(causal=c, window=9, global_tokens=2), "union") for c in (True, False)),
    (Longformer(causal=False, window=600), "union"),  # nearly everyone to everyone: one part with a mask
    (Blocks(causal=False, size=9), "union"),
    (Axial(causal=False, cols=7), "union"),
    (Star(causal=False, w=2), "union"),
]


def pairs(plan, number, origin=0):
    """(query, source, key) of a plan, by their numbers in the whole sequence: each may stand there once."""
    found = []
    for part in plan.parts:
        seen = np.broadcast_to(part.allowed(), (part.queries.blocks, part.queries.length, part.keys.length))
        a, r, s = seen.nonzero()
        assert part.origin == origin
        queries, keys, stored = (
            part.queries.places()[a, r],
            (part.numbers or part.keys).places()[a, s],
            part.keys.places()[a, s],
        )
        assert (number(part.source)[stored] == keys).all(), "a key is stored where the plan says"
        found += zip((queries + origin).tolist(), [part.source] * len(keys), keys.tolist(), strict=True)
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize(("support", "which"), CASES, ids=lambda x: x if isinstance(x, str) else repr(x))
def test_the_pieces_of_a_plan_are_the_plan(support, which):
    for n in (1, 2, 23, 61, 300 if support == Longformer(window=600) else 64):
        whole = plan_of(support.text, n, which)
        everything = pairs(whole, lambda source: np.arange(10_000))
        sources = 1 + max(part.source for part in whole.parts) if whole.parts else 1
        keys = [1 + max((s[2] for s in everything if s[1] == source), default=-1) for source in range(sources)]
        for processes in (1, 2, 3):
            union = set()
            for rank in range(processes):
                rows = divide(whole.rows, processes)[rank]
                own = tuple(divide(m, processes)[rank] for m in keys)
                shard = Shard(of=support.text, rows=rows, sources=own)
                needed = shard.needed(n, which)
                here = pairs(plan_of(shard.text, n, f"{which}:local"), lambda s, own=own: np.arange(*own[s]), rows[0])
                sent = pairs(plan_of(shard.text, n, f"{which}:remote"), lambda s, x=needed: x[s], rows[0])
                assert not here & sent
                union |= here | sent
                assert all(key in needed[source] for _, source, key in sent)
            assert union == everything


def test_cuts():
    assert divide(10, 3) == ((0, 4), (4, 7), (7, 10)) and divide(1, 2) == ((0, 1), (1, 1))
    assert aligned(divide(10, 3), 4, 10) == ((0, 4), (4, 8), (8, 10))
    assert aligned(divide(10, 3), 64, 10) == ((0, 0), (0, 0), (0, 10))
    assert in_blocks(((0, 4), (4, 8), (8, 10)), 4) == ((0, 1), (1, 2), (2, 3))


def test_a_seed_for_later_instances():
    """Row 3 of a batch drops by itself what it drops inside the batch."""
    for seed in (0, 17, 2**61 + 5, -3):
        moved = int(dropout_seed(seed_from(torch.tensor(seed), 12)))
        assert (moved - int(dropout_seed(torch.tensor(seed))) - 12 * 0x9E3779B97F4A7C15) % 2**64 == 0
