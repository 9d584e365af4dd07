"""A batch over two processes: a step of DistributedDataParallel is that of one process, for every mechanism."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import subquad
from distributed_runs import Team, close, grad
from subquad.attention.registry import mechanism
from subquad.distributed.groups import Group
from subquad.layers import Projections
from subquad.training.statistics import add, over_processes

N, ROWS, WIDTH = 21, 2, 16  # tokens of a row, rows of a process


@pytest.fixture(scope="module")
def two():
    team = Team(2)
    yield team
    team.close()


class Observed(nn.Module):
    """A layer that also returns the sums that the mechanism's running averages need."""

    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        options = {"causal": causal, "max_length": 64, "dropout": 0.1, **mechanism(name).examples[0]}
        self.layer = subquad.MultiheadAttention(WIDTH, 2, attention=name, batch_first=True, **options)

    def forward(self, x):  # (B, n, E) → (B, n, E)
        mixed, record = self.layer.attention.attend_tokens(x, x, x, Projections(self.layer), None, want_record=True)
        return self.layer.out_proj(mixed), record.statistics


def step(model, x, weight, seed: int):
    """Forward and backward of the rows of one process; the sums for running averages."""
    torch.manual_seed(seed)  # graphs and dropout are drawn from torch's generator
    out, sums = model(x)
    (out * weight).sum().backward()
    return sums


def compare_batches(group: Group, name: str, causal: bool) -> None:
    """Two steps, as DistributedDataParallel reports in the second one which parameters the first one did not use."""
    one = Observed(name, causal).double().train()
    model = DistributedDataParallel(copy.deepcopy(one))
    for number in range(2):
        draw = torch.Generator().manual_seed(number)
        xs, weights = torch.randn(2, group.size, ROWS, N, WIDTH, generator=draw, dtype=torch.float64)
        seeds = [10 * number + rank for rank in range(group.size)]
        own = step(model, xs[group.rank], weights[group.rank], seeds[group.rank])
        total = over_processes(add(None, own))
        sums = None
        for part in zip(xs, weights, seeds, strict=True):  # one process: the parts of the batch one after the other
            sums = add(sums, step(one, *part))
        where = f"{name} causal={causal} step {number}"
        for (title, p), q in zip(one.named_parameters(), model.parameters(), strict=True):
            close(grad(q), grad(p) / group.size, f"{where}: gradient of {title}")
        if sums is not None:
            one.layer.attention.update(sums)
            model.module.layer.attention.update(total)
        for (title, x), y in zip(one.named_buffers(), model.buffers(), strict=True):
            close(y.double(), x.double(), f"{where}: {title}")
        one.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("name", subquad.available())
def test_a_batch_over_two_processes(two, name):
    able = mechanism(name).capabilities
    for causal in [each for each, can in ((True, able.causal), (False, able.bidirectional)) if can]:
        if mechanism(name).examples[0].get("causal", causal) == causal:
            two.run(compare_batches, name, causal)
