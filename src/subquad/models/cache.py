"""What a decoder keeps between calls: transformers' `Cache`, whose layers hold the states of our mechanisms.

    output = model(prompt, use_cache=True)
    output = model(next_tokens, past_key_values=output.past_key_values)

A layer has no keys and values to show: its mechanism keeps what a later token can ask for, which is less (see
`subquad.attention.states`). Everything `generate` does with a cache is here: reorder rows for beams, take tokens back
for assisted decoding, repeat and select rows, move to another device. Where more tokens are taken back than the states
can, the next call computes them again from the tokens that were read (`Past`): their numbers are kept, 8 bytes each and
another 9 for their positions and mask, once for all layers. What was given as embeddings is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from subquad.attention.base import Attention
from subquad.attention.states import State
from subquad.attention.states.entrance import memory_of
from subquad.attention.states.state import ROLLBACK, Unmade, grown


class Past:
    """Pieces of what a model was given, each a dict of tensors (B, room) or (B, room, D), and how many slots it has."""

    def __init__(self) -> None:
        self.pieces: list[dict[str, Tensor]] = []
        self.sizes: list[int] = []

    @property
    def slots(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for piece in self.pieces for x in piece.values())

    def add(
        self,
        ids: Tensor | None,
        embeds: Tensor | None,
        key_mask: Tensor | None,
        positions: Tensor,
        token_type_ids: Tensor | None,
    ) -> None:
        """New slots: ids (B, t) or embeds (B, t, D), key_mask bool (B, t), positions (B or 1, t)."""
        x = ids if ids is not None else embeds
        assert x is not None
        shape = (x.shape[0], x.shape[1])
        real = torch.ones(shape, dtype=torch.bool, device=x.device) if key_mask is None else key_mask
        news = {"ids" if ids is not None else "embeds": x, "mask": real, "positions": positions.expand(shape)}
        if token_type_ids is not None:
            news["types"] = token_type_ids
        if ids is None or not self.pieces or self.pieces[-1].keys() != news.keys():
            self.pieces.append({name: new.clone() for name, new in news.items()})  # written into, as it grows
            self.sizes.append(shape[1])
            return
        have, wanted = self.sizes[-1], self.sizes[-1] + shape[1]
        for name, new in news.items():
            own = self.pieces[-1][name] = grown(self.pieces[-1][name], wanted, 1)
            own[:, have:wanted] = new
        self.sizes[-1] = wanted

    def lengths(self, slots: int) -> Tensor:
        """How many of the first `slots` hold a real token, int64 (B,)."""
        found, left = [], slots
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            found.append(piece["mask"][:, : min(size, left)].sum(1))
            left = max(0, left - size)
        return torch.stack(found).sum(0)

    def crop(self, slots: int) -> None:
        pieces, sizes, left = [], [], slots
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            if left:
                pieces.append(piece)
                sizes.append(min(size, left))
                left -= sizes[-1]
        self.pieces, self.sizes = pieces, sizes

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Reorder, repeat or select the rows of everything."""
        self.pieces = [{name: change(x) for name, x in piece.items()} for piece in self.pieces]

    def taken(self) -> list[dict[str, Any]]:
        """Everything, as `Stack.run` takes it, one piece after another; nothing of it is kept."""
        calls, masks = [], []
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            own = {name: x[:, :size] for name, x in piece.items()}
            masks.append(own["mask"].long())
            calls.append(
                {
                    "ids": own.get("ids"),
                    "embeds": own.get("embeds"),
                    "mask": torch.cat(masks, 1),
                    "position_ids": own["positions"],
                    "token_type_ids": own.get("types"),
                }
            )
        self.pieces, self.sizes = [], []
        return calls


RECORDING = 512  # tokens that can be taken back where transformers announces that it will


