"""Finding repeated tokens (Cho et al. 2022, section 5.1): a task that needs full attention.

A sequence holds N integers drawn uniformly from {0, …, N-1}; the target of a token is 1 if it occurs again somewhere.
One layer, one head, 32 dimensions, a fresh batch of 256 sequences at every step, Adam at 1e-3, 2000 steps. SBM
attention starts at a density of a quarter and must find out by itself that it needs all edges: figure 4 draws loss
and density.

`run` trains every attention that is asked for, writes `<name>.jsonl` (one line per step) and `<name>.pt` (to go on
after a kill, from the last checkpoint) in a folder, and draws `repeated_tokens.png`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.sbm import sbm_layers
from subquad.layers import MultiheadAttention

CHECKPOINT = 50  # steps between two checkpoints


@dataclass(frozen=True)
class Setting:
    """The paper's setting (table 7, column SYNTHETIC)."""

    length: int = 256  # N, and the number of different tokens
    width: int = 32
    batch: int = 256
    steps: int = 2000
    rate: float = 1e-3
    seed: int = 0


def sequences(batch: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, N) and targets (B, N): 1.0 where a token occurs more than once."""
    tokens = torch.randint(length, (batch, length), generator=draw)
    counts = torch.zeros(batch, length, dtype=torch.long).scatter_add_(1, tokens, torch.ones_like(tokens))
    return tokens, (counts.gather(1, tokens) > 1).float()


class Finder(nn.Module):
    """Embedding, one pre-norm Transformer layer with one head, one logit per token."""

    def __init__(self, attention: str, setting: Setting) -> None:
        super().__init__()
        d = setting.width
        self.embedding = nn.Embedding(setting.length, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.attention = MultiheadAttention(d, 1, attention=attention, batch_first=True)
        self.feedforward = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
        self.head = nn.Linear(d, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (B, N, d)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.feedforward(self.norms[1](x))
        return self.head(self.norms[2](x)).squeeze(-1)  # (B, N)

    def density(self) -> float:
        """Of the masks of the last call; full attention has 1."""
        layers = sbm_layers(self)
        return float(layers[0].last_density.mean()) if layers else 1.0


def train(
    attention: str,
    folder: Path,
    setting: Setting = Setting(),  # noqa: B008  (frozen)
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train, or go on training, one attention; returns the records {attention, step, loss, accuracy, density}."""
    folder.mkdir(parents=True, exist_ok=True)
    log, saved = (folder / f"{attention.replace(':', '-')}{end}" for end in (".jsonl", ".pt"))
    torch.manual_seed(setting.seed)
    model = Finder(attention, setting)
    optimizer = torch.optim.Adam(model.parameters(), setting.rate)
    draw = torch.Generator().manual_seed(setting.seed)
    records = _resume(model, optimizer, draw, log, saved, setting)
    with log.open("w") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
        for step in range(len(records) + 1, setting.steps + 1):
            tokens, target = sequences(setting.batch, setting.length, draw)
            logits = model(tokens)
            loss = F.binary_cross_entropy_with_logits(logits, target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            accuracy = ((logits > 0) == (target > 0)).float().mean().item()
            record = {"attention": attention, "step": step, "loss": loss.item(), "accuracy": accuracy}
            records.append({**record, "density": model.density()})
            lines.write(json.dumps(records[-1]) + "\n")
            lines.flush()
            if step % CHECKPOINT == 0 or step == setting.steps:
                _save(model, optimizer, draw, saved, setting, step)
            if report is not None:
                report(records[-1])
    return records


def _save(model, optimizer, draw: torch.Generator, path: Path, setting: Setting, step: int) -> None:
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "setting": asdict(setting),
        "step": step,
    }
    random = {"draw": draw.get_state(), "torch": torch.get_rng_state()}
    torch.save({**states, **random}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)  # a kill leaves the old one or the new one, never half of one


