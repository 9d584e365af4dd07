"""The attention layer of the models: four projections and a mechanism between them.

`q_proj`, `k_proj`, `v_proj` and `out_proj` are modules that are called, because adapters, quantisation and offloading
replace or wrap them by name; only a plain `nn.Linear` that nobody has hooked is read (`kernels.affine`).
`AttentionLayer` is the only place in the models that calls a mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from subquad.attention.call import Record, draw_seed, repeat_heads
from subquad.attention.registry import attention as make_attention
from subquad.kernels.affine import apply_linear, apply_linears
from subquad.models.cache import StateLayer
from subquad.models.config import SubquadConfig
from subquad.models.loading import separate_projections
from subquad.packing import Bucket, Packing, attend_packed


class Projections:
    """The layer's input projections, as mechanisms ask for them: tokens (B, n, D) → heads (B, H, n, d).

    With `angles` (B or 1, n, d/2) queries and keys are rotated by their position (rotary embeddings, Su et al. 2021).
    """

    def __init__(self, layer: AttentionLayer, angles: Tensor | None = None) -> None:
        self.layer, self.angles = layer, angles
        self.rotation = None if angles is None else (angles.cos()[:, None], angles.sin()[:, None])  # (B, 1, n, d/2)

    @property
    def affine(self) -> bool:
        """May a weighted sum of tokens be taken before or after them? Not where they depend on positions."""
        return self.rotation is None

    def queries(self, x: Tensor) -> Tensor:
        return self._rotated(self._split(apply_linear(self.layer.q_proj, x)))

    def keys(self, x: Tensor) -> Tensor:
        return self._rotated(self._split(apply_linear(self.layer.k_proj, x)))

    def values(self, x: Tensor) -> Tensor:
        return self._split(apply_linear(self.layer.v_proj, x))

    def together(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not (query is key and key is value):
            return self.queries(query), self.keys(key), self.values(value)
        layer = self.layer
        q, k, v = (self._split(part) for part in apply_linears((layer.q_proj, layer.k_proj, layer.v_proj), query))
        return self._rotated(q), self._rotated(k), v

    def of_rows(self, bucket: Bucket, batch: int) -> Projections:
        """The projections of the sequences of a packed batch, each a row."""
        if self.angles is None:
            return self
        return Projections(self.layer, bucket.rows(self.angles.expand(batch, -1, -1)))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.layer.head_dim)).transpose(1, 2)  # (B, H or G, n, d)

    def _rotated(self, x: Tensor) -> Tensor:
        if self.rotation is None:
            return x
        a, b = x.chunk(2, -1)  # (B, H, n, d/2)
        cos, sin = (part.to(x.dtype) for part in self.rotation)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class AttentionLayer(nn.Module):
    """Tokens (B, n, D) → (B, n, D): self-attention, or attention to `context` (B, m, D)."""

    def __init__(self, config: SubquadConfig, spec: str = "full", **options: Any) -> None:
        super().__init__()
        width, heads, groups, d = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        self.num_heads, self.head_dim = heads, d
        self.q_proj = nn.Linear(width, heads * d)
        self.k_proj = nn.Linear(width, groups * d)
        self.v_proj = nn.Linear(width, groups * d)
        self.out_proj = nn.Linear(heads * d, width)
        self.attention = make_attention(spec, num_heads=heads, head_dim=d, **options)

    def reset_parameters(self) -> None:
        """As torch's MultiheadAttention: q, k and v are drawn as if they were one matrix."""
        inputs = (self.q_proj, self.k_proj, self.v_proj)
        bound = math.sqrt(6 / (self.q_proj.in_features + sum(linear.out_features for linear in inputs)))
        for linear in inputs:
            nn.init.uniform_(linear.weight, -bound, bound)
        bound = self.out_proj.in_features**-0.5
        nn.init.uniform_(self.out_proj.weight, -bound, bound)
        for linear in (*inputs, self.out_proj):
            nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        angles: Tensor | None = None,
        *,
        context: Tensor | None = None,
        seed: int | None = None,
        want_weights: bool = False,
        want_record: bool = False,
        packing: Packing | None = None,
        state: StateLayer | None = None,
        cross: tuple[EncoderDecoderCache, int] | None = None,
    ) -> tuple[Tensor, Record, Tensor | None]:
        """The output, the record of this call and its weights (B, H, n, m); empty and None unless they are wanted.

        With `packing` the slots of x are several sequences, each of which attends to itself (and `key_mask` says
        nothing new). Where weights are wanted the output is made of them, as transformers' eager attention does: the
        slow definition. With `state` x is what follows the tokens that the state has, and the state has x afterwards;
        `cross` keeps the keys and values of `context`, under the number of the layer.
        """
        if state is not None:
            return self._streamed(x, key_mask, angles, seed, packing, state, want_weights), Record(), None
        if cross is not None:
            return self._across(x, key_mask, context, cross, want_weights), Record(), None
        keys, project, mechanism = x if context is None else context, Projections(self, angles), self.attention
        drawn = None if seed is None else torch.tensor(seed)
        if want_weights and drawn is None and mechanism.is_random:
            drawn = draw_seed()  # the output and the record must speak of the same sampled graph
        packing = None if packing is None else packing.for_call(mechanism, want_record)
        with weights_at_hand(mechanism):
            if packing is None:
                about = (x, keys, keys, project, key_mask, drawn)
                y, record = mechanism.attend_tokens(*about, want_record=want_record)  # (B, n, H·d)
            else:
                rows = (lambda bucket: project.of_rows(bucket, x.shape[0]), drawn)
                y, record = attend_packed(packing, mechanism, (x, x, x), *rows, want_record=want_record)
        weights = None
        if want_weights:
            with weights_at_hand(mechanism):
                weights, y = self._defined(project, x, keys, key_mask, drawn, packing)
        if key_mask is not None and context is None and not mechanism.positional:
            y = y.masked_fill(~key_mask[..., None], 0)  # as positional mechanisms do: padding gives the same anywhere
        return apply_linear(self.out_proj, y), record, weights

    def _streamed(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        angles: Tensor | None,
        seed: int | None,
        packing: Packing | None,
        state: StateLayer,
        want_weights: bool,
    ) -> Tensor:
        """Attention of new tokens x (B, t, D) to themselves and to those that `state` has."""
        if want_weights:
            raise ValueError("output_attentions: with a cache there are no weights to show; pass use_cache=False")
        drawn, project = None if seed is None else torch.tensor(seed), Projections(self, angles)
        with weights_at_hand(self.attention):
            if packing is None:
                return self.out_proj(state.extend(self.attention, x, project, key_mask, drawn))
            (bucket,) = packing.buckets
            rows = (bucket.rows(x), project.of_rows(bucket, x.shape[0]), bucket.mask)
            y = state.extend(self.attention, *rows, drawn)
            if bucket.slots.shape[1] < x.shape[1]:
                state.skip(key_mask)
            return self.out_proj(packing.join([y]))

    def _across(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        context: Tensor,
        cross: tuple[EncoderDecoderCache, int],
        want_weights: bool,
    ) -> Tensor:
        """Attention to `context`, whose keys and values are projected once."""
        if want_weights:
            raise ValueError("output_attentions: with a cache there are no weights to show; pass use_cache=False")
        project, (both, layer) = Projections(self), cross
        cache = both.cross_attention_cache
        if both.is_updated.get(layer):
            k, v = cache.layers[layer].keys, cache.layers[layer].values
        else:
            k, v = cache.update(project.keys(context), project.values(context), layer)
            both.is_updated[layer] = True
        y = self.attention(project.queries(x), k, v, key_mask=key_mask)  # (B, H, t, d)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _defined(
        self,
        project: Projections,
        x: Tensor,
        keys: Tensor,
        key_mask: Tensor | None,
        seed: Tensor | None,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor]:
        """The weights from the definition, (B, H, n, m), and the output they give, (B, n, H·d)."""
        mechanism = self.attention
        if not mechanism.capabilities.weights:
            raise ValueError(
                f"output_attentions: {mechanism.name} has no single matrix of weights over tokens; "
                "leave output_attentions out"
            )
        q, k, v = project.together(x, keys, keys)  # (B, H, n, d)
        if packing is None:
            weights = mechanism.differentiable_weights(q, k, key_mask, seed)  # (B, H, n, m)
        else:
            apart = []
            seeds = packing.seeds(seed, mechanism.training)
            for bucket, own_seed in zip(packing.buckets, seeds, strict=True):
                own_q, own_k = (bucket.rows(part.transpose(1, 2)).transpose(1, 2) for part in (q, k))
                apart.append(mechanism.differentiable_weights(own_q, own_k, bucket.mask, own_seed))
            weights = packing.join_weights(apart)
        dropped = F.dropout(weights, mechanism.options.dropout, training=self.training)
        y = dropped.to(v.dtype) @ repeat_heads(v, q.shape[1])
        return weights, y.transpose(1, 2).flatten(2)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        separate_projections(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@contextmanager
def weights_at_hand(module: nn.Module) -> Iterator[None]:
    """Load what accelerate has offloaded, for the whole of `module`.

    Its hooks load the parameters of a module when that module is called. The parts of a mechanism are not all called
    (lists of parameters cannot be), so their hooks are run here, once: a part that is called meanwhile would take its
    parameters away from others that read them.
    """
    hooked = [(part, part.forward) for part in module.modules() if hasattr(part, "_hf_hook")]
    for part, _ in hooked:
        part._hf_hook.pre_forward(part)
        part.forward = part._old_forward
    try:
        yield
    finally:
        for part, forward in hooked:
            part.forward = forward
            part._hf_hook.post_forward(part, None)
