"""The layers that models are stacked from: embeddings with positions, self-attention, the Transformer block."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from subquad.layers import MultiheadAttention, Projections
from subquad.models.config import SubquadConfig


class Embeddings(nn.Module):
    """Tokens (+ segments) (+ positions), normalised if the blocks are post-norm: (B, n) → (B, n, D)."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__()
        width, std = config.hidden_size, config.initializer_range
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.segments = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        learned = config.positions == "learned"
        self.places = nn.Embedding(config.max_position_embeddings, width) if learned else None
        self.sinusoidal = config.positions == "sinusoidal"
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.norm == "post" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        for table in (self.tokens, self.segments, self.places):
            if table is not None:
                nn.init.normal_(table.weight, std=std)
        # sines are of size 1, token embeddings of size std: on one scale neither drowns the other
        self.scale = std * math.sqrt(2) if self.sinusoidal else 1.0

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """x: ids (B, n) or embeddings (B, n, D); positions (B or 1, n)."""
        x = x if x.is_floating_point() else self.tokens(x)  # (B, n, D)
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(positions) if segments is None else segments)
        elif segments is not None:
            raise ValueError("token_type_ids: the model has no segments (type_vocab_size=0)")
        if self.places is not None:
            x = x + self.places(positions)
        elif self.sinusoidal:
            x = x + self.scale * sinusoids(positions, x.shape[-1]).to(x.dtype)
        return self.dropout(self.norm(x))


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """sin and cos of position / 10000^(2i/D), side by side: (B, n) → (B, n, D). Vaswani et al. 2017, section 3.5."""
    angles = angles_of(positions, width + width % 2)  # (B, n, ⌈D/2⌉)
    return torch.cat([angles.sin(), angles.cos()], -1)[..., :width]


def angles_of(positions: Tensor, width: int) -> Tensor:
    """position / 10000^(2i/width), (B, n) → (B, n, width/2)."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    return positions[..., None].float() * rates


class Turned(Projections):
    """Projections whose queries and keys are turned by their position (rotary embeddings, Su et al. 2021)."""

    def __init__(self, layer: MultiheadAttention, angles: Tensor) -> None:
        super().__init__(layer)
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]  # (B, 1, n, d/2)

    def queries(self, x: Tensor) -> Tensor:
        return self._turn(super().queries(x))

    def keys(self, x: Tensor) -> Tensor:
        return self._turn(super().keys(x))

    def together(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if query is not key or key is not value:
            return self.queries(query), self.keys(key), self.values(value)
        q, k, v = super().together(query, key, value)
        return self._turn(q), self._turn(k), v

    def _turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)  # (B, H, n, d/2)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class SelfAttention(MultiheadAttention):
    """The attention of a block: tokens (B, n, D) → (B, n, D), with rotary positions where angles are given."""

    def forward(self, x: Tensor, key_mask: Tensor | None, angles: Tensor | None = None) -> Tensor:
        project = Projections(self) if angles is None else Turned(self, angles)
        return self.out_proj(self.attention.attend_tokens(x, x, x, project, key_mask)[0])


class Block(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feedforward(norm(x)); post-norm: norm(x + f(x))."""

    def __init__(self, config: SubquadConfig, index: int, *, causal: bool) -> None:
        super().__init__()
        width = config.hidden_size
        spec, options = config.layer_options(index, causal=causal)
        self.attention = SelfAttention(width, config.num_attention_heads, attention=spec, batch_first=True, **options)
        self.feedforward = feedforward(config)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def forward(self, x: Tensor, key_mask: Tensor | None, angles: Tensor | None = None) -> Tensor:
        if self.pre:
            x = x + self.dropout(self.attention(self.norms[0](x), key_mask, angles))
            return x + self.dropout(self.feedforward(self.norms[1](x)))
        x = self.norms[0](x + self.dropout(self.attention(x, key_mask, angles)))
        return self.norms[1](x + self.dropout(self.feedforward(x)))


def feedforward(config: SubquadConfig) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Linear(config.hidden_size, config.intermediate_size),
        ACT2FN[config.hidden_act],
        nn.Linear(config.intermediate_size, config.hidden_size),
    )
    for linear in (layers[0], layers[2]):
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
    return layers


def share_positions(blocks: nn.ModuleList) -> dict[str, str]:
    """MS-VIPE is one for a whole model: all layers take the first layer's tables. Returns which names mean the same
    table, {name: first name}, for saving and loading.
    """
    layers = [(index, block.attention.attention) for index, block in enumerate(blocks)]
    layers = [(index, layer) for index, layer in layers if getattr(layer, "positions", None) is not None]
    same = {}
    for index, layer in layers[1:]:
        layer.share_positions(layers[0][1])
        for name, _ in layer.positions.named_parameters():
            mine, first = (f"blocks.{i}.attention.attention.positions.{name}" for i in (index, layers[0][0]))
            same[mine] = first
    return same
