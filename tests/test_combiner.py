"""What is special to Combiner: plans are partitions, summaries leak nothing, and the family agrees with itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import subquad
from subquad import MultiheadAttention
from subquad.attention import summaries
from subquad.attention.base import Call
from subquad.kernels.pools.groups import others, pooled, prefixes
from subquad.kernels.pools.nodes import binary_nodes
from subquad.layers import Projections
from subquad.studies import combiner_cost
from subquad.supports import binary, grids, partitions, spans

ABSTRACTIONS = ("max", "mean", "deepsets-max", "deepsets-mean")


def halves(n):
    """A user's plan: oneself directly, everything before and everything behind as two groups."""
    return [[i] for i in range(n)], [[range(i), range(i + 1, n)] for i in range(n)]


SPECS = {
    "combiner-fixed": {"span": 5},
    "combiner-logsparse": {},
    "combiner-axial:plan=vertical": {"cols": 4},
    "combiner-axial:plan=horizontal": {"cols": 4},
    "combiner-axial:plan=horizontal,split=true": {"cols": 4},
    "combiner-axial:plan=rowmajor": {"cols": 4},
    "combiner-mixture": {},
    "combiner-mixture:joint=true": {"cols": 3},
    "combiner-mixture:joint=true,split=true": {"cols": 5},
    "combiner-mixture:plans=fixed+logsparse+tree+routing": {"max_length": 200},
    "combiner-routing": {"clusters": 3},
    "combiner-tree": {"span": 2, "depth": 3},
    "combiner-plan": {"plan": halves},
}


def make(spec, causal, heads=2, width=4, **options):
    torch.manual_seed(0)
    base = SPECS.get(spec, {})
    module = subquad.attention(spec, num_heads=heads, head_dim=width, causal=causal, **{**base, **options})
    return module.double().eval()


def draw(n, batch=2, heads=2, width=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, width, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]


# ---- plans --------------------------------------------------------------------------------------------------


def plans(causal, n, seed=0):
    """Every plan with its default knob, which takes all values from 1 to √n over the lengths."""
    g = torch.Generator().manual_seed(seed)
    yield spans.Fixed(causal=causal)
    yield binary.Logsparse(causal=causal)
    yield grids.AxialVertical(causal=causal)
    yield grids.AxialHorizontal(causal=causal)
    yield grids.AxialHorizontal(causal=causal, split=True)
    yield grids.AxialRowmajor(causal=causal)
    yield spans.Tree(causal=causal)
    yield spans.Window(causal=causal, span=5, window=9, sinks=3)
    yield spans.Window(causal=causal, window=17, sinks=20)
    yield partitions.Routing(
        causal=causal, assignment=tuple(torch.randint(0, 1 + math.isqrt(n), (n,), generator=g).tolist())
    )


def odd_plans(causal):
    """Knobs far from √n."""
    yield spans.Fixed(causal=causal, span=7)
    yield spans.Tree(causal=causal, depth=3, span=2)
    for cols in (1, 6, 50):
        yield grids.AxialVertical(causal=causal, cols=cols)
        yield grids.AxialHorizontal(causal=causal, cols=cols)
        yield grids.AxialHorizontal(causal=causal, cols=cols, split=True)
        yield grids.AxialRowmajor(causal=causal, cols=cols)


@pytest.mark.parametrize("whole", [60, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [False, True])
def test_plans_are_partitions_for_every_length(causal, whole):
    """Every query of lengths up to `whole`; beyond, every tenth one, from another one on at each length."""
    for n in range(1, 301):
        queries = range(n) if n <= whole else [*range(n % 10, n, 10), n - 1]
        for plan in plans(causal, n):
            if n <= 60 or n % 20 == 1 or not isinstance(plan, partitions.Routing):  # its clusters are loops over tokens
                plan.check(n, queries)
        for plan in odd_plans(causal) if n <= 60 else ():
            plan.check(n)
        if n <= 40:
            partitions.IndexSets(causal=causal, sets=halves).check(n)


@given(st.integers(301, 3000), st.booleans(), st.data())
def test_plans_are_partitions_for_long_sequences(n, causal, data):
    queries = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4))
    for plan in (*plans(causal, n, seed=n), *odd_plans(causal)):
        plan.check(n, queries)


