"""The contract: what every attention mechanism is, takes and promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.core.options import Options as BaseOptions


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do. What is not declared raises when asked for."""

    causal: bool = True
    bidirectional: bool = True
    cross: bool = False  # queries and keys of different length
    padding: bool = True  # key_mask
    streaming: bool = False  # token-by-token decoding with a cache
    stochastic: bool = False  # random also in evaluation
    needs_max_length: bool = False
    level: str = "head"  # "head": works on q, k, v; "layer": works on tokens and the layer's projections


class Attention(nn.Module):
    """One attention mechanism, configured.

        y = a(q, k, v, key_mask=None)        q (B, H, n, d), k, v (B, H, m, d) → (B, H, n, d)
        w = a.weights(q, k, key_mask=None)   (B, H, n, m): the effective weights, from the definition

    `key_mask` is bool (B, m), True = a real token. A query with nothing to attend to gives 0.
    A mechanism writes `attend` (fast) and `define` (the dense definition the fast path is checked against),
    and declares its options, its capabilities and the lines that `subquad list` shows.
    """

    Options: ClassVar[type[BaseOptions]] = BaseOptions
    capabilities: ClassVar[Capabilities] = Capabilities()
    family: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    cost: ClassVar[str] = ""  # time and memory in n, for people
    exponent: float = 2.0  # operations(n) grow like n^exponent up to logarithms; a property where options decide
    name: ClassVar[str] = ""  # set by the registry
    options: Any
    exceptions: ClassVar[dict[str, str]] = {}  # checks of the contract that cannot hold, each with its reason

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options  # an instance of Options
        allowed = self.capabilities
        if options.causal and not allowed.causal:
            raise ValueError(f"{self.name}: causal=True is not supported; it is bidirectional only")
        if not options.causal and not allowed.bidirectional:
            raise ValueError(f"{self.name}: causal=False is not supported; it is causal only")
        if allowed.needs_max_length and options.max_length is None:
            raise ValueError(f"{self.name}: max_length is needed, an integer ≥ 1")

    # ---- what a mechanism writes ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """The fast path."""
        raise TypeError(f"{self.name} does not work on q, k, v")

    def define(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        """The effective weights from the definition, (B, H, n, m): slow and simple."""
        raise TypeError(f"{self.name} has no weights over tokens")

    def support(self, n: int) -> Tensor:
        """Who may attend to whom: bool (n, n), or (H, n, n) where heads differ. Row = query."""
        full = torch.ones(n, n, dtype=torch.bool)
        return full.tril() if self.options.causal else full

    def picture(self, n: int) -> Tensor:
        """What to draw, (n, n) or (H, n, n): 0 = not attended, 1 = directly, 2 = through a summary."""
        return self.support(n).int()

    # ---- what people call ----

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        self._validate(q, k, v, key_mask)
        q, k, v = _clean(q, k, v, key_mask)
        return self.attend(q, k, v, key_mask)

    @torch.no_grad()
    def weights(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        self._validate(q, k, None, key_mask)
        q, k, _ = _clean(q, k, None, key_mask)
        return self.define(q, k, key_mask)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The oracle: the definition's weights times the values, differentiable."""
        self._validate(q, k, v, key_mask)
        q, k, v = _clean(q, k, v, key_mask)
        return self.define(q, k, key_mask).to(v.dtype) @ v

    # ---- inside a layer ----

    def attend_tokens(self, query: Tensor, key: Tensor, value: Tensor, project, key_mask: Tensor | None) -> Tensor:
        """Tokens (B, n, E) and the layer's projections → heads side by side, (B, n, E).

        A mechanism of level "layer" (one that projects more than once) overrides this one instead of `attend`.
        """
        q, k, v = project.together(query, key, value)  # (B, H, n, d)
        return self(q, k, v, key_mask=key_mask).transpose(1, 2).flatten(2)

    def token_weights(self, query: Tensor, key: Tensor, project, key_mask: Tensor | None) -> Tensor:
        """The effective weights inside a layer, (B, H, n, m)."""
        return self.weights(project.queries(query), project.keys(key), key_mask=key_mask)

    @property
    def drop(self) -> float:
        """The dropout that holds now."""
        return self.options.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in vars(self.options).items() if value is not None)

    # ---- checks ----

    def _validate(self, q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None) -> None:
        heads, width = self.options.num_heads, self.options.head_dim
        for label, x in (("q", q), ("k", k), ("v", v)):
            if label == "v" and x is None:
                continue
            if not isinstance(x, Tensor):
                raise TypeError(f"{label} must be a tensor (B, H, n, d), not {type(x).__name__}")
            if not x.is_floating_point():
                raise TypeError(f"{label} must be of a floating-point dtype, not {x.dtype}")
            if x.dim() != 4:
                raise ValueError(f"{label} must have 4 dimensions (B, H, n, d), not shape {tuple(x.shape)}")
            if x.shape[1] != heads:
                raise ValueError(f"{label} has {x.shape[1]} heads, the mechanism was made with num_heads={heads}")
            if x.shape[3] != width:
                raise ValueError(f"{label} has width {x.shape[3]}, the mechanism was made with head_dim={width}")
            if x.shape[0] != q.shape[0]:
                raise ValueError(f"{label} has batch size {x.shape[0]}, q has {q.shape[0]}")
            if x.dtype != q.dtype or x.device != q.device:
                raise TypeError(f"{label} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")
        if v is not None and v.shape[2] != k.shape[2]:
            raise ValueError(f"v has length {v.shape[2]}, k has {k.shape[2]}: they must be equal")
        self._validate_lengths(q.shape[2], k.shape[2])
        self._validate_mask(k, key_mask)

    def _validate_lengths(self, n: int, m: int) -> None:
        if n < 1 or m < 1:
            raise ValueError(f"sequences must have at least one token: q has length {n}, k has {m}")
        if n != m and not self.capabilities.cross:
            raise ValueError(
                f"{self.name}: q has length {n} and k has length {m}; cross-attention has no meaning here, "
                "the lengths must be equal"
            )
        if n != m and self.options.causal:
            raise ValueError(f"{self.name}: causal=True needs q and k of equal length, not {n} and {m}")
        longest = self.options.max_length
        if longest is not None and max(n, m) > longest:
            raise ValueError(f"{self.name}: length {max(n, m)} is beyond max_length={longest}")

    def _validate_mask(self, k: Tensor, key_mask: Tensor | None) -> None:
        if key_mask is None:
            return
        if not self.capabilities.padding:
            raise ValueError(f"{self.name}: key_mask is not supported")
        if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
            kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
            raise TypeError(f"key_mask must be a bool tensor, True = a real token, not {kind}")
        if key_mask.shape != (k.shape[0], k.shape[2]):
            raise ValueError(
                f"key_mask must have shape (B, m) = {(k.shape[0], k.shape[2])}, not {tuple(key_mask.shape)}"
            )
        if key_mask.device != k.device:
            raise ValueError(f"key_mask is on {key_mask.device}, k is on {k.device}")


def _clean(q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None):
    """What stands in padded slots never matters: k and v become 0 there, a q that is not finite too.

    A finite q in a padded slot is still computed, so that masked attention equals torch's row for row.
    """
    if key_mask is None:
        return q, k, v
    padded = ~key_mask[:, None, :, None]  # (B, 1, m, 1)
    if q.shape[2] == k.shape[2]:
        q = q.masked_fill(padded & ~torch.isfinite(q), 0)
    k = k.masked_fill(padded, 0)
    return q, k, None if v is None else v.masked_fill(padded, 0)
