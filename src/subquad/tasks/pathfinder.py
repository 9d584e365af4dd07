"""Are two dots joined by a dashed line? Pathfinder (Linsley et al. 2018), as in the Long Range Arena (Tay et al. 2021).

A picture of two long dashed contours, short ones that distract, and two dots, read row by row, one id 0 … 255 per
pixel; rows are handed to mechanisms on a grid (`cols`). The dots are the ends of one contour (label 1) or of two
different ones (label 0). Nothing in a part of the picture says which: the contour has to be followed. Guessing is right
in 50 %.

Pictures are generated (`contours.py`: both classes alike in everything else, labels exact), half of each class, by
seed. With `source=file` the official folders are read, such as pathfinder32/curv_contour_length_14 (6 dashes:
curv_baseline): metadata/<k>.npy is text, a row per picture,

    imgs/<k> sample_<i>.png <i> <label> …          what follows is how it was drawn

and the pictures lie in imgs/<k>/. As in the Arena, 80 % train, 10 % validate, 10 % test, and a picture whose file is
empty does not count (the release has one). The split is drawn once for all seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.core.options import option
from subquad.data.datasets import Examples
from subquad.data.files import Source
from subquad.data.pictures import pathfinder_rows, read_picture
from subquad.tasks.arena import CST, ArenaTask
from subquad.tasks.base import Example, Splits
from subquad.tasks.contours import picture
from subquad.tasks.recipe import Recipe

SOURCE = Source(
    "pathfinder",
    "pathfinder32, pathfinder64 or pathfinder128 with its folders curv_baseline, curv_contour_length_9 and _14",
    "the Long Range Arena release, https://github.com/google-research/long-range-arena",
)
CLASSES = ("not joined", "joined")


@dataclass(frozen=True, kw_only=True)
class PathfinderRecipe(Recipe):
    source: Literal["generated", "file"] = option("generated", "where pictures come from")
    size: int = option(32, "pixels of a side; length is at least size²", ge=12, le=128)
    contour: int = option(9, "dashes of the two long contours", ge=2)
    distractors: int = option(3, "short contours, of a third as many dashes (generated pictures)", ge=0)

    def check_task(self) -> None:
        if self.length < self.size**2:
            raise ValueError(f"length must be size² = {self.size**2} at least, not {self.length}")


class Pathfinder(ArenaTask):
    """Recipe `paper`: Table 7 of the SBM paper (column PATHFINDER), on the hard pictures (14 dashes).

    The paper builds on the Nyströmformer's implementation of the Arena; what its table leaves out is from there: 312
    warm-up steps, then linear decay, no weight decay, an evaluation every 312 steps. Where the official files are not
    at hand, --set source=generated draws the pictures.
    """

    title = "are two dots joined by a dashed line, pixel by pixel (generated; Long Range Arena: Pathfinder)"
    paper = "Tay et al. 2021; SBM, Table 7; Composite Slice, A.6.1; Combiner, Table 5"
    head = "sequence"
    recipes = {
        "small": PathfinderRecipe(
            length=256, size=16, contour=3, distractors=1, width=64, layers=2, heads=2, feedforward=128, initial=0.125,
            steps=3000, batch=32, rate=1e-3, warmup=100, evaluate=500, train_size=96_000, eval_size=1000,
        ),
        "paper": PathfinderRecipe(
            source="file", length=1024, size=32, contour=14, width=64, layers=2, heads=2, feedforward=128, dropout=0.1,
            attention_dropout=0.1, steps=62400, batch=1024, rate=5e-4, warmup=312, schedule="linear", decay=0.0,
            evaluate=312, classifier="mlp",
        ),
        "cst": PathfinderRecipe(
            source="file", length=1024, size=32, contour=14, **CST, steps=62400, batch=1024, warmup=312, evaluate=312
        ),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        if r.source == "file":
            return self._read()
        picture(np.random.default_rng(self.seed), r.size, r.contour, r.distractors, False)  # does it fit?
        sizes = (r.train_size or 160_000, r.eval_size or 20_000, r.eval_size or 20_000)
        return Splits(*(GeneratedPictures(r, size, (self.seed, part)) for part, size in enumerate(sizes)))

    def _read(self) -> Splits:
        r = self.recipe
        name = "curv_baseline" if r.contour == 6 else f"curv_contour_length_{r.contour}"
        rows = pathfinder_rows(SOURCE.find(self.data, f"pathfinder{r.size}/{name}", name))
        rows = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
        cuts = (0, len(rows) * 8 // 10, len(rows) * 9 // 10, len(rows))
        parts = []
        for key, start, stop in zip(("train_size", "eval_size", "eval_size"), cuts, cuts[1:], strict=False):
            limit = getattr(r, key)
            if (limit or 0) > stop - start:
                raise ValueError(f"{key} must be at most {stop - start}, what the data has, not {limit}")
            chosen = rows[start:stop][:limit]
            parts.append(Examples([read_picture(*row[:2], r.size) for row in chosen], [row[2] for row in chosen]))
        return Splits(*parts)

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": 256, "num_labels": 2, "cols": self.recipe.size}

    def answer(self, logits: Tensor) -> str:
        return CLASSES[int(logits.argmax(-1))]


class GeneratedPictures(Dataset):
    """Pictures drawn when first asked for, number i from its own seed: even ones not joined, odd ones joined."""

    def __init__(self, recipe: PathfinderRecipe, size: int, seed: tuple[int, ...]) -> None:
        self.recipe, self.seed = recipe, seed
        self.pixels = np.zeros((size, recipe.size**2), np.uint8)
        self.known = np.zeros(size, bool)

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        joined = index % 2
        if not self.known[index]:
            r = self.recipe
            rng = np.random.default_rng((*self.seed, index))
            self.pixels[index] = picture(rng, r.size, r.contour, r.distractors, bool(joined)).ravel()
            self.known[index] = True
        ids = torch.from_numpy(self.pixels[index].astype(np.int64))  # (size²,)
        return {"input_ids": ids, "labels": torch.tensor(joined)}
