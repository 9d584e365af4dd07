"""Language modelling on bytes: the next byte of a text, in bits per byte.

Sources: enwik8 (the first 10⁸ bytes of Wikipedia of 2006, split 90 / 5 / 5 million as customary), pg19 (books of
Project Gutenberg, Rae et al. 2020: the official folders train, validation, test, or any tar of books, split 90/5/5 %),
shakespeare (the 1.1 MB of Karpathy's char-rnn, split 90/5/5 %), or any file, split 90/5/5 %. Ids are the bytes
themselves. Packed files are unpacked once into a cache, and texts are mapped, not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from subquad.core.options import option
from subquad.data.cache import mapped
from subquad.data.corpora import ENWIK8, PG19, SHAKESPEARE, read_books, read_enwik8, read_text
from subquad.data.datasets import split_90_5_5
from subquad.tasks.base import Example
from subquad.tasks.language import Language, LanguageRecipe, Texts, after, entropies


@dataclass(frozen=True, kw_only=True)
class BytesRecipe(LanguageRecipe):
    source: Literal["enwik8", "pg19", "shakespeare", "file"] = option("enwik8", "the text")


class Bytes(Language):
    """Recipe `paper`: the language model of the Combiner paper, appendix E.3 (12 layers of 768, length 2048).

    There it runs on sentence pieces of Wiki-40B; here on the bytes of enwik8. The paper is silent on the learning rate
    (3e-4 here, as in the published configuration), the betas and the weight decay of Adam (none here), dropout (none).
    """

    title = "language modelling on bytes (enwik8, PG-19, Shakespeare, any file)"
    paper = "Combiner, E.3; Composite Slice, A.7.2 (PG-19)"
    metric = "bits_per_byte"
    sources = {"enwik8": ENWIK8, "pg19": PG19, "shakespeare": SHAKESPEARE}
    recipes = {
        "small": BytesRecipe(
            source="shakespeare", length=256, width=128, layers=2, heads=4, feedforward=512, steps=1000, batch=8,
            rate=3e-3, warmup=50, initial=0.1, evaluate=250, eval_size=100, stride=128,
        ),
        "paper": BytesRecipe(
            source="enwik8", length=2048, width=768, layers=12, heads=12, feedforward=3072, steps=125000, batch=128,
            rate=3e-4, warmup=10000, decay=0.0, evaluate=1000, stride=1024,
        ),
    }  # fmt: skip

    def plateau(self) -> tuple[float, float, str]:
        """A model that looks at one byte only reaches the bigram entropy; small models stay there for a while."""
        return entropies(self.valid)[1], 0.0, "bigram"

    def texts(self) -> Texts:
        source = self.recipe.source
        if source == "enwik8":
            return read_enwik8(ENWIK8.find(self.data, "enwik8", "enwik8.zip"))
        if source == "pg19":
            return self._books()
        if source == "shakespeare":
            return split_90_5_5(read_text(SHAKESPEARE.find(self.data, "input.txt")))
        return split_90_5_5(read_text(Path(self.recipe.path)))

    def _books(self) -> Texts:
        """The official folders, or one archive of books that is cut."""
        path = PG19.find(self.data, "train", "books.tar")
        if path.name != "train":
            return split_90_5_5(mapped(path, read_books))
        valid, test = (PG19.find(self.data, part) for part in ("validation", "test"))
        return mapped(path, read_books), mapped(valid, read_books), mapped(test, read_books)

    def bounds(self, text: np.ndarray) -> np.ndarray:
        """A document ends with a blank line: a speech, a paragraph."""
        newline = text == ord("\n")
        return after(np.flatnonzero(newline[1:] & newline[:-1]) + 1, text)

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": 256}

    def measure(self, statistics: np.ndarray) -> dict[str, float]:
        per_byte = super().measure(statistics)
        return {"bits_per_byte": per_byte["bits"], **{key: per_byte[key] for key in ("perplexity", "accuracy")}}

    def encode(self, text: str) -> Example:
        if not text:
            raise ValueError(f"{self.name}: the text is empty, and needs one byte at least")
        return {"input_ids": torch.tensor(list(text.encode()))}

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 (a model may write any) show as �."""
        return bytes(int(token) for token in ids).decode("utf-8", "replace")

    def answer(self, logits: Tensor) -> str:
        """The likeliest next byte after the text, logits (n, 256)."""
        return self.decode([int(logits[-1].argmax(-1))])
