"""What is measured: one step of a mechanism, of a layer or, with `bench_model`, of a whole model.

    head    a mechanism on q, k, v, held against `F.scaled_dot_product_attention`
    layer   a mechanism on tokens, inside a `MultiheadAttention` layer, held against a layer of full attention

A ragged batch has rows of n/2 to n tokens, evenly spread, padded to n. Full attention gets what a user of torch would
give it: a mask of keys or, causal, a mask of pairs, made once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention.base import Attention
from subquad.attention.registry import for_length
from subquad.layers import MultiheadAttention

FULL = "full"  # what everything is measured against
LEAST = 0.05  # seconds of a round
DTYPES = ("float32", "bfloat16", "float16")
PEAK_SIZE = 1024  # of the matrices whose product stands for the peak: 12 MB in float32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements of a run share."""

    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    causal: bool = False
    backward: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    ragged: bool = False  # rows of n/2 to n tokens
    dropout: float = 0.0
    level: str | None = None  # None: that of each mechanism

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer ≥ 1, not {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, not {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: torch finds no GPU here (subquad doctor shows what it finds)")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be a probability ≥ 0 and < 1, not {self.dropout}")
        if self.dropout and not self.backward:
            raise ValueError("dropout acts in training only: it needs backward")
        if self.ragged and self.batch < 2:
            raise ValueError(f"ragged needs a batch of at least 2 rows, not {self.batch}")

    @property
    def place(self) -> dict[str, Any]:
        """Where tensors are, and of which dtype."""
        return {"device": self.device, "dtype": getattr(torch, self.dtype)}

    @property
    def plain(self) -> Setting | None:
        """The same without padding and dropout; None if it has neither."""
        return replace(self, ragged=False, dropout=0.0) if self.ragged or self.dropout else None

    def asdict(self) -> dict[str, Any]:
        """For a report: what was not asked for is left out."""
        rare = {"ragged": False, "dropout": 0.0, "level": None}
        return {key: value for key, value in asdict(self).items() if key not in rare or value != rare[key]}

    def key_mask(self, n: int) -> Tensor | None:
        """bool (B, n) of a ragged batch; None: all tokens are real."""
        if not self.ragged:
            return None
        lengths = torch.linspace(n / 2, n, self.batch).ceil().long()  # (B,)
        return (torch.arange(n) < lengths[:, None]).to(self.device)


@dataclass
class Step:
    """Something that runs once per call: forward without gradients, or forward and backward."""

    spec: str
    level: str
    module: nn.Module
    inputs: list[Tensor]
    grad: Tensor | None  # of the output; None = forward only
    key_mask: Tensor | None = None  # (B, n), of a ragged batch
    pairs: float = 1.0  # the share of pairs that causal full attention computes: the counter takes all of them
    flops: int | None = None
    rounds: list[float] = field(default_factory=list)  # seconds, the best of each round
    memory: int | None = None
    plain: Step | None = None  # the same without padding and dropout, where there is either

    @property
    def seconds(self) -> float:
        return min(self.rounds)

    def __call__(self) -> None:
        if self.grad is None:
            with torch.no_grad():
                self.forward()
            return
        self.module.zero_grad(set_to_none=True)
        for x in self.inputs:
            x.grad = None
        self.forward().backward(self.grad)

    def forward(self) -> Tensor:
        if self.level == "layer":
            padded = None if self.key_mask is None else ~self.key_mask
            return self.module(*self.inputs * 3, key_padding_mask=padded, need_weights=False)[0]
        return self.module(*self.inputs, **({} if self.key_mask is None else {"key_mask": self.key_mask}))

    def count(self) -> None:
        """The first call, under the counter."""
        with FlopCounterMode(display=False) as counter:
            self()
        counts = counter.get_flop_counts().get("Global", {})
        shares = {op: self.pairs if "scaled_dot_product" in str(op) else 1 for op in counts}
        self.flops = int(sum(shares[op] * counts[op] for op in counts)) or None

    def wait(self) -> None:
        """Until a GPU has done what it was given."""
        if self.inputs[0].is_cuda:
            torch.cuda.synchronize()

    def clock(self) -> None:
        """The best of the calls that fit into `LEAST` seconds: a single short call says little."""
        self.wait()
        first = last = time.perf_counter()
        best = float("inf")
        while last - first < LEAST:
            self()
            self.wait()
            now = time.perf_counter()
            best, last = min(best, now - last), now
        self.rounds.append(best)


# ---- making one ----


class Level(NamedTuple):
    """How the steps of a level are made; a module that adds a level puts it into `LEVELS`."""

    inputs: Callable[[int, Setting], tuple[list[Tensor], Tensor | None]]
    step: Callable[[str, int, Setting, tuple[list[Tensor], Tensor | None]], Step]


def make_inputs(level: str, n: int, setting: Setting) -> tuple[list[Tensor], Tensor | None]:
    """Seeded q, k, v (B, H, n, d), or tokens (B, n, E); and the gradient of the output."""
    return LEVELS[level].inputs(n, setting)


def make_step(spec: str, level: str, n: int, setting: Setting, data: tuple[list[Tensor], Tensor | None]) -> Step:
    """A mechanism ready to run on `data` of `make_inputs`; full attention on q, k, v is torch's function."""
    step = LEVELS[level].step(spec, n, setting, data)
    step.key_mask = setting.key_mask(n)
    step.pairs = (n + 1) / (2 * n) if spec == FULL and setting.causal and not setting.ragged else 1.0
    return step


class _Full(nn.Module):
    """torch's own attention, without anything around it."""

    def __init__(self, n: int, setting: Setting) -> None:
        super().__init__()
        self.dropout, self.causal, self.mask = setting.dropout, setting.causal, None
        real = setting.key_mask(n)
        if real is not None:
            self.causal, self.mask = False, real[:, None, None]  # (B, 1, 1, n)
            if setting.causal:
                self.mask = self.mask & torch.ones(n, n, dtype=torch.bool, device=real.device).tril()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, self.dropout, is_causal=self.causal)


