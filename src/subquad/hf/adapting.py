"""`adapt`: win back what a conversion has cost, training little: the mechanisms' own parameters and low-rank updates.

First every converted layer is fitted to the original's output, then the whole model is tuned, see `fitting`. The
original is the same weights with full attention: there is no second copy. Texts are taken a window at a time, so
memory is that of one window. A run writes its log line by line, keeps a checkpoint, and resumes from it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from subquad.attention.base import Attention
from subquad.core.files import write_atomically
from subquad.hf.conversion import converted_layers
from subquad.hf.fitting import body, fit_loss, tune_backward, watch_original
from subquad.hf.interface import watching
from subquad.hf.layers import NAME
from subquad.hf.lowrank import add_updates, merge_updates
from subquad.hf.texts import hide_numbers, windows

CHECKPOINT, LOG, SETTINGS = "adapt.pt", "adapt.jsonl", "adapt.json"
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained, for how long."""

    length: int = 1024  # tokens of a window
    fit_steps: int = 12  # windows of the first phase
    repeats: int = 4  # steps that every layer takes on one window
    tune_steps: int = 24  # windows of the second phase
    rank: int = 8  # of the updates of q, k and v; 0 = none
    rate: float = 3e-2  # learning rate of the mechanisms' parameters in the first phase; a tenth in the second
    update_rate: float = 5e-4  # learning rate of the low-rank updates
    distillation: float = 0.9  # its share of the loss of the second phase; the rest is cross-entropy
    numbers: int = 0  # hidden in each window of the second phase and asked for at its end
    decay: bool = False  # do the rates of the second phase fall to 0, linearly?
    clip: float = 1.0  # the longest gradient
    seed: int = 0


def check_folder(folder: Path) -> None:
    """Refuse a folder with a model that no run of ours made: it would be overwritten."""
    if (folder / "config.json").exists() and not (folder / SETTINGS).exists():
        raise ValueError(f"{folder} already contains a model, and no run to resume: choose another folder")