class StateLayer(CacheLayerMixin):
    """The state of one layer's mechanism, and the number of slots it has seen, padding included.

    `state` and `past` are slots of the class: transformers' exporters walk through the `__dict__` of everything and
    would write into what they find there. Graphs take a cache as `subquad.models.trees` says.
    """

    __slots__ = ("past", "state")
    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self, past: Past | None = None, *, leads: bool = True) -> None:
        super().__init__()
        self.state: State | None = None
        self.slots, self.rollback = 0, ROLLBACK
        self.past = Past() if past is None else past  # one for all layers; the first one looks after it
        self.leads = leads
        self.is_behind = False  # cropped beyond what the state keeps: to be computed again before the next tokens

    def __repr__(self) -> str:
        return f"StateLayer(slots={self.slots}, nbytes={0 if self.state is None else self.state.nbytes})"

    def extend(self, mechanism: Attention, x: Tensor, project: Any, key_mask: Tensor | None, seed: Any) -> Tensor:
        """Heads side by side (B, t, H·d) for new tokens (B, t, D), which the state has from now on."""
        if x.shape[1] == 0:
            return x.new_zeros(len(x), 0, mechanism.options.num_heads * mechanism.options.head_dim)
        if self.state is None:
            kind = x.dtype if mechanism.capabilities.level == "layer" else computed_in(x)  # of tokens, or of keys
            self.state = mechanism.start(x.shape[0], device=x.device, dtype=kind, seed=seed, rollback=self.rollback)
            self.is_initialized, self.device, self.dtype = True, x.device, self.state.dtype
        elif isinstance(self.state.memory, Unmade):
            self.state = replace(self.state, memory=memory_of(mechanism, self.state.rollback))
        y, self.state = mechanism.extend_tokens(x, project, self.state, key_mask)
        self.slots += x.shape[1]
        return y

    def record(self, *given: Any) -> None:
        """The tokens of the call that has just ended, as `Past.add` takes them. After a step that was not recorded (a
        graph records nothing) none of them are known: what is missing cannot be computed again.
        """
        x = given[0] if given[0] is not None else given[1]
        if self.past.slots + x.shape[1] != self.slots:
            self.past.crop(0)
        else:
            self.past.add(*given)

    def skip(self, key_mask: Tensor) -> None:
        """After `extend` with the real slots of a chunk alone, count those that hold padding in every row."""
        self.slots += int((~key_mask[0]).sum())

    @property
    def batch_size(self) -> int:
        if self.state is None:
            raise AttributeError("batch_size is not known before the first tokens")
        return self.state.batch_size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a StateLayer holds the state of a mechanism, not keys and values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a StateLayer holds the state of a mechanism, not keys and values: call the model with it")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots

    def get_max_length(self) -> int:
        return -1

    def _set(self, state: State | None) -> None:
        self.state = state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._set(None if self.state is None else self.state.reorder(beam_idx))
        if self.leads:
            self.past.change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._set(None if self.state is None else self.state.repeat(repeats))
        if self.leads:
            self.past.change_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            chosen = torch.arange(self.state.batch_size, device=self.state.device)[indices.to(self.state.device)]
            self._set(self.state.reorder(chosen))
            if self.leads:
                self.past.change_rows(lambda x: x.index_select(0, chosen.to(x.device)))

    def activate_past_recording(self) -> None:
        """transformers will take tokens back: keep more of them."""
        self.rollback = max(self.rollback, RECORDING)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove slots, as if they had never been. Beyond what the state keeps, it is
        computed again with the next call.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.slots:
            raise ValueError(
                f"tokens_to_remove must be 0 or minus a number of tokens, down to -{self.slots}, not {tokens_to_remove}"
            )
        if tokens_to_remove and self.state is not None:
            left, known = self.slots + tokens_to_remove, self.past.slots
            if known >= left:  # the first layer has cropped it already
                length = self.past.lengths(left).to(self.state.device) if left else torch.zeros_like(self.state.length)
            else:  # what is removed beyond a row's own tokens was padding in front of them
                length = (self.state.length + tokens_to_remove).clamp(min=0)
            self.is_behind = self.is_behind or bool(((length < self.state.earliest) & (length > 0)).any())
            self._set(self.state.crop(0 if self.is_behind and known >= left else length))
            self.slots = left
            if self.leads and known >= left:
                self.past.crop(left)

    @property
    def lengths(self) -> Tensor | None:
        """Positions of each row, counted from its first real token, (B,); None before the first tokens."""
        if self.state is None:
            return None
        return self.past.lengths(self.slots) if self.is_behind else self.state.length

    def reset(self) -> None:
        self.state, self.slots, self.is_initialized, self.is_behind = None, 0, False, False
        if self.leads:
            self.past.crop(0)

    def reserve(self, length: int) -> None:
        self._set(None if self.state is None else self.state.reserve(length))

    def offload(self) -> None:
        self._set(None if self.state is None else self.state.to("cpu"))

    def prefetch(self) -> None:
        self._set(None if self.state is None else self.state.to(self.device))


