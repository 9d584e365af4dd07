"""Measurement of streaming: one decode step against full attention over a preallocated key/value cache.

    for rows in measure(["combiner-fixed"], [4096, 65536], Setting(causal=True)): ...

step      best of several rounds; in each, full attention and all mechanisms take turns. Full attention writes one key
          and one value into a cache that has room for them, and calls `F.scaled_dot_product_attention` on what is
          there. A mechanism of level "layer" is held against a layer: the same projections around that.
state     bytes of the state, against the keys and values of the cache
prefill   the tokens in chunks, against the tokens in one call of the mechanism, which keeps no state: the time, and
          how far the resident memory rises; the outputs of chunks are dropped, as a decoder drops them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.registry import attention
from subquad.bench import FULL, Setting, level_of
from subquad.core import memory
from subquad.layers import MultiheadAttention

ROOM = 1024  # decode steps that caches have room for
LEAST = 0.05  # seconds of a round


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """One mechanism after n tokens; `ratio` = seconds / full_seconds of one step."""

    spec: str
    level: str
    n: int
    seconds: float
    full_seconds: float
    ratio: float
    state_bytes: int
    cache_bytes: int
    call_seconds: float | None = None  # all tokens in one call
    chunk_seconds: float | None = None  # all tokens in chunks, with a state
    call_memory: int | None = None  # bytes that the one call takes at its peak, its output among them
    chunk_memory: int | None = None  # bytes that the chunks take at their peak, the state among them


@dataclass
class _Subject:
    spec: str
    level: str
    step: Callable[[], Any]
    bytes: Callable[[], int]
    seconds: float = float("inf")
    prefill: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def clock(self) -> None:
        first = last = time.perf_counter()
        while last - first < LEAST:
            self.step()
            now = time.perf_counter()
            self.seconds, last = min(self.seconds, now - last), now


def measure(
    specs: Sequence[str],
    lengths: Sequence[int],
    setting: Setting,
    *,
    repeats: int = 3,
    chunk: int = 1024,
    tell: Callable[[str], None] = lambda what: None,
) -> Iterator[list[DecodeRow]]:
    """All rows so far, after every length."""
    if not specs or not lengths or repeats < 1 or min(lengths) < 1 or chunk < 1:
        raise ValueError(
            f"bench needs specs, lengths, repeats and chunk ≥ 1, not {specs}, {lengths}, {repeats}, {chunk}"
        )
    done: list[DecodeRow] = []
    for n in lengths:
        subjects = []
        for spec, level in _subjects(specs):
            tell(f"{spec} at n = {n:,}, the first tokens")
            subjects.append(_full(n, level, setting) if spec == FULL else _mechanism(spec, level, n, setting, chunk))
        for turn in range(repeats):
            tell(f"n = {n:,}, round {turn + 1}")
            for subject in subjects:
                subject.clock()
        done += _rows(subjects, n)
        yield done


def _subjects(specs: Sequence[str]) -> list[tuple[str, str]]:
    wanted = [(spec, level_of(spec)) for spec in dict.fromkeys(specs) if spec != FULL]
    levels = [level for _, level in wanted] or ["head"]
    return list(dict.fromkeys([(FULL, level) for level in levels] + wanted))


def _rows(subjects: Sequence[_Subject], n: int) -> list[DecodeRow]:
    full = {subject.level: subject for subject in subjects if subject.spec == FULL}
    return [
        DecodeRow(
            spec=subject.spec,
            level=subject.level,
            n=n,
            seconds=subject.seconds,
            full_seconds=full[subject.level].seconds,
            ratio=subject.seconds / full[subject.level].seconds,
            state_bytes=subject.bytes(),
            cache_bytes=full[subject.level].bytes(),
            **subject.prefill,
        )
        for subject in subjects
    ]


def _tokens(n: int, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shape = (setting.batch, setting.heads, n, setting.head_dim)
    q, k, v = (torch.randn(shape, generator=draw) for _ in range(3))
    return q, k, v


def _full(n: int, level: str, setting: Setting) -> _Subject:
    """Full attention over a cache; for a layer between its projections."""
    q, k, v = _tokens(n + ROOM, setting)
    at, width = [n], setting.heads * setting.head_dim
    layer = MultiheadAttention(width, setting.heads, batch_first=True, causal=True) if level == "layer" else None
    x = torch.randn(setting.batch, 1, width)

    def step() -> Tensor:
        i = at[0] = n + (at[0] - n + 1) % ROOM
        if layer is None:
            new = q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1]
        else:
            mixed = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)  # type: ignore[arg-type]
            new = tuple(y.unflatten(-1, (setting.heads, -1)).transpose(1, 2) for y in mixed.chunk(3, -1))
        k[:, :, i : i + 1], v[:, :, i : i + 1] = new[1], new[2]
        out = F.scaled_dot_product_attention(new[0], k[:, :, : i + 1], v[:, :, : i + 1])
        return out if layer is None else layer.out_proj(out.transpose(1, 2).flatten(2))

    item = k.element_size() * setting.batch * width
    return _Subject(FULL, level, step, lambda: 2 * n * item)


@torch.no_grad()
def _mechanism(spec: str, level: str, n: int, setting: Setting, chunk: int) -> _Subject:
    """After n tokens, which came in chunks; the time of that, and of one call."""
    sizes: dict[str, Any] = {"causal": True, "max_length": n + ROOM}
    width = setting.heads * setting.head_dim
    inputs: tuple[Tensor, ...] = _tokens(n + 1, setting)
    if level == "layer":
        module: Any = MultiheadAttention(width, setting.heads, batch_first=True, attention=spec, **sizes)
        inputs = (inputs[0].transpose(1, 2).flatten(2),)
    else:
        module = attention(spec, num_heads=setting.heads, head_dim=setting.head_dim, **sizes)
    module.eval()
    dim = 1 if level == "layer" else 2
    pieces = [tuple(x.narrow(dim, a, min(chunk, n - a)) for x in inputs) for a in range(0, n, chunk)]
    whole = tuple(x.narrow(dim, 0, n) for x in inputs)
    about = {"need_weights": False} if level == "layer" else {}

    def in_one() -> Any:
        return module(*(whole * 3 if level == "layer" else whole), **about)

    def in_chunks() -> Any:
        state = module.start(setting.batch)
        for piece in pieces:
            _, state = module.extend(*piece, state)
        return state

    prefill: dict[str, Any] = {}
    for _ in range(2):  # the first time makes plans
        for name, run in (("call", in_one), ("chunk", in_chunks)):
            state = None  # what the last run left
            before, begun = memory.reset_peak(), time.perf_counter()
            state = run()
            prefill[f"{name}_seconds"] = min(prefill.get(f"{name}_seconds", float("inf")), time.perf_counter() - begun)
            prefill[f"{name}_memory"] = memory.peak() - before
    current: list[Any] = [state]
    last = tuple(x.narrow(dim, n, 1) for x in inputs)

    def step() -> Tensor:
        if int(current[0].length[0]) >= n + ROOM:
            current[0] = current[0].crop(n + ROOM - 32)
        out, current[0] = module.extend(*last, current[0])
        return out

    return _Subject(spec, level, step, lambda: current[0].nbytes, prefill=prefill)
