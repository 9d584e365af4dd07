"""Masked language modelling (Devlin et al. 2019): guess the tokens that are hidden in a text.

An example is [CLS] A [SEP] B [SEP], where A and B are consecutive: as many whole sentences of one document as fit in
the length (a longer sentence is cut), parted into A and B at the end of a sentence nearest to the middle; a single
sentence is A alone. Every token but the specials is chosen with probability 15 %; of the chosen ones 80 % become
[MASK], 10 % a token drawn uniformly, 10 % stay as they are. The labels are the chosen tokens. There is no
next-sentence loss: none of the papers here reports one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.core.options import option
from subquad.data import subwords
from subquad.data.corpus import Corpus, tokenised
from subquad.data.datasets import split_90_5_5
from subquad.data.documents import TEXTS, WIKITEXT, read_path, read_wikitext
from subquad.data.subwords import SPECIALS, cached_tokenizer, framed
from subquad.tasks.base import IGNORED, Example, Splits
from subquad.tasks.recipe import Recipe
from subquad.tasks.tokenized import TokenizedTask

CHOSEN, HIDDEN, DRAWN = 0.15, 0.8, 0.1
COPIES = 10  # different masks of a training example, as many as BERT made
SAMPLE = 50_000  # sentences that the tokenizer is trained on
SPECIAL = len(SPECIALS)  # ids below are specials
MASKED = SPECIALS.index(subwords.MASK)


@dataclass(frozen=True, kw_only=True)
class MlmRecipe(Recipe):
    source: Literal["wikitext-2", "texts"] = option("wikitext-2", "the corpus; texts: the .txt files in DATA/texts")
    path: str | None = option(None, "a text file or a folder of .txt files, each a document, instead of source")
    subwords: int = option(4000, "tokens in the vocabulary", ge=256 + SPECIAL)


class Mlm(TokenizedTask):
    """Recipe `paper`: the pre-training of SBM-Transformer, table 7, column BERT: 4 layers of 512, 8 heads, hidden
    2048, length 512, batch 256, rate 1e-4, 50,265 tokens. It runs for 50 epochs of a corpus whose size is not given;
    50,000 steps here. Where blocks are normalised, the warm-up and the schedule are those of BERT.

    `base` is BERT-base: Sparse Transformers, G.4 (length 128, 450,000 steps); rate, batch, warm-up and dropout from
    Devlin et al. 2019, which G.4 and Composite Slice A.8.1 (900,000 steps) refer to. `c4` is Combiner, E.5: as its
    E.3 (12 layers of 768, pre-norm, 125,000 steps, batch 128, 10,000 warm-up steps, cosine), 2 segments, length 2048.
    Rate, decay and dropout are not given there (3e-4 and none here, as in `lm-books --recipe wiki40b`).
    The papers' corpora (Wikipedia, BooksCorpus, RealNews, C4) are read from the folder `texts` of the data directory,
    or from `path`.

    `small` has rotary positions, which learned soonest to look at context in short trials: after 300 steps a model with
    sinusoidal ones still guessed by frequency. Attentions that work on tokens, such as composite-slice, have the
    positions of their papers.
    """

    title = "masked language modelling on subwords (WikiText-2, any text)"
    paper = "SBM-Transformer, table 7; Sparse Transformers, G.4; Composite Slice, table 5; Combiner, table 6"
    head = "masked-lm"
    metric = "perplexity"
    larger_is_better = False
    needs_data = True
    sources = {"wikitext-2": WIKITEXT, "texts": TEXTS}
    recipes = {
        "small": MlmRecipe(
            length=64, width=128, layers=2, heads=4, feedforward=512, positions="rotary-or-published", subwords=1000,
            steps=1200, batch=32, rate=2e-3, warmup=50, evaluate=200, eval_size=400,
        ),
        "paper": MlmRecipe(
            source="texts", length=512, width=512, layers=4, heads=8, feedforward=2048, norm="post", dropout=0.1,
            attention_dropout=0.1, subwords=50265, steps=50_000, batch=256, rate=1e-4, warmup=5000,
            schedule="linear", evaluate=1000,
        ),
        "base": MlmRecipe(
            source="texts", length=128, width=768, layers=12, heads=12, feedforward=3072, norm="post", dropout=0.1,
            attention_dropout=0.1, subwords=30522, steps=450_000, batch=256, rate=1e-4, warmup=10_000,
            schedule="linear", evaluate=5000,
        ),
        "c4": MlmRecipe(
            source="texts", length=2048, width=768, layers=12, heads=12, feedforward=3072, subwords=32_000,
            steps=125_000, batch=128, rate=3e-4, warmup=10_000, decay=0.0, evaluate=1000,
        ),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        path = self.path
        texts = read_wikitext(self.data) if path is None else [read_path(path)]
        if not self.has_tokenizer:
            self.tokenizer = cached_tokenizer(sample(texts[0].documents()), r.subwords, lowercase=True)
        parts = [
            (corpus, windows(corpus, r.length - 3))
            for corpus in (tokenised(text.source, text.documents, self.tokenizer) for text in texts)
        ]
        if path is not None:
            parts = cut(*parts[0], str(path))
        for word, (_, places) in zip(("training", "validation", "test"), parts, strict=True):
            if not len(places):
                raise ValueError(f"{self.name}: the {word} text is empty")
        sizes = (r.train_size, r.eval_size, r.eval_size)
        train, valid, test = ((corpus, places[:size]) for (corpus, places), size in zip(parts, sizes, strict=True))
        copies = min(COPIES, -(-r.steps * r.batch // len(train[1])))
        vocabulary = self.tokenizer.get_vocab_size()
        self.train, self.test = train, Masked(*test, vocabulary, (self.seed, 2))
        return Splits(
            Masked(*train, vocabulary, (self.seed, 0), copies), Masked(*valid, vocabulary, (self.seed, 1)), self.test
        )

    @property
    def path(self) -> Path | None:
        """The texts; None if they are WikiText-2."""
        if self.recipe.path is None and self.recipe.source == "texts":
            return TEXTS.in_folder(self.data)
        return None if self.recipe.path is None else Path(self.recipe.path)

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": self.tokenizer.get_vocab_size(), "type_vocab_size": 2, "pad_token_id": 0}

    def baselines(self) -> dict[str, float]:
        """Perplexity of the masked tokens of the test set under the frequencies of the training text (after `load`)."""
        (corpus, places), size = self.train, self.vocabulary()["vocab_size"]
        counts = np.bincount(corpus.tokens[places[0, 0] : places[-1, 2]], minlength=size)[SPECIAL:] + 1.0
        surprise = -np.log(counts / counts.sum())
        labels = torch.cat([self.test[i]["labels"] for i in range(len(self.test))])
        return {"unigram": math.exp(surprise[labels[labels != IGNORED].numpy() - SPECIAL].mean())}

    def encode(self, text: str) -> Example:
        """A text with [MASK] in it, which `answer` then fills."""
        example = framed(self.ids(text))
        self.asked = example["input_ids"]  # (n,)
        if MASKED not in self.asked:
            raise ValueError(f"{self.name}: the text has no {subwords.MASK} to be filled: {text[:60]!r}")
        return example

    def answer(self, logits: Tensor) -> str:
        """The text that was encoded last, its masks filled with the likeliest tokens, logits (n, V)."""
        likeliest = SPECIAL + logits[:, SPECIAL:].argmax(-1)
        return self.decode(torch.where(self.asked == MASKED, likeliest, self.asked).tolist())


class Masked(Dataset):
    """Examples with tokens hidden. Number i has its own seed: order and restarts do not matter, and each of the
    `copies` of an example hides others.
    """

    def __init__(self, corpus: Corpus, places: np.ndarray, vocabulary: int, seed: tuple[int, ...], copies: int = 1):
        self.corpus, self.places, self.vocabulary, self.seed, self.copies = corpus, places, vocabulary, seed, copies

    def __len__(self) -> int:
        return len(self.places) * self.copies

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, middle, end = self.places[index % len(self.places)]
        tokens = self.corpus.tokens
        example = framed(tokens[start:middle].tolist(), tokens[middle:end].tolist())
        rng = np.random.default_rng((*self.seed, index))
        ids, labels = mask(example["input_ids"].numpy(), rng, self.vocabulary)
        return {**example, "input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def mask(ids: np.ndarray, rng: np.random.Generator, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, labels), both (n,): some tokens hidden, and those that are to be guessed; specials are left alone."""
    chosen = (rng.random(len(ids)) < CHOSEN) & (ids >= SPECIAL)
    draws = rng.random(len(ids))
    drawn = rng.integers(SPECIAL, vocabulary, len(ids))
    hidden = np.where(draws < HIDDEN, MASKED, np.where(draws < HIDDEN + DRAWN, drawn, ids))
    return np.where(chosen, hidden, ids), np.where(chosen, ids, IGNORED)


