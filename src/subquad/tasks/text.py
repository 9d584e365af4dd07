"""Sentiment of film reviews, byte by byte: the Text task of the Long Range Arena (Tay et al. 2021) on IMDb.

Data: the Large Movie Review Dataset v1.0 (Maas et al. 2011), 25,000 training and 25,000 test reviews, half of them
positive, as its official tree aclImdb/{train,test}/{pos,neg}/*.txt or an archive of it. A review is its first `length`
bytes, byte b as id b + 1 (0 is padding): no tokenizer, any encoding. Answering always the same class is right in 50 %.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from subquad.core.options import option
from subquad.data.datasets import Examples, with_validation
from subquad.data.files import Source, members
from subquad.tasks.arena import CST, ByteTask
from subquad.tasks.base import Example, Splits
from subquad.tasks.recipe import Recipe

IMDB = Source(
    "imdb",
    "the Large Movie Review Dataset v1.0, aclImdb_v1.tar.gz, packed or unpacked to aclImdb/",
    "https://ai.stanford.edu/~amaas/data/sentiment/",
)
REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/([^/]+)\.txt$")


@dataclass(frozen=True, kw_only=True)
class TextRecipe(Recipe):
    valid: int = option(2500, "training reviews set aside for validation, drawn by seed", ge=1)


class Text(ByteTask):
    """Recipe `paper`: Table 7 of the SBM paper (column TEXT), but for `length`: the Arena's 4096 bytes, not 3072.

    The paper builds on the Nyströmformer's implementation of the Arena; what its table leaves out is from there:
    8000 warm-up steps, then linear decay, no weight decay, an evaluation every 500 steps.
    """

    title = "sentiment of film reviews, byte by byte (IMDb; Long Range Arena: Text)"
    paper = "Tay et al. 2021; SBM, Table 7; Composite Slice, A.6.1; Combiner, Table 5"
    head = "sequence"
    needs_data = True
    sources = {"": IMDB}
    classes = ("negative", "positive")
    recipes = {
        "small": TextRecipe(
            length=1024, width=64, layers=2, heads=2, feedforward=128, initial=0.125, steps=1000, batch=16, rate=1e-3,
            warmup=100, evaluate=250, eval_size=2000,
        ),
        "paper": TextRecipe(
            length=4096, width=64, layers=2, heads=2, feedforward=128, dropout=0.1, attention_dropout=0.1,
            steps=20000, batch=128, rate=5e-4, warmup=8000, schedule="linear", decay=0.0, evaluate=500,
            classifier="mlp",
        ),
        "cst": TextRecipe(length=4096, **CST, steps=20000, batch=128, warmup=8000, evaluate=500),
    }  # fmt: skip

    def load(self) -> Splits:
        path = IMDB.find(self.data, "aclImdb", "aclImdb_v1.tar", "aclImdb_v1_labeled.tar")
        found: dict[tuple[str, str], list[tuple[str, np.ndarray]]] = {}
        for name, content in members(path, REVIEW.search):
            match = REVIEW.search(name)
            assert match is not None
            if not content:
                raise ValueError(f"{path}: the review {name} is empty")
            part, kind, number = match.groups()
            found.setdefault((part, kind), []).append((number, self.ids(content)))
        train, test = (self._examples(path, found, part) for part in ("train", "test"))
        r = self.recipe
        return with_validation(train, test, r.valid, self.seed, train_size=r.train_size, eval_size=r.eval_size)

    def _examples(self, path: Any, found: dict, part: str) -> Examples:
        ids: list[np.ndarray] = []
        labels: list[int] = []
        for label, kind in enumerate(("neg", "pos")):
            if (part, kind) not in found:
                raise ValueError(f"{path} holds no reviews {part}/{kind}/*.txt: get {IMDB.what} from {IMDB.origin}")
            # by name, so that folder and archive give the same order, and one seed the same validation part
            reviews = [review for _, review in sorted(found[part, kind], key=lambda item: item[0])]
            ids += reviews
            labels += [label] * len(reviews)
        return Examples(ids, labels)

    def read(self, text: str) -> Example:
        """A review of any length; as in training, what follows the first `length` bytes is not read."""
        if not text:
            raise ValueError(f"{self.name}: the review is empty")
        return {"input_ids": torch.from_numpy(self.ids(text.encode()).astype(np.int64))}