def _resume(model, optimizer, draw: torch.Generator, log: Path, saved: Path, setting: Setting) -> list[dict[str, Any]]:
    """Back to the last checkpoint: the records up to it. Another setting (but for the steps) starts afresh."""
    if not saved.exists() or not log.exists():
        return []
    state = torch.load(saved, weights_only=True)
    if {**state["setting"], "steps": 0} != {**asdict(setting), "steps": 0}:
        return []
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    draw.set_state(state["draw"])
    torch.set_rng_state(state["torch"])
    return read(log)[: state["step"]]


def read(log: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; a last line that a kill cut short is left out."""
    records = []
    for line in log.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


@torch.no_grad()
def evaluate(attention: str, folder: Path, setting: Setting = Setting(), batches: int = 8) -> dict[str, float]:  # noqa: B008
    """Accuracy, loss and density of the last checkpoint on fresh sequences, without exploration."""
    state = torch.load(folder / f"{attention.replace(':', '-')}.pt", weights_only=True)
    model = Finder(attention, setting).eval()
    model.load_state_dict(state["model"])
    torch.manual_seed(setting.seed + 1)
    draw = torch.Generator().manual_seed(setting.seed + 1)
    totals = torch.zeros(3, dtype=torch.float64)
    for _ in range(batches):
        tokens, target = sequences(setting.batch, setting.length, draw)
        logits = model(tokens)
        right = ((logits > 0) == (target > 0)).float().mean()
        totals += torch.tensor([right, F.binary_cross_entropy_with_logits(logits, target), model.density()])
    accuracy, loss, density = (totals / batches).tolist()
    return {"step": state["step"], "accuracy": accuracy, "loss": loss, "density": density}


def run(
    folder: Path,
    attentions: Iterable[str] = ("full", "sbm"),
    setting: Setting = Setting(),  # noqa: B008
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, dict[str, float]]:
    """The whole study; returns the evaluation of each attention after its last step."""
    folder, attentions = Path(folder), list(attentions)
    for name in attentions:
        train(name, folder, setting, report)
    draw_training(folder, attentions)
    return {name: evaluate(name, folder, setting) for name in attentions}


def draw_training(folder: Path, attentions: Iterable[str] = ("full", "sbm")) -> Path:
    """Figure 4: loss, and mask density, over the steps. Returns the picture's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    loss, density = figure.subplots(1, 2)
    for name in attentions:
        records = read(folder / f"{name.replace(':', '-')}.jsonl")
        steps = [record["step"] for record in records]
        loss.plot(steps, [record["loss"] for record in records], label=name, linewidth=1)
        density.plot(steps, [record["density"] for record in records], label=name, linewidth=1)
    loss.set(xlabel="step", ylabel="binary cross-entropy", title="training loss", yscale="log")
    density.set(xlabel="step", ylabel="edges / pairs", title="mask density", ylim=(0, 1.05))
    loss.legend()
    path = folder / "repeated_tokens.png"
    figure.savefig(path, dpi=130)
    return path


def show(
    out: Path = Path("out/repeated-tokens"), length: int = 256, batch: int = 256, steps: int = 2000, seed: int = 0
) -> None:
    """SBM learns to use full attention where the task needs it (SBM-Transformer, section 5.1): loss and density over
    the steps. Goes on where it stopped.
    """
    setting = Setting(length=length, batch=batch, steps=steps, seed=seed)

    def report(record: dict[str, Any]) -> None:
        if record["step"] % 50 == 0:
            numbers = "  ".join(f"{key} {record[key]:.4f}" for key in ("loss", "accuracy", "density"))
            print(f"{record['attention']:>5} {record['step']:>5}  {numbers}", flush=True)

    run(out, setting=setting, report=report)
    print(f"drawn: {draw_training(out)}")


def add_to(app) -> None:
    """The command `subquad study repeated-tokens`."""
    app.command("repeated-tokens")(show)
