"""The network of the proof as torch modules: `subquad.MultiheadAttention` with the pattern inside, and ReLU layers.

Appendix F replaces the hardmax by ρ[t·] and the three-piece activations by ReLUs. What comes out is a Transformer of
the class ST^{2,m,4} (eq. 2): blocks x + attention(x) and x + W_2 ReLU(W_1 x + b_1), no LayerNorm, and the weights
below written into the library's own layers, in float64.

    g̃_q   x_i - ReLU(s) + ReLU(s - (1-α)δ)/α - (1-α)/α ReLU(s - δ),   s = x_i - kδ           three units   (F.1)
    g̃_c   W_Q = t uᵀ with bias -tb,  W_K = W_V = uᵀ,  W_O = (c, -c) in the first row          two heads     (F.2)
    g̃_v   x + move · trapezoid(uᵀx - id)                                                      four units    (F.3)
    clip  x_i - ReLU(x_i - high) + ReLU(low - x_i)                                            two units

A layer of one kind leaves out the other half of its block, whose weights would be 0.

Choices. The width is d rounded up to a multiple of the number of heads, and a head uses its first coordinate only: the
layers want heads of equal width. The value layers go from the largest id to the smallest; then every unit of a column
that is not meant, or that has its output already, is exactly 0, and nothing large has to cancel. The ramps of the
trapezoid are a power of two wide, so that its plateau is exactly 1 in float64. The last layers, `clip`, are ours:
without them the constant B of F.4 is as large as an id, and α would have to be smaller than float64 can resolve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.abstraction import Abstraction
from subquad.layers import MultiheadAttention
from subquad.theory.construction import Assign, MaxShift, Plan, Quantise, Shift, max_shifts, selective_shifts
from subquad.theory.sets import Support

KIND = torch.float64
DIGITS = 2.0**49  # ids up to this many δ leave float64 three bits below δ


class Residual(nn.Module):
    """x + attention(x)."""

    def __init__(self, attention: MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:  # (N, n, D)
        return x + self.attention(x, x, x, need_weights=False)[0]


class FeedForward(nn.Module):
    """x + W_2 ReLU(W_1 x + b_1); a unit is (weights of the input (D,), bias, weights of the output (D,))."""

    def __init__(self, units: Sequence[tuple[Tensor, float, Tensor]]) -> None:
        super().__init__()
        inward, bias, outward = zip(*units, strict=True)
        self.first_weight = nn.Parameter(torch.stack(inward))  # (r, D)
        self.first_bias = nn.Parameter(torch.tensor(bias, dtype=KIND))  # (r,)
        self.second_weight = nn.Parameter(torch.stack(outward, 1))  # (D, r)

    def forward(self, x: Tensor) -> Tensor:  # (N, n, D)
        return x + F.linear(F.relu(F.linear(x, self.first_weight, self.first_bias)), self.second_weight)


def head_count(support: Support) -> int:
    """Two heads per family that a layer holds (Theorem 1)."""
    return 2 * len(support.heads) if support.layout == "multihead" else 2


def width(support: Support, d: int) -> int:
    """D: d rounded up to a multiple of the heads."""
    heads = head_count(support)
    return heads * -(-d // heads)


# ---- g̃_c ----------------------------------------------------------------------------------------------------------


def context_layers(plan: Plan) -> list[Shift | MaxShift]:
    """The layers of g_c that do something; the others are the identity and only keep the families cycling."""
    return [*(layer for layer in selective_shifts(plan) if layer.c), *max_shifts(plan)]


def context_network(support: Support, plan: Plan, t: float) -> nn.Sequential:
    """g̃_c with ρ[t·], made of the mechanism's own layers."""
    return nn.Sequential(*(attention_block(support, plan, layer, t) for layer in context_layers(plan))).eval()


def attention_block(support: Support, plan: Plan, layer: Shift | MaxShift, t: float) -> Residual:
    """One layer Ψ̃ or Ω̃ as `MultiheadAttention` with these weights."""
    module = make_layer(support, plan.d, layer.family)
    first = 2 * layer.family if support.layout == "multihead" else 0
    shift = [(float(layer.c), 0.0)]  # (c, b) of each head
    if isinstance(layer, Shift):
        shift = [(float(layer.c), (layer.b - 0.5) / plan.m), (-float(layer.c), (layer.b + 0.5) / plan.m)]
    u, D, size = direction(plan, module.embed_dim), module.embed_dim, module.head_dim
    weight, bias, out = torch.zeros(3 * D, D, dtype=KIND), torch.zeros(3 * D, dtype=KIND), torch.zeros(D, D, dtype=KIND)
    for head, (c, b) in enumerate(shift, first):
        query, key, value = (part * D + head * size for part in range(3))
        weight[query], bias[query] = t * u, -t * b
        weight[key] = weight[value] = u
        out[0, head * size] = c
    with torch.no_grad():
        module.in_proj_weight.copy_(weight)  # type: ignore[union-attr]
        module.in_proj_bias.copy_(bias)  # type: ignore[union-attr]
        module.out_proj.weight.copy_(out)
        module.out_proj.bias.zero_()
    return Residual(module)


