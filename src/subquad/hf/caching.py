"""Caches of decoding: a converted layer keeps the state of its mechanism, not the keys and values of all tokens.

transformers makes a DynamicCache and hands it through the model. Before the model sees it, the entries of the
converted layers are replaced by `StateLayer`s: their `update` returns the new keys and values alone, marked with the
entry, and the attention function extends the state that it finds there. Beams, cropping and all else that
transformers does to a cache is done to the states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from subquad.attention.base import Attention
from subquad.attention.states import State
from subquad.hf.layers import NAME

ROLLBACK = 32  # tokens that can be cropped: more than assisted decoding proposes unless it is told to


class StateLayer(CacheLayerMixin):
    """The state of one layer in the place of its keys and values; of heads that stay full these, (B, h, m, d)."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.slots = 0  # as transformers counts: padding included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are; the attention function finds this entry on the keys."""
        self.is_initialized = True
        self.slots += key_states.shape[2]
        marked: Any = key_states.view_as(key_states)  # an object of its own
        marked._subquad_cache = self
        return marked, value_states

    def extend(self, mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The output of the new tokens, (B, H, t, d); `mask` (B, m) is that of all tokens so far."""
        if self.state is None:
            self.state = mechanism.start(len(q), device=q.device, dtype=q.dtype, rollback=ROLLBACK)
        real = None if mask is None else mask[:, -q.shape[2] :]
        out, self.state = mechanism.extend(q, k.as_subclass(Tensor), v, self.state, key_mask=real)
        return out

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far of the heads that stay full, (B, h, m, d)."""
        if self.keys is None:
            self.keys, self.values = k, v
        else:
            kept = self.keys.to(k.device), self.values.to(v.device)  # they may have been offloaded
            self.keys, self.values = torch.cat((kept[0], k), 2), torch.cat((kept[1], v), 2)
        return self.keys, self.values

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    def get_seq_length(self) -> int:
        return self.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        full = 0 if self.keys is None else self.keys.nbytes + self.values.nbytes
        return full + (0 if self.state is None else self.state.nbytes)

    # ---- what transformers does to a cache ----

    def reset(self) -> None:
        self.state, self.slots, self.is_initialized = None, 0, False
        self.keys = self.values = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, not {tokens_to_remove}")
        if self.state is not None and tokens_to_remove:
            self.state = self.state.crop((self.state.length + tokens_to_remove).clamp(min=0))
            self.slots = max(0, self.slots + tokens_to_remove)
            self._change(lambda x: x[:, :, : self.slots])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)
            self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.repeat(repeats)
            self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(indices)
            self._change(lambda x: x[indices])

    def offload(self) -> None:
        if self.state is not None:
            self.state = self.state.to("cpu")
            self._change(lambda x: x.to("cpu"))

    def prefetch(self) -> None:
        """What is kept comes back to the device with the next call."""


def install_states(model: PreTrainedModel) -> None:
    """Before each forward pass of a (sub)model, let the cache hold states for its converted layers."""
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(model: Any, args: Any, about: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    cache, wanted = about.get("past_key_values"), about.get("use_cache")
    learning = model.training and torch.is_grad_enabled()  # a training step needs no states; `generate` always does
    if learning or torch.compiler.is_compiling() or (cache is not None and cache.get_seq_length() > 0):
        return args, about
    numbers = _numbers(model)
    if not numbers:
        return args, about
    if cache is None and (getattr(model.config, "use_cache", False) if wanted is None else wanted):
        cache = _new_cache(model, about)
    if cache is None:
        return args, about
    put_states(cache, numbers)
    return args, {**about, "past_key_values": cache}


def put_states(cache: Any, numbers: list[int]) -> None:
    """Replace the entries of these layers, as long as they are empty."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if not isinstance(own, DynamicCache):
        raise ValueError(
            f"past_key_values: a converted layer keeps its state in a DynamicCache, not in a {type(own).__name__}; "
            "leave cache_implementation at its default"
        )
    for number in numbers:
        while len(own.layers) <= number:
            own.layers.append((own.layer_class_to_replicate or type(own.layers[0]))())
        if not isinstance(own.layers[number], StateLayer) and own.layers[number].get_seq_length() == 0:
            own.layers[number] = StateLayer()


def cache_bytes(cache: Any) -> int:
    """What a cache holds, in bytes: states, keys and values."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    total = 0
    for layer in cache.layers:
        tensors = (x for x in (layer.keys, layer.values) if isinstance(x, Tensor))
        total += layer.nbytes if isinstance(layer, StateLayer) else sum(x.nbytes for x in tensors)
    return total


def _new_cache(model: PreTrainedModel, about: dict[str, Any]) -> Any:
    cache = DynamicCache(config=model.config)
    paired = about.get("encoder_hidden_states") is not None or model.config.is_encoder_decoder
    return EncoderDecoderCache(cache, DynamicCache(config=model.config)) if paired else cache


def _numbers(model: nn.Module) -> list[int]:
    """The places in a cache of the converted layers that can stream."""
    found = []
    for part in model.modules():
        mechanism = part._modules.get(NAME)
        if (
            isinstance(mechanism, Attention)
            and isinstance(getattr(part, "layer_idx", None), int)
            and _streams(mechanism)
        ):
            found.append(part.layer_idx)
    return found


def _streams(mechanism: Attention) -> bool:
    if not mechanism.options.causal or not mechanism.capabilities.streaming:
        return False
    try:
        mechanism.start(1, seed=0)  # draws nothing
    except (TypeError, ValueError):  # sizes left open
        return False
    return True
