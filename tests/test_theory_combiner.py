"""Combiner's theory: Proposition 1, examined and run, and the rank-1 blocks of section 3.3."""

from itertools import pairwise

import pytest
import torch

import subquad
from subquad.attention.base import Call
from subquad.supports import partitions
from subquad.theory import check, prove, theorem1
from subquad.theory.combiner import direct_sets, proposition1
from subquad.theory.sets import plans_of, read

PROVED = [
    "combiner-fixed:span=2",
    "combiner-fixed:span=3",
    "combiner-fixed:span=2,abstraction=deepsets-max",
    "combiner-logsparse",
    "combiner-axial:plan=vertical,cols=2",
    "combiner-axial:plan=horizontal,cols=2",
    "combiner-mixture:cols=2",
    "combiner-mixture:cols=2,joint=true",
    "combiner-tree:span=2,depth=2",
    "combiner-routing:clusters=2",
    "combiner-fixed:span=2,abstraction=mean",
    "combiner-logsparse:abstraction=deepsets-mean",
]


@pytest.mark.parametrize("spec", PROVED)
@pytest.mark.parametrize("causal", [False, True])
def test_proposition_1_is_proved_for_pooled_groups_and_runs(spec, causal):
    verdict = check(spec, 4, causal=causal)
    assert verdict.proposition1.proved and verdict.universal is True
    proof = prove(spec, 4, 1, "1/2", causal=causal)
    assert proof.holds and proof.stages[-1].name.startswith("summaries"), str(proof)


def test_proposition_1_at_other_sizes():
    for spec, n, d, delta in (("combiner-fixed:span=2", 5, 1, "1/2"), ("combiner-tree:span=2", 3, 1, "1/3")):
        assert prove(spec, n, d, delta).holds
    assert prove("combiner-fixed:span=1", 3, 2, "1/2").holds  # every token a group by itself


@pytest.mark.slow
@pytest.mark.parametrize("spec", PROVED)
@pytest.mark.parametrize(
    ("n", "d", "delta"), [(5, 1, "1/2"), (6, 1, "1/2"), (3, 1, "1/3"), (3, 2, "1/2"), (2, 2, "1/3")]
)
def test_proposition_1_at_many_sizes(spec, n, d, delta):
    assert prove(spec, n, d, delta, "sum").holds


@pytest.mark.slow
def test_the_mean_works_with_a_fine_grid():
    """δ^(-d) ≥ n + 3; at δ = 1/2 this very plan fails, because the largest id hides behind the mean of its group."""
    spec = "combiner-axial:plan=vertical,cols=2,abstraction=mean"
    assert prove(spec, 3, 1, "1/6").holds
    coarse = prove(spec, 7, 1, "1/2")
    assert coarse.breaks.name.startswith("summaries") and "another id" in coarse.breaks.detail
    assert "finer delta" in coarse.breaks.detail


