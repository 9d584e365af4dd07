"""The layers that models are stacked from: embeddings with positions, the feed-forward layer, the Transformer block."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, GELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from subquad.kernels.affine import apply_linear, is_untouched
from subquad.kernels.feedforward import feedforward
from subquad.models.attention import AttentionLayer
from subquad.models.config import SubquadConfig
from subquad.models.outputs import BlockOutput


class Embeddings(nn.Module):
    """Tokens (+ segments) (+ positions), normalised if the blocks are post-norm: (B, n) → (B, n, D)."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.segments = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        learned = config.positions == "learned"
        self.places = nn.Embedding(config.max_position_embeddings, width) if learned else None
        self.sinusoidal = config.positions == "sinusoidal"
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.norm == "post" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        # sines are of size 1, token embeddings of size std: on one scale neither drowns the other
        self.scale = config.initializer_range * math.sqrt(2)

    def _look_up(self, ids: Tensor) -> Tensor:
        """On a CPU, torch says of an id beyond the vocabulary only that an index is out of range."""
        if torch.compiler.is_compiling():
            return self.tokens(ids)
        try:
            return self.tokens(ids)
        except IndexError:
            low, high = (int(each) for each in ids.aminmax())
            size, found = self.tokens.num_embeddings, f"{low}" if low == high else f"{low} to {high}"
            raise ValueError(f"input_ids must be between 0 and {size - 1} (vocab_size={size}), not {found}") from None

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """x: ids (B, n) or embeddings (B, n, D); positions (B or 1, n)."""
        x = x if x.is_floating_point() else self._look_up(x)  # (B, n, D)
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


class Glorot(nn.Sequential):
    """Layers whose linear maps begin as Glorot and Bengio (2010) have them."""

    def reset_parameters(self) -> None:
        for layer in self:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)


class FeedForward(Glorot):
    """Two linear maps and the activation between them."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(
            nn.Linear(config.hidden_size, config.intermediate_size),
            ACT2FN[config.hidden_act],
            nn.Linear(config.intermediate_size, config.hidden_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, activation, second = self
        exact = is_untouched(activation, GELUActivation) and activation.act is nn.functional.gelu
        if exact and is_untouched(first, nn.Linear) and is_untouched(second, nn.Linear):
            return feedforward(x, first.weight, first.bias, second.weight, second.bias)
        return apply_linear(second, activation(apply_linear(first, x)))


class Block(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feedforward(norm(x)); post-norm: norm(x + f(x)). With mlp=last only the last
    block has a feed-forward layer.

    The options of `forward` are those of `AttentionLayer`: seed, want_weights, want_record and `state`, what a decoder
    keeps of earlier tokens of this layer.
    """

    def __init__(self, config: SubquadConfig, index: int, *, causal: bool) -> None:
        super().__init__()
        width = config.hidden_size
        spec, options = config.layer_options(index, causal=causal)
        self.attention = AttentionLayer(config, spec, **options)
        fed = config.mlp == "every" or index == config.num_hidden_layers - 1
        self.feedforward = FeedForward(config) if fed else None
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(1 + fed))
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def forward(self, x: Tensor, key_mask: Tensor | None, angles: Tensor | None, **options: Any) -> BlockOutput:
        y, record, weights = self.attention(self.before(self.norms[0], x), key_mask, angles, **options)
        x = self.feed(self.after(self.norms[0], x, y))
        return BlockOutput(x, weights, None, *record[:3])

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward sublayer, if the block has one."""
        if self.feedforward is None:
            return x
        return self.after(self.norms[1], x, self.feedforward(self.before(self.norms[1], x)))

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """What a sublayer reads."""
        return norm(x) if self.pre else x

    def after(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The residual stream x with the output y of a sublayer added."""
        x = x + self.dropout(y)
        return x if self.pre else norm(x)


def shared_positions(blocks: nn.ModuleList) -> dict[str, str]:
    """MS-VIPE is one for a whole model: the tables of all layers are those of the first, {name: name of the first}."""
    tables = {}
    for index, block in enumerate(blocks):
        positions = getattr(block.attention.attention, "positions", None)
        if positions is not None:
            tables[f"blocks.{index}.attention.attention.positions."] = dict(positions.named_parameters())
    (first, those), *others = tables.items() or [("", {})]
    for name, these in others:
        shapes = [[tuple(table.shape) for table in each.values()] for each in (these, those)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"attention: the layers share MS-VIPE, but {name} has tables {shapes[0]}, not {shapes[1]}")
    return {name + table: first + table for name, these in others for table in these}