def make_layer(support: Support, d: int, family: int = 0) -> MultiheadAttention:
    """An untrained layer of the mechanism, without scale, in float64."""
    if support.layer is None or support.view not in ("map", "summaries"):
        reason = "samples its graph anew in every call" if support.view == "sampled" else "is no registered mechanism"
        raise ValueError(f"{support.name} {reason}; a network with given weights cannot be made of it")
    name, options = support.layer
    if support.layout == "sequential" and len(support.heads) > 1:
        options = {**options, "layer_index": family}
    made = MultiheadAttention(
        width(support, d), head_count(support), batch_first=True, dtype=KIND, attention=name, scale=1.0, **options
    )
    for part in made.modules():  # DeepSets: W = 1 leaves ReLU(x), which is x for the ids
        if isinstance(part, Abstraction) and hasattr(part, "query_weight"):
            for matrix in (part.query_weight, part.key_weight):
                nn.init.eye_(matrix)
    return made


def direction(plan: Plan, width: int) -> Tensor:
    """u = (1, m, …, m^{d-1}, 0, …), (D,)."""
    return torch.tensor([float(plan.m**i) for i in range(plan.d)] + [0.0] * (width - plan.d), dtype=KIND)


# ---- g̃_q, g̃_v and the clipping ------------------------------------------------------------------------------------


def quantiser(plan: Plan, layers: Sequence[Quantise], alpha: float, width: int) -> nn.Sequential:
    """g̃_q (F.1): equal to g_q where every entry lies in [kδ, (k+1-α)δ]."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; it must lie between 0 and 1, both excluded")
    step, blocks = 1 / plan.m, []
    for layer in layers:
        row = unit_vector(layer.row, width)
        starts = (0.0, (1 - alpha) * step, step)
        slopes = (-1.0, 1 / alpha, -(1 - alpha) / alpha)
        blocks.append(
            FeedForward([(row, -layer.k * step - s, slope * row) for s, slope in zip(starts, slopes, strict=True)])
        )
    return nn.Sequential(*blocks)


def value_network(plan: Plan, layers: Sequence[Assign], width: int) -> nn.Sequential:
    """g̃_v (F.3): a column whose id is within δ/4 of a known one moves to its output, from the largest id down."""
    u, ramp = direction(plan, width), 2.0 ** math.floor(math.log2(1 / (4 * plan.m)))
    blocks = []
    for layer in sorted(layers, key=lambda layer: layer.id, reverse=True):
        move = torch.zeros(width, dtype=KIND)
        move[: plan.d] = torch.from_numpy(in_floats(layer.move, plan.unit))
        inner = [float(-Fraction(layer.id, plan.unit) + side * Fraction(1, 4 * plan.m)) for side in (1, -1)]
        biases = (inner[0] + ramp, inner[0], inner[1], inner[1] - ramp)
        blocks.append(
            FeedForward([(u, b, s / ramp * move) for b, s in zip(biases, (1.0, -1.0, -1.0, 1.0), strict=True)])
        )
    return nn.Sequential(*blocks)


def clip_network(d: int, low: float, high: float, width: int) -> nn.Sequential:
    """Every entry into [low, high], one layer per row."""
    rows = [unit_vector(i, width) for i in range(d)]
    return nn.Sequential(*(FeedForward([(row, -high, -row), (-row, low, row)]) for row in rows))


def unit_vector(i: int, width: int) -> Tensor:
    row = torch.zeros(width, dtype=KIND)
    row[i] = 1.0
    return row


# ---- between the integers of the construction and the tokens of the network ---------------------------------------


def in_floats(z: np.ndarray, unit: int) -> np.ndarray:
    """Whole multiples of 1/unit as float64."""
    return np.array([float(Fraction(int(value), unit)) for value in z.flat]).reshape(z.shape)


def to_tokens(z: np.ndarray, width: int) -> Tensor:
    """float64 (N, d, n) → tokens (N, n, D), padded with zeros."""
    return F.pad(torch.from_numpy(np.ascontiguousarray(z.transpose(0, 2, 1))).to(KIND), (0, width - z.shape[1]))


def from_tokens(x: Tensor, d: int) -> np.ndarray:
    """Tokens (N, n, D) → (N, d, n)."""
    return x[..., :d].transpose(1, 2).numpy()
