"""Is composing attentions more expressive than adding them? Propositions 1 and 2 of Lee et al. 2023, in numbers.

The two propositions (section 4, appendix A.5) are one: with γ(X; W) = softmax(XW_q (XW_k)ᵀ) XW_v, slices S of L tokens
and μ the mean over a slice,

    H    Y_g = γ(Sμ; W_g)                      the two-level H-Transformer, `composition=parallel`
    CS   Y_g = γ(γ(S; W_l)μ; W_g)              Composite Slice, `composition=local-global`

as functions of the weights in [-1, 1] lie within ε of rational functions of degree d(ε) = O(log 1/ε) and 4d(ε). Since
4d > d, the paper concludes that CS is more expressive. Four things are computed here:

    degrees    d(ε) of both, on random lines through the weights: the least degree with which polynomials come within
               ε/2 of numerator and denominator (the metric of Definition 1)
    ranks      of what a slice gets from other slices: as a matrix over tokens, and block by block
    entropies  of the weights inside a foreign slice: log L where they are uniform
    families   is every H a CS? exactly, by choosing weights; and a counterexample when the scales share weights

What an upper bound says: nothing about which family is larger. The proof itself adds degrees where composing
polynomials multiplies them, so its 4d does not follow either; measured, the factor is far below 4.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

EPSILONS = (1e-1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10)
NODES = 256  # Chebyshev points on a line through the weights
Weights = tuple[Tensor, Tensor, Tensor]  # W_q, W_k, W_v, (D, D) each


# ---- the two families -----------------------------------------------------------------------------------------------


def fraction(x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """γ(X; W) as numerator (…, n, D) and denominator (…, n, 1)."""
    q, k, v = (x @ w for w in weights)
    scores = (q @ k.mT).exp()  # (…, n, n)
    return scores @ v, scores.sum(-1, keepdim=True)


def attend(x: Tensor, weights: Weights) -> Tensor:
    """γ(X; W)."""
    above, below = fraction(x, weights)
    return above / below


def pooled(slices: Tensor, local: Weights | None) -> Tensor:
    """What the global attention reads, (m, D): the mean of the tokens (H) or of their local attention (CS)."""
    return (slices if local is None else attend(slices, local)).mean(-2)


def random_weights(width: int, generator: torch.Generator) -> Weights:
    q, k, v = (torch.rand(width, width, dtype=torch.float64, generator=generator) * 2 - 1 for _ in range(3))
    return q, k, v


def random_slices(n: int, length: int, width: int, generator: torch.Generator) -> Tensor:
    """Tokens of norm 1, (n / L, L, D)."""
    x = torch.randn(n, width, dtype=torch.float64, generator=generator)
    return (x / x.norm(dim=-1, keepdim=True)).unflatten(0, (-1, length))


# ---- degrees --------------------------------------------------------------------------------------------------------


def degrees(slices: Tensor, local: Weights, coarse: Weights, composed: bool, epsilons: Sequence[float]) -> list[int]:
    """d(ε) of Y_g along τ·(W_l, W_g), τ ∈ [-1, 1]."""
    nodes = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    rows = []
    for tau in nodes:
        scaled = [tuple(tau * w for w in weights) for weights in (local, coarse)]
        above, below = fraction(pooled(slices, scaled[0] if composed else None), scaled[1])  # type: ignore[arg-type]
        rows.append(torch.cat([above.flatten(), below.flatten()]).numpy())
    return [least_degree(np.stack(rows), epsilon / 2) for epsilon in epsilons]


def least_degree(values: np.ndarray, tolerance: float) -> int:
    """The least degree whose Chebyshev sums stay within the tolerance; values (nodes, functions) at the nodes."""
    nodes = np.cos(np.pi * (np.arange(len(values)) + 0.5) / len(values))
    table = np.polynomial.chebyshev.chebvander(nodes, len(values) // 2)  # (nodes, degree + 1)
    coefficients = table.T @ values * (2 / len(values))  # (degree + 1, functions)
    coefficients[0] /= 2
    rest = values.copy()
    for degree, (column, row) in enumerate(zip(table.T, coefficients, strict=True)):
        rest -= column[:, None] * row
        if np.abs(rest).max() <= tolerance:
            return degree
    raise ValueError(f"no polynomial of degree {len(values) // 2} comes within {tolerance:g}: the inputs are too large")


# ---- ranks and entropies, with the library's own layers -------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """The token-to-token weights of what slices get from each other, ψ A_g φ."""

    composition: str
    rank: int  # of the whole matrix (n, n)
    largest_block_rank: int  # of one slice's rows over another slice's columns
    entropy: float  # mean over slices of the entropy of the weights inside a slice, in nats
    spread: float  # standard deviation of that entropy


def global_matrix(composition: str, n: int, length: int, width: int, seed: int) -> Matrix:
    """One layer of one head on random tokens; weights drawn from U(-1, 1)/D^(1/4), which keeps the softmax soft."""
    from subquad.layers import MultiheadAttention, Projections

    spec = f"composite-slice:slice_length={length},composition={composition}"
    layer = MultiheadAttention(width, 1, attention=spec, batch_first=True, dtype=torch.float64, scale=1.0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in (layer.in_proj_weight, layer.out_proj.weight):
            weights.copy_(torch.rand(weights.shape, dtype=torch.float64, generator=generator) * 2 - 1)  # type: ignore[union-attr]
            weights /= width**0.25  # type: ignore[operator]
    x = torch.randn(1, n, width, dtype=torch.float64, generator=generator)
    mechanism: Any = layer.attention
    local, coarse = (w[0, 0] for w in mechanism.weights(x, x, x, Projections(layer)))  # (n, n), (m, m)
    mean = torch.eye(n // length, dtype=torch.float64).repeat_interleave(length, 1) / length  # μ, (m, n)
    inner = mean if composition == "parallel" else mean @ local  # (m, n): how a slice is read
    whole = coarse.repeat_interleave(length, 0) @ inner  # (n, n)
    blocks = whole.view(n // length, length, n // length, length).transpose(1, 2)  # (m, m, L, L)
    shares = inner.view(n // length, n // length, length).diagonal(dim1=0, dim2=1).T  # (m, L): each sums to 1
    entropy = torch.special.entr(shares).sum(-1)  # (m,)
    ranks = [int(torch.linalg.matrix_rank(block)) for block in blocks.flatten(0, 1)]
    return Matrix(
        composition, int(torch.linalg.matrix_rank(whole)), max(ranks), float(entropy.mean()), float(entropy.std())
    )


# ---- families -------------------------------------------------------------------------------------------------------


def contained(slices: Tensor, coarse: Weights) -> float:
    """Y_g of H as one of CS: with W_q = 0 and W_v = 1 the local attention is the mean. The largest difference."""
    width = slices.shape[-1]
    zero, one = torch.zeros(width, width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)
    plain = attend(pooled(slices, None), coarse)
    composed = attend(pooled(slices, (zero, zero, one)), coarse)
    return float((plain - composed).abs().max())


def shared_gap(weight: float = 0.5, points: int = 201) -> tuple[float, float]:
    """Weights shared by the scales, D = 1: how near does one family come to a member of the other?

    Slices of equal tokens s = (-1, 0, 1 and their shifts by 1/2). With scores 0, H is w s + w mean(s) and CS is
    w s + w² mean(s). Returns (least distance of CS from that H, least distance of H from that CS) over a grid of
    all weights (score factor, w) in [-1, 1]²; it would be 0 if the families were the same.
    """
    s = torch.tensor([[-1.0, 0.0, 1.0], [-0.5, 0.5, 1.5], [0.0, 1.0, 2.0]], dtype=torch.float64)  # inputs × slices
    grid = torch.linspace(-1, 1, points, dtype=torch.float64)

    def outputs(a: Tensor, w: Tensor, composed: bool) -> Tensor:
        """(…, inputs, slices) for score factors a and weights w, (…, 1, 1)."""
        z = w * s if composed else s.expand(torch.broadcast_shapes(w.shape, s.shape))  # what the global attention reads
        scores = (a[..., None] * z[..., :, None] * z[..., None, :]).softmax(-1)
        return w * s + w * (scores @ z[..., None])[..., 0]

    zero, chosen = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), weight, dtype=torch.float64)
    gaps = []
    for composed in (True, False):
        family = outputs(grid[:, None, None, None], grid[None, :, None, None], composed)  # (a, w, inputs, slices)
        gaps.append(float((family - outputs(zero, chosen, not composed)).abs().amax((-2, -1)).min()))
    return gaps[0], gaps[1]


# ---- the command ----------------------------------------------------------------------------------------------------


def study(seeds: int, n: int = 16, length: int = 4, width: int = 4) -> dict:
    """All numbers, as plain values."""
    found: dict[str, list[list[int]]] = {"parallel": [], "local-global": []}
    inside = 0.0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        slices = random_slices(n, length, width, generator)
        local, coarse = random_weights(width, generator), random_weights(width, generator)
        for name, rows in found.items():
            rows.append(degrees(slices, local, coarse, name == "local-global", EPSILONS))
        inside = max(inside, contained(slices, coarse))
    means = {name: np.mean(rows, 0).tolist() for name, rows in found.items()}
    ratios = np.array(found["local-global"]) / np.array(found["parallel"])
    matrices = [
        asdict(global_matrix(name, n=64, length=8, width=16, seed=seed)) for name in found for seed in range(seeds)
    ]
    return {
        "epsilons": list(EPSILONS),
        "degrees": means,
        "largest_ratio": float(ratios.max()),
        "smallest_ratio": float(ratios.min()),
        "slices": 8,
        "uniform_entropy": float(np.log(8)),
        "matrices": matrices,
        "contained": inside,
        "shared_gap": shared_gap(),
    }


def draw(result: dict, path: Path | str) -> Path:
    """Degrees over ε, and entropies inside a slice."""
    from matplotlib.figure import Figure

    from subquad.plots import save

    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = result["degrees"]["parallel"]
    left.plot(result["epsilons"], [4 * d for d in plain], color="black", linestyle=":", label="4 d(ε) of H")
    for name, label in (("local-global", "Composite Slice"), ("parallel", "H (parallel)")):
        left.plot(result["epsilons"], result["degrees"][name], marker="o", label=label)
    left.set(xlabel="ε", ylabel="degree", xscale="log", title="degree needed, mean over the seeds")
    left.invert_xaxis()
    left.legend(fontsize=8)
    for row in result["matrices"]:
        colour = "C0" if row["composition"] == "local-global" else "C1"
        right.errorbar([row["composition"]], [row["entropy"]], yerr=[row["spread"]], fmt="o", color=colour)
    right.axhline(result["uniform_entropy"], color="black", linestyle=":", label="log L, uniform")
    right.set(ylabel="nats", title="entropy of the weights inside a slice")
    right.set_ylim(0, 1.1 * result["uniform_entropy"])
    right.margins(x=0.5)
    right.legend(fontsize=8)
    return save(figure, path, dpi=130)


def table(result: dict) -> list[str]:
    """The result as lines of text."""
    lines = [f"{'ε':>8} {'d of H':>8} {'d of CS':>8} {'CS / H':>8}   (the paper allows CS / H ≤ 4)"]
    for epsilon, h, cs in zip(
        result["epsilons"], *(result["degrees"][k] for k in ("parallel", "local-global")), strict=True
    ):
        lines.append(f"{epsilon:>8.0e} {h:>8.1f} {cs:>8.1f} {cs / h:>8.2f}")
    lines.append(
        f"CS / H lies between {result['smallest_ratio']:.2f} and {result['largest_ratio']:.2f} over all seeds and ε"
    )
    lines.append("")
    lines.append(f"{'composition':<14} {'rank':>5} {'block rank':>11} {'entropy in a slice':>19}")
    for name in ("parallel", "local-global"):
        rows = [row for row in result["matrices"] if row["composition"] == name]
        rank, block = (max(row[key] for row in rows) for key in ("rank", "largest_block_rank"))
        entropy = np.mean([row["entropy"] for row in rows])
        lines.append(f"{name:<14} {rank:>5} {block:>11} {entropy:>19.3f}")
    lines.append(f"{result['slices']} slices; uniform weights have entropy log L = {result['uniform_entropy']:.3f}")
    lines.append("")
    lines.append(f"with weights of their own, Y_g of H is one of CS: largest difference {result['contained']:.1e}")
    gaps = "CS is {:.3f} away from a member of H, and H {:.3f} from a member of CS".format(*result["shared_gap"])
    lines.append(f"with weights shared by the scales neither contains the other: {gaps}")
    return lines


def show(png: Path, seeds: int, as_json: bool) -> None:
    """Propositions 1 and 2 of Composite Slice (appendix A.5): degrees, ranks and entropies, a table and a plot."""
    result = study(seeds)
    path = draw(result, png)
    if as_json:
        print(json.dumps({**result, "png": str(path)}, indent=1))
        return
    print("\n".join(table(result)))
    print(f"drawn: {path}")
