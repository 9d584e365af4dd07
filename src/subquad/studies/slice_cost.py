"""What Composite Slice attention costs against linear attentions (Lee et al. 2023, section A.4 and figure 4).

    slices   αNL + N²/L²    local attention, and global attention over N/L slices
    linear   NM             N queries to M abstractions

Slices are cheaper while N < L²(M - αL): tens of thousands of tokens for the usual L and M. And a slice stands
for L tokens at any length, an abstraction of a linear method for N/M, more and more. Counted are the pairs of
query and key; projecting the slices again costs a share 1/L of the layer's projections and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def slice_cost(n: int, slice_length: int, extension: float = 1.0) -> float:
    """αNL + N²/L²: pairs of query and key at both scales."""
    return extension * n * slice_length + (n / slice_length) ** 2


def linear_cost(n: int, abstractions: int) -> float:
    """NM."""
    return float(n) * abstractions


def crossover(slice_length: int, abstractions: int, extension: float = 1.0) -> float:
    """The length up to which slices are cheaper: L²(M - αL), 0 if they never are."""
    return max(0.0, slice_length**2 * (abstractions - extension * slice_length))


def best_slice_length(n: int, extension: float = 1.0) -> float:
    """The L of least cost, (2N/α)^(1/3): both scales then cost as 2 : 1, and the whole 1.5·αNL ~ N^(4/3)."""
    return (2 * n / extension) ** (1 / 3)


def draw_slice_cost(
    path: Path | str,
    slice_lengths: Sequence[int] = (8, 16, 32, 64),
    abstractions: Sequence[int] = (64, 128, 256),
    longest: int = 1 << 17,
) -> Path:
    """Figure 4: cost, and tokens per abstraction, over the length. Writes a PNG and returns its path."""
    from matplotlib.figure import Figure

    from subquad.plots import save

    lengths = [1 << power for power in range(8, longest.bit_length())]
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    cost, share = figure.subplots(1, 2)
    cost.plot(lengths, [float(n) ** 2 for n in lengths], color="black", linestyle=":", label="full, N²")
    for index, size in enumerate(slice_lengths):
        style = {"color": f"C{index}", "label": f"slices, L = {size}"}
        cost.plot(lengths, [slice_cost(n, size) for n in lengths], **style)
        share.plot(lengths, [size] * len(lengths), **style)
    for index, count in enumerate(abstractions):
        style = {"color": str(0.25 + 0.5 * index / len(abstractions)), "label": f"linear, M = {count}"}
        cost.plot(lengths, [linear_cost(n, count) for n in lengths], linestyle="--", **style)
        share.plot(lengths, [n / count for n in lengths], linestyle="--", **style)
    cost.set(xlabel="length N", ylabel="pairs of query and key", title="cost", xscale="log", yscale="log")
    share.set(xlabel="length N", ylabel="tokens", title="tokens per abstraction", xscale="log", yscale="log")
    cost.legend(fontsize=7)
    return save(figure, path, dpi=130)


def show(png: Path) -> None:
    """Cost of slices against linear attentions (Composite Slice, section A.4): a table and a plot."""
    print(f"{'N':>7} {'best L':>7} {'full / slices':>14} {'linear M=128 / slices':>22}")
    for n in (1024, 4096, 16384, 65536):
        best = best_slice_length(n)
        cost = slice_cost(n, round(best))
        print(f"{n:>7} {best:>7.1f} {n * n / cost:>14.1f} {linear_cost(n, 128) / cost:>22.1f}")
    print(f"drawn: {draw_slice_cost(png)}")
