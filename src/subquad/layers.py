"""The layer around a mechanism: `MultiheadAttention`, a drop-in for torch's, with any attention inside."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.call import draw_seed
from subquad.attention.registry import attention as make_attention
from subquad.attention.states import State
from subquad.kernels.affine import affine, affine_parts, apply_linear
from subquad.kernels.values import readable, require
from subquad.packing import Packing, attend_packed, packing_of

PADDING = {  # names of padding elsewhere → what torch's layer takes
    "key_mask": "padding is given as key_padding_mask, in which True is padding: key_padding_mask=~key_mask",
    "attention_mask": "padding is given as key_padding_mask, in which True is padding",
    "mask": "padding is given as key_padding_mask, in which True is padding",
}
QUADRATIC = 4096  # weights of a sequence longer than this earn a warning: they cost what the mechanism saves


class Projections:
    """The layer's input projections, for mechanisms that work on tokens: tokens (B, n, E) → heads (B, H, n, d)."""

    affine = True  # a weighted sum of tokens may be taken before or after them

    def __init__(self, layer: MultiheadAttention) -> None:
        self.layer = layer

    def queries(self, x: Tensor) -> Tensor:
        return self._project(0, x)

    def keys(self, x: Tensor) -> Tensor:
        return self._project(1, x)

    def values(self, x: Tensor) -> Tensor:
        return self._project(2, x)

    def together(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three, of the same tokens where it is self-attention."""
        if query is key and key is value and self.layer.in_proj_weight is not None:
            weight, bias = self.layer.in_proj_weight, self.layer.in_proj_bias
            parts = affine_parts(query, weight, bias, self.layer.widths)  # (B, n, E) each
            q, k, v = (self._split(x) for x in parts)
            return q, k, v
        return self.queries(query), self.keys(key), self.values(value)

    def matrix(self, which: int) -> tuple[Tensor, Tensor | None]:
        """The weight (f, E) and the bias (f,) of queries, keys or values: 0, 1 or 2."""
        layer, widths = self.layer, self.layer.widths
        rows = slice(sum(widths[:which]), sum(widths[: which + 1]))
        if layer.in_proj_weight is not None:
            weight: Any = layer.in_proj_weight[rows]
        else:
            weight = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)[which]
        return weight, None if layer.in_proj_bias is None else layer.in_proj_bias[rows]

    def _project(self, which: int, x: Tensor) -> Tensor:
        return self._split(affine(x, *self.matrix(which)))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.layer.head_dim)).transpose(1, 2)  # (B, H, n, d)


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with a chosen attention inside.

        m = MultiheadAttention(512, 8, attention="longformer:window=64", causal=True, batch_first=True)
        y, _ = m(x, x, x, need_weights=False)

    Same arguments, same call, same state dict as torch's; with attention="full" the same outputs and gradients.
    What it does not support raises an error: add_bias_kv, add_zero_attn, and an attn_mask other than the causal one
    (full attention takes any). `key_padding_mask` is torch's: True = padding. `need_weights=True` (torch's default)
    returns the effective weights of this call, a matrix n × n: pass need_weights=False for long sequences.

    A packed batch is several sequences one after another in a row, none of which sees another: `cu_seqlens` (S + 1,),
    the slots they begin with and the end, or `position_ids` (B, n) that restart at 0 (see `subquad.packing`).

    Beyond torch's: `num_kv_heads` keys and values with fewer heads (grouped query attention), `head_dim` heads whose
    width is not embed_dim / num_heads.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = "full",
        causal: bool = False,
        max_length: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        **options: Any,
    ) -> None:
        """The arguments before the star are torch's; `attention` is a name or a spec such as "combiner-fixed:span=64".

        `causal`, `max_length`, `dropout` and `options` are for the mechanism; `num_kv_heads` must divide num_heads.
        """
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, value in {**sizes, "kdim": kdim, "vdim": vdim}.items():
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if wrong and (name in ("embed_dim", "num_heads") or value is not None):
                raise ValueError(f"{name} must be an integer ≥ 1, not {value!r}")
        if embed_dim % num_heads and head_dim is None:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads={num_heads}, not {embed_dim}; or give head_dim"
            )
        if num_heads % (num_kv_heads or num_heads):
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, not {num_kv_heads}")
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not supported: they must be False")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim or embed_dim // num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.batch_first = batch_first
        # nn.TransformerEncoderLayer would read True here as leave to run its own full attention on our weights
        self._qkv_same_embed_dim = False
        self._make_projections(bias, {"device": device, "dtype": dtype})
        # what is left at its default does not contradict a spec that sets it
        given = {"causal": causal or None, "max_length": max_length, "dropout": dropout or None}
        options.update({name: value for name, value in given.items() if value is not None})
        self.attention = make_attention(attention, num_heads=num_heads, head_dim=self.head_dim, **options).to(
            device=device, dtype=dtype
        )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of the projected queries, keys and values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    def _make_projections(self, bias: bool, factory: dict[str, Any]) -> None:
        e, (q, k, v) = self.embed_dim, self.widths
        together = self.kdim == self.vdim == q == k == e
        shapes = {
            "in_proj_weight": (3 * e, e) if together else None,
            "q_proj_weight": None if together else (q, e),
            "k_proj_weight": None if together else (k, self.kdim),
            "v_proj_weight": None if together else (v, self.vdim),
            "in_proj_bias": (q + k + v,) if bias else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **factory)))
        self.out_proj = nn.Linear(q, e, bias=bias, **factory)
        for name, shape in shapes.items():  # torch's initialisation
            if shape is not None and name != "in_proj_bias":
                nn.init.xavier_uniform_(getattr(self, name))
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """`forward`; other names of the padding are answered with torch's."""
        for name in named.keys() & PADDING.keys():
            raise TypeError(f"MultiheadAttention: a call has no argument {name!r}; {PADDING[name]}")
        return super().__call__(*args, **named)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, n, E), key (B, m, kdim), value (B, m, vdim) → output (B, n, E) and weights, or None.

        Without batch_first the order is (n, B, E); without a batch it is (n, E). `key_padding_mask` (B, m): True or
        -inf = padding. `attn_mask` (n, m) or (B·H, n, m): True or -inf = may not attend. `is_causal` says that the mask
        is the causal one. The weights, returned with need_weights=True, are (B, n, m), or (B, H, n, m) with
        average_attn_weights=False.
        """
        self._check_tokens(query, key, value)
        batched = query.dim() == 3
        tokens = [x if batched else x[None] if self.batch_first else x[:, None] for x in (query, key, value)]
        if not self.batch_first:  # one transposed tensor for one object: `together` looks at identity
            first = {id(x): x.transpose(0, 1) for x in tokens} if batched else {}
            tokens = [first.get(id(x), x.transpose(0, 1)) for x in tokens]
        elif not batched and query is key and key is value:
            tokens = [tokens[0]] * 3
        _check_shapes(*tokens)
        key_mask = self._key_mask(key_padding_mask, tokens[1])
        packing = self._packing(tokens, key_mask, position_ids, cu_seqlens)
        if packing is not None and attn_mask is not None and not is_causal:
            raise ValueError("attn_mask: a packed batch has no mask but the causal one; leave attn_mask out")
        seen = self._attn_mask(attn_mask, is_causal, tokens[0], tokens[1])
        project = Projections(self)
        # one seed: the weights are those of this call
        extra: dict[str, Any] = {"seed": draw_seed()} if need_weights and self.attention.is_random else {}
        extra |= {} if seen is None else {"seen": seen}
        query, key, value = tokens
        if packing is None:
            mixed, _ = self.attention.attend_tokens(query, key, value, project, key_mask, **extra)  # (B, n, H·d)
        else:
            mixed, _ = attend_packed(packing, self.attention, tokens, lambda _: project, **extra)
        out = apply_linear(self.out_proj, mixed)
        weights = None
        if need_weights:
            weights = self._weights(tokens, project, key_mask, packing, extra, average_attn_weights)
        out = out if self.batch_first else out.transpose(0, 1)
        if not batched:
            out = out.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights[0]
        return out, weights

    def _packing(
        self, tokens: list[Tensor], key_mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> Packing | None:
        """The sequences of a packed batch; None where a row is one."""
        if position_ids is None and cu_seqlens is None:
            return None
        if tokens[0].shape[1] != tokens[1].shape[1]:
            raise ValueError("cu_seqlens and position_ids: packed batches are for self-attention")
        # sizes that are left open follow the length of a call: only sequences of one length may share one
        able = self.attention.capabilities
        settled = self.attention.options.max_length or (able.streaming and not self.attention.open_size)
        shape = (tokens[0].shape[0], tokens[0].shape[1])
        about: dict[str, Any] = {"sharing": "near" if settled else "equal", "device": tokens[0].device}
        about["longest"] = self.attention.options.max_length
        return packing_of(shape, key_mask, position_ids, cu_seqlens, **about)

    def start(self, batch_size: int, **about: Any) -> State:
        """An empty state for streaming, as `Attention.start`: device, dtype, seed, rollback."""
        like: dict[str, Any] = {"device": self.out_proj.weight.device, "dtype": self.out_proj.weight.dtype}
        given = {name: value for name, value in about.items() if value is not None or name not in like}
        return self.attention.start(batch_size, **like | given)

    def extend(self, x: Tensor, state: State, *, key_mask: Tensor | None = None) -> tuple[Tensor, State]:
        """Causal self-attention of t ≥ 1 new tokens per row, (B, t, E) → (B, t, E), and the state that has them.

        `key_mask` bool (B, t), True = a real token, is that of the new tokens; see `Attention.extend`.
        """
        self._check_tokens(x, x, x)
        if x.dim() != 3:
            raise ValueError(f"x must have 3 dimensions (B, t, E), not {tuple(x.shape)}")
        mixed, state = self.attention.extend_tokens(x, Projections(self), state, key_mask)  # (B, t, H·d)
        return self.out_proj(mixed), state

    def _weights(self, tokens, project, key_mask, packing, extra, average: bool) -> Tensor:
        if tokens[1].shape[1] > QUADRATIC and self.attention.name != "full":
            warnings.warn(
                f"need_weights=True makes a matrix of {tokens[0].shape[1]} × {tokens[1].shape[1]} weights: "
                "quadratic cost; pass need_weights=False",
                stacklevel=3,
            )
        if packing is None:
            weights = self.attention.token_weights(tokens[0], tokens[1], project, key_mask, **extra)  # (B, H, n, m)
        else:
            seeds = packing.seeds(extra.get("seed"), self.attention.training)
            apart = [
                self.attention.token_weights(bucket.rows(tokens[0]), bucket.rows(tokens[1]), project, bucket.mask, seed)
                for bucket, seed in zip(packing.buckets, seeds, strict=True)
            ]
            weights = packing.join_weights(apart)
        return weights.mean(1) if average else weights

    def _check_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name} must be a tensor of a floating-point dtype, not {kind}")
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                raise ValueError(f"{name} must have 3 dimensions, or all of them 2 (no batch), not {tuple(x.shape)}")
            if x.shape[-1] != width:
                raise ValueError(f"{name} must have width {width}, not {x.shape[-1]}")
            own: Any = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
            if x.device != own.device or not (x.dtype == own.dtype or torch.is_autocast_enabled(x.device.type)):
                raise TypeError(f"{name} is {x.dtype} on {x.device}, the layer is {own.dtype} on {own.device}")

    def _key_mask(self, padding: Tensor | None, key: Tensor) -> Tensor | None:
        """torch's key_padding_mask (True or -inf = padding) as our key_mask (True = a real token)."""
        if padding is None:
            return None
        _check_mask(padding, "key_padding_mask", "padding")
        padding = padding if padding.dtype == torch.bool else padding == -torch.inf
        padding = padding[None] if padding.dim() == 1 else padding
        if padding.shape != key.shape[:2]:
            raise ValueError(f"key_padding_mask must have shape {tuple(key.shape[:2])}, not {tuple(padding.shape)}")
        if padding.device != key.device:
            raise ValueError(f"key_padding_mask is on {padding.device}, key is on {key.device}")
        return ~padding

    def _attn_mask(self, mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
        """None where the mechanism already honours the mask; else what full attention may see, bool."""
        causal, (batch, n), m = self.attention.options.causal, query.shape[:2], key.shape[1]
        if is_causal and not causal:
            raise ValueError(
                "is_causal=True needs a layer made with causal=True (torch's encoder and decoder layers pass it when "
                "the mask that they are given is the causal one)"
            )
        if mask is None or is_causal:  # torch: with is_causal the mask is a hint that says the same
            return None
        _check_mask(mask, "attn_mask", "may not attend")
        seen = ~mask if mask.dtype == torch.bool else mask == 0  # torch: True = may not attend
        if seen.dim() == 2 and seen.shape == (n, m) and causal and self._is_causal(seen):
            return None
        if self.attention.name != "full":
            raise ValueError(
                f"attn_mask: {self.attention.name} attends by its own support; only the causal mask of a causal "
                "layer is accepted (attention='full' takes any mask, attention='pattern' your own sets)"
            )
        shapes = (n, m), (batch * self.num_heads, n, m)
        if seen.shape not in shapes:
            raise ValueError(
                f"attn_mask must have shape {shapes[0]} or (B·H, n, m) = {shapes[1]}, not {tuple(mask.shape)}"
            )
        if seen.device != query.device:
            raise ValueError(f"attn_mask is on {seen.device}, query is on {query.device}")
        return seen if seen.dim() == 2 else seen.unflatten(0, (-1, self.num_heads))  # (n, m) or (B, H, n, m)

    def _is_causal(self, seen: Tensor) -> bool:
        """Is it the causal mask, (n, m)? A GPU is not waited for: a mechanism that takes no other assumes so, and the
        device checks it; full attention takes the mask as it is.
        """
        same = (seen == torch.ones_like(seen).tril()).all()
        if readable(same):
            return bool(same)
        if self.attention.name == "full":
            return False
        require(same, f"attn_mask: {self.attention.name} takes the causal mask of a causal layer alone")
        return True

    def extra_repr(self) -> str:
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{sizes}, head_dim={self.head_dim}, batch_first={self.batch_first}"


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Tokens (B, n, E), (B, m, ·) and (B, m, ·)."""
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} has batch size {x.shape[0]}, query has {query.shape[0]}: they must be equal")
    if value.shape[1] != key.shape[1]:
        raise ValueError(f"value has length {value.shape[1]}, key has {key.shape[1]}: they must be equal")


def _check_mask(mask: Any, name: str, meaning: str) -> None:
    """A mask is bool, or one of 0 and -inf; on a GPU the device checks that, and the host does not wait."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a tensor, bool (True = {meaning}) or float, not {kind}")
    if mask.is_floating_point():
        message = f"{name}: a float mask may hold 0 and -inf only; other biases are not supported"
        require(((mask == 0) | (mask == -torch.inf)).all(), message)
