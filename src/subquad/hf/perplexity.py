"""`subquad perplexity`: what a conversion costs and saves: loss by position, time, memory, mass on summaries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.core.memory import peak, reset_peak
from subquad.hf.fitting import body
from subquad.hf.interface import watching
from subquad.hf.lowrank import original

BLOCK = 512  # positions whose logits exist at the same time


class Measured(NamedTuple):
    """One forward pass over n tokens."""

    losses: Tensor  # (n-1,): nats, of token i+1
    seconds: float  # of the body and the head
    memory: int  # bytes above what was held before
    mass: float | None  # mean share of attention on summaries; None where there are none

    def loss(self, start: int = 0) -> float:
        """The mean from position `start` on."""
        return self.losses[start:].mean().item()

    def by_position(self, parts: int = 8) -> list[float]:
        return [part.mean().item() for part in self.losses.tensor_split(parts)]


@torch.no_grad()
def measure(model: Any, ids: Tensor, *, full: bool = False, mass: bool = True) -> Measured:
    """The losses of tokens (1, n) under a language model; `full`: under the original inside it."""
    model.eval()
    before, began = reset_peak(), time.perf_counter()
    with original(model) if full else nullcontext():
        losses = token_losses(model, ids)
    seconds, memory = time.perf_counter() - began, peak() - before
    return Measured(losses, seconds, memory, None if full or not mass else summary_mass(model, ids))


def token_losses(model: Any, ids: Tensor) -> Tensor:
    hidden = body(model)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]  # (n-1, E)
    head, labels = model.get_output_embeddings(), ids[0, 1:]
    parts = zip(hidden.split(BLOCK), labels.split(BLOCK), strict=True)
    return torch.cat([F.cross_entropy(head(part).float(), wanted, reduction="none") for part, wanted in parts])


def summary_mass(model: Any, ids: Tensor) -> float | None:
    """The mean over layers, heads and tokens of the attention that goes to summaries."""
    shares: list[float] = []

    def note(layer: nn.Module, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Any, out: Tensor) -> None:
        if hasattr(mechanism, "summary_mass"):
            shares.append(mechanism.summary_mass(q, k, key_mask=key_mask).mean().item())

    with watching(note):
        body(model)(input_ids=ids, use_cache=False)
    return sum(shares) / len(shares) if shares else None


def compare(model: Any, ids: Tensor, lengths: Sequence[int]) -> list[tuple[int, Measured, Measured]]:
    """For each length: the original and the converted model on the first n tokens."""
    return [(n, measure(model, ids[:, :n], full=True), measure(model, ids[:, :n])) for n in lengths]