def fingerprint(model: nn.Module, values: int = 16) -> str:
    """A digest of the first values of every parameter, by name and shape."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        first = parameter.detach().flatten()[:values].double().cpu()
        found.update(f"{name} {tuple(parameter.shape)} {first.tolist()}\n".encode())
    return found.hexdigest()


class Adapter:
    """A model being adapted: what is trained, how far it has got, and its folder."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str], folder: Path, settings: Settings) -> None:
        self.model, self.settings, self.folder = model, settings, folder
        self.layers = {
            name: part for name, part in model.named_modules() if isinstance(getattr(part, NAME, None), Attention)
        }
        if not self.layers:
            raise ValueError("the model is not converted: convert it first")
        body(model)
        self.tokenizer, self.texts, self.step = tokenizer, texts, 0
        self.origin = {"model": fingerprint(model), "texts": hashlib.sha256("\0".join(texts).encode()).hexdigest()}
        torch.manual_seed(settings.seed)
        model.requires_grad_(False)
        self.trained = self._prepare()
        groups = [
            {"params": own, "lr": rate, "first": rate, "own": number < 2}
            for number, (own, rate) in enumerate(self.trained)
            if own
        ]
        if not groups:
            raise ValueError("there is nothing to train: the mechanism has no parameters of its own, and rank is 0")
        self.optimizer = torch.optim.Adam(groups)

    def _prepare(self) -> list[tuple[list[nn.Parameter], float]]:
        own: list[nn.Parameter] = []
        updates: list[nn.Parameter] = []
        for layer in self.layers.values():
            own += [p.requires_grad_() for p in getattr(layer, NAME).parameters()]
        for name in converted_layers(self.model) if self.settings.rank else ():  # those that keep their attention too
            updates += add_updates(self.model.get_submodule(name), self.settings.rank)
        small, large = [p for p in own if p.dim() < 3], [p for p in own if p.dim() >= 3]
        rate = self.settings.rate
        return [(small, rate), (large, rate / 10), (updates, self.settings.update_rate)]  # matrices learn more slowly

    @property
    def total(self) -> int:
        return self.settings.fit_steps + self.settings.tune_steps

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for own, _ in self.trained for p in own]

    # ---- the folder ----

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one; it must have been made with the same settings."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings, given = self.folder / SETTINGS, asdict(self.settings)
        check_folder(self.folder)
        if (self.folder / CHECKPOINT).exists():
            before = json.loads(settings.read_text())
            differing = [key for key in given if before.get(key) != given[key]]
            if differing:
                key = differing[0]
                raise ValueError(
                    f"{self.folder} already contains a run with {key}={before.get(key)}, not {given[key]}: repeat its "
                    "settings to resume it, or choose another folder"
                )
            for key, value in self.origin.items():
                if before.get(key, value) != value:  # a run of an earlier version does not tell
                    raise ValueError(
                        f"{self.folder} already contains a run with another {key.removesuffix('s')}: repeat its "
                        "command to resume it, or choose another folder"
                    )
            saved = torch.load(self.folder / CHECKPOINT, weights_only=True)
            self.step = saved["step"]
            self.optimizer.load_state_dict(saved["optimizer"])
            for parameter, value in zip(self.parameters, saved["parameters"], strict=True):
                parameter.data.copy_(value)
            kept = (self.folder / LOG).read_text().splitlines()[: self.step]  # steps behind the checkpoint are repeated
            write_atomically(self.folder / LOG, "".join(f"{line}\n" for line in kept))
        write_atomically(settings, json.dumps({**given, **self.origin}, indent=1) + "\n")

    def checkpoint(self) -> None:
        part = self.folder / f".{CHECKPOINT}"
        torch.save(
            {
                "step": self.step,
                "optimizer": self.optimizer.state_dict(),
                "parameters": [p.data for p in self.parameters],
            },
            part,
        )
        part.replace(self.folder / CHECKPOINT)

    # ---- calibration and the two phases ----

    def run(self, tell: Tell | None = None, every: float = 60.0) -> None:
        """All steps that are left; a checkpoint every `every` seconds, and at the end."""
        self.resume()
        kept = time.monotonic()
        source = windows(self.texts, self.tokenizer, self.settings.length, self.settings.seed, skip=self.step)
        if self.step == 0:
            self.calibrate(next(windows(self.texts, self.tokenizer, self.settings.length, self.settings.seed)))
        with (self.folder / LOG).open("a") as log, SummaryWriter(str(self.folder / "tensorboard")) as board:
            while self.step < self.total:
                began = time.monotonic()
                fits = self.step < self.settings.fit_steps
                line = self.fit(next(source)) if fits else self.tune(self._with_numbers(next(source)))
                self.step += 1
                line = {"step": self.step, "of": self.total, **line, "seconds": round(time.monotonic() - began, 1)}
                log.write(json.dumps(line) + "\n")
                log.flush()
                for key in line.keys() & {"error", "after", "loss", "distillation"}:
                    board.add_scalar(f"{line['phase']}/{key}", line[key], self.step)
                if tell:
                    tell(line)
                if time.monotonic() - kept > every or self.step in (self.settings.fit_steps, self.total):
                    self.checkpoint()
                    kept = time.monotonic()

    @torch.no_grad()
    def calibrate(self, ids: Tensor) -> None:
        """Let the summaries of every layer that can be calibrated ask what its queries ask on average."""

        def note(layer: nn.Module, mechanism: Any, q: Tensor, *rest: Any) -> None:
            abstraction = getattr(mechanism, "abstraction", None)
            if getattr(abstraction, "kind", "") == "residual-attended":
                abstraction.calibrate(q.mean((0, 2)))  # (H, d)

        seen = watch_original(self.model, self.layers, ids)
        with watching(note):
            for name, layer in self.layers.items():
                layer(*seen[name].args, **seen[name].about)

    def fit(self, ids: Tensor) -> dict[str, Any]:
        """Every layer takes `repeats` steps towards the original's output on this window."""
        seen = watch_original(self.model, self.layers, ids)
        losses: list[float] = []
        for _ in range(self.settings.repeats):
            total = 0.0
            for name, layer in self.layers.items():
                loss = fit_loss(layer, seen[name])
                loss.backward()
                total += loss.item()
            self._step()
            losses.append(total / len(self.layers))
        return {"phase": "fit", "error": round(losses[0], 5), "after": round(losses[-1], 5)}

    def _with_numbers(self, ids: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(self.settings.seed * 2**32 + self.step)  # a resumed run draws the same
        count = self.settings.numbers
        return hide_numbers(ids, self.tokenizer, count, draw) if count else ids

    def tune(self, ids: Tensor) -> dict[str, Any]:
        """One step of the whole model."""
        left = (self.total - self.step) / self.settings.tune_steps if self.settings.decay else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = left * (group["first"] / 10 if group["own"] else group["first"])
        entropy, divergence = tune_backward(self.model, ids, self.settings.distillation)
        self._step()
        return {"phase": "tune", "loss": round(entropy, 4), "distillation": round(divergence, 5)}

    def _step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> Any:
        """The adapted model, its updates merged, everything trainable again."""
        merge_updates(self.model)
        return self.model.requires_grad_()
