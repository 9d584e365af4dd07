"""A case: one mechanism, causal or not, and the way to call it; and what the checks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.attention.base import Attention, Capabilities
from subquad.attention.registry import attention, mechanism
from subquad.core.options import split_spec
from subquad.layers import MultiheadAttention, Projections

LENGTHS = (1, 2, 7, 8, 9, 31, 33, 65)  # 1, 2, b-1, b, b+1, a prime, 2^k ± 1
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class NotApplicable(Exception):
    """A check has nothing to say about a case."""


@dataclass(frozen=True)
class Case:
    """One mechanism, causal or not: called on q, k, v, or as a layer on tokens."""

    spec: str
    causal: bool
    options: dict[str, Any] = field(default_factory=dict)
    heads: int = 2
    width: int = 8
    device: str = "cpu"
    cannot: ClassVar[frozenset[str]] = frozenset()

    @property
    def title(self) -> str:
        """The spec with all options, and the direction."""
        texts = [f"{k}={v}" for k, v in self.options.items() if k != "causal" and not callable(v)]
        given = f"{',' if ':' in self.spec else ':'}{','.join(texts)}" if texts else ""
        return f"{self.spec}{given}{' causal' if self.causal else ''}"

    def make(self, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
        torch.manual_seed(0)
        options = {"causal": self.causal, **self.options, **more}
        if self.able.needs_max_length:
            options.setdefault("max_length", 1 << 16)
        if self.is_layer:
            size = self.heads * self.width
            module: Any = MultiheadAttention(size, self.heads, batch_first=True, attention=self.spec, **options)
        else:
            module = attention(self.spec, num_heads=self.heads, head_dim=self.width, **options)
        return module.to(self.device, dtype).eval()

    @property
    def kind(self) -> type[Attention]:
        return mechanism(split_spec(self.spec)[0])

    @property
    def able(self) -> Capabilities:
        return self.kind.capabilities

    @property
    def exceptions(self) -> dict[str, str]:
        return self.kind.exceptions

    @property
    def is_layer(self) -> bool:
        return self.able.level == "layer"

    @property
    def names(self) -> tuple[str, ...]:
        """What the inputs are called."""
        return ("tokens",) if self.is_layer else ("q", "k", "v")

    @property
    def time(self) -> int:
        """Which dimension of inputs and outputs is the sequence."""
        return 1 if self.is_layer else 2

    def inputs(self, n: int, dtype: torch.dtype = torch.float64, batch: int = 2, seed: int = 1) -> list[Tensor]:
        """q, k, v (B, H, n, d), or tokens (B, n, E) for a layer."""
        draw = torch.Generator("cpu").manual_seed(seed)
        shape = (batch, n, self.heads * self.width) if self.is_layer else (batch, self.heads, n, self.width)
        made = [torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") for _ in self.names]
        return [x.to(self.device, dtype) for x in made]

    def run(self, module: Any, inputs: Sequence[Tensor], key_mask: Tensor | None = None, seed: int = 2) -> Tensor:
        torch.manual_seed(seed)  # what samples, samples the same in every run
        return self.call(module, inputs, key_mask)

    def call(self, module: Any, inputs: Sequence[Tensor], key_mask: Tensor | None = None, **about: Any) -> Tensor:
        if not self.is_layer:
            return module(*inputs, key_mask=key_mask, **about)
        padding = None if key_mask is None else ~key_mask
        return module(*[*inputs] * 3, key_padding_mask=padding, need_weights=False)[0]

    def dense(self, module: Any, inputs: Sequence[Tensor], key_mask: Tensor | None = None) -> Tensor:
        """The same from the definition."""
        torch.manual_seed(2)
        if not self.is_layer:
            return module.dense(*inputs, key_mask=key_mask)
        return module.out_proj(module.attention.dense_tokens(*[*inputs] * 3, Projections(module), key_mask))

    def core(self, module: Any) -> Attention:
        return module.attention if self.is_layer else module

    def rows(self, x: Tensor, where: Tensor) -> Tensor:
        """The outputs at `where`, bool (B, n): (…, d)."""
        return x[where] if self.is_layer else x.transpose(1, 2)[where]

    def spoil(self, x: Tensor, where: Tensor, value: float) -> Tensor:
        """The inputs with `value` at `where`, bool (B, n)."""
        return x.masked_fill(self.spread(where), value)

    def spread(self, mask: Tensor) -> Tensor:
        """A mask (B, n) as it broadcasts to inputs and outputs."""
        return mask[:, :, None] if self.is_layer else mask[:, None, :, None]


@dataclass(frozen=True)
class Foreign(Case):
    """A module that is not registered, with its definition."""

    factory: Callable[[bool], Any] = lambda causal: None
    definition: Callable[..., Tensor] = lambda *given: given[2]
    capabilities: Capabilities = field(default_factory=Capabilities)
    cannot: ClassVar[frozenset[str]] = frozenset(
        {"weights_are_probabilities", "grouped_heads", "leaves_no_trace", "batch_is_its_parts", "dropout_is_fair",
         "grows_as_declared", "bad_input_is_refused", "streams_in_any_split", "state_is_a_value",
         "state_grows_as_declared", "streaming_refuses_bad_input", "scale_is_used"}
    )  # fmt: skip

    @classmethod
    def cases(cls, factory: Callable, definition: Callable, able: Capabilities, device: str = "cpu") -> list[Foreign]:
        wanted = [c for c, can in ((False, able.bidirectional), (True, able.causal)) if can]
        about: dict[str, Any] = {"factory": factory, "definition": definition, "capabilities": able, "device": device}
        return [cls(getattr(factory, "__name__", "module"), causal, **about) for causal in wanted]

    def make(self, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
        torch.manual_seed(0)
        return self.factory(self.causal).to(self.device, dtype).eval()

    @property
    def able(self) -> Capabilities:
        return self.capabilities

    @property
    def exceptions(self) -> dict[str, str]:
        return {}

    def dense(self, module: Any, inputs: Sequence[Tensor], key_mask: Tensor | None = None) -> Tensor:
        return self.definition(*inputs, key_mask, self.causal)


def masks(n: int) -> Tensor:
    """Key masks for a batch of 5, bool (5, n): nothing padded, then left, right, on both sides, inside."""
    third, place = max(1, n // 3), torch.arange(n)
    left, right = place < third, place >= n - third
    inside = (place >= third) & (place < 2 * third) if n > 2 else left & ~left
    return ~torch.stack([left & False, left & (n > 1), right, (left | right) & (n > 2), inside])


def close(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)} is not {tuple(b.shape)}"
    error = (a - b).abs().max().item() if a.numel() else 0.0
    limit = tolerance * max(1.0, b.abs().max().item() if b.numel() else 0.0)
    assert error <= limit, f"{what}: off by {error:.2e}, allowed {limit:.0e}"
    assert math.isfinite(error), f"{what}: not a number"


def gradients(out: Tensor, inputs: Sequence[Tensor], module: Any = None) -> list[Tensor]:
    """Gradients of a fixed random projection of `out`, for the inputs and the parameters of `module`."""
    targets = [*inputs, *(p for p in (module.parameters() if module else ()) if p.requires_grad)]
    draw = torch.Generator("cpu").manual_seed(3)
    direction = torch.randn(out.shape, generator=draw, dtype=torch.float64, device="cpu").to(out)
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in targets]
    grads = torch.autograd.grad(out, targets, direction, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, targets, strict=True)]


def gradient_names(case: Case, module: Any = None) -> list[str]:
    """What the gradients of `gradients` belong to."""
    own = [name for name, p in module.named_parameters() if p.requires_grad] if module else []
    return [*case.names, *own]