def _random_inputs(shape: tuple[int, ...], count: int, setting: Setting) -> tuple[list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(**setting.place) for _ in range(count)]
    if not setting.backward:
        return inputs, None
    return [x.requires_grad_() for x in inputs], torch.randn(shape, generator=generator).to(**setting.place)


def _head_inputs(n: int, setting: Setting) -> tuple[list[Tensor], Tensor | None]:
    return _random_inputs((setting.batch, setting.heads, n, setting.head_dim), 3, setting)


def _layer_inputs(n: int, setting: Setting) -> tuple[list[Tensor], Tensor | None]:
    return _random_inputs((setting.batch, n, setting.heads * setting.head_dim), 1, setting)


def _head_step(spec: str, n: int, setting: Setting, data: tuple[list[Tensor], Tensor | None]) -> Step:
    if spec == FULL:
        return Step(spec, "head", _Full(n, setting), *data)
    return Step(spec, "head", _chosen(spec, n, setting).to(**setting.place).train(setting.backward), *data)


def _layer_step(spec: str, n: int, setting: Setting, data: tuple[list[Tensor], Tensor | None]) -> Step:
    layer = MultiheadAttention(setting.heads * setting.head_dim, setting.heads, batch_first=True, causal=setting.causal)
    layer.attention = _chosen(spec, n, setting)
    return Step(spec, "layer", layer.to(**setting.place).train(setting.backward), *data)


def _chosen(spec: str, n: int, setting: Setting) -> Attention:
    return for_length(spec, n, causal=setting.causal, **options(setting))


def options(setting: Setting) -> dict[str, Any]:
    """What a setting says to a mechanism, beside the direction."""
    dropout = {"dropout": setting.dropout} if setting.dropout else {}
    return {"num_heads": setting.heads, "head_dim": setting.head_dim, **dropout}


LEVELS = {"head": Level(_head_inputs, _head_step), "layer": Level(_layer_inputs, _layer_step)}


# ---- the roof ----


class _Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


def make_peak(setting: Setting) -> Step:
    """A large matrix product: as fast as this machine multiplies."""
    a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE).to(**setting.place)
    return Step("gemm", "head", _Product(), [a, b], None, flops=2 * PEAK_SIZE**3)
