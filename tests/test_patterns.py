"""Sparse patterns: definition against parts, the papers' formulas, head layouts, users' own sets."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import subquad
from subquad.supports import drawn as D
from subquad.supports import patterns as P
from subquad.supports.binary import Logsparse
from test_kernels import cover


def regular(causal: bool) -> list[P.Pattern]:
    c = {"causal": causal}
    return [
        *(P.Strided(w=w, **c) for w in (None, 1, 2, 5, 200)),
        *(P.Fixed(w=w, close=close, **c) for w in (None, 1, 7) for close in (False, True)),
        *(P.Star(w=w, relay=relay, **c) for w in (1, 3, 40) for relay in ("last", "first")),
        *(P.Longformer(window=w, global_tokens=g, **c) for w, g in ((1, 0), (9, 0), (10, 3), (4, 50))),
        *(P.Axial(cols=cols, **c) for cols in (None, 1, 3)),
        D.BigBird(block=4, **c),
        D.BigBird(block=8, random_blocks=2, global_blocks=0, window_blocks=5, **c),
        D.BigBird(block=3, random_blocks=0, global_blocks=1, window_blocks=1, **c),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index", range(len(regular(False))))
def test_parts_are_the_definition(index, causal):
    pattern = regular(causal)[index]
    for n in (1, 2, 3, 5, 8, 13, 16, 31, 64, 65, 100):
        for family in (*range(pattern.families), None):
            mask = pattern.mask(n, family)
            count = cover(pattern.parts(n, family), n, pattern.drawn(n))
            assert torch.equal(count, mask.long()), f"{pattern}, n={n}, family={family}"
            assert [set(keys) for keys in sets(pattern, n, family)] == [set(row.nonzero()[0]) for row in mask.numpy()]
            assert not causal or not mask.triu(1).any()
            assert mask.diagonal().all(), "every token sees itself"


def sets(pattern: P.Pattern, n: int, family: int | None = None) -> list[list[int]]:
    """A_0 … A_{n-1}, from the edge list."""
    indptr, indices = pattern.csr(n, family)
    return [indices[a:b].tolist() for a, b in itertools.pairwise(indptr)]


def sets_1_based(pattern: P.Pattern, n: int, family: int) -> list[set[int]]:
    return [{j + 1 for j in keys} for keys in sets(pattern, n, family)]


@given(n=st.integers(1, 60), w=st.integers(1, 20))
def test_equations_4_to_6_as_printed(n, w):
    """The paper's sets, 1-based, written once more as it prints them."""
    whole = set(range(1, n + 1))
    window = [whole & set(range(k - -(-w // 2), k + w // 2 + 1)) for k in sorted(whole)]
    strides = [whole & set(range(k % w or w, n + 1, w)) for k in sorted(whole)]
    assert sets_1_based(P.Strided(w=w), n, 0) == window
    assert sets_1_based(P.Strided(w=w), n, 1) == strides
    segment = [whole & set(range(-(-k // w) * w - w + 1, -(-k // w) * w + 1)) for k in sorted(whole)]
    assert sets_1_based(P.Fixed(w=w), n, 0) == segment
    assert sets_1_based(P.Fixed(w=w), n, 1) == [whole & ({k} | set(range(w, n + 1, w))) for k in sorted(whole)]
    if n > 1:
        ring = [{n} | {(i - 1) % (n - 1) + 1 for i in range(k - w, k + w + 1)} for k in range(1, n)]
        assert sets_1_based(P.Star(w=w), n, 0) == [*ring, whole]


def test_counts_and_sparsity():
    assert P.Fixed(w=4).connections(16, 0) == 64
    # Table 1 of the paper: n = 256 with w = 16 is 93 % sparse sequentially and 87 % as a union (2 % either way)
    for pattern in (P.Strided(w=16), P.Fixed(w=16)):
        assert pattern.sparsity(256, 0) == pytest.approx(0.93, abs=0.02)
        assert pattern.sparsity(256, 1) == pytest.approx(0.93, abs=0.02)
        assert pattern.sparsity(256, None) == pytest.approx(0.87, abs=0.02)


@given(n=st.integers(1, 80), density=st.floats(0.01, 1.0), seed=st.integers(0, 99), causal=st.booleans())
def test_random_draws_exactly_what_was_asked(n, density, seed, causal):
    pattern = D.Random(density=density, seed=seed, causal=causal)
    mask = pattern.mask(n)
    reach = torch.arange(1, n + 1) if causal else torch.full((n,), n)
    assert torch.equal(mask.sum(1), (density * reach).round().long().clamp(min=1))
    assert mask.diagonal().all()
    assert torch.equal(mask, D.Random(density=density, seed=seed, causal=causal).mask(n))


def test_random_is_uniform_and_follows_the_seed():
    draws = torch.stack([D.Random(density=0.3, seed=seed).mask(20) for seed in range(2000)]).double().mean(0)
    expected = torch.full((20, 20), 5 / 19, dtype=torch.float64).fill_diagonal_(1)  # 6 keys, one of them oneself
    assert (draws - expected).abs().max() < 5 * (0.26 * 0.74 / 2000) ** 0.5
    assert not torch.equal(D.Random(seed=1).mask(50), D.Random(seed=2).mask(50))


def test_logsparse_sees_powers_of_two():
    assert sets(P.Logsparse(causal=True, sets="powers"), 20)[13] == [5, 9, 11, 12, 13]
    assert sets(P.Logsparse(sets="powers"), 20)[13] == [5, 9, 11, 12, 13, 14, 15, 17]


@given(n=st.integers(1, 70), causal=st.booleans())
def test_logsparse_suffixes_end_combiners_blocks(n, causal):
    """Section 4.2: i itself, and the last token (bidirectional: the first one of a mirrored block) of every block."""
    plan = Logsparse(causal=causal)
    for i, keys in enumerate(sets(P.Logsparse(causal=causal), n)):
        blocks = plan.blocks(n, i)
        assert set(keys) == {i} | {block[-1] if block[-1] < i else block[0] for block in blocks}
    assert sets(P.Logsparse(causal=True), 14)[13] == [7, 11, 12, 13]  # 13 = 8 + 4 + 1


def test_random_graphs_differ_between_heads_and_layers():
    make = lambda **more: subquad.attention("random", num_heads=4, head_dim=4, density=0.2, **more).support(40)  # noqa: E731
    first, second = make(), make(layer_index=1)
    assert first.shape == (4, 40, 40)
    assert len({bytes(graph.numpy()) for graph in (*first, *second)}) == 8
    assert make(shared=True).shape == (40, 40)
    assert torch.equal(make(shared=True), make(shared=True, layer_index=3))


@pytest.mark.parametrize(
    "spec", ["star", "star:relay=first", "random", "bigbird:block=4", "logsparse", "fixed:close=true"]
)
def test_causal_sets_do_not_depend_on_what_follows(spec):
    a = subquad.attention(spec, num_heads=2, head_dim=4, causal=True, max_length=200)
    long = a.support(100)
    for n in (1, 7, 33, 64):
        assert torch.equal(a.support(n), long[..., :n, :n])


def test_bigbird_draws_other_blocks():
    pattern = D.BigBird(block=2, random_blocks=3, global_blocks=1, window_blocks=3)
    for a, drawn in enumerate(pattern.draw(40)):
        assert len(drawn) == (3 if a >= 1 else 0)
        assert all(x >= 1 and abs(x - a) > 1 for x in drawn)


def test_head_layouts():
    make = lambda heads, **more: subquad.attention("strided", w=4, heads=heads, num_heads=5, head_dim=4, **more)  # noqa: E731
    pattern = P.Strided(w=4)
    assert torch.equal(make("sequential").support(20), pattern.mask(20, 0))
    assert torch.equal(make("sequential", layer_index=3).support(20), pattern.mask(20, 1))
    assert torch.equal(make("union").support(20), pattern.mask(20, 0) | pattern.mask(20, 1))
    split = make("multihead").support(20)
    assert torch.equal(split, torch.stack([pattern.mask(20, int(h >= 2)) for h in range(5)]))


def test_own_sets_as_lists_masks_and_functions():
    sets = [[0], [0, 1], [1, 2], [3, 0]]
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    q, k, v = (torch.randn(1, 2, 4, 3) for _ in range(3))
    outs = []
    for given_sets in (
        sets,
        [set(s) for s in sets],
        mask,
        mask[None],
        [torch.tensor(s) for s in sets],
        lambda n: mask[:n, :n],
    ):
        a = subquad.attention("pattern", sets=given_sets, num_heads=2, head_dim=3)
        assert torch.equal(a.support(4), mask)
        outs.append(a(q, k, v))
    assert all(torch.equal(out, outs[0]) for out in outs)
    two = subquad.attention("pattern", sets=[sets, [[0, 1, 2, 3]] * 4], layer_index=1, num_heads=2, head_dim=3)
    assert two.support(4).all()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (None, "sets is needed"),
        ([[0], [2]], r"sets\[1\] holds 2"),
        ([[0], [0.5]], r"sets\[1\] holds 0.5"),
        ("ab", "sets must be"),
        (torch.ones(3, 3), "must be bool"),
        (torch.ones(3, 4, dtype=torch.bool), r"\(n, n\)"),
    ],
)
def test_bad_sets_are_refused(sets, words):
    with pytest.raises((TypeError, ValueError), match=words):
        subquad.attention("pattern", sets=sets, num_heads=1, head_dim=4)


def test_sets_of_one_length_refuse_another():
    a = subquad.attention("pattern", sets=torch.ones(4, 4, dtype=torch.bool), num_heads=1, head_dim=2)
    with pytest.raises(ValueError, match="length 5"):
        a(*(torch.randn(1, 1, 5, 2) for _ in range(3)))


def test_nearly_dense_blocks_run_as_one_masked_product():
    a = subquad.attention("bigbird", num_heads=2, head_dim=4).double()
    q, k, v = (torch.randn(2, 2, 300, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 300) < 0.8
    for key_mask in (None, mask):
        out, want = a(q, k, v, key_mask=key_mask), a.dense(q, k, v, key_mask=key_mask)
        torch.testing.assert_close(out, want)
        grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want))
        torch.testing.assert_close(*grads)


def test_several_mechanisms_compile_into_one_graph():
    """Constants of a length (index lists, buckets) are taken by one graph as often as it has mechanisms."""
    specs = ("random", "strided:heads=multihead,map=entmax,alpha=learn", "logsparse", "bigbird:block=2", "random")
    torch.manual_seed(0)
    stack = torch.nn.ModuleList(subquad.attention(s, num_heads=2, head_dim=4) for s in specs).double()

    def run(x):
        for a in stack:
            x = a(x, x, x)
        return x

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for n in (9, 20):
        x = torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True)  # a compiled map sums in another order
        torch.testing.assert_close(compiled(x), run(x))
        grads = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, run))
        torch.testing.assert_close(*grads)
    torch._dynamo.reset()


def test_sets_of_another_length_are_refused_by_name():
    attention = subquad.attention("pattern", num_heads=1, head_dim=2, sets=[[0], [1]])
    with pytest.raises(ValueError, match=r"sets for a sequence of length 3 have length 2, not 3$"):
        attention(*torch.randn(3, 1, 1, 3, 2))


def test_a_mask_that_is_changed_later_is_not_that_of_the_mechanism():
    mask, x = torch.ones(4, 4, dtype=torch.bool), torch.randn(1, 1, 4, 2)
    attention = subquad.attention("pattern", num_heads=1, head_dim=2, sets=mask)
    before = attention.weights(x, x)
    mask.fill_(False).fill_diagonal_(True)
    assert torch.equal(attention.weights(x, x), before)
    torch.testing.assert_close(attention(x, x, x), before @ x)