class SubquadCache(DynamicCache):
    """A `StateLayer` for each of `num_layers` layers."""

    layers: list[StateLayer]

    def __init__(self, num_layers: int) -> None:
        Cache.__init__(self, layers=state_layers(num_layers))

    @property
    def nbytes(self) -> int:
        past = self.layers[0].past.nbytes if self.layers else 0
        return past + sum(layer.state.nbytes for layer in self.layers if layer.state is not None)

    @property
    def lengths(self) -> Tensor | None:
        return lengths_of(self)

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` positions: an exported step allocates nothing."""
        for layer in self.layers:
            layer.reserve(length)


class SubquadEncoderDecoderCache(EncoderDecoderCache):
    """A `SubquadCache` for the decoder's own tokens, keys and values for those of the encoder."""


def lengths_of(cache: DynamicCache) -> Tensor | None:
    """Positions of each row, counted from its first real token, (B,); None before the first tokens."""
    return cache.layers[0].lengths


def state_layers(number: int) -> list[StateLayer]:
    past = Past()
    return [StateLayer(past, leads=index == 0) for index in range(number)]


def begun_anew(cache: DynamicCache) -> list[dict[str, Any]]:
    """What a cache has read, where its states are to be computed again, as `Stack.run` takes it; else nothing."""
    if not any(layer.is_behind for layer in cache.layers):
        return []
    calls = cache.layers[0].past.taken()
    cache.reset()
    return calls


def with_state_layers(cache: Any, num_layers: int) -> DynamicCache:
    """The cache that a caller gave. One of transformers' own that is still empty is given our layers."""
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values must be a transformers Cache, not {type(cache).__name__}")
    if not isinstance(cache, DynamicCache) or cache.offloading:
        raise TypeError(
            f"past_key_values: these models keep states of their own; give a SubquadCache or an empty DynamicCache, "
            f"not a {type(cache).__name__}{' that offloads' if isinstance(cache, DynamicCache) else ''}"
        )
    if not all(isinstance(layer, StateLayer) for layer in cache.layers) or not cache.layers:
        if cache.get_seq_length():
            raise ValueError("past_key_values holds keys and values, from another model: its states are needed here")
        cache.layers = state_layers(num_layers)
        cache.layer_class_to_replicate = None
    if len(cache.layers) != num_layers:
        raise ValueError(f"past_key_values has {len(cache.layers)} layers, the model has {num_layers}")
    return cache


def split(cache: Any) -> tuple[Any, EncoderDecoderCache | None]:
    """The cache of a decoder's self-attention, and the whole, which has that of its attention to the encoder."""
    if cache is None:
        return None, None
    if not isinstance(cache, EncoderDecoderCache):
        raise TypeError(f"past_key_values must be an EncoderDecoderCache, not {type(cache).__name__}")
    return cache.self_attention_cache, cache


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype of a projection of x: autocast has its own."""
    autocast = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