def test_groups_asked_by_a_position_need_a_suitable_order():
    """axial-rowmajor: down the columns instead of along the rows."""
    spec = "combiner-axial:plan=rowmajor,cols=2"
    proof = prove(spec, 4)
    assert proof.holds and proof.plan.order != [0, 1, 2, 3]
    rows = [token // 2 for token in proof.plan.order]
    assert all(a != b for a, b in pairwise(rows))
    assert check(spec, 36).universal is True and prove(spec, 6).holds


@pytest.mark.parametrize(("n", "causal", "why"), [(5, False, "not full"), (4, True, "no order of the tokens suits")])
def test_where_the_proof_does_not_apply(n, causal, why):
    spec = "combiner-axial:plan=rowmajor,cols=2"
    verdict = check(spec, n, causal=causal)
    assert verdict.universal is None and verdict.proposition1.status == "not decided" and not verdict.refuted
    assert why in str(verdict) and "refutes nothing" in str(verdict)
    if causal:
        proof = prove(spec, n, causal=True)
        assert proof.breaks.name.startswith("summaries") and all(stage.holds for stage in proof.stages[:-1])
    else:
        assert prove(spec, n).holds  # at this size the layers do all the same: "not decided" is no refutation


def test_theorem_1_with_a_combiner():
    proof = prove("combiner-fixed:span=2", 4, 1, "1/2", "sine")
    found = theorem1(proof, "sine", samples=512)
    assert found.holds, [str(stage) for stage in found.stages]
    layers = [m for m in found.network.modules() if isinstance(m, subquad.MultiheadAttention)]
    assert layers and all(layer.attention.name == "combiner-fixed" for layer in layers)


def test_the_direct_sets_alone():
    fixed = check("combiner-fixed:span=4", 32).proposition1
    assert fixed.direct_universal is False and fixed.direct_hops.witness == (0, 4)  # spans never meet
    axial = check("combiner-axial:plan=vertical,cols=4", 16).proposition1
    assert axial.direct_universal is True and axial.direct_hops.steps == 2  # row and column: X is inside
    sets = direct_sets(read("combiner-fixed:span=4", 10))
    assert sets.of(5).tolist() == [4, 5, 6, 7] and sets.of(9).tolist() == [8, 9]
    assert fixed.to_dict()["direct_sets_hops"] is None


def test_a_plan_that_breaks_a_condition():
    def support(plan):
        made = read("combiner-fixed:span=2", 4)
        return type(made)(**{**vars(made), "plans": (plan,)})

    own = partitions.IndexSets(
        sets=lambda n: ([[i] for i in range(n)], [[[j for j in range(n) if j != i]] for i in range(n)])
    )
    assert proposition1(support(own)).proved
    away = partitions.IndexSets(
        sets=lambda n: (
            [[(i + 1) % n] for i in range(n)],
            [[[j for j in range(n) if j != (i + 1) % n]] for i in range(n)],
        )
    )
    found = proposition1(support(away))
    assert not found.proved and "token 0 is not" in found.conditions[0].detail and found.direct_universal is False
    with pytest.raises(ValueError, match="no Combiner plan"):
        proposition1(read("star", 8))


# ---- section 3.3 --------------------------------------------------------------------------------------------------

PLANS = [
    "combiner-fixed:span=4",
    "combiner-fixed:span=4,abstraction=mean",
    "combiner-logsparse",
    "combiner-logsparse:abstraction=deepsets-mean",
    "combiner-axial:plan=vertical,cols=4",
    "combiner-axial:plan=horizontal,cols=4",
    "combiner-axial:plan=horizontal,split=true,cols=4",
    "combiner-axial:plan=rowmajor,cols=4",
    "combiner-tree:span=2,depth=3",
    "combiner-routing:clusters=4",
    "combiner-mixture:plans=fixed",
]


def weights_and_plan(spec: str, n: int, causal: bool):
    """q(j|i) of one head on random tokens (n, n), and the plan that made it."""
    torch.manual_seed(0)
    a = subquad.attention(spec, num_heads=1, head_dim=4, causal=causal).double()
    q, k = torch.randn(2, 1, 1, n, 4, dtype=torch.float64)
    (plan,) = plans_of(a)
    if hasattr(a, "assign"):  # the clusters depend on q and k
        plan = partitions.Routing(causal=causal, assignment=tuple(a.assign(q, k, Call())[0, 0].tolist()))
    return a.weights(q, k)[0, 0], plan


def blocks(plan, n: int):
    """(queries, members) of every group that several queries have."""
    users: dict = {}
    for i in range(n):
        for group in plan.groups(n, i):
            users.setdefault(group, []).append(i)
    return [(rows, list(group.members)) for group, rows in users.items() if len(rows) > 1 and len(group.members) > 1]


@pytest.mark.parametrize("spec", PLANS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_block_of_a_group_has_rank_1(spec, causal):
    n = 21
    weights, plan = weights_and_plan(spec, n, causal)
    found = blocks(plan, n)
    assert found
    for rows, members in found:
        block = weights[rows][:, members]
        values = torch.linalg.svdvals(block)
        assert values[1] <= 1e-12 * values[0] and values[0] > 0
        ratio = block / block.sum(1, keepdim=True)  # p(j|Ω), whoever asks
        assert torch.allclose(ratio, ratio[:1].expand_as(ratio), atol=1e-12)


def test_direct_blocks_have_full_rank_and_so_has_the_matrix():
    weights, plan = weights_and_plan("combiner-fixed:span=4", 16, False)
    for start in range(0, 16, 4):
        block = weights[start : start + 4, start : start + 4]
        assert list(plan.direct(16, start)) == list(range(start, start + 4))
        assert torch.linalg.matrix_rank(block) == 4
    assert torch.linalg.matrix_rank(weights) == 16


def test_a_mixture_of_two_plans_has_blocks_of_rank_2():
    """Section 3.3, the workaround: what is rank 1 under either plan is rank 2 under their mean."""
    torch.manual_seed(0)
    a = subquad.attention("combiner-mixture:plans=fixed+logsparse", num_heads=1, head_dim=4).double()
    q, k = torch.randn(2, 1, 1, 32, 4, dtype=torch.float64)
    weights = a.weights(q, k)[0, 0]
    ranks = []
    fixed, logsparse = plans_of(a)
    for i in range(31):
        shared = set(fixed.groups(32, i)) & set(fixed.groups(32, i + 1))
        also = [set(g.members) for g in logsparse.groups(32, i) if g in logsparse.groups(32, i + 1)]
        for group in shared:
            if any(set(group.members) <= other for other in also):
                ranks.append(int(torch.linalg.matrix_rank(weights[[i, i + 1]][:, list(group.members)], rtol=1e-12)))
    assert 2 in ranks
