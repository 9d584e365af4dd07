"""Texts as tokens: windows of a fixed length, drawn from files with a seed, and numbers that are hidden in them.

A model is tuned on windows with hidden numbers so that it learns to find what lies beyond its window. A sentence early
in the window says a number, the end of the window asks for it. The original with full attention answers, and the
distillation teaches the converted model to. The words are not those of `subquad passkey`.
"""

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


THINGS = ("locker", "ticket", "room", "train", "ship", "parcel", "account", "house", "page", "seat", "ward", "engine")
STATEMENTS = (" Note that the number of the {thing} is {number}.", " On the {thing} was written {number}, no more.")
QUESTIONS = (
    " What was the number of the {thing}? It was {number}.",
    " Tell me about the {thing}: the {thing} has {number}.",
)
EARLY = 0.6  # the statements are in this part of the text


def hide_numbers(ids: Tensor, tokenizer: Any, count: int, draw: torch.Generator) -> Tensor:
    """Tokens (1, n) in which `count` numbers are said and, at the end, asked for; the last tokens make room."""
    said, asked = [], []
    for thing in torch.randperm(len(THINGS), generator=draw)[:count].tolist():
        words = {"thing": THINGS[thing], "number": _integer(draw, 10**4, 10**6)}
        said.append(tokens(tokenizer, STATEMENTS[_integer(draw, 0, len(STATEMENTS))].format(**words)))
        asked.append(tokens(tokenizer, QUESTIONS[_integer(draw, 0, len(QUESTIONS))].format(**words)))
    end = [token for number in torch.randperm(len(asked), generator=draw).tolist() for token in asked[number]]
    room = ids.shape[1] - len(end) - sum(map(len, said))
    if room < 1:
        raise ValueError(
            f"numbers={count} needs windows of at least {ids.shape[1] - room + 1} tokens, not {ids.shape[1]}"
        )
    text = ids[0, :room].tolist()
    places = sorted((_integer(draw, 0, int(EARLY * room) + 1) for _ in said), reverse=True)
    for place, statement in zip(places, said, strict=True):  # from the last one on: the places before it stay
        text[place:place] = statement
    return torch.tensor([text + end])


def _integer(draw: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=draw))