def test_a_group_that_overlaps_or_is_missing_is_found():
    class Overlap(spans.Fixed):
        def direct(self, n, i):
            return range(0, i + 1)

    class Twice(spans.Fixed):
        def groups(self, n, i):
            return 2 * super().groups(n, i)

    class Short(spans.Fixed):
        def groups(self, n, i):
            return super().groups(n, i)[1:]

    class Hollow(spans.Fixed):
        def groups(self, n, i):
            return [*super().groups(n, i), partitions.Group(range(3, 3))]

    spans.Fixed(span=4).check(13)
    for kind in (Overlap, Twice, Short, Hollow):
        with pytest.raises(ValueError, match=r"no partition of its support|is empty"):
            kind(span=4).check(13)


def test_a_plan_that_is_no_partition_is_refused():
    def twice(n):
        return [[i] for i in range(n)], [[range(n)] for _ in range(n)]

    with pytest.raises(ValueError, match="query 0 of 3 are no partition"):
        partitions.IndexSets(sets=twice).direct(3, 0)
    with pytest.raises(ValueError, match="2 direct sets"):
        partitions.IndexSets(sets=lambda n: ([[0]] * 2, [[]] * 2)).direct(3, 0)


def test_cost_terms_are_those_of_section_3_1():
    n, s = 64, 8
    fixed = spans.Fixed(span=s).cost(n)
    assert fixed == (n * (s + n // s - 1), n // s, n)
    causal = spans.Fixed(span=s, causal=True).cost(n)
    assert causal.groups == n // s - 1
    assert causal.terms == sum(i % s + 1 + i // s for i in range(n))
    assert binary.Logsparse(causal=True).cost(n).terms == sum(1 + i.bit_count() for i in range(n))
    tree = spans.Tree(depth=2, span=4).cost(n)
    assert tree == (n * (4 + 3 + 3), 16 + 4, n + 16)


@pytest.mark.parametrize("plan", combiner_cost.PLANS)
def test_counted_operations_grow_as_declared_from_1k_to_64k(plan):
    small, _ = combiner_cost.operations(plan, 1024)
    large, declared = combiner_cost.operations(plan, 65536)
    found = combiner_cost.growth_exponent((1024, 65536), (small, large))
    below = 0.25 if plan == "routing" else 0.1  # at 1k its tiles are as large as its clusters
    assert declared - below <= found <= declared + 0.1  # logsparse: n·log n


@pytest.mark.parametrize(
    ("plan", "exponent"),
    [
        (spans.Fixed, 1.5),
        (grids.AxialVertical, 1.5),
        (grids.AxialRowmajor, 1.5),
        (binary.Logsparse, 1.0),
        (spans.Tree, 4 / 3),
    ],
)
def test_terms_of_section_3_1_grow_as_declared(plan, exponent):
    small, large = (plan(causal=True).cost(n).total for n in (256, 4096))
    assert abs(math.log(large / small, 16) - exponent) <= 0.15


def test_picture_shows_direct_and_local():
    drawn = subquad.attention("combiner-fixed:span=3", num_heads=1, head_dim=2, causal=True).picture(7)
    assert drawn[5].tolist() == [2, 2, 2, 1, 1, 1, 0]
    mixed = subquad.attention("combiner-mixture:cols=3", num_heads=1, head_dim=2).picture(9)
    assert mixed[4].tolist() == [2, 1, 2, 1, 1, 1, 2, 1, 2]


# ---- the fast path and the definition -----------------------------------------------------------------------


def agree(module, n, mask=None):
    xs = draw(n, batch=1 if mask is None else len(mask))
    fast, dense = module(*xs, key_mask=mask), module.dense(*xs, key_mask=mask)
    torch.testing.assert_close(fast, dense, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(fast)
    targets = [*xs, *module.parameters()]
    for a, b in zip(
        *(torch.autograd.grad(y, targets, direction, allow_unused=True) for y in (fast, dense)), strict=True
    ):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        assert (a - b).abs().max() <= 1e-9 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("abstraction", ABSTRACTIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_fast_equals_definition(spec, abstraction, causal):
    module = make(spec, causal, abstraction=abstraction)
    n = 33
    agree(module, n)
    gaps = torch.rand(3, n, generator=torch.Generator().manual_seed(1)) < torch.tensor([[0.7], [0.15], [0.0]])
    agree(module, n, gaps)


@given(st.sampled_from(sorted(SPECS)), st.booleans(), st.integers(1, 40), st.integers(0, 2**16))
def test_fast_equals_definition_anywhere(spec, causal, n, bits):
    mask = torch.tensor([[bool(bits >> (i % 16) & 1) for i in range(n)]])
    agree(make(spec, causal), n, mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129, 200])
def test_logsparse_at_powers_of_two(n, causal):
    agree(make("combiner-logsparse", causal), n)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [9, 24, 31])
def test_options_at_their_limits(n, causal):
    for spec in ("combiner-axial:cols=1", "combiner-axial:cols=50", "combiner-axial:plan=horizontal,cols=1",
                 "combiner-axial:plan=rowmajor,cols=1", "combiner-axial:plan=horizontal,split=true,cols=2",
                 "combiner-fixed:span=1", "combiner-fixed:span=50", "combiner-tree:span=2,depth=8",
                 "combiner-tree:span=40", "combiner-routing:clusters=1", "combiner-routing:clusters=60"):  # fmt: skip
        agree(make(spec, causal), n)


@pytest.mark.parametrize("n", [15, 16, 17, 23])
@pytest.mark.parametrize("spec", SPECS)
def test_no_summary_leaks_the_future(spec, n):
    """By value and by gradient, at every position."""
    module = make(spec, True)
    xs = draw(n, batch=1)
    base = module(*xs)
    for t in range(1, n):
        moved = [x.detach().clone() for x in xs]
        for x in moved:
            x[:, :, t] += 3.0
        after = module(*moved)[:, :, :t]
        assert torch.equal(after, base[:, :, :t])
        for g in torch.autograd.grad(base[:, :, :t].sum(), xs, retain_graph=True):
            assert not g[:, :, t:].any()


@pytest.mark.parametrize("n", [63, 65])
@pytest.mark.parametrize("spec", SPECS)
def test_no_gradient_from_the_future_across_blocks(spec, n):
    xs = draw(n, batch=1)
    base = make(spec, True)(*xs)
    for t in range(1, n):
        for g in torch.autograd.grad(base[:, :, t - 1].sum(), xs, retain_graph=True):
            assert not g[:, :, t:].any()


# ---- relations between the mechanisms -----------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_tree_of_one_level_is_fixed(causal):
    xs = draw(50)
    tree, fixed = make("combiner-tree", causal, span=6, depth=1), make("combiner-fixed", causal, span=6)
    assert torch.equal(tree(*xs), fixed(*xs))
    torch.testing.assert_close(tree.weights(*xs[:2]), fixed.weights(*xs[:2]))


def test_two_plans_of_ones_own_are_two_plans():
    """They are told apart by what they are, not by how they are described."""
    xs = draw(9)
    outs = []
    for size in (2, 5):
        cut = lambda n, size=size: [range(a, min(a + size, n)) for a in range(0, n, size)]  # noqa: E731
        sets = lambda n, cut=cut, size=size: (  # noqa: E731
            [cut(n)[i // size] for i in range(n)],
            [[s for a, s in enumerate(cut(n)) if a != i // size] for i in range(n)],
        )
        module = make("combiner-plan", False, plan=sets)
        torch.testing.assert_close(module(*xs), make("combiner-fixed", False, span=size)(*xs))
        outs.append(module.weights(*xs[:2]))
    assert not torch.allclose(*outs)


def test_mixture_is_the_mean_of_its_components():
    xs = draw(30)
    parts = [make(f"combiner-axial:plan={p}", True, cols=5)(*xs) for p in ("vertical", "horizontal")]
    torch.testing.assert_close(make("combiner-mixture", True, cols=5)(*xs), sum(parts) / 2)


def test_joint_counts_the_direct_part_once():
    q, k, _ = draw(12, batch=1)
    module = make("combiner-mixture:joint=true", False, cols=4)
    one = make("combiner-axial:plan=vertical", False, cols=4)
    i, j = 0, 5  # j is in another row and column of i: a group of the vertical and of the horizontal plan holds it
    direct = [c for c in range(12) if c // 4 == i // 4 or c % 4 == i % 4]
    joint, single = module.weights(q, k)[0, 0, i], one.weights(q, k)[0, 0, i]
    ratio = joint[direct] / single[direct]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # one softmax: direct weights keep their ratios
    assert joint[j] > 0 and ratio[0] < 1  # and share the total with two sets of groups


def test_one_span_is_full_attention():
    xs = draw(20)
    full = subquad.attention("full", num_heads=2, head_dim=4, causal=True)(*xs)
    torch.testing.assert_close(make("combiner-fixed", True, span=20)(*xs), full)


def test_impossible_options_are_refused():
    with pytest.raises(ValueError, match="split=True belongs to plan=horizontal"):
        make("combiner-axial:split=true", False)
    for other in ("fixed", "logsparse", "routing", "tree"):
        with pytest.raises(ValueError, match=f"joint=True is for the axial plans.* plans has {other}"):
            make(f"combiner-mixture:plans={other}+axial-vertical,joint=true", False)
    with pytest.raises(ValueError, match="split=True belongs to axial-horizontal"):
        make("combiner-mixture:plans=fixed,split=true", False)
    with pytest.raises(TypeError, match="plan must be a function"):
        make("combiner-plan", False, plan=None)
    with pytest.raises(ValueError, match="plan has causal=True"):
        make("combiner-plan", False, plan=spans.Fixed(causal=True))
    with pytest.raises(ValueError, match="plain groups"):
        make("combiner-plan", False, plan=spans.Tree())(*draw(20))


# ---- pools --------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.sampled_from(["max", "mean"]), st.integers(0, 2**10))
def test_pools_leave_padding_out(n, pool, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, n, 3, generator=g, dtype=torch.float64)
    real = torch.rand(1, 1, n, 1, generator=g) < 0.6
    over = torch.amax if pool == "max" else torch.mean
    spoilt = torch.where(real, x, 1e9)
    got = {
        "up to i": pooled(spoilt, pool, real, prefixes(2)),
        "others": pooled(spoilt, pool, real, others(2)),
        "nodes": pooled(spoilt, pool, real, binary_nodes),
    }
    for i in range(n):
        low = i + 1 - ((i + 1) & -(i + 1))
        sets = {"up to i": range(i + 1), "others": [j for j in range(n) if j != i], "nodes": range(low, i + 1)}
        for name, members in sets.items():
            kept = [j for j in members if real[0, 0, j]]
            wanted = over(x[0, 0, kept], 0) if kept else torch.zeros(3, dtype=torch.float64)
            torch.testing.assert_close(got[name][0, 0, i], wanted, atol=1e-6, rtol=0)


def test_maximum_of_all_others_with_ties():
    x = torch.tensor([2.0, 2.0, 1.0]).view(1, 1, 3, 1)
    assert others(2)(x, "max").flatten().tolist() == [2, 2, 2]
    x = torch.tensor([3.0, 2.0, 1.0]).view(1, 1, 3, 1)
    assert others(2)(x, "max").flatten().tolist() == [2, 3, 3]


def test_fidelity_study_measures_every_plan(tmp_path):
    from subquad.studies import fidelity

    rows = fidelity.run(32, steps=1, budgets=(1.0,))
    assert {row.data for row in rows} == {"random", "trained"} and len(rows) == 2 * 7
    assert all(0 <= row.variation <= 1 and row.error >= 0 for row in rows)
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    assert max(fidelity.distances("combiner-fixed:span=32", q, k, v, True)) < 1e-5  # one span is full attention
    assert fidelity.draw(rows, tmp_path / "fidelity.png").stat().st_size > 1000
    assert fidelity.table(rows).count("\n") == len(rows)


# ---- summary=proj ---------------------------------------------------------------------------------------------------


def projected(causal, cols=4):
    torch.manual_seed(0)
    about = {"attention": "combiner-axial", "summary": "proj", "cols": cols, "causal": causal, "batch_first": True}
    return MultiheadAttention(6, 2, **about).double().eval()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 11, 16, 17])
def test_projected_summaries_are_their_definition(n, causal):
    layer = projected(causal)
    x = torch.randn(3, n, 6, dtype=torch.float64, requires_grad=True)
    real = torch.ones(3, n, dtype=torch.bool)
    real[1, n // 2 :] = False  # padded on the right, nothing left of it at n = 1
    real[2, : n // 3] = False
    if n > 4:
        real[2, n // 3 + 1] = False
    for mask in (None, real):
        about = (Projections(layer), mask)
        fast, _ = layer.attention.attend_tokens(x, x, x, *about)
        slow = layer.attention.dense_tokens(x, *about)
        fast, slow = (y if mask is None else y * mask[..., None] for y in (fast, slow))
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
        weight = torch.randn_like(fast)
        of = [x, *layer.parameters()]
        grads = [torch.autograd.grad((y * weight).sum(), of, allow_unused=True) for y in (fast, slow)]
        for one, other in zip(*grads, strict=True):
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_projected_summaries_leak_nothing_and_say_what_they_cannot_do():
    layer = projected(causal=True)
    x = torch.randn(1, 13, 6, dtype=torch.float64, requires_grad=True)
    out = layer(x, x, x, need_weights=False)[0]
    for t in (0, 3, 4, 9):
        (grad,) = torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)
        assert not grad[0, t + 1 :].any() and grad[0, : t + 1].any()
    q = torch.randn(1, 2, 5, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="summary=proj works on tokens and their projections"):
        layer.attention(q, q, q)
    with pytest.raises(TypeError, match="summary=proj has no weights"):
        layer.attention.weights(q, q)
    with pytest.raises(ValueError, match="query, key and value must be one tensor"):
        layer(x, x.clone(), x, need_weights=False)
    with pytest.raises(ValueError, match="summary=proj belongs to plan=rowmajor"):
        make("combiner-axial:plan=vertical,summary=proj", True)


@pytest.mark.parametrize("abstraction", ["max", "deepsets-max"])
def test_nan_in_padding_reaches_no_gradient(abstraction):
    a = subquad.attention("combiner-fixed:span=4", causal=True, num_heads=2, head_dim=8, abstraction=abstraction)
    mask = torch.arange(13) < torch.tensor([13, 7])[:, None]
    x = [torch.randn(2, 2, 13, 8).masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_() for _ in range(3)]
    out = a(*x, key_mask=mask)
    grads = torch.autograd.grad(out.sum(), [*x, *a.parameters()])
    assert all(g.isfinite().all() for g in (out, *grads))


@pytest.mark.parametrize("strided", [False, True])
def test_rows_of_their_own_lengths_are_turned_around_with_their_derivatives(strided):
    lengths, draw = torch.tensor([5, 0, 1, 4]), torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 5, 2, generator=draw, dtype=torch.float64)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x
    call = Call(None, lengths, None, 0.0, False, 5)
    turn = summaries._Reverse(summaries.Tokens(x, x, x, call))
    expected = torch.stack([torch.cat([row[:, :n].flip(1), row[:, n:]], 1) for row, n in zip(x, lengths, strict=True)])
    assert torch.equal(turn(x), expected)
    assert torch.autograd.gradcheck(turn, x.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(turn, x.clone().requires_grad_())
    assert torch.equal(torch.func.vmap(turn)(x[None])[0], expected)
