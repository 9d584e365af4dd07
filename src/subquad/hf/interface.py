"""The attention function and the mask function that transformers calls by the name "subquad".

A layer that holds a mechanism (`layer.subquad`) runs it on the queries, keys and values that it has made (projected,
normalised, rotated); any other layer of the same model runs torch's scaled_dot_product_attention. The mask that
travels through the model is the key mask (B, m), as with flash attention, or None where nothing is padded. Whatever is
neither causal nor bidirectional (packed batches, sliding windows, chunks, masks of the caller's own) is made as a mask
(B, 1, n, m), which the layers that kept their attention honour and a mechanism refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from subquad.attention.base import Attention
from subquad.attention.call import repeat_heads
from subquad.hf.heads import full_heads, joined, split
from subquad.hf.layers import NAME
from subquad.kernels.values import may_look

UNKNOWN_TERMS = {  # what other attention functions are handed and no mechanism has a place for
    "softcap": "a soft cap on the scores",
    "s_aux": "learned sinks in the softmax",
    "position_bias": "a bias on the scores",
    "sliding_window": "a sliding window",
    "cu_seq_lens_q": "a packed batch",
    "cu_seq_lens_k": "a packed batch",
}
Watcher = Callable[[nn.Module, Attention, Tensor, Tensor, Tensor, Any, Tensor], None]
_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


def register_interface() -> None:
    """Make the name known to transformers: an attention without a mask of the same name would lose causality."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Inside, `watcher(layer, mechanism, q, k, v, key_mask, out)` is called after each call of a mechanism."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **about: Any,
) -> Tensor | None:
    """The key mask (B, m), None where every key is real; (B, 1, n, m) where the mask is a special one."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        about = {**about, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask=attention_mask, **about
        )
    if attention_mask is None:
        return None
    real = attention_mask[:, -kv_length:]
    return None if may_look(real) and bool(real.all()) else real


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **terms: Any,
) -> tuple[Tensor, None]:
    """q (B, H, n, d), k and v (B, H or H/g, m, d) → (B, n, H, d), as transformers wants it."""
    mechanism = getattr(module, NAME, None)
    if mechanism is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = attend_fully(query, key, value, attention_mask, scaling, dropout, bool(causal), terms)
        return out.transpose(1, 2).contiguous(), None
    refuse(module, mechanism, attention_mask, dropout, is_causal, terms)
    cached, heads, kept = getattr(key, "_subquad_cache", None), key.shape[1], full_heads(mechanism)
    if not kept:
        out = run(module, mechanism, query, key, value, attention_mask, scaling, cached)
        return out.transpose(1, 2).contiguous(), None
    (q, q_full), (k, k_full), (v, v_full) = (split(x, heads, kept) for x in (query, key, value))
    out = run(module, mechanism, q, k, v, attention_mask, scaling, cached)
    if cached is not None:
        k_full, v_full = cached.append(k_full, v_full)
    full = attend_fully(q_full, k_full, v_full, attention_mask, scaling, dropout, mechanism.options.causal, {})
    return joined(out, full, heads, kept).transpose(1, 2).contiguous(), None


def run(
    module: nn.Module, mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: Any, cached
) -> Tensor:
    """The mechanism on its heads, (B, H, n, d); with a cache it goes on from the state there."""
    own_scale = mechanism.options.softmax_scale
    if scaling is not None and scaling != own_scale:
        q = q * (scaling / own_scale)  # (B, H, n, d)
    if cached is not None:
        out = cached.extend(mechanism, q, k, v, mask)
    else:
        if q.shape[2] != k.shape[2]:
            raise no_state(module, mechanism, q.shape[2], k.shape[2])
        out = mechanism(q, k, v, key_mask=mask)
    for watcher in () if torch.compiler.is_compiling() else _watchers.get():  # a graph is not watched
        watcher(module, mechanism, q, k, v, mask, out)
    return out


def no_state(module: nn.Module, mechanism: Attention, queries: int, keys: int) -> ValueError:
    """A cache has keys where the mechanism needs its state: why, and what to do."""
    came = f"{type(module).__name__}: {queries} queries came with {keys} keys, and {mechanism.name} cannot go on from a"
    size = mechanism.open_size
    if size:
        example = f"convert(model, {mechanism.name!r}, {size}=…)"
        also = "" if size == "max_length" else " or max_length"
        return ValueError(
            f"{came} cache while {size} is left open, which then follows the length of a call: set {size}{also}, "
            f"{example}, or pass use_cache=False"
        )
    if module.training and torch.is_grad_enabled():
        return ValueError(
            f"{came} cache in training mode with gradients: call model.eval() or use torch.no_grad(), also for the "
            "call that makes the cache, or pass use_cache=False"
        )
    return ValueError(f"{came} cache of keys: pass use_cache=False, or no cache of your own")


def refuse(
    module: nn.Module, mechanism: Attention, mask: Any, dropout: float, is_causal: bool | None, terms: dict[str, Any]
) -> None:
    """Say what a mechanism cannot honour, by name."""
    name = f"{type(module).__name__} with {mechanism.name}"
    for term, meaning in UNKNOWN_TERMS.items():
        if terms.get(term) is not None:
            raise ValueError(f"{name}: {meaning} ({term}) is not supported; keep this layer full with layers=")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise ValueError(
            f"{name}: attention_mask must be a key mask (B, m); a packed batch, a sliding window or a mask of your own "
            "is not supported (under torch.compile and torch.export give the model an attention_mask: without one "
            "transformers prepares for a packed batch)"
        )
    if is_causal is not None and bool(is_causal) != mechanism.options.causal:
        raise ValueError(f"{name}: is_causal={is_causal} was asked for, it was created with {mechanism.options.causal}")
    if dropout > 0 and dropout != mechanism.options.dropout:
        raise ValueError(
            f"{name}: a dropout of {dropout} on the weights was asked for, it was created with "
            f"{mechanism.options.dropout}; convert(..., dropout={dropout}) sets it"
        )


def attend_fully(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: Any, dropout: float, causal: bool, terms: Any
) -> Tensor:
    """The layers that keep their attention: (B, H, n, d), with the mask as `make_mask` has made it."""
    for term in ("softcap", "s_aux"):
        if terms.get(term) is not None:
            raise ValueError(f"{UNKNOWN_TERMS[term]} ({term}) is not supported beside converted layers")
    n, m = q.shape[2], k.shape[2]
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    causal = causal and n > 1
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None].bool()  # (B, 1, 1, m)
    if causal and ((mask is not None and mask.shape[2] == 1) or n != m):  # the last query sees the last key
        earlier = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        mask, causal = (earlier if mask is None else mask & earlier), False
    bias = terms.get("position_bias")
    if bias is not None:
        seen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n) if causal else mask
        mask, causal = bias if seen is None else bias.masked_fill(~seen, torch.finfo(bias.dtype).min), False
    elif mask is not None:
        mask = mask.expand(len(q), 1, n, m)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scaling
    )
