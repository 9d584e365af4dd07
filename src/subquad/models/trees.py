"""A cache as a tree of tensors: `torch.export` takes and returns it as one.

    cache.reserve(4096)                                             room for the tokens to come
    step = torch.export.export(model, (), {"input_ids": ids, "past_key_values": cache}, strict=False)
    output = step.module()(input_ids=ids, past_key_values=cache)    then with output.past_key_values, and so on

The leaves are the buffers of the states, the lengths of the rows, and the number of slots, a tensor too: one graph
serves every step. What the cache remembers of the tokens themselves (`Past`) is left out, and the sizes
of a memory are its mechanism's to say again. The rest is plain JSON, so a program can be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SequenceKey, register_pytree_node
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from subquad.attention.states import State
from subquad.attention.states.state import Unmade
from subquad.models.cache import StateLayer, SubquadCache, SubquadEncoderDecoderCache

Leaves = list[Any]  # tensors, or what a tree is mapped to


def flatten_states(cache: SubquadCache) -> tuple[Leaves, Any]:
    parts = [_flatten_layer(layer) for layer in cache.layers]
    return [leaf for leaves, _ in parts for leaf in leaves], [about for _, about in parts]


def unflatten_states(leaves: Iterable[Any], about: Any) -> SubquadCache:
    cache, rest = SubquadCache(len(about)), iter(leaves)
    for layer, one in zip(cache.layers, about, strict=True):
        layer.rollback = one["rollback"]
        if one["mechanism"] is not None:
            _fill_layer(layer, one, rest)
    return cache


def _flatten_layer(layer: StateLayer) -> tuple[Leaves, dict[str, Any]]:
    state = layer.state
    if state is None:
        return [], {"mechanism": None, "rollback": layer.rollback}
    if layer.is_behind or state.stale:
        raise ValueError(
            "past_key_values: tokens were taken back beyond what its states keep, so that they are to be computed "
            "again: call the model itself once before it is traced with this cache"
        )
    slots = layer.slots
    if not isinstance(slots, Tensor):
        slots = torch.scalar_tensor(slots, dtype=torch.int64, device=state.device)
    named = {"buffers": list(state.buffers), "tokens": None if state.tokens is None else list(state.tokens)}
    leaves = [slots, state.length, state.high, *state.buffers.values(), *(state.tokens or {}).values()]
    about = {
        "mechanism": state.mechanism,
        "rollback": layer.rollback,
        "dtype": str(state.dtype).removeprefix("torch."),
        "key_heads": state.key_heads,
        "seed": state.seed is not None,
        **named,
    }
    return leaves if state.seed is None else [*leaves, state.seed], about


def _fill_layer(layer: StateLayer, about: dict[str, Any], rest: Iterator[Any]) -> None:
    slots, length, high = next(rest), next(rest), next(rest)
    buffers = {name: next(rest) for name in about["buffers"]}
    tokens = None if about["tokens"] is None else {name: next(rest) for name in about["tokens"]}
    seed, dtype = next(rest) if about["seed"] else None, getattr(torch, about["dtype"])
    count = int(slots) if type(slots) is Tensor and not torch.compiler.is_compiling() else slots
    layer.state = State(
        about["mechanism"], Unmade(), length, high, seed, about["rollback"], dtype, about["key_heads"],
        buffers=buffers, tokens=tokens, bound=count if isinstance(count, int) else None,
    )  # fmt: skip
    layer.slots = count
    layer.is_initialized, layer.dtype, layer.device = True, dtype, getattr(length, "device", None)


def flatten_pair(cache: SubquadEncoderDecoderCache) -> tuple[Leaves, Any]:
    own, about = flatten_states(cache.self_attention_cache)
    across = [(layer.keys, layer.values) for layer in cache.cross_attention_cache.layers if layer.is_initialized]
    return [*own, *(x for pair in across for x in pair)], {"own": about, "across": len(across)}


def unflatten_pair(leaves: Iterable[Any], about: Any) -> SubquadEncoderDecoderCache:
    every, count = list(leaves), 2 * about["across"]
    own, rest = every[: len(every) - count], every[len(every) - count :]
    across = DynamicCache()
    for keys, values in zip(rest[::2], rest[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        layer.dtype, layer.device = getattr(keys, "dtype", None), getattr(keys, "device", None)
        across.layers.append(layer)
    return SubquadEncoderDecoderCache(unflatten_states(own, about["own"]), across)


def _register(kind: type, flatten: Any, unflatten: Any) -> None:
    def with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, about = flatten(cache)
        return [(SequenceKey(index), leaf) for index, leaf in enumerate(leaves)], about

    name = f"{kind.__module__}.{kind.__qualname__}"
    register_pytree_node(kind, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=with_keys)


_register(SubquadCache, flatten_states, unflatten_states)
_register(SubquadEncoderDecoderCache, flatten_pair, unflatten_pair)
