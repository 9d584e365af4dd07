"""Attention of tiles of queries to runs of keys: the kernels, the reference and the dense formula agree."""

import pytest
import torch
from torch.testing import assert_close as close

from subquad.kernels.row_dots import row_dots
from subquad.kernels.runs import Runs, attend_runs, cpu, reference
from subquad.kernels.runs.op import EVERYTHING, attention


def tables(n: int, counts: list[int], sources: tuple[int, ...], tile: int, seed: int = 0) -> Runs:
    """Random runs; the last tile has none, and the last query is in no tile."""
    draw = torch.Generator().manual_seed(seed)
    firsts = list(range(0, n - 1, tile))
    tiles = torch.tensor([(t, min(tile, n - 1 - t)) for t in firsts])
    spans = torch.zeros(len(firsts), len(sources), 4, dtype=torch.int64)
    for t in range(len(firsts) - 1):
        for p, source in enumerate(sources):
            first = int(torch.randint(counts[source], (), generator=draw))
            count = int(torch.randint(counts[source] - first + 1, (), generator=draw))
            last = EVERYTHING if (t + p) % 2 else count - tile
            spans[t, p] = torch.tensor((first, count, last, -EVERYTHING if t % 3 else count - tile))
    sizes = (tile, *(counts[source] for source in sources))
    return Runs(tiles, spans, sources, int((tiles[:, 1:] * spans[:, :, 1]).sum()), sizes)


def dense(q, keys, values, runs: Runs, scale: float, bias):
    """out and lse, query by query and run by run."""
    begins = [sum(k.shape[1] for k in keys[:s]) for s in range(len(keys))]
    outs = [[torch.zeros_like(q[:, 0]), torch.full_like(q[:, 0, 0], -torch.inf)] for _ in range(q.shape[1])]
    for (first, count), spans in zip(runs.tiles.tolist(), runs.spans.tolist(), strict=True):
        for i in range(count):
            scores, rows = [], []
            for (start, many, last, own), s in zip(spans, runs.sources, strict=True):
                seen = [start + j for j in range(many) if j <= i + last and j != i + own]
                shift = 0 if bias is None else bias[:, [begins[s] + j for j in seen]]
                scores.append((keys[s][:, seen] @ q[:, first + i, :, None])[..., 0] * scale + shift)
                rows.append(values[s][:, seen])
            score = torch.cat(scores, 1)
            if score.shape[1]:
                outs[first + i] = [(score.softmax(1)[:, None] @ torch.cat(rows, 1))[:, 0], score.logsumexp(1)]
    return tuple(torch.stack(x, 1) for x in zip(*outs, strict=True))


def problem(n: int, counts: list[int], d: int, kind: torch.dtype, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, m, d, generator=draw, dtype=kind) for m in (n, *counts, *counts)]
    bias = torch.randn(2, sum(counts), generator=draw, dtype=kind)
    bias[0, 3] = -torch.inf
    return tensors[0], tensors[1 : 1 + len(counts)], tensors[1 + len(counts) :], bias


@pytest.mark.parametrize("d", [8, 3])
@pytest.mark.parametrize("tile", [1, 7, 30])
def test_values_and_gradients_are_those_of_the_formula(d, tile):
    q, keys, values, bias = problem(61, [40, 150], d, torch.float64)
    runs = tables(61, [40, 150], (0, 1, 0), tile)
    given = [x.requires_grad_() for x in (q, *keys, *values)]
    wanted = dense(q, keys, values, runs, 0.4, bias)
    found = attend_runs(q, keys, values, runs, 0.4, bias)
    close(found, wanted, atol=1e-11, rtol=1e-9)
    finite = wanted[1] > -torch.inf
    weight = torch.randn(wanted[0].shape, dtype=q.dtype), torch.randn(int(finite.sum()), dtype=q.dtype)
    totals = [(out * weight[0]).sum() + (lse[finite] * weight[1]).sum() for out, lse in (wanted, found)]
    close(torch.autograd.grad(totals[1], given), torch.autograd.grad(totals[0], given), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_kernel_is_the_reference_on_strided_views(with_bias):
    n, d = 300, 16
    mixed = torch.randn(2, n, 3, 4, d, generator=torch.Generator().manual_seed(1))
    q, k, v = (x[0].transpose(0, 1) for x in mixed.unbind(2))  # (4, n, d)
    bias = torch.randn(1, n) if with_bias else None
    runs = tables(n, [n], (0, 0), 25)
    close(
        attend_runs(q, [k], [v], runs, 0.25, bias),
        reference.forward(q, [k], [v], bias, runs.tiles, runs.spans, [0, 0], list(runs.sizes), 0.25),
        atol=1e-5,
        rtol=1e-5,
    )


def test_keys_of_one_run_each():
    """Two sources, every key in one run, every query in one tile: gradients are written, not added."""
    q, keys, values, bias = problem(61, [40, 150], 8, torch.float64)
    tiles = torch.tensor([(0, 20), (20, 30), (50, 11)])
    own = torch.tensor([(f, c, EVERYTHING, -EVERYTHING) for f, c in ((0, 13), (13, 0), (13, 27))])
    other = torch.tensor([(f, c, 3, -EVERYTHING) for f, c in ((90, 60), (60, 30), (0, 60))])
    runs = Runs(tiles, torch.stack((own, other), 1), (0, 1), 61 * 60, (30, 40, 60))
    given = [x.requires_grad_() for x in (q, *keys, *values)]
    assert cpu.divides(runs.spans, runs.sources, keys) and cpu.covers(tiles, 61)
    assert not cpu.divides(runs.spans, (0, 0), keys[:1])
    grads = [
        torch.autograd.grad(attend(q, keys, values, runs, 0.4, bias)[0].square().sum(), given)
        for attend in (attend_runs, dense)
    ]
    close(*grads, atol=1e-10, rtol=1e-8)


def test_what_is_not_a_number_stays_where_it_is():
    q, keys, values, _ = problem(20, [20], 8, torch.float32)
    q[0, 3] = torch.nan
    runs = Runs(torch.tensor([(0, 20)]), torch.tensor([[(0, 20, EVERYTHING, -EVERYTHING)]]), (0,), 400, (20, 20))
    out, lse = attend_runs(q, keys, values, runs, 1.0)
    bad = out.isnan().any(-1)
    assert bad[0, 3] and bad.sum() == 1 and lse[0, 3].isnan()


def test_the_operator_keeps_its_promises():
    q, keys, values, bias = problem(21, [11], 8, torch.float64)
    runs = tables(21, [11], (0,), 6)
    given = (q.requires_grad_(), keys, values, bias, runs.tiles, runs.spans, [0], list(runs.sizes), 0.5, runs.pairs)
    torch.library.opcheck(attention, given, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    out, _ = attend_runs(q, keys, values, runs, 0.5)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n, d", [(1, 8), (65, 16), (130, 12)])
def test_dot_products_of_rows(n, d, dtype):
    a, b = torch.randn(n, 3, d).transpose(0, 1).to(dtype), torch.randn(3, n, d).to(dtype)
    close(row_dots(a, b), (a * b).sum(-1))
