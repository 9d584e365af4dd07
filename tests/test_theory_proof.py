"""The constructive proof: verified on whole grids, exact, and broken where an assumption is."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.theory import prove
from subquad.theory.construction import embed, grid, max_shifts, quantisers, run, selective_shifts
from subquad.theory.counting import sparse_blocks
from subquad.theory.hops import hops

OWN = [[[0, 1], [1], [2, 3], [3, 0]], [[0], [1, 2], [2], [3, 2]]]  # two families, γ is not the identity


@pytest.mark.parametrize("delta", ["1/2", "1/3"])
@pytest.mark.parametrize("source", ["strided:w=2", "fixed:w=2", "star:w=1", "full", "axial:cols=2", OWN], ids=str)
def test_the_construction_on_the_whole_grid(source, delta):
    proof = prove(source, 4, 1, delta)
    assert proof.holds, str(proof)
    assert len(proof.inputs) == int(1 / Fraction(delta)) ** 4
    p, s = len(proof.support.heads), hops(proof.support.heads).steps
    blocks = sparse_blocks(4, 1, delta, p, s)
    assert list(proof.layers.values()) == [blocks.quantisation, blocks.context, blocks.values]


@pytest.mark.parametrize(("source", "n", "d", "delta"), [("star:w=1", 3, 2, "1/2"), ("fixed:w=2", 2, 2, "1/3")])
def test_wider_tokens(source, n, d, delta):
    assert prove(source, n, d, delta, "sum").holds


def test_the_layers_cycle_through_the_families():
    plan = prove("strided:w=2", 4).plan
    layers = [*selective_shifts(plan), *max_shifts(plan)]
    assert [layer.family for layer in layers] == [t % 2 for t in range(len(layers))]


def test_the_network_equals_the_function_inside_the_cubes_too():
    """The network as a whole, from a point of the domain to the output, not stage by stage."""
    proof = prove("fixed:w=2", 4, 1, "1/2", lambda x: x * x - 3)
    plan = proof.plan
    layers = [*quantisers(plan), *selective_shifts(plan), *max_shifts(plan), *proof.values]
    x = grid(4, 1, 2, plan.unit) + 3 * plan.delta // 4
    assert (run(plan, layers, embed(plan, x)) == proof.outputs).all()
    first = np.array([Fraction(int(v), plan.unit) for v in proof.outputs[-1].flat])
    assert (first == Fraction(1, 4) - 3).all()  # x = (1/2, 1/2, 1/2, 1/2) is the last of the grid


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["1/2", "1/3"]))
def test_random_functions_on_random_patterns(seed, delta):
    generator = np.random.default_rng(seed)
    masks = generator.random((2, 3, 3)) < 0.4
    masks |= np.eye(3, dtype=bool)
    masks[generator.integers(2), [1, 2, 0], [0, 1, 2]] = True  # a ring: paths and hops are there
    table = {}

    def function(x):
        return table.setdefault(tuple(x.flat), generator.normal(size=(1, 3)) * 10.0 ** generator.integers(0, 9))

    proof = prove(masks, 3, 1, delta, function)
    assert proof.holds, str(proof)


def test_large_outputs_do_not_collide_with_ids():
    """Lemma 8 as printed would catch a column twice when an output's id is one of the ids."""
    ids = prove("full", 3).context[:, 0]
    hit = Fraction(int(max(ids.flat)), prove("full", 3).plan.unit)
    proof = prove("full", 3, 1, "1/2", lambda x: 0 * x + hit)
    assert proof.holds and proof.plan.lift > 1


@pytest.mark.parametrize("spec", ["full", "fixed:w=2", "strided:w=2", "star:w=1,relay=first"])
def test_causal_networks_compute_causal_functions(spec):
    for n, d, delta in ((4, 1, "1/2"), (3, 1, "1/3"), (2, 2, "1/2")):
        assert prove(spec, n, d, delta, "cumsum", causal=True).holds
    with pytest.raises(ValueError, match="output 0 depends on a later token"):
        prove(spec, 3, 1, "1/2", lambda x: x[:, ::-1], causal=True)


@pytest.mark.parametrize(
    ("sets", "stage", "words"),
    [
        ([[1], [0, 2], [0, 1]], "selective shifts", "Assumption 1.1"),  # nobody sees itself
        ([[0, 1, 2], [1], [2]], "embedding", "no order"),  # 1 and 2 on no common path
        ([[0, 1], [0, 1], [1, 2]], "Property 7.2", "token 0 never reaches token 2"),
    ],
)
def test_where_a_violated_assumption_breaks_the_proof(sets, stage, words):
    proof = prove(sets, 3)
    assert not proof.holds and proof.breaks.name.startswith(stage)
    assert words in str(proof)
    assert not proof.stages[-1].holds  # and no network computes the function


def test_fixed_with_an_open_segment_breaks_at_the_hops():
    proof = prove("fixed:w=2", 3)
    assert proof.breaks.name.startswith("Property 7.2") and "token 0 never reaches token 2" in proof.breaks.detail
    assert prove("fixed:w=2,close=true", 3).holds


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("star", 1), "n is 1"),
        (("star", 4, 0), "d must be an integer ≥ 1, not 0"),
        (("star", 4, 1, 0.4), "1/delta"),
        (("star", 9, 2), "columns"),
        (("star", 3, 1, "1/2", "nothing"), "reverse, sum, mean"),
        (("star", 3, 1, "1/2", lambda x: x[:, :2]), r"\(d, n\)"),
        (("composite-slice", 4), "neither a probability map"),
        (("star", 3, 1, "1/2", lambda x: x * float("nan")), "finite numbers"),
        (("star", 3, 1, "1/2", lambda x: x * 1j), "finite numbers"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        prove(*arguments)


def test_a_function_must_be_callable():
    with pytest.raises(TypeError, match="name or a callable"):
        prove("star", 3, 1, "1/2", 7)
