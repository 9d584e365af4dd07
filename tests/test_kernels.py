"""Blocks and merge: parts cover what they say, one softmax over several key sets equals dense attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.kernels.blocks import Part, columns, diagonal, part, plan, rows_to_keys, selves, unplan, windows
from subquad.kernels.merge import merge_attention, plain_merge


def cover(parts: list[Part], n: int, drawn: tuple[int, ...] = ()) -> torch.Tensor:
    """How often each (query, key) pair occurs in the parts, by walking through them."""
    count = torch.zeros(n, n, dtype=torch.int64)
    for p in parts:
        seen = p.allowed().expand(p.blocks, p.q_len, p.k_len)
        block, row, key = seen.nonzero().unbind(1)
        q = p.q_start + block * p.q_step + row * p.q_stride
        k = p.k_start + block * p.k_step + key * p.k_stride
        if p.draws:
            size = p.k_len // p.draws
            k = torch.tensor(drawn)[p.k_start + block * p.k_step + key // size] * size + key % size
        count.index_put_((q, k), torch.ones_like(q), accumulate=True)
    return count


lengths = st.integers(1, 150)


@given(n=lengths, left=st.integers(0, 60), right=st.integers(0, 60), block=st.sampled_from([None, 1, 4, 7, 16]))
def test_windows(n, left, right, block):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    expected = (j >= i - left) & (j <= i + right)
    assert torch.equal(cover(windows(0, n, left, right, block=block), n), expected.long())


@given(n=lengths, size=st.integers(1, 160), causal=st.booleans())
def test_diagonal_and_columns(n, size, causal):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    past = (j <= i) | (not causal)
    assert torch.equal(cover(diagonal(0, n, size, causal=causal), n), ((i // size == j // size) & past).long())
    assert torch.equal(cover(columns(n, size, causal=causal), n), (((i - j) % size == 0) & past).long())
    strict = columns(n, size, causal=causal, xlo=0, xhi=0)
    assert torch.equal(cover(strict, n), (((i - j) % size == 0) & past & (i != j)).long())


@given(n=st.integers(1, 600), first=st.integers(0, 20), step=st.integers(1, 9), hi=st.sampled_from([-3, 0, 1 << 40]))
def test_rows_to_keys(n, first, step, hi):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    expected = (j >= first) & ((j - first) % step == 0) & (j - i <= hi)
    assert torch.equal(cover(rows_to_keys(range(n), range(first, n, step), hi=hi), n), expected.long())


@given(n=st.integers(1, 80), size=st.integers(1, 20))
def test_triangle_and_everything_are_recognised(n, size):
    for p in diagonal(0, n, size, causal=True) + columns(n, size, causal=True) + windows(0, n, 3, 5, block=4):
        seen = p.allowed()
        assert p.sees_everything() == bool(seen.all()) or not p.sees_everything()  # never claims too much
        if p.is_triangle():
            assert torch.equal(seen, torch.ones_like(seen).tril())


def test_plan_marks_the_first_visit_and_round_trips():
    parts = [*diagonal(0, 10, 4, causal=False), *columns(10, 3, causal=False, xlo=0, xhi=0)]
    back = unplan(plan(parts, 10))
    assert [p._replace(fresh=0) for p in back] == parts
    assert [p.fresh for p in back] == [1, 1, 0, 0]


def summaries_case(n: int, dtype: torch.dtype, seed: int = 0):
    """Own span of 4 up to i, and one summary per earlier span: two sources, as Combiner uses them."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 8, generator=draw, dtype=dtype) for _ in range(3))
    m = max(1, n // 4)
    ks, vs = (torch.randn(2, 3, m, 8, generator=draw, dtype=dtype) for _ in range(2))
    i = torch.arange(n)[:, None]
    own = (i // 4 == torch.arange(n) // 4) & (torch.arange(n) <= i)
    far = torch.arange(m) < i // 4
    parts = diagonal(0, n, 4, causal=True)
    parts += rows_to_keys(range(n), range(m), positions=range(4, 4 * m + 1, 4), source=1, hi=0)
    return [q, k, v, ks, vs], torch.cat([own, far], 1), plan(parts, n)


def dense(q, k, v, ks, vs, seen, scale):
    scores = (q @ torch.cat([k, ks], 2).mT * scale).masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1, keepdim=True), scores, 0).softmax(-1) * seen
    return weights @ torch.cat([v, vs], 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 4, 5, 37, 64])
