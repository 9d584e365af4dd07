"""How far is Combiner's q(j|i) (eq. 8) from full attention's p(j|i), plan by plan, at equal cost?

    total variation   mean over queries of ½ Σ_j |q(j|i) - p(j|i)|
    output error      |Σ_j q(j|i) v_j - Σ_j p(j|i) v_j| / |Σ_j p(j|i) v_j|   (Frobenius norms)

Cost is the sum of the three terms of section 3.1, counted. Every plan with a knob (span, columns, clusters) gets the
setting whose cost is nearest to the budget; logsparse has none and stands at its own cost. Measured on random
q, k, v and on those of a small language model trained with full attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.combiner_routing import CombinerRouting
from subquad.attention.registry import attention
from subquad.layers import MultiheadAttention, Projections
from subquad.plots import save
from subquad.supports import binary, grids, partitions, spans

VOCABULARY, PHRASE = 24, 16  # the text to learn: phrases of 16 tokens that come back


@dataclass(frozen=True)
class Row:
    """One plan on one kind of q, k, v."""

    data: str  # "random" or "trained"
    spec: str
    budget: float  # the cost asked for, relative to the least that every plan can meet
    cost: int  # the cost it has
    variation: float
    error: float


def run(
    n: int = 256,
    *,
    causal: bool = True,
    budgets: Sequence[float] = (1.0, 1.5, 2.0),
    steps: int = 150,
    given: dict[str, Sequence[Tensor]] | None = None,
    seed: int = 0,
) -> list[Row]:
    """Measure every plan. `given` replaces the data: name → q, k, v (B, H, n, d); steps=0 leaves the trained out."""
    data = given
    if data is None:
        draw = torch.Generator().manual_seed(seed)
        data = {"random": [torch.randn(2, 4, n, 16, generator=draw) for _ in range(3)]}
        if steps:
            data["trained"] = trained(n, steps=steps, causal=causal, seed=seed)
    rows = []
    for name, (q, k, v) in data.items():
        for budget, spec, cost in at_equal_cost(q.shape[2], causal, budgets):
            rows.append(Row(name, spec, budget, cost, *distances(spec, q, k, v, causal)))
    return rows


def distances(spec: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[float, float]:
    """Total variation and relative output error against full attention."""
    shape = {"num_heads": q.shape[1], "head_dim": q.shape[3], "causal": causal}
    exact = attention("full", **shape).weights(q, k)  # (B, H, n, n)
    module = attention(spec, **shape).to(q.dtype).eval()
    if isinstance(module, CombinerRouting):  # clusters are learned: give them ten steps of k-means
        module.train()
        for _ in range(10):
            _, record = module.observe(q, k, v)
            assert record.statistics is not None
            module.update(record.statistics)
        module.eval()
    found = module.weights(q, k)
    variation = (found - exact).abs().sum(-1).mean() / 2
    error = ((found - exact) @ v).norm() / (exact @ v).norm()
    return variation.item(), error.item()


def knobs(causal: bool) -> dict[str, tuple[str, Callable[[int], partitions.Partition]]]:
    """Plan → its spec with a knob x, and its index sets."""
    return {
        "fixed": ("combiner-fixed:span={}", lambda x: spans.Fixed(causal=causal, span=x)),
        "vertical": ("combiner-axial:plan=vertical,cols={}", lambda x: grids.AxialVertical(causal=causal, cols=x)),
        "horizontal": (
            "combiner-axial:plan=horizontal,cols={}",
            lambda x: grids.AxialHorizontal(causal=causal, cols=x),
        ),
        "rowmajor": ("combiner-axial:plan=rowmajor,cols={}", lambda x: grids.AxialRowmajor(causal=causal, cols=x)),
        "tree": ("combiner-tree:depth=2,span={}", lambda x: spans.Tree(causal=causal, depth=2, span=x)),
        "routing": ("combiner-routing:decay=0.5,clusters={}", lambda x: partitions.Routing(causal=causal, dealt=x)),
    }


def at_equal_cost(n: int, causal: bool, budgets: Sequence[float]) -> list[tuple[float, str, int]]:
    """(budget, spec, cost) for every plan and budget; a budget of 1 is the least that every plan can meet."""
    settings = sorted({max(2, round(2 ** (e / 2))) for e in range(2, 2 * int(math.log2(n)) + 1)})
    costs = {
        plan: {x: make(x).cost(n).total for x in settings} for plan, (_, make) in knobs(causal).items()
    }  # plan → setting → cost
    least = max(min(by_setting.values()) for by_setting in costs.values())
    own = binary.Logsparse(causal=causal).cost(n).total
    chosen = [(own / least, "combiner-logsparse", own)]
    for budget in budgets:
        for plan, by_setting in costs.items():
            x = min(by_setting, key=lambda x, of=by_setting, b=budget: abs(math.log(of[x] / (b * least))))
            chosen.append((budget, knobs(causal)[plan][0].format(x), by_setting[x]))
    return chosen


# ---- trained q, k, v ----------------------------------------------------------------------------------------


class TinyModel(nn.Module):
    """Two layers of full attention that predict every token (causal: the next one)."""

    def __init__(self, n: int, causal: bool, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, width)
        self.place = nn.Parameter(0.1 * torch.randn(n, width))
        self.layers = nn.ModuleList(
            MultiheadAttention(width, heads, attention="full", causal=causal, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.place  # (B, n, E)
        for layer, norm in zip(self.layers, self.norms[:2], strict=True):
            last = norm(x)
            x = x + layer(last, last, last, need_weights=False)[0]
        return self.head(self.norms[2](x)), last


def trained(n: int, *, steps: int, causal: bool, seed: int) -> Sequence[Tensor]:
    """q, k, v (2, 4, n, 16) of the second layer, after `steps` on text whose phrases repeat."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TinyModel(n, causal)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            text = _text(8, n + 1)
            hidden = torch.rand(8, n) < 0.15
            seen = text[:, :-1] if causal else text[:, :-1].masked_fill(hidden, VOCABULARY)
            scores, _ = model(seen)
            target = text[:, 1:] if causal else text[:, :-1].masked_fill(~hidden, -100)
            loss = F.cross_entropy(scores.flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            _, x = model(_text(2, n + 1)[:, :-1])
            return Projections(cast(MultiheadAttention, model.layers[1])).together(x, x, x)


def _text(batch: int, n: int) -> Tensor:
    """Phrases drawn from four per text, so that what follows is known once a phrase has been read."""
    phrases = torch.randint(0, VOCABULARY, (batch, 4, PHRASE))
    order = torch.randint(0, 4, (batch, -(-n // PHRASE)))
    return phrases[torch.arange(batch)[:, None], order].flatten(1)[:, :n]  # (B, n)


# ---- table and plot -----------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'data':8} {'budget':>6} {'spec':42} {'cost':>9} {'variation':>9} {'error':>7}"]
    for r in rows:
        lines.append(f"{r.data:8} {r.budget:6.2f} {r.spec:42} {r.cost:9,} {r.variation:9.3f} {r.error:7.3f}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path | str) -> Path:
    """Total variation and output error over the cost, one column per kind of data."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.data for row in rows))
    figure = Figure(figsize=(4.8 * len(kinds), 6.4), layout="constrained")
    axes = figure.subplots(2, len(kinds), squeeze=False, sharex=True)
    for column, kind in enumerate(kinds):
        lines: dict[str, list[Row]] = {}
        for row in (row for row in rows if row.data == kind):
            lines.setdefault(re.sub(r"[:,](span|cols|clusters|decay)=[^,]*", "", row.spec), []).append(row)
        for name, points in lines.items():
            for line, measure in enumerate(("variation", "error")):
                xs, ys = [p.cost for p in points], [getattr(p, measure) for p in points]
                axes[line][column].plot(xs, ys, marker="o", markersize=4, label=name)
        axes[0][column].set(title=f"{kind} q, k, v", ylabel="total variation")
        axes[1][column].set(xlabel="cost (terms + groups + members)", ylabel="relative output error")
    axes[1][0].legend(fontsize=7, loc="upper right")
    return save(figure, path, dpi=130)


def show(n: int, causal: bool, steps: int, png: Path, seed: int) -> None:
    """How close the weights of Combiner are to full attention, every plan at equal cost: a table and a plot."""
    rows = run(n, causal=causal, steps=steps, seed=seed)
    print(table(rows))
    print(f"drawn: {draw(rows, png)}")
