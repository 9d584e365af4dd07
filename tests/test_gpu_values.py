"""The way that a GPU goes, gone on tensors of the CPU: values and gradients of the definition.

Nothing there is decided by values that the host would have to read, so paths differ from those of the CPU: one plan for
a padded batch, tiles of a fixed number, transforms of any length.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import subquad
from fake_gpu import as_on_a_gpu
from merge_calls import Asked, asked, asked_by
from subquad.attention.registry import mechanism
from subquad.kernels import devices
from subquad.kernels.clusters import aten as cluster_kernels
from subquad.kernels.fourier import mix
from subquad.kernels.merge import cuda, reference
from subquad.kernels.tables import pattern_buckets, pattern_edges
from subquad.supports import binary, drawn, patterns
from subquad.supports.support import parse, plan_of
from subquad.testing import cases
from subquad.testing.case import Case, close, gradient_names, gradients, masks
from subquad.testing.streaming import streams_in_any_split
from test_gpu_merge import seen_by_plan, tensors


def compare(case: Case, n: int, padded: bool, dtype=torch.float64, tolerance=1e-9, impl="reference") -> None:
    module, mask = case.make(dtype), masks(n) if padded else None
    xs = [x.requires_grad_() for x in case.inputs(n, dtype, 2 if mask is None else len(mask))]
    slow = case.dense(module, xs, mask)
    wanted = gradients(slow, xs, module)
    with as_on_a_gpu(impl):
        fast = case.run(module, xs, mask)
        found = gradients(fast, xs, module)
    what = f"{case.title}, n={n}, {'every kind of' if padded else 'no'} padding"
    close(fast, slow, tolerance, what)
    for name, a, b in zip(gradient_names(case, module), found, wanted, strict=True):
        close(a, b, tolerance, f"gradient of {name}: {what}")


@pytest.mark.parametrize("name", subquad.available())
def test_the_way_of_a_gpu_equals_the_definition(name):
    for case in cases(name, **mechanism(name).examples[0]):
        compare(case, 33, padded=case.able.padding)


@pytest.mark.parametrize("name", ["sbm", "scatterbrain", "routing", "combiner-routing"])
def test_the_way_of_long_sequences(name, monkeypatch):
    """Where all pairs would be too many, the host reads how many there are."""
    monkeypatch.setattr(devices, "FEW", 8)
    for case in cases(name, **mechanism(name).examples[0]):
        compare(case, 33, padded=True)


@pytest.mark.parametrize("few", [8, 1024])
@pytest.mark.parametrize("name", ["sbm", "scatterbrain", "routing", "combiner-routing", "combiner-logsparse"])
def test_the_same_is_dropped_as_on_a_cpu(name, few, monkeypatch):
    monkeypatch.setattr(devices, "FEW", few)
    check_dropped(name)


def check_dropped(name: str, **options) -> None:
    for case in cases(name, dropout=0.3, **options):
        module, mask = case.make(torch.float64).train(), masks(21)
        xs = [x.requires_grad_() for x in case.inputs(21, torch.float64, len(mask))]
        want = module(*xs, key_mask=mask, seed=torch.tensor(5))
        with as_on_a_gpu():
            found = module(*xs, key_mask=mask, seed=torch.tensor(5))
            grads = gradients(found, xs, module)
        close(found, want, 1e-9, case.title)
        for x, y in zip(grads, gradients(want, xs, module), strict=True):
            close(x, y, 1e-9, f"gradients: {case.title}")


@pytest.mark.slow
@pytest.mark.parametrize("name", subquad.available())
def test_the_way_of_a_gpu_equals_the_definition_with_every_example(name):
    for options in mechanism(name).examples:
        for case in cases(name, **options):
            for n in (1, 2, 9, 65):
                for padded in (False, True) if case.able.padding else (False,):
                    compare(case, n, padded)


MAPS = ({"map": "topk", "topk": 3}, {"map": "sparselin-gen", "lam": 0.3}, {"map": "entmax"})


@pytest.mark.parametrize("options", MAPS, ids=lambda o: o["map"])
def test_other_probability_maps(options):
    for case in cases("strided", w=4, heads="multihead", **options):
        compare(case, 21, padded=True)


OWN_SETS = [
    ("star", {"w": 2}), ("star", {"w": 3, "relay": "first", "map": "topk", "topk": 2}), ("logsparse", {}),
    ("fixed", {"w": 4, "close": True, "heads": "multihead"}),
    ("fixed", {"w": 4, "close": True, "heads": "union", "map": "entmax"}), ("bigbird", {"block": 2}),
    ("bigbird", {"block": 3, "window_blocks": 1, "map": "topk", "topk": 2}), ("random", {"density": 0.4}),
    ("random", {"density": 0.2, "heads": "union"}), ("random", {"map": "entmax"}), ("logsparse", {"map": "entmax"}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", OWN_SETS, ids=str)
def test_sets_that_depend_on_the_length(name, options, monkeypatch):
    """Short sequences, and long ones; the same is dropped as on a CPU."""
    for few in (8, 1024):
        monkeypatch.setattr(devices, "FEW", few)
        for case in cases(name, **options):
            for n in (1, 3, 21):
                compare(case, n, padded=True)
        check_dropped(name, **options)


@pytest.mark.parametrize("name, options", [x for x in OWN_SETS if "map" in x[1]], ids=str)
def test_masks_that_depend_on_the_length(name, options, monkeypatch):
    """A compiled graph has masks of all lengths."""
    monkeypatch.setattr(devices, "FEW", 8)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for case in cases(name, **options):
        for n in (1, 3, 21):
            compare(case, n, padded=True)


@pytest.mark.parametrize("pattern", [patterns.Star(w=2), patterns.Star(w=40), drawn.BigBird(block=2)], ids=str)
def test_pairs_beside_a_plan(pattern):
    """`Support.beside`: together the pairs of the plan of every length, each of them once."""
    n = 29
    lengths = torch.arange(n + 1)
    name, placed = pattern.beside("0", n, lengths)
    one = Asked(pattern.text, name, n, n, (n,))
    (common,) = seen_by_plan(plan_of(pattern.text, n, name), one)
    for length in range(n + 1):
        found = torch.from_numpy(common.copy())
        found[length:], found[:, length:] = 0, 0
        for piece in placed:
            queries, keys = (x[length % len(x)] for x in piece[:2])
            a, row, key = piece.seen[length].nonzero(as_tuple=True)
            found.index_put_((queries[a, row], keys[a, key]), torch.tensor(1), accumulate=True)
        assert torch.equal(found[:length, :length].bool(), pattern.mask(length) if length else found[:0, :0].bool())
        assert found.max() <= 1 and found.sum() == found[:length, :length].sum()


LISTED = [
    patterns.Star(w=2), patterns.Star(w=40), patterns.Star(w=3, relay="first"), patterns.Fixed(w=4, close=True),
    patterns.Logsparse(), drawn.BigBird(block=2), drawn.BigBird(block=3, global_blocks=0), drawn.Random(),
]  # fmt: skip


@pytest.mark.parametrize("pattern", LISTED, ids=str)
def test_lists_made_on_the_device(pattern):
    """`Pattern.listed`, ascending, each key once, and `Pattern.global_queries`: the sets of every length."""
    n = 29
    lengths = torch.arange(n + 1)
    for family in (None, *range(pattern.families)):
        keys, everyone = pattern.listed(n, family, lengths), pattern.global_queries(n, lengths)
        assert ((keys.diff(dim=2) > 0) | (keys[..., 1:] == n)).all()
        for length in range(1, n + 1):
            found = torch.zeros(n, n + 1, dtype=torch.bool).scatter_(1, keys[length], True)[:, :n]
            for i in () if everyone is None else everyone[length].tolist():
                assert not found[i].any()
                found[i, :length] = i < length
            assert torch.equal(found[:length, :length], pattern.mask(length, family)) and not found[length:].any()


def check_streaming(name: str, **more: bool) -> None:
    for case in cases(name, causal=True, **mechanism(name).examples[0], **more):
        with as_on_a_gpu():
            streams_in_any_split(case)


@pytest.mark.parametrize("name", ["longformer", "bigbird", "combiner-fixed", "composite-slice"])
def test_streaming(name):
    check_streaming(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in subquad.available() if mechanism(name).capabilities.streaming])
def test_streaming_of_every_mechanism(name):
    check_streaming(name)
    # sets of one's own must say that those of a shorter row are the same: the lengths are not read here
    nested = {"nested": True} if hasattr(mechanism(name).Options, "nested") else {}
    with devices.without_waiting():
        check_streaming(name, **nested)


# ---- padded batches under one plan ----


def check_part(one, fewer: int) -> None:
    """`Support.within`: the pairs of fewer tokens are the first rows and keys of the pairs of more."""
    part = parse(one.support).within(one.which, fewer)
    if part is None:
        return
    own = seen_by_plan(plan_of(one.support, fewer, one.which), one)
    whole = seen_by_plan(plan_of(one.support, one.n, one.which), one)
    for source, pairs in enumerate(whole):
        pairs[int(part.rows) :], pairs[:, int(part.keys[source]) :] = 0, 0
        assert (pairs == own[source]).all(), f"{one}: {fewer} tokens, source {source}"


@pytest.mark.parametrize("n", [9, 33])
def test_plans_of_fewer_tokens_are_parts_of_longer_ones(n):
    for one in asked(n):
        for fewer in {1, 2, one.n // 2, one.n - 2, one.n - 1} & set(range(1, one.n)):
            check_part(one, fewer)


@pytest.mark.slow
def test_plans_of_fewer_tokens_are_parts_of_longer_ones_at_every_length():
    for one in asked(79):
        for fewer in range(1, one.n):
            check_part(one, fewer)


@pytest.mark.parametrize(
    "pattern",
    [
        patterns.Strided(w=3), patterns.Fixed(w=4), patterns.Longformer(window=3, global_tokens=2),
        patterns.Axial(cols=4), patterns.Blocks(size=5), patterns.Logsparse(sets="powers"),
        patterns.Logsparse(causal=True),
        patterns.Star(causal=True, relay="first"), drawn.Random(causal=True), drawn.BigBird(causal=True, block=4),
        patterns.Fixed(w=4, close=True, causal=True),
    ],
    ids=str,
)  # fmt: skip
def test_nested_patterns(pattern):
    whole = pattern.mask(29)
    for fewer in range(1, 29):
        assert (pattern.mask(fewer) == whole[:fewer, :fewer]).all()
    assert pattern.is_nested


@pytest.mark.parametrize(
    "pattern",
    [
        patterns.Star(), patterns.Star(relay="first"), patterns.Fixed(w=4, close=True), patterns.Logsparse(),
        drawn.Random(), drawn.BigBird(block=4), patterns.Strided(), patterns.Axial(),
    ],
    ids=str,
)  # fmt: skip
def test_patterns_that_depend_on_the_length(pattern):
    """The declaration is strict: who does not depend on it says so."""
    whole = pattern.mask(29)
    assert any((pattern.mask(fewer) != whole[:fewer, :fewer]).any() for fewer in range(1, 29))
    assert not pattern.is_nested


def test_partitions_that_depend_on_the_length():
    assert binary.Logsparse(causal=False).within("main", 5) is None


def test_a_plan_and_its_mirror_image():
    """`Support.halves`: together the pairs of the plan, and of the second half the last queries and keys are those of
    fewer tokens.
    """
    (one,) = (x for x in asked_by("combiner-logsparse", 33) if parse(x.support).halves(x.which))
    main, ahead, back = (
        seen_by_plan(plan_of(one.support, 33, which), one) for which in ("main", *parse(one.support).halves("main"))
    )
    for source in range(3):
        assert (main[source] == ahead[source] + back[source]).all()
    for fewer in range(1, 33):
        own = seen_by_plan(plan_of(one.support, fewer, "back"), one)[2]
        assert (own[:fewer, :fewer] == back[2][33 - fewer :, 33 - fewer :]).all()


MERGES = ["combiner-fixed", "combiner-logsparse", "strided", "star", "fixed", "bigbird"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MERGES)
def test_merge_of_rows_of_their_own_length(name, dropout):
    """With and without a key mask; what stands behind the end of a row has no part in it, not even as a gradient."""
    lengths = torch.tensor([33, 0, 12, 31, 1, 30])  # rows of an odd and of an even number of tokens
    for number, one in enumerate(asked_by(name, 33)):
        q, keys, values, valid = tensors(one, batch=6, masked=number % 2 == 0)
        rest = (valid, lengths, torch.tensor(5), one.support, one.which, one.n, 0.3, dropout)
        want = reference.forward(q, keys, values, *rest)
        grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
        with devices.use("reference"):
            torch.testing.assert_close(cuda.forward(q, keys, values, *rest), want)
            found = cuda.backward(grad, q, keys, values, *want, *rest)
        torch.testing.assert_close(found, reference.backward(grad, q, keys, values, *want, *rest))


# ---- what follows from the length ----


@pytest.mark.parametrize("n", [1, 2, 9, 64, 65])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_transforms_of_any_length(n, dtype, tolerance):
    x = torch.randn(5, n, 6, dtype=dtype, generator=torch.Generator().manual_seed(n))
    lengths = torch.tensor([n, 0, 1, n // 2, n - 1])
    want = mix(x, lengths)
    with as_on_a_gpu():
        got = mix(x, lengths)
    close(got, want, tolerance, f"n={n}")


@pytest.mark.parametrize("families", [[0], [0, 1, 1]])
def test_buckets_made_on_the_host(families):
    like, text = torch.empty(0), patterns.Strided(causal=True, w=3).text
    pairs, place = pattern_edges(like, text, families, 20, len(families), None).buckets
    found, where = pattern_buckets(like, text, families, 20)
    assert torch.equal(where, place) and len(found) == len(pairs)
    for got, want in zip(found, pairs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- clusters by torch's kernels, which are written out here: they need a GPU ----


def sequences(starts: Tensor):
    return [slice(a, b) for a, b in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True)]


def scores(q: Tensor, k: Tensor, causal: int) -> Tensor:
    s = q[:, 0] @ k[:, 0].T / q.shape[-1] ** 0.5
    return s.masked_fill(~torch.ones_like(s).tril().bool(), -torch.inf) if causal else s


def efficient(q, k, v, bias, starts, other, most, more, dropout, causal, wants_lse):
    """`_efficient_attention_forward` for sequences in a row: out, and logsumexps (sequences, 1, ⌈n/32⌉·32)."""
    assert bias is None and starts.dtype == torch.int32 and torch.equal(starts, other) and wants_lse
    assert q.shape[3] % 8 == 0 and v.shape[3] % 8 == 0 and most == more >= (starts.diff()).max()
    out, lse = torch.zeros_like(v), torch.full((len(starts) - 1, 1, -(-most // 32) * 32), torch.nan)
    for number, own in enumerate(sequences(starts)):
        s = scores(q[0, own], k[0, own], causal)
        out[0, own, 0] = s.softmax(-1) @ v[0, own, 0]
        lse[number, 0, : len(s)] = s.logsumexp(-1)
    return out, lse, None, None, most, more


def efficient_backward(
    grad, q, k, v, bias, out, starts, other, most, more, lse, dropout, seed, offset, causal, wants_bias
):
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for number, own in enumerate(sequences(starts)):
        a, b, c, g, o = (x[0, own, 0] for x in (q, k, v, grad, out))
        p = (scores(q[0, own], k[0, own], causal) - lse[number, 0, : len(a), None]).exp()
        ds = p * (g @ c.T - (g * o).sum(-1, keepdim=True)) / q.shape[3] ** 0.5
        for total, change in zip(found, (ds @ b, ds.T @ a, p.T @ g), strict=True):
            total[0, own, 0] = change
    return *found, None


@pytest.mark.parametrize("n", [1, 2, 9, 33, 70])
@pytest.mark.parametrize("name", ["routing", "combiner-routing"])
def test_whole_clusters_by_the_kernels_of_torch(name, n, monkeypatch):
    monkeypatch.setattr(cluster_kernels, "_forward", efficient)
    monkeypatch.setattr(cluster_kernels, "_backward", efficient_backward)
    for case in cases(name, clusters=3):
        for padded in (False, True):
            compare(case, n, padded, torch.float32, 1e-5, impl="auto")
