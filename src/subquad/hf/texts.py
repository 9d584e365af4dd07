"""Texts as tokens: windows of a fixed length, drawn from files with a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.core.files import read_text as read

__all__ = ["read", "tokens", "window", "windows"]

CHARACTERS = 8  # of a token, at most; what is cut out of a file to get a window of n tokens


def tokens(tokenizer: Any, text: str) -> list[int]:
    """A text as it stands, without tokens in front or behind."""
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def window(text: str, tokenizer: Any, n: int, start: int = 0) -> Tensor:
    """n tokens of a text from character `start` on, (1, n)."""
    ids = tokens(tokenizer, text[start : start + CHARACTERS * n])
    if len(ids) < n:
        raise ValueError(f"the text has {len(ids)} tokens behind character {start}: {n} are needed")
    return torch.tensor([ids[:n]])


def windows(texts: Sequence[str], tokenizer: Any, n: int, seed: int, skip: int = 0) -> Iterator[Tensor]:
    """Windows (1, n) without end, each from a text drawn by its length and a place in it, without the first `skip`."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([max(1, len(text) - CHARACTERS * n) for text in texts], dtype=torch.float64)
    for number in range(2**62):
        which = int(torch.multinomial(sizes, 1, generator=draw))
        start = int(torch.rand((), generator=draw, dtype=torch.float64) * sizes[which])
        if number >= skip:
            yield window(texts[which], tokenizer, n, start)