def windows(corpus: Corpus, room: int) -> np.ndarray:
    """(W, 3): start, middle and end (in tokens) of the examples that a corpus is cut into, of ≤ `room` tokens each."""
    if room < 2:
        raise ValueError(f"mlm: length must be ≥ 5 (two tokens and three specials), not {room + 3}")
    found = []
    for first, last in zip(corpus.documents[:-1], corpus.documents[1:], strict=True):
        bounds = np.asarray(corpus.pieces[first : last + 1])  # where sentences begin, and the end
        start = bounds[0]
        while start < bounds[-1]:
            end = bounds[np.searchsorted(bounds, start + room, "right") - 1]
            end = end if end > start else start + room  # not even one sentence fits
            inside = bounds[np.searchsorted(bounds, start, "right") : np.searchsorted(bounds, end)]
            middle = inside[np.abs(2 * inside - start - end).argmin()] if len(inside) else end
            found.append((start, middle, end))
            start = end
    return np.array(found, np.int64).reshape(-1, 3)


def cut(corpus: Corpus, places: np.ndarray, path: str) -> list[tuple[Corpus, np.ndarray]]:
    """90 % of the examples to train, 5 % to validate, 5 % to test, in this order."""
    parts = split_90_5_5(places)
    if not all(map(len, parts)):
        raise ValueError(f"mlm: {path} gives {len(places)} examples, too few to be split into 90/5/5 %")
    return [(corpus, part) for part in parts]


def sample(documents: Iterable[Iterable[str]]) -> list[str]:
    """The first sentences, for the tokenizer."""
    return list(islice(chain.from_iterable(documents), SAMPLE))
