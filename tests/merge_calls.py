"""The plans that mechanisms really ask the merge operator for."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch

import subquad
from subquad.attention.registry import mechanism
from subquad.kernels import mixture
from subquad.kernels.merge import op
from subquad.testing import cases


class Asked(NamedTuple):
    """A plan, the number of its queries, and the number of keys of every source."""

    support: str
    which: str
    n: int
    rows: int
    keys: tuple[int, ...]


@cache
def asked_by(name: str, n: int) -> tuple[Asked, ...]:
    """What one mechanism asks for at n tokens, with all its examples, causal or not."""
    found: dict[Asked, None] = {}
    merge, plans = op.eager_merge, mixture.plans

    def note(q: Any, keys: Any, support: str, which: str, length: int) -> None:
        if not support.startswith("given:"):
            found[Asked(support, which, length, q.shape[2], tuple(k.shape[2] for k in keys))] = None

    def noting_merge(q: Any, keys: Any, *rest: Any) -> Any:
        note(q, keys, *rest[4:7])
        return merge(q, keys, *rest)

    def noting_plans(q: Any, keys: Any, *rest: Any) -> Any:
        note(q, keys, *rest[2:5])
        return plans(q, keys, *rest)

    # the CPU kernel of a mixture does without merge
    with mock.patch.object(op, "eager_merge", noting_merge), mock.patch.object(mixture, "plans", noting_plans):
        for options in mechanism(name).examples:
            for case in cases(name, **options):
                case.run(case.make(torch.float32), case.inputs(n, torch.float32, batch=1))
    return tuple(found)


def asked(n: int) -> list[Asked]:
    return list(dict.fromkeys(one for name in subquad.available() for one in asked_by(name, n)))
