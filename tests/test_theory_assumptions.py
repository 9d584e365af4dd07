"""Assumption 1: hops against set recursion, paths against exhaustive search, the facts about the known patterns."""

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad
from subquad.supports import patterns as P
from subquad.supports.drawn import Random
from subquad.theory import check, read
from subquad.theory.counting import connections, dense_blocks, growth, sparse_blocks, sparsity
from subquad.theory.hamiltonian import cut_vertex, exact, hamiltonian_path, incomparable, is_path, no_cover, search
from subquad.theory.hops import hop_sets, hops, unpack
from subquad.theory.sbm import lemma1, lemma2
from subquad.theory.sets import UNDECLARED
from subquad.theory.survey import Row, specs


@st.composite
def random_sets(draw, most: int = 9, families: int = 3):
    """p families of n sets, with or without self-loops, no set empty."""
    n, p = draw(st.integers(2, most)), draw(st.integers(1, families))
    loops = draw(st.booleans())
    chance = draw(st.sampled_from([0.05, 0.15, 0.3, 0.6]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    masks = generator.random((p, n, n)) < chance
    if loops:
        masks |= np.eye(n, dtype=bool)
    rows = ~masks.any(2)
    masks[rows, generator.integers(0, n, rows.sum())] = True
    return masks


def brute_hops(masks: np.ndarray, causal: bool = False) -> int | None:
    """The recursion of section 3.2 with Python sets, until all is seen or a state comes back."""
    p, n, _ = masks.shape
    sets = [[frozenset(np.flatnonzero(row).tolist()) for row in mask] for mask in masks]
    wanted = [frozenset(range(k + 1)) if causal else frozenset(range(n)) for k in range(n)]
    current, met, t = tuple(sets[0]), set(), 1
    while True:
        if all(have >= want for have, want in zip(current, wanted, strict=True)):
            return t
        if (t % p, current) in met:
            return None
        met.add((t % p, current))
        family = sets[t % p]
        current = tuple(frozenset().union(*(current[j] for j in family[k])) for k in range(n))
        t += 1


def brute_path(mask: np.ndarray) -> bool:
    n = len(mask)
    return any(all(mask[b, a] for a, b in pairwise(order)) for order in permutations(range(n)))


@settings(max_examples=300)
@given(random_sets())
def test_hops_agree_with_set_recursion(masks):
    found = hops(read(torch.from_numpy(masks)).cycle)
    assert found.steps == brute_hops(masks)
    if found.witness is not None:
        k, j = found.witness
        walk = hop_sets(read(torch.from_numpy(masks)).cycle)
        for _ in range(len(masks) * (masks.shape[1] + 2)):
            assert not unpack(next(walk), masks.shape[1])[k, j]


@settings(max_examples=150)
@given(random_sets())
def test_causal_hops_agree_with_set_recursion(masks):
    masks = np.tril(masks)
    masks |= np.eye(masks.shape[1], dtype=bool) & ~masks.any(2)[..., None]  # no empty sets
    support = read(torch.from_numpy(masks), causal=True)
    assert hops(support.cycle, causal=True).steps == brute_hops(masks, causal=True)


def test_a_circle_without_loops_never_fills_although_every_pair_meets():
    ring = [[(k + 1) % 5] for k in range(5)]
    found = hops(read(ring).cycle)
    assert found.steps is None and found.witness is None and "circle" in found.why(False)


@pytest.mark.parametrize("n", [63, 64, 65, 130])
def test_hops_across_word_boundaries(n):
    verdict = hops(read(P.Longformer(window=2), n).cycle)
    assert verdict.steps == n - 1
    apart = [[k, k ^ 1 if k ^ 1 < n else k] for k in range(n)]
    assert hops(read(apart).cycle).witness == (0, 2)


@settings(max_examples=200)
@given(random_sets(most=7, families=1))
def test_paths_agree_with_exhaustive_search(masks):
    family = read(torch.from_numpy(masks)).union
    there = brute_path(masks[0])
    path = hamiltonian_path(family)
    assert path.status == ("found" if there else "impossible")
    if there:
        assert is_path(family, path.order)
        assert not (incomparable(family) or no_cover(family) or cut_vertex(family))
    order = search(family)  # the heuristic may miss a path, but what it returns is one
    assert order is None or is_path(family, order)


@pytest.mark.parametrize("seed", range(3))
def test_paths_of_nine_tokens_agree_with_exhaustive_search(seed):
    generator = np.random.default_rng(seed)
    mask = (generator.random((9, 9)) < 0.17) | np.eye(9, dtype=bool)
    family = read(torch.from_numpy(mask)).union
    assert (exact(family) is not None) == brute_path(mask)


def test_larger_paths_are_found_or_ruled_out_never_guessed():
    def path_of(sets):
        return hamiltonian_path(read(sets).union)

    n = 30
    assert path_of([[k, min(k + 1, n - 1)] for k in range(n)]).status == "found"  # the reverse order
    islands = path_of([[k, k ^ 1] for k in range(n)])
    assert islands.status == "impossible" and "reach each other" in islands.why
    star = torch.eye(n, dtype=torch.bool)
    star[0] = star[:, 0] = True  # everyone through one token
    assert "matching" in path_of(star).why
    legs = torch.eye(31, dtype=torch.bool)  # three legs of ten tokens that meet in token 30
    for leg in range(3):
        tokens = [30, *range(leg * 10, leg * 10 + 10)]
        for a, b in pairwise(tokens):
            legs[a, b] = legs[b, a] = True
    assert path_of(legs).status == "impossible" and "without token 30" in path_of(legs).why
    assert hamiltonian_path(read(P.Axial(), 250, layout="union").union).status == "found"
    assert hamiltonian_path(read(Random(density=0.05), 200).union).status == "found"


def test_a_path_must_be_a_permutation_along_edges():
    family = read([[0, 1], [0, 1], [1, 2]]).union
    assert is_path(family, np.array([0, 1, 2]))
    assert not is_path(family, np.array([0, 2, 1]))
    assert not is_path(family, np.array([0, 1, 1]))


# ---- the facts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "n", "steps", "witness"),
    [
        ("full", 64, 1, None),
        ("strided:w=16", 256, 3, None),  # the paper says 2
        ("fixed:w=16", 256, 2, None),
        ("fixed:w=16", 250, None, (0, 240)),
        ("fixed:w=16,close=true", 250, 2, None),
        ("star", 256, 2, None),
        ("longformer:window=16", 128, 16, None),
        ("longformer:window=16", 256, 32, None),
        ("longformer:window=16,global_tokens=1", 256, 2, None),
        ("axial", 64, 2, None),
    ],
)
def test_hops_of_the_known_patterns(spec, n, steps, witness):
    verdict = check(spec, n)
    assert (verdict.hops.steps, verdict.hops.witness) == (steps, witness)
    assert verdict.self_loops and verdict.hamiltonian_path
    assert verdict.universal is (steps is not None)
    assert verdict.refuted is (steps is None)


def test_random_depends_on_its_seed_and_is_computed():
    steps = [check(f"random:density=0.06,shared=true,seed={seed}", 96).hops.steps for seed in range(8)]
    assert len(set(steps)) > 1
    support = read("random:density=0.06,shared=true,seed=3", 96)
    mask = subquad.attention("random:density=0.06,shared=true,seed=3").support(96).numpy()
    assert hops(support.cycle).steps == brute_hops(mask[None])


@pytest.mark.parametrize(
    ("spec", "steps"), [("full", 1), ("strided:w=8", 3), ("fixed:w=8", 2), ("star:w=4", 16), ("axial", None)]
)
def test_causal_patterns_are_reported_under_the_causal_variant(spec, steps):
    verdict = check(spec, 64, causal=True)
    found = verdict.to_dict()
    assert found["variant"] == "causal" and found["hops"] == steps
    assert found["universal"] is (steps is not None)
    assert any("causal variant" in reason for reason in verdict.reasons)
    if steps is not None:
        assert verdict.path.identity  # the only order that looks back
    plain = hops(read(subquad.attention(spec, causal=True), 64).cycle, causal=False)
    assert plain.steps is None and plain.witness[0] == 0  # 1.3 as printed cannot hold


def test_head_layouts():
    n, w = 64, 8
    sequential, union, multihead = (check(f"strided:w={w},heads={h}", n) for h in ("sequential", "union", "multihead"))
    masks = P.Strided(w=w).mask(n, 0).numpy(), P.Strided(w=w).mask(n, 1).numpy()
    assert sequential.hops.steps == brute_hops(np.stack(masks))
    assert union.hops.steps == multihead.hops.steps == brute_hops((masks[0] | masks[1])[None])
    assert connections(sequential.support) == connections(multihead.support) < connections(union.support)
    assert len(multihead.support.heads) == 2 and len(union.support.heads) == 1
    one_bare = [[[0, 1], [0, 1]], [[1], [0, 1]]]  # head family 1: token 0 does not see itself
    assert check(one_bare, layout="union").self_loops
    for layout in ("sequential", "multihead"):
        assert check(one_bare, layout=layout).loops == (1, 0)


def test_an_sbm_is_read_through_its_expected_graph():
    sbm = check("sbm:clusters=4", 16)
    assert sbm.hops.steps == 1 and sbm.universal is True and sbm.support.view == "sampled"


OUTSIDE = ["composite-slice", "routing", "linear", "performer", "sinkhorn", "reformer", "synthesizer", "fnet", "moba"]


@pytest.mark.parametrize("spec", OUTSIDE)
def test_what_the_theorem_does_not_cover_gets_a_reason_and_no_conditions(spec):
    verdict = check(spec, 16)
    assert verdict.support.view == "other" and verdict.universal is None and verdict.answer == "not covered"
    assert "universal? not covered (" in str(verdict) and "possible connections per layer" in str(verdict)
    assert "does not cover it" in verdict.reasons[0] and ("summaries" in str(verdict)) is (spec == "composite-slice")
    assert not any(line.startswith(("1.1", "1.2", "2 ")) for line in verdict.reasons)
    assert any(line.startswith("1.3") and "possible pairs" in line for line in verdict.reasons)
    found = verdict.to_dict()
    assert found["answer"] == "not covered" and found["hops"] == 1
    for claim in ("assumption1", "assumption2", "self_loops", "hamiltonian_path", "path", "path_why", "map"):
        assert found[claim] is None, claim


def test_reformer_says_why_it_is_not_covered():
    reason = check("reformer", 16).reasons[0]
    assert "its keys are its queries at length 1" in reason and "does not attend to itself" in reason


@pytest.mark.parametrize("causal", [False, True])
def test_every_mechanism_that_is_not_covered_has_a_reason_of_its_own(causal):
    supports = [read(spec, 8, causal=causal) for spec in specs(causal)]
    assert [s.name for s in supports if s.view == "other" and s.why_other == UNDECLARED] == []


def test_sets_without_a_loop_count_only_where_the_theorem_asks_for_one():
    support = replace(read([[1, 2], [0, 1], [1, 2]]), view="other")
    assert check(support).answer == "not covered" and check(support).self_loops is None
    one_way = check(replace(read([[0], [0, 1]]), view="other"))
    assert one_way.refuted and one_way.answer == "no" and "token 0 never reaches token 1" in str(one_way)
    with pytest.raises(ValueError, match="reformer has no probability map to replace"):
        check("reformer", 8, map=torch.softmax)


def test_the_table_has_no_conditions_of_what_is_not_covered():
    assert Row("reformer", check("reformer", 16), 2.0).cells()[1:5] == ["not covered", "–", "–", "1"]
    one_way = check(replace(read([[0], [0, 1]]), view="other"))
    assert Row("mine", one_way, 2.0).cells()[1:5] == ["no", "–", "–", "token 0 never reaches token 1"]
    assert Row("full", check("full", 16), 2.0).cells()[1:5] == ["yes", "yes", "identity", "1"]


def test_a_class_may_say_how_it_is_to_be_read():
    class Declared(type(subquad.attention("full"))):
        theory_view = "other"

    declared = Declared(subquad.attention("full").options)
    assert check(declared, 8).universal is None and check("full", 8).universal is True
    assert "declares neither" in check(declared, 8).reasons[0]
    Declared.theory_reason = "its weights are mine"
    assert "its weights are mine" in check(declared, 8).reasons[0]
    Declared.theory_view = "guess"
    with pytest.raises(ValueError, match="map, summaries, sampled, other"):
        check(declared, 8)


def test_all_sources_give_the_same_answer():
    n, pattern = 20, P.Fixed(w=4)
    masks = torch.stack([pattern.mask(n, f) for f in range(2)])
    sets = [[row.nonzero().flatten().tolist() for row in mask] for mask in masks]
    answers = []
    for source in ("fixed:w=4", subquad.attention("fixed", w=4), pattern, masks, masks.numpy(), list(masks), sets):
        found = check(source, n).to_dict()
        answers.append([found[key] for key in ("universal", "hops", "hops_witness", "connections", "sparsity")])
    assert all(answer == answers[0] for answer in answers) and answers[0][:2] == [True, 2]


def test_missing_loops_and_what_is_refuted():
    bare = check([[1, 2], [0, 1], [1, 2]])
    assert bare.universal is False and not bare.refuted and bare.loops == (0, 0)
    assert any("does not prove" in reason for reason in bare.reasons)
    one_way = check([[0], [0, 1]])  # the paper's example in section 3.2
    assert one_way.refuted and one_way.hops.witness == (0, 1)
    assert "token 0 never reaches token 1" in str(one_way)


# ---- counting ----------------------------------------------------------------------------------------------


def test_counting():
    assert abs(growth("star", 512) - 1) < 0.02
    assert abs(growth("strided", 512) - 1.5) < 0.05
    assert growth("full", 64) == pytest.approx(2)
    strided = read("strided:w=16", 256)
    assert round(sparsity(strided), 2) == 0.94 and round(sparsity(read("strided:w=16,heads=union", 256)), 2) == 0.88
    assert sparsity(read("full", 16, causal=True)) == 0
    blocks = sparse_blocks(4, 1, "1/2", 2, 3)
    assert (blocks.quantisation, blocks.context, blocks.values) == (8, 15, 64)
    assert dense_blocks(4, 1, 0.5).context == 9 and blocks.values == dense_blocks(4, 1, 0.5).values
    for delta in (0.4, "2/3", 1, 0, -0.5):
        with pytest.raises(ValueError, match="1/delta must be an integer"):
            sparse_blocks(4, 1, delta, 1, 1)


# ---- SBM, appendix A ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(16, 4), (60, 7), (64, 8), (200, 5)])
def test_lemma_2(n, k):
    printed, mended = check(lemma2(n, k)), check(lemma2(n, k, order=(1, 3, 2)))
    assert printed.universal and mended.universal
    assert (printed.hops.steps, mended.hops.steps) == (5, 3)
    clusters = lemma2(n, k).cycle[0]
    assert len({tuple(clusters.of(i)) for i in range(n)}) == k  # no cluster of its own for the last token


@pytest.mark.parametrize("n", [4, 7])
def test_lemma_1_against_simulation(n):
    found = lemma1(n, samples=3000)
    assert found.expected >= 1
    assert abs(found.mean - found.expected) < 4 * found.error
    assert found.share < 1 or n == 4
    assert lemma1(n, p=1.0, samples=2).mean == pytest.approx(found.expected / found.p**n)  # every order is a cycle


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([[0, 1], []], ValueError, "the set of token 1 is empty"),
        ([[0, 1], [2]], ValueError, "0 … 1"),
        ([[0, 1], [-1]], ValueError, "0 … 1"),
        ([[0]], ValueError, "n is 1"),
        (torch.ones(2, 3, dtype=torch.bool), ValueError, "n, n"),
        (torch.ones(2, 2), TypeError, "bool"),
        ([np.ones((2, 2), dtype=bool), np.ones((3, 3), dtype=bool)], ValueError, "one shape"),
        ([[[0, 1], [1]], [[0], [1], [2]]], ValueError, "one set per token"),
        (torch.zeros(3, 3, dtype=torch.bool), ValueError, "the set of token 0 is empty"),
        (7, TypeError, "sets"),
    ],
)
def test_bad_sets(source, error, message):
    with pytest.raises(error, match=message):
        check(source)


def test_bad_arguments():
    with pytest.raises(ValueError, match="n is 1"):
        check("star", 1)
    with pytest.raises(ValueError, match="n is None"):
        check("star")
    with pytest.raises(ValueError, match="given for length 2"):
        check([[0, 1], [1, 0]], 5)
    with pytest.raises(ValueError, match="layout of its own"):
        check("star", 8, layout="union")
    with pytest.raises(ValueError, match="sequential, union, multihead"):
        check(P.Star(), 8, layout="both")
    with pytest.raises(TypeError, match="map is 3"):
        check("star", 8, map=3)
    with pytest.raises(ValueError, match="clusters"):
        lemma2(8, 9)
    with pytest.raises(ValueError, match="3 ≤ n"):
        lemma1(2)
