"""Numbers hidden in the windows that a model is tuned on, so that it learns to find what lies beyond its window.

A sentence early in the window says a number, the end of the window asks for it. The original with full attention
answers, and the distillation teaches the converted model to. The words are not those of `subquad passkey`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.hf.texts import tokens

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
