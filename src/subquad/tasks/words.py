"""Language modelling on words: the next word of a text, in perplexity.

Sources: wikitext-2, wikitext-103 (Merity et al. 2017), ptb (the Penn Treebank as prepared by Mikolov), or any text
file, split 90/5/5 % by lines. Words are what blanks separate, and every line ends in <eos>, blank ones too: so are
the published tokens counted. The vocabulary is that of the training text, and <unk> stands for every other word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from subquad.core.options import option
from subquad.data.corpora import CORPORA, END, read_corpus, read_file
from subquad.data.files import read_lines
from subquad.tasks.base import Example
from subquad.tasks.language import Language, LanguageRecipe, Texts, after, learned_bigram

UNKNOWN = "<unk>"
SAVED = "vocabulary.txt"  # beside a trained model, one word a line


@dataclass(frozen=True, kw_only=True)
class WordsRecipe(LanguageRecipe):
    source: Literal["wikitext-2", "wikitext-103", "ptb", "file"] = option("wikitext-103", "the text")
    rare: int = option(1, "words seen less often than this in the training text are <unk>", ge=1)


class Words(Language):
    """Recipe `paper`: the small model of the Composite Slice paper on WikiText-103, section 5.2 and A.7.1.

    16 layers of width 128, 8 heads, length 256, batch 96, 500,000 steps, rate 2.5e-4, 2000 warm-up steps, cosine. The
    paper follows Dai et al. 2019 for the rest: dropout 0.1, no weight decay. How windows are laid in an evaluation is
    not said; here they overlap by half.
    """

    title = "language modelling on words (WikiText-2, WikiText-103, Penn Treebank, any text file)"
    paper = "Composite Slice, 5.2 and A.7.1"
    metric = "perplexity"
    sources = {
        "wikitext-2": CORPORA["wikitext-2"][0], "wikitext-103": CORPORA["wikitext-103"][0], "ptb": CORPORA["ptb"][0],
    }  # fmt: skip
    recipes = {
        "small": WordsRecipe(
            source="ptb", length=128, width=128, layers=2, heads=4, feedforward=512, dropout=0.1, initial=0.1,
            steps=2000, batch=8, rate=2e-3, warmup=50, evaluate=500, eval_size=250, stride=64,
        ),
        "paper": WordsRecipe(
            source="wikitext-103", length=256, width=128, layers=16, heads=8, feedforward=2048, dropout=0.1,
            steps=500000, batch=96, rate=2.5e-4, warmup=2000, decay=0.0, evaluate=4000, stride=128,
        ),
        "long": WordsRecipe(
            source="wikitext-103", length=1024, width=512, layers=16, heads=8, feedforward=2048, dropout=0.1,
            steps=90_000, batch=32, rate=5e-4, warmup=2000, decay=0.0, evaluate=2000, stride=512,
        ),
    }  # fmt: skip

    words: list[str]
    ids: dict[str, int]

    def texts(self) -> Texts:
        r = self.recipe
        parts = read_file(Path(r.path)) if r.source == "file" else read_corpus(r.source, self.data)
        counts = Counter(chain.from_iterable(parts[0]))
        frequent = (word for word, count in counts.most_common() if count >= r.rare and word not in (UNKNOWN, END))
        self._use([UNKNOWN, END, *frequent])
        train, valid, test = (np.fromiter(map(self._id, chain.from_iterable(part)), np.int32) for part in parts)
        return train, valid, test

    def plateau(self) -> tuple[float, float, str]:
        """A model that looks at one word only can learn the pairs of the training text. (The bigram of `baselines` is
        that of the test text itself, far below.)
        """
        return 2 ** learned_bigram(self.train, self.valid, len(self.words)), 0.0, "bigram"

    def bounds(self, text: np.ndarray) -> np.ndarray:
        """A document is a line, which ends in <eos>: a sentence of the Penn Treebank, a paragraph of WikiText."""
        return after(np.flatnonzero(text == self.ids[END]), text)

    def _use(self, words: list[str]) -> None:
        self.words, self.ids = words, {word: number for number, word in enumerate(words)}

    def _id(self, word: str) -> int:
        return self.ids.get(word, 0)

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": len(self.words)}

    def save(self, folder: Path) -> None:
        (folder / SAVED).write_text("\n".join(self.words) + "\n", encoding="utf-8")

    def restore(self, folder: Path) -> None:
        self._use([word for _, word in read_lines(folder / SAVED)])

    def encode(self, text: str) -> Example:
        """Line ends inside the text are <eos>; a word that the training text has not is <unk>."""
        words = f" {END} ".join(text.split("\n")).split()
        if not words:
            raise ValueError(f"{self.name}: the text is empty, and needs one word at least")
        return {"input_ids": torch.tensor([self._id(word) for word in words])}

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join("\n" if self.words[token] == END else self.words[token] for token in ids)

    def answer(self, logits: Tensor) -> str:
        """The likeliest next word after the text, logits (n, V)."""
        return self.words[int(logits[-1].argmax(-1))]