@pytest.mark.parametrize("path", [merge_attention, plain_merge])
def test_one_softmax_over_two_sources(path, n, masked):
    tensors, seen, flat = summaries_case(n, torch.float64)
    tensors = [t.requires_grad_() for t in tensors]
    valid = []
    if masked:
        draw = torch.Generator().manual_seed(1)
        valid = [torch.rand(2, 1, t.shape[2], generator=draw) < 0.6 for t in (tensors[1], tensors[3])]
        seen = seen & torch.cat(valid, 2)[:, :, None]
    q, k, v, ks, vs = tensors
    out = path(q, [k, ks], [v, vs], flat, scale=0.4, valid=valid)
    expected = dense(*tensors, seen, 0.4)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    direction = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, tensors, direction, allow_unused=True),  # a short sequence asks no summary
        torch.autograd.grad(expected, tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b, atol=1e-11, rtol=0)


def test_gradcheck_of_overlapping_windows():
    flat = plan(windows(0, 11, 3, 2, block=4), 11)
    tensors = [torch.randn(1, 2, 11, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: merge_attention(q, [k], [v], flat, scale=0.5), tensors)


def test_drawn_blocks_equal_dense_attention():
    """Query block a sees two blocks that stand in no regular place, one of them drawn by several."""
    drawn = (2, 0, 1, 0, 2, 0)
    parts = [*selves(14), Part(0, 3, 4, 4, 1, 0, 2, 8, 1, draws=2)]
    tensors = [torch.randn(2, 2, 14, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    count = cover(parts, 14, drawn).double()  # oneself may be seen twice: it then weighs twice
    scores = (tensors[0] @ tensors[1].mT * 0.5 + count.log()).softmax(-1)
    expected, direction = scores @ tensors[2], torch.randn(2, 2, 14, 4, dtype=torch.float64)
    for path in (merge_attention, plain_merge):
        out = path(tensors[0], [tensors[1]], [tensors[2]], plan(parts, 14, drawn), scale=0.5, valid=[])
        torch.testing.assert_close(out, expected)
        got, want = (torch.autograd.grad(x, tensors, direction, retain_graph=True) for x in (out, expected))
        torch.testing.assert_close(got, want)


def test_a_second_derivative_is_refused_by_the_fused_path_and_right_in_the_plain_one():
    flat = plan([*selves(3), part((0, 1, 0, 3, 1), (0, 0, 3, 1), xlo=0, xhi=0)], 3)
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    (g,) = torch.autograd.grad(merge_attention(q, [k], [v], flat, scale=1.0).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="merge_backward"):
        g.sum().backward()
    plain = lambda q, k, v: plain_merge(q, [k], [v], flat, scale=1.0, valid=[])  # noqa: E731
    assert torch.autograd.gradgradcheck(plain, (q, k, v))


def test_strided_heads_keep_their_layout():
    """The layer's heads are (B, n, H, d) in memory: read and written as views."""
    x = torch.randn(1, 20, 3, 8).transpose(1, 2)
    out = merge_attention(x, [x], [x], plan(diagonal(0, 20, 6, causal=True), 20), scale=0.3)
    assert out.stride() == x.stride()
    y = x.contiguous()
    expected = merge_attention(y, [y], [y], plan(diagonal(0, 20, 6, causal=True), 20), scale=0.3)
    torch.testing.assert_close(out, expected)
