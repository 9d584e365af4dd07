"""The tokens that a cache has read: with them it goes back further than its states do.

A compact state takes back a number of tokens, and has given up what lies before. The numbers of the tokens are kept
here, 8 bytes each and another 9 for their positions and mask, once for all layers; from them the states of a shorter
sequence are computed again. What was given as embeddings is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.attention.states.state import grown


class Past:
    """Pieces of what a model was given, each a dict of tensors (B, room) or (B, room, D), and how many slots it has."""

    def __init__(self) -> None:
        self.pieces: list[dict[str, Tensor]] = []
        self.sizes: list[int] = []

    @property
    def slots(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for piece in self.pieces for x in piece.values())

    def add(
        self,
        ids: Tensor | None,
        embeds: Tensor | None,
        key_mask: Tensor | None,
        positions: Tensor,
        token_type_ids: Tensor | None,
    ) -> None:
        """New slots: ids (B, t) or embeds (B, t, D), key_mask bool (B, t), positions (B or 1, t)."""
        x = ids if ids is not None else embeds
        assert x is not None
        shape = (x.shape[0], x.shape[1])
        real = torch.ones(shape, dtype=torch.bool, device=x.device) if key_mask is None else key_mask
        news = {"ids" if ids is not None else "embeds": x, "mask": real, "positions": positions.expand(shape)}
        if token_type_ids is not None:
            news["types"] = token_type_ids
        if ids is None or not self.pieces or self.pieces[-1].keys() != news.keys():
            self.pieces.append({name: new.clone() for name, new in news.items()})  # written into, as it grows
            self.sizes.append(shape[1])
            return
        have, wanted = self.sizes[-1], self.sizes[-1] + shape[1]
        for name, new in news.items():
            own = self.pieces[-1][name] = grown(self.pieces[-1][name], wanted, 1)
            own[:, have:wanted] = new
        self.sizes[-1] = wanted

    def lengths(self, slots: int) -> Tensor:
        """How many of the first `slots` hold a real token, int64 (B,)."""
        found, left = [], slots
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            found.append(piece["mask"][:, : min(size, left)].sum(1))
            left = max(0, left - size)
        return torch.stack(found).sum(0)

    def crop(self, slots: int) -> None:
        pieces, sizes, left = [], [], slots
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            if left:
                pieces.append(piece)
                sizes.append(min(size, left))
                left -= sizes[-1]
        self.pieces, self.sizes = pieces, sizes

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Reorder, repeat or select the rows of everything."""
        self.pieces = [{name: change(x) for name, x in piece.items()} for piece in self.pieces]

    def taken(self) -> list[dict[str, Any]]:
        """Everything, as `Stack.run` takes it, one piece after another; nothing of it is kept."""
        calls, masks = [], []
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            own = {name: x[:, :size] for name, x in piece.items()}
            masks.append(own["mask"].long())
            calls.append(
                {
                    "ids": own.get("ids"),
                    "embeds": own.get("embeds"),
                    "mask": torch.cat(masks, 1),
                    "position_ids": own["positions"],
                    "token_type_ids": own.get("types"),
                }
            )
        self.pieces, self.sizes = [], []
        return calls
