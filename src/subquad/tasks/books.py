"""Language modelling at length: the next subword of books (PG-19), of sentences (One Billion Words), of any texts.

Windows never cross a document: each begins at position 0 with tokens of one document, between <s> and </s>, and a
window that a document does not fill is padded. Two documents are not packed into one window, because only a mask that
is block-diagonal would keep them apart, and the attentions here have none: every token of a window may see every
earlier one. So no label is predicted from another document, and memory does not matter: tokens are mapped from a file
in the cache that is written once, document by document, and a long book is read line by line.

Sources: pg19 (Rae et al. 2020: its folders train, validation and test, or a tar of some books, of which one tenth
validates and one tenth tests), lm1b (Chelba et al. 2013: every line is a document; held-out file 0 tests, file 1
validates), wiki40b (Guo et al. 2020: a JSON object a line, whose "text" has the marks of the release), folder (any
folder of .txt files, parted like a tar of books). `lm-bytes` reads PG-19 as one text of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.core.options import option
from subquad.data.corpora import PG19
from subquad.data.corpus import Corpus, Document, tokenised
from subquad.data.datasets import PackedDocuments, Windows
from subquad.data.documents import LM1B, WIKI40B, Texts, drawn, one_billion_words, whole, wiki_40b
from subquad.data.subwords import PAD, cached_tokenizer
from subquad.tasks.base import Example, Splits
from subquad.tasks.language import entropy, learned_bigram
from subquad.tasks.recipe import Recipe
from subquad.tasks.tokenized import TokenizedTask

BEGIN, END = "<s>", "</s>"
SPECIALS = (PAD, BEGIN, END)
SAMPLE, SHARE = 10_000_000, 1_000_000  # characters that the tokenizer is trained on, and of one document


@dataclass(frozen=True, kw_only=True)
class BooksRecipe(Recipe):
    """`train_size` and `eval_size` count windows, spread evenly over all documents."""

    source: Literal["pg19", "lm1b", "wiki40b", "folder"] = option("pg19", "the texts")
    path: str | None = option(None, "the folder of source=folder")
    subwords: int = option(32_000, "tokens in the vocabulary", ge=256 + len(SPECIALS))
    stride: int | None = option(None, "step of the windows of an evaluation; None = length - 1, no overlap", ge=1)
    pack: bool = option(False, "fill windows with whole documents that do not see each other, in place of a stride")

    def check_task(self) -> None:
        if (self.source == "folder") != (self.path is not None):
            raise ValueError(f"path must be given with source=folder, and only then (source={self.source})")
        if self.length < 2:
            raise ValueError(f"length must be ≥ 2, not {self.length}")
        if not self.pack and self.stride is not None and self.stride >= self.length:
            last = self.length - 1
            raise ValueError(f"stride must be at most length - 1 = {last}, not {self.stride}; none: no overlap")


class Books(TokenizedTask):
    """Recipe `paper`: PG-19 in Composite Slice, A.7.2 (table 9): GPT-2 (12 layers of 768, 12 heads), 1,000,000 steps,
    batch 32, rate 1e-3, decay 0.1, β = (0.9, 0.99). Of its lengths 1024 is taken here; schedule and warm-up are not
    given (cosine, 2000 here).

    `lm1b` is One Billion Words in Sparse Transformers, G.2: 12 blocks of 256, 8 heads of width 64, feed-forward 1024,
    length 256, Adafactor with weight decay, 10,000 warm-up steps of 240,000. The batch of 4096 tokens on each of 8
    chips is 128 sequences; rate (1e-3), weight decay (0.01) and vocabulary (32,000) are not given.

    `wiki40b` is Wiki-40B in Combiner, E.3 (tables 2 and 3): 12 layers of 768, 12 heads, pre-norm, 32,000 pieces,
    125,000 steps of 128 sequences, cosine with 10,000 steps of warm-up; rate 3e-4 as in the published configuration.
    The length is 2048 or 8192: --set length=8192. The pieces are byte-level BPE, not the authors' SentencePiece model.

    `small` has pieces of one byte, because in some minutes a small model learns no more of larger ones than which piece
    follows which (perplexity 104 of 2,000 pieces in a table of pairs, 135 in a model after 600 steps of 256 pieces).
    """

    title = "language modelling at length on subwords (PG-19, One Billion Words, Wiki-40B, any folder of texts)"
    paper = "Composite Slice, A.7.2; Sparse Transformers, G.2; Combiner, E.3"
    head = "causal-lm"
    metric = "perplexity"
    larger_is_better = False
    needs_data = True
    sources = {"pg19": PG19, "lm1b": LM1B, "wiki40b": WIKI40B}
    recipes = {
        "small": BooksRecipe(
            length=256, width=128, layers=2, heads=4, feedforward=512, subwords=259, steps=1200, batch=8, rate=3e-3,
            warmup=30, initial=0.1, evaluate=300, eval_size=240, stride=128,
        ),
        "paper": BooksRecipe(
            length=1024, width=768, layers=12, heads=12, feedforward=3072, dropout=0.1, attention_dropout=0.1,
            subwords=50_257, steps=1_000_000, batch=32, rate=1e-3, warmup=2000, decay=0.1, beta2=0.99, evaluate=10_000,
            stride=512,
        ),
        "lm1b": BooksRecipe(
            source="lm1b", length=256, width=256, layers=12, heads=8, head_dim=64, feedforward=1024, dropout=0.1,
            subwords=32_000, optimizer="adafactor", steps=240_000, batch=128, rate=1e-3, warmup=10_000, schedule="sqrt",
            evaluate=5000,
        ),
        "wiki40b": BooksRecipe(
            source="wiki40b", length=2048, width=768, layers=12, heads=12, feedforward=3072, subwords=32_000,
            steps=125_000, batch=128, rate=3e-4, warmup=10_000, decay=0.0, evaluate=1000, stride=1024,
        ),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        parts = self.texts()
        if not self.has_tokenizer:
            self.tokenizer = cached_tokenizer(sample(parts[0].documents()), r.subwords, SPECIALS)
        found = [tokenised(part.source, part.documents, self.tokenizer, (BEGIN, END)) for part in parts]
        self.train, self.valid, self.test = found
        if r.pack:
            sizes = (r.train_size, r.eval_size, r.eval_size)
            return Splits(*(PackedDocuments(part.tokens, part.bounds, r.length, size, spread=True)
                            for part, size in zip(found, sizes, strict=True)))  # fmt: skip
        step = r.stride or r.length - 1
        return Splits(
            DocumentWindows(found[0], r.length, r.length - 1, r.train_size),
            DocumentWindows(found[1], r.length, step, r.eval_size),
            DocumentWindows(found[2], r.length, step, r.eval_size),
        )

    def texts(self) -> list[Texts]:
        """Training, validation and test texts."""
        r = self.recipe
        if r.source == "lm1b":
            return one_billion_words(self.data)
        if r.source == "wiki40b":
            return wiki_40b(self.data)
        if r.source == "folder":
            return drawn(Path(r.path), self.seed)
        path = PG19.find(self.data, "train", "books.tar")
        if path.name != "train":
            return drawn(path, self.seed)
        return [whole(path), *(whole(PG19.find(self.data, part)) for part in ("validation", "test"))]

    def vocabulary(self) -> dict[str, Any]:
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return {"vocab_size": self.tokenizer.get_vocab_size(), **ids}

    def baselines(self) -> dict[str, float]:
        """Perplexity of the test tokens under their own frequencies, the best without context, and under the pairs of
        the training text (after `load`).
        """
        return {"unigram": 2 ** entropy(self.test.tokens), "bigram": self._bigram(self.test)}

    def plateau(self) -> tuple[float, float, str]:
        """A model that looks at one token only can learn the pairs of the training text."""
        return self._bigram(self.valid), 0.0, "bigram"

    def _bigram(self, text: Corpus) -> float:
        return 2 ** learned_bigram(self.train.tokens, text.tokens, self.vocabulary()["vocab_size"])

    def encode(self, text: str) -> Example:
        """The beginning of a document."""
        return {"input_ids": torch.tensor([SPECIALS.index(BEGIN), *self.ids(text)])}

    def answer(self, logits: Tensor) -> str:
        """The likeliest next token after the text, logits (n, V)."""
        return self.decode([int(logits[-1].argmax(-1))])


class DocumentWindows(Dataset):
    """`Windows` over each document of a corpus, one document after another; `size` of them, evenly spread."""

    def __init__(self, corpus: Corpus, length: int, stride: int, size: int | None = None) -> None:
        if not 1 <= stride < length:
            raise ValueError(f"stride must be between 1 and length - 1 = {length - 1}, not {stride}")
        self.tokens, self.bounds, self.length, self.stride = corpus.tokens, corpus.bounds, length, stride
        beyond = np.maximum(np.diff(self.bounds) - length, 0)  # (D,) tokens after the first window
        self.last = (1 + -(-beyond // stride)).cumsum()  # (D,) windows up to the end of each document
        self.total = int(self.last[-1]) if len(self.last) else 0
        self.size = self.total if size is None else min(size, self.total)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.size:
            raise IndexError(index)
        window = index * self.total // self.size
        document = int(np.searchsorted(self.last, window, "right"))
        inside = window - (int(self.last[document - 1]) if document else 0)
        tokens = self.tokens[self.bounds[document] : self.bounds[document + 1]]
        return Windows(tokens, self.length, self.stride)[inside]


def sample(documents: Iterable[Document]) -> list[str]:
    """The beginnings of the first documents, for the tokenizer."""
    found, total = [], 0
    for document in documents:
        size = 0
        for piece in document:
            found.append(piece)
            size += len(piece)
            if size >= SHARE:
                break
        total += size
        if total >= SAMPLE:
            break
    return found
