"""The effective weights of the layers of a trained model on one text.

A layer's calls are watched while the model reads the text. Its weights q(j|i) come from the definition where an n × n
matrix per head is small. Beyond, they are read off the fast path, which is linear in the values: with the unit vectors
of d tokens as values, the outputs are the d columns of the weights that belong to these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.attention.base import Attention

DENSE = 2**28  # bytes of an n × n matrix for all heads up to which the definition is used


class Watched(NamedTuple):
    """What one layer was called with."""

    number: int  # of the layer in the model
    attention: Attention
    q: Tensor  # (1, H, n, d)
    k: Tensor  # (1, H or H/g, n, d)
    seed: Tensor | None


@contextmanager
def watched(layers: list[Attention]) -> Iterator[list[Watched]]:
    """The calls of these mechanisms, in order, as long as the context lasts."""
    calls: list[Watched] = []

    def watch(number: int, attention: Attention) -> None:
        attend = attention.attend_tokens

        def attend_tokens(query: Tensor, key: Tensor, value: Tensor, project: Any, *rest: Any, **more: Any) -> Any:
            seed = rest[1] if len(rest) > 1 else more.get("seed")
            calls.append(Watched(number, attention, project.queries(query), project.keys(key), seed))
            return attend(query, key, value, project, *rest, **more)

        attention.__dict__["attend_tokens"] = attend_tokens

    for number, attention in enumerate(layers):
        watch(number, attention)
    try:
        yield calls
    finally:
        for attention in layers:
            del attention.__dict__["attend_tokens"]


@torch.no_grad()
def effective_weights(call: Watched, tell: Callable[[str], Any] = lambda what: None) -> np.ndarray:
    """float32 (H, n, n), beyond `DENSE` float16."""
    heads, n = call.q.shape[1:3]
    if 4 * heads * n * n <= DENSE:
        return call.attention.weights(call.q, call.k, seed=call.seed)[0].float().numpy()
    return probed_weights(call, tell)


@torch.no_grad()
def probed_weights(call: Watched, tell: Callable[[str], Any] = lambda what: None) -> np.ndarray:
    """The same from the fast path, d columns at a time: float16 (H, n, n)."""
    heads, n, d = call.q.shape[1:]
    found = np.empty((heads, n, n), np.float16)
    for first in range(0, n, d):
        tell(f"layer {call.number}, {first:,} of {n:,} tokens")
        count = min(d, n - first)
        v = call.k.new_zeros(*call.k.shape[:3], d)
        v[:, :, range(first, first + count), range(count)] = 1
        columns = call.attention(call.q, call.k, v, seed=call.seed)[0, :, :, :count]  # (H, n, count)
        found[:, :, first : first + count] = columns.float().numpy()
    return found
