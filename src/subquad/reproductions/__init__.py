"""Every table and figure of the four papers: what it says, and how it is made again (`subquad reproduce`)."""

from __future__ import annotations

from subquad.core.names import unknown
from subquad.reproductions import combiner, composite_slice, sbm, sparse
from subquad.reproductions.declare import Reproduction

PAPERS = {
    "Combiner (Ren et al. 2021)": combiner.ALL,
    "Composite Slice (Lee et al. 2023)": composite_slice.ALL,
    "Sparse universality (Yun et al. 2020)": sparse.ALL,
    "SBM-Transformer (Cho et al. 2022)": sbm.ALL,
}
REPRODUCTIONS: dict[str, Reproduction] = {each.key: each for paper in PAPERS.values() for each in paper}


def find(key: str) -> Reproduction:
    """The table or figure of that name; one that is another one's with more decimals is that other one."""
    if key not in REPRODUCTIONS:
        raise unknown("table or figure", key, REPRODUCTIONS)
    found = REPRODUCTIONS[key]
    return REPRODUCTIONS[found.same_as] if found.kind == "same" else found
