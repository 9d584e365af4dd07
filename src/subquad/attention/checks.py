"""What a call of a mechanism may be given: an error names the argument, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_inputs(attention: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    for label, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{label} must be a tensor (B, H, n, d), not {type(x).__name__}")
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            raise TypeError(f"{label} must be of a floating-point dtype of 16 bits or more, not {x.dtype}")
        if x.dim() != 4:
            raise ValueError(f"{label} must have 4 dimensions (B, H, n, d), not shape {tuple(x.shape)}")
    for label, x in (("q", q), ("k", k), ("v", v)):
        _check_heads(attention, label, x, k.shape[1])
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{label} has batch size {x.shape[0]}, q has {q.shape[0]}")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(f"{label} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: they must be equal")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v has length {v.shape[2]}, k has {k.shape[2]}: they must be equal")
    if q.shape[0] < 1:
        raise ValueError("q has batch size 0: it must be at least 1")
    check_lengths(attention, q.shape[2], k.shape[2])
    check_mask(attention, k, key_mask)


def _check_heads(attention: Any, label: str, x: Tensor, key_heads: int) -> None:
    heads, width = attention.options.num_heads, attention.options.head_dim
    if label == "q" and x.shape[1] != heads:
        hint = "; q must be (B, H, n, d): q.transpose(1, 2) makes it so" if x.shape[2] == heads else ""
        raise ValueError(f"q has {x.shape[1]} heads, the mechanism was created with num_heads={heads}{hint}")
    if x.shape[1] < 1 or heads % x.shape[1]:
        raise ValueError(f"{label} has {x.shape[1]} heads: it must be a divisor of num_heads={heads}")
    if label == "v" and x.shape[1] != key_heads:
        raise ValueError(f"v has {x.shape[1]} heads, k has {key_heads}: they must be equal")
    if x.shape[3] != width:
        raise ValueError(f"{label} has width {x.shape[3]}, the mechanism was created with head_dim={width}")


def check_lengths(attention: Any, n: int, m: int) -> None:
    if (n < 1 or m < 1) and attention.across is None:  # a process may have no token of a short sequence
        raise ValueError(f"sequences must have at least one token: q has length {n}, k has {m}")
    if n != m and not attention.capabilities.cross:
        raise ValueError(
            f"{attention.name}: q has length {n} and k has length {m}; cross-attention is not defined for it, "
            "the lengths must be equal"
        )
    if n != m and attention.options.causal:
        raise ValueError(f"{attention.name}: causal=True needs q and k of equal length, not {n} and {m}")
    longest = attention.options.max_length
    if longest is not None and max(n, m) > longest:
        raise ValueError(f"{attention.name}: length {max(n, m)} is beyond max_length={longest}")


def check_mask(attention: Any, k: Tensor, key_mask: Tensor | None) -> None:
    if key_mask is None:
        return
    if not attention.capabilities.padding:
        raise ValueError(f"{attention.name}: key_mask is not supported")
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a bool tensor, True = a real token, not {kind}")
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"key_mask must have shape (B, m) = {(k.shape[0], k.shape[2])}, not {tuple(key_mask.shape)}")
    if key_mask.device != k.device:
        raise ValueError(f"key_mask is on {key_mask.device}, k is on {k.device}")


def refuse_tangents(attention: Any, *tensors: Tensor, project: Any = None) -> None:
    """Refuse forward-mode derivatives of inputs, parameters and projections: torch drops tangents at our operators."""
    if attention.is_torch_alone or torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    layer = getattr(project, "layer", attention)
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (*tensors, *layer.parameters())):
        raise NotImplementedError(
            f"{attention.name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); take the "
            "derivative backwards, with torch.autograd.grad"
        )


CALL = ("q", "k", "v", "key_mask", "seed")
PADDING = "padding is given as key_mask, a bool tensor (B, m) in which True is a real token"
MADE = {"is_causal": "causal=True", "causal": "causal=True", "dropout_p": "dropout=0.1", "dropout": "dropout=0.1",
        "scale": "scale=0.125"}  # fmt: skip
ELSEWHERE = {  # what torch and transformers call it → what to give here
    "attn_mask": f"who attends to whom is decided by the mechanism, with causal=True when it is created; {PADDING}",
    "mask": f"{PADDING}; who attends to whom is decided by the mechanism, with causal=True when it is created",
    "key_padding_mask": f"{PADDING}: key_mask=~key_padding_mask",
    "attention_mask": f"{PADDING}: key_mask=attention_mask.bool()",
    "need_weights": "the weights are a call of their own, weights(q, k)",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "generator": "seed, an integer, makes a random call repeatable",
}


def refuse_unknown_arguments(attention: Any, names: Iterable[str]) -> None:
    """Refuse what a call does not take; what torch or transformers call an argument is answered with its name here."""
    for name in names:
        if name in CALL:
            continue
        instead = ELSEWHERE.get(name, "a call takes q, k, v, key_mask and seed")
        if name in MADE:
            made = f"subquad.attention({attention.name!r}, …, {MADE[name]})"
            instead = f"it is decided when the mechanism is created: {made}"
        raise TypeError(f"{attention.name}: a call has no argument {name!r}; {instead}")


def checked_seed(seed: Tensor | int | None) -> Tensor | None:
    """The seed as a tensor, int64 ()."""
    if isinstance(seed, int) and not isinstance(seed, bool):
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must fit into 64 bits, not {seed}")
        return torch.tensor(seed, device="cpu")
    if seed is not None and not (isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.dim() == 0):
        kind = f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"seed must be an integer or an int64 tensor without dimensions, not {kind}")
    return seed
